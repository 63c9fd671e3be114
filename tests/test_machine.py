"""What a machine can do, what a run will need of it, and how it goes on when something fails."""
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train_gpt as t
from train_gpt import CAPABILITIES, CARDS, FINEWEB, TINY, Run

ROOT = Path(__file__).resolve().parent.parent
DATA = str(ROOT / "data" / "tiny")
GIB = 1 << 30


# ---- the tables ----------------------------------------------------------------------------------

@pytest.mark.parametrize("name, card", [
    ("NVIDIA GeForce RTX 3060", "RTX 3060"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
    ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA H200", "H200"),
    ("Pretended NVIDIA GeForce RTX 4070", "RTX 4070"), ("RTX 5090", "RTX 5090")])
def test_card_of_a_drivers_name(name, card):
    assert t.card_of(name) is CARDS[card]


@pytest.mark.parametrize("name", [
    "NVIDIA GeForce RTX 4070 Ti", "NVIDIA GeForce RTX 4070 SUPER", "NVIDIA H100 NVL", "cpu",
    "NVIDIA GeForce RTX 3060 Laptop GPU", "NVIDIA GeForce GTX 1080", "Tesla T4"])
def test_another_card_is_not_taken_for_a_known_one(name):
    assert t.card_of(name) is None


def test_the_tables_agree_with_each_other():
    peaks = {"RTX 3060": 25.5, "RTX 4060": 30.2, "RTX 4070": 58.3, "RTX 3090": 71.2,
             "RTX 4090": 165.2, "RTX 5090": 209.5, "A100": 312, "H100 PCIe": 756, "H100": 989,
             "H200": 989}
    assert {name: CARDS[name].tflops for name in peaks} == peaks
    assert all(card.capability in CAPABILITIES for card in CARDS.values())
    assert set(CAPABILITIES) == {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}
    for capability, (shared, fp8, _) in CAPABILITIES.items():
        assert fp8 == (capability not in ((8, 0), (8, 6)))
        assert shared == {8: 166912 if capability == (8, 0) else 101376, 9: 232448, 10: 232448,
                          12: 101376}[capability[0]]


@pytest.mark.parametrize("built, capability, runs", [
    (["sm_80", "sm_86"], (8, 9), True), (["sm_80", "sm_90"], (8, 6), True),
    (["sm_86"], (8, 0), False), (["sm_90a"], (9, 0), True), (["sm_90"], (10, 0), False),
    (["sm_120"], (12, 1), True), (["sm_100f"], (10, 3), True), (["compute_80"], (12, 0), True),
    (["sm_90", "compute_100"], (9, 5), True), (["compute_100"], (9, 0), False),
    (["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"], (7, 0), False)])
def test_which_builds_run_on_a_device(built, capability, runs):
    assert t.runs_on(built, capability) is runs


def fake_device(monkeypatch, name: str, capability: tuple, built=("sm_80", "sm_90")) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built))


@pytest.mark.parametrize("name, capability, built, expected", [
    ("NVIDIA GeForce GTX 1080", (6, 1), ["sm_80"], "expected 8.0 or higher"),
    ("Tesla T4", (7, 5), ["sm_75", "sm_80"], "expected 8.0 or higher"),
    ("NVIDIA B200", (10, 0), ["sm_80", "sm_90"], "has no code" and "for which torch")])
def test_a_device_that_cannot_run_is_refused_in_one_line(monkeypatch, name, capability, built,
                                                         expected):
    fake_device(monkeypatch, name, capability, built)
    with pytest.raises(t.UserError) as refusal:
        t.choose_device(FINEWEB)
    assert expected in refusal.value.line and name in refusal.value.line
    assert "\n" not in refusal.value.line


@pytest.mark.parametrize("capability, fp8", [(c, row[1]) for c, row in CAPABILITIES.items()]
                         + [((12, 9), False)])
def test_fp8_only_where_the_table_says_so(monkeypatch, capability, fp8):
    fake_device(monkeypatch, "NVIDIA X", capability, ["compute_80"])
    device = t.choose_device(FINEWEB)
    assert t.can(device)[1] is fp8 and t.choose_head(FINEWEB, device) == "auto"
    asked = replace(FINEWEB, head="fp8-torch")
    if fp8:
        assert t.choose_head(asked, device) == "fp8-torch"
    else:
        with pytest.raises(t.UserError, match="2"):
            t.choose_head(asked, device)
    assert t.choose_head(FINEWEB, torch.device("cpu")) == "reference"


# ---- compilation ---------------------------------------------------------------------------------

@pytest.mark.parametrize("lack, remedy", [
    ("compiler", "apt install g++"), ("triton", "WSL2"), ("header", "apt install python3-dev"),
    ("bad torch", "install the pinned version")])
def test_what_compilation_lacks_is_named_with_its_remedy(monkeypatch, lack, remedy, tmp_path):
    fake_device(monkeypatch, "NVIDIA A100-SXM4-80GB", (8, 0))
    cuda = torch.device("cuda")
    monkeypatch.setattr(t.shutil, "which", lambda name: "/usr/bin/g++")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(t.sysconfig, "get_path", lambda name: str(tmp_path))
    assert t.choose_compile(FINEWEB, cuda) == (True, ())
    if lack == "compiler":
        monkeypatch.setattr(t.shutil, "which", lambda name: None)
    elif lack == "triton":
        monkeypatch.setattr(t, "triton", None)
    elif lack == "header":
        (tmp_path / "Python.h").unlink()
    else:
        monkeypatch.setattr(torch, "__version__", "2.10.0+cu128")
    on, notes = t.choose_compile(FINEWEB, cuda)
    assert not on and len(notes) == 1 and remedy in notes[0]
    assert t.choose_compile(replace(FINEWEB, compile="on"), cuda) == (True, ())


SMALL = replace(
    TINY, vocab_size=4097, width=32, head_dim=16, mlp_width=64, layers=2, long_window=(2,),
    value_layers=((1, 0),), skips=(), unit_tokens=512, doc_cap=256, tokens_per_step=1024, steps=3,
    extra_steps=0, val_tokens=3000, val_sequence=1024, val_every=2, data_dir=DATA, device="cpu",
    precision="fp32", checkpoint=False, val_piece=512, window_unit=32, windows=(2, 4),
    final_windows=(1, 2, 3))


def test_a_failed_compilation_goes_on_eager_with_one_line(monkeypatch):
    def broken(*arguments, **options):
        raise torch._inductor.exc.InductorError(RuntimeError("ld: cannot find -lcuda"), None)

    import torch._inductor.exc  # noqa: F401
    run = Run(SMALL, t.choose_machine(SMALL))
    assert run.machine.compile
    run.use(run.machine._replace(compile=True))
    monkeypatch.setattr(t, "compiled", lambda function, on: broken if on else function)
    run.warm_up()
    assert not run.machine.compile and not run.machine.head.compile and not run.optimizer.compile
    (line,) = run.tried
    assert line.startswith("not compiled, so slower: ") and "\n" not in line
    with pytest.raises(torch._inductor.exc.InductorError):
        asked = Run(replace(SMALL, compile="on"), t.choose_machine(replace(SMALL, compile="on")))
        asked.warm_up()


# ---- memory --------------------------------------------------------------------------------------

def machine_of(card: str, s=FINEWEB) -> t.Machine:
    """As choose_machine would make it for that card, before memory is looked at."""
    chunk = 128 * max(1, 256 * CARDS[card].processors // s.width)
    kind = "fp8-torch" if CAPABILITIES[CARDS[card].capability][1] else "bf16"
    head = t.Head(s.vocab_size, s.logit_cap, s.logit_slope, chunk, True, kind)
    return t.Machine(torch.device("cuda"), torch.bfloat16, True, "varlen_attn", head, (1, 0, 1),
                     "off", 65536, ())


@pytest.mark.parametrize("card, k, recompute", [
    ("RTX 4060", 1, "blocks"), ("RTX 3060", 1, "off"), ("RTX 4070", 1, "off"),
    ("RTX 3090", 3, "off"), ("RTX 4090", 3, "off"), ("RTX 5090", 3, "off"), ("H100", 3, "off")])
def test_each_card_has_a_plan(card, k, recompute):
    """Of what a card with a desktop leaves: 0.8 GiB less than it says."""
    m = t.fit_memory(FINEWEB, machine_of(card), int((CARDS[card].memory - 0.8) * GIB))
    assert (m.share, m.recompute) == ((k, 0, 1), recompute)
    assert "memory plan" in m.notes[-1] and f"{k} units" in m.notes[-1]


def test_the_plan_falls_with_every_step_back_and_ends_in_one_line():
    m, seen, room = machine_of("RTX 3090"), [], 24 * GIB
    with pytest.raises(t.UserError) as refusal:
        while True:
            m = t.fit_memory(FINEWEB, m, room)
            plan = t.memory_plan(FINEWEB, m)
            room = sum(plan.values()) - 1
            seen.append((m.share[0], m.recompute))
    assert seen == [(3, "off"), (2, "off"), (1, "off"), (1, "light"), (1, "blocks")] or (
        seen[0] == (3, "off") and seen[-1] == (1, "blocks"))
    assert "close what else uses the GPU" in refusal.value.line


def test_a_micro_batch_that_divides_no_step_becomes_one_that_does():
    s = replace(FINEWEB, micro_batch=5)       # of 24 units
    m = t.fit_memory(s, machine_of("H200", s)._replace(share=(4, 0, 1)), 130 * GIB)
    assert m.share[0] == 4


def test_validation_takes_smaller_pieces_before_training_recomputes():
    m = machine_of("H100")._replace(val_piece=1 << 20)
    room = sum(t.memory_plan(FINEWEB, m._replace(share=(3, 0, 1), val_piece=65536)).values())
    fitted = t.fit_memory(FINEWEB, m, room)
    assert (fitted.share[0], fitted.recompute) == (3, "off") and fitted.val_piece < 1 << 20
    asked = t.fit_memory(replace(FINEWEB, val_piece=1 << 20), m, 40 * GIB)
    assert asked.val_piece == 1 << 20
    small = m._replace(val_piece=2 * 8192)    # a half would not reach back as far as windows do
    with pytest.raises(t.UserError):
        t.fit_memory(FINEWEB, small, 5 * GIB)


def test_plan_counts_parameters_and_state_exactly():
    plan = t.memory_plan(FINEWEB, machine_of("H100"))
    model = t.GPT(FINEWEB)
    optimizer = t.Optimizer(model, FINEWEB, False)
    assert plan["parameters"] == plan["gradients"] == sum(
        p.numel() * 4 for p in model.parameters())
    assert plan["optimizer"] == sum(x.numel() * 4 for s in optimizer.state.values() for x in s)


def test_out_of_memory_in_warm_up_takes_a_smaller_micro_batch(monkeypatch):
    run, calls = Run(SMALL, t.choose_machine(SMALL)), []
    run.use(run.machine._replace(compile=False, share=(2, 0, 1)))
    plain = Run.gradients

    def gradients(self, batch, stage):
        calls.append((len(batch.inputs_T) // 512, self.machine.recompute))
        if calls[-1] != (1, "blocks"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return plain(self, batch, stage)

    monkeypatch.setattr(Run, "gradients", gradients)
    before = {name: x.clone() for name, x in run.state().items()}
    run.warm_up()
    assert calls[0] == (2, "off") and calls[-1] == (1, "blocks") and (1, "off") in calls
    assert run.machine.share[0] == 1 and run.machine.recompute == "blocks" and run.model.recompute
    assert all(line.startswith("out of memory, so memory plan") for line in run.tried)
    assert all(torch.equal(x, before[name]) for name, x in run.state().items())


def test_out_of_memory_in_validation_takes_smaller_pieces_and_the_same_loss(monkeypatch):
    s = replace(SMALL, compile="off", val_sequence=3000, val_piece=2048)
    run, pieces = Run(s, t.choose_machine(s)), []
    for p in run.model.parameters():
        p.data.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.3)
    whole, plain, before = run.validate(0), Run.val_losses, run.machine.head

    def val_losses(self, group, stage):
        pieces.append(self.machine.val_piece)
        if self.machine.val_piece > 600 and len(pieces) > 1:  # in the midst of a validation
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return plain(self, group, stage)

    monkeypatch.setattr(Run, "val_losses", val_losses)
    assert math.isclose(run.validate(0), whole, rel_tol=1e-6)
    assert pieces[:3] == [2048, 2048, 1024] and set(pieces) == {2048, 1024, 512}
    assert run.machine.val_piece == 512 and run.val_data.room == 512
    assert run.machine.head == before  # else training would compile again, within the clock


@pytest.mark.parametrize("k, recompute", [(1, "off"), (2, "off"), (4, "off"), (1, "blocks"),
                                          (2, "blocks")])
def test_the_trajectory_depends_neither_on_k_nor_on_recomputation(k, recompute):
    s = replace(SMALL, compile="off", unit_tokens=128, doc_cap=128, tokens_per_step=512)
    losses = []
    for units, level in ((1, "off"), (k, recompute)):
        run = Run(s, t.choose_machine(replace(s, micro_batch=units))._replace(recompute=level))
        assert run.machine.share[0] == units
        for number in range(2):
            parts = [[4 * number + n + i for i in range(units)] for n in range(0, 4, units)]
            batches = [run.train_data.micro_batch(part) for part in parts]
            loss = run.step(number, [lambda batch=batch: batch for batch in batches])
        losses.append(loss.item())
    assert math.isclose(*losses, rel_tol=1e-6)


# ---- choosing by trying --------------------------------------------------------------------------

def test_the_fastest_right_trial_is_chosen():
    import time
    x = torch.randn(50)

    def slow() -> tuple:
        time.sleep(0.02)
        return (x,)

    def broken() -> tuple:
        raise RuntimeError("no kernel image\nis available")

    trials = {"reference": slow, "fast": lambda: (x + 1e-4,), "wrong": lambda: (x * 1.5,),
              "nan": lambda: (x * math.nan,), "broken": broken}
    lines = []
    name = t.fastest("attention", trials, dict.fromkeys(trials, 1e-3), torch.device("cpu"), lines)
    assert name == "fast" and len(lines) == 6 and lines[-1] == "attention: fast"
    assert "out: off by 0.5" in lines[2] and "out: off by nan" in lines[3]
    assert lines[4] == "attention broken: out: RuntimeError: no kernel image"
    with pytest.raises(t.UserError, match="2"):
        t.fastest("head", {"broken": broken}, {"broken": 1.0}, torch.device("cpu"), [])


# ---- FLOPs ---------------------------------------------------------------------------------------

def test_flops_of_the_matrices_are_those_that_torch_counts():
    s = replace(SMALL, compile="off", gate_width=4)
    run = Run(s, t.choose_machine(s))
    batch = run.train_data.micro_batch([0])
    ours = 512 * t.flops_per_token(s, torch.zeros(512), run.stages[0])
    with FlopCounterMode(display=False) as counter:
        run.gradients(batch, run.stages[0])
    counted = counter.get_flop_counts()["Global"]
    found = sum(n for op, n in counted.items() if "mm" in str(op))
    head = 6 * t.padded_vocab(s) * s.width * 512     # inside an operator: not counted
    gates = 6 * 512 * (2 * 2 * 4 + 4)                # two heads in two blocks, the smear gate
    one_key = 12 * s.width * 2 * 512                 # of attention, which torch does not count here
    assert found == ours - head - one_key + gates


def test_attention_flops_count_the_keys_that_are_seen():
    s, stage = FINEWEB, t.stages(FINEWEB)[0]
    positions = torch.arange(2048)
    per_token = t.flops_per_token(s, positions, stage) - t.flops_per_token(s, positions * 0, stage)
    keys = [sum(min(i, window) for i in range(2048)) / 2048 for window in (128, 384)]
    assert math.isclose(per_token, 12 * 768 * (8 * keys[0] + 2 * keys[1]), rel_tol=1e-9)
    matrices = 40 * 768 ** 2 + 22 * 768 * 3072 + 50304 * 768
    assert math.isclose(t.flops_per_token(s, positions * 0, stage),
                        6 * matrices + 12 * 768 * 10, rel_tol=1e-9)
