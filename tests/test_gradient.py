"""Neither micro-batches nor processes nor compilation change what a step computes."""
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from train_gpt import FINEWEB, TINY, Run, Settings

# 8 units a step: 1, 2, 4 and 8 divide them
SMALL = replace(
    FINEWEB, track="tiny", vocab_size=300, width=64, head_dim=32, mlp_width=96, layers=3,
    no_attention=(2,), long_window=(3,), value_layers=((1, 0), (3, 1)), skips=((3, 1),),
    unit_tokens=256, doc_cap=200, window_unit=16, windows=(2, 3), final_windows=(1, 3, 4),
    tokens_per_step=2048, steps=4, extra_steps=1, muon_lr=0.03, adam_lr=0.004, embed_lr=20.0,
    momentum_warmup=3, val_every=2, val_tokens=3000, val_sequence=1024, val_sha256="",
    device="cpu", precision="fp32", compile="off", val_piece=384, head_chunk=300, checkpoint=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two training shards and one of validation: random words of a small language."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    sizes = dict(x_train_000000=14000, x_train_000001=9000, x_val_000000=4000)
    for name, count in sizes.items():
        # the next token is a function of the last one in three cases of four: there is something
        # to learn, and a loss that falls
        tokens = rng.integers(0, 299, count)
        for i in np.flatnonzero(rng.random(count) < 0.75):
            tokens[i] = (7 * tokens[i - 1] + 1) % 299
        tokens[np.cumsum(rng.integers(1, 300, 500)) % count] = 299
        tokens[0] = 299
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, count
        (folder / f"{name}.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return folder


def randomised(run: Run) -> Run:
    """Random values in every parameter: with its zero head a new model has few gradients."""
    generator = torch.Generator().manual_seed(1)
    for name, p in run.model.named_parameters():
        p.data.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return run


def build(data: Path, **changes) -> Run:
    s = replace(SMALL, data_dir=str(data), **changes)
    return Run(s, train_gpt.choose_machine(s))


def micro_batches(run: Run, step: int) -> list:
    """What the reader would hand out in this step, to a single process."""
    units = run.s.tokens_per_step // run.s.unit_tokens
    return [lambda units=units: run.train_data.micro_batch(units)
            for units in train_gpt.unit_schedule(step, units, *run.machine.share)]


def step_gradients(run: Run, step: int) -> tuple[float, dict]:
    """Mean loss and gradients of a step, caught where the optimizer would use them."""
    caught = {}

    def keep(*_) -> None:
        caught.update({n: p.grad.clone() for n, p in run.model.named_parameters()})

    run.optimizer.step = keep
    return run.step(step, micro_batches(run, step)).item(), caught


def equal_gradients(ours: dict, truth: dict, tolerance: float) -> None:
    assert set(ours) == set(truth)
    for name, expected in truth.items():
        size = expected.abs().max()
        assert size > 1e-6, f"{name} has no gradient"
        error = ((ours[name] - expected).abs().max() / size).item()
        assert error < tolerance, f"gradient of {name}: relative error {error:.1e}"


def test_a_gradient_does_not_depend_on_the_micro_batch(data):
    """8 units in micro-batches of 1, 2, 4 and 8; and it is the gradient of the mean loss."""
    whole = randomised(build(data, micro_batch=8))
    assert whole.machine.share == (8, 0, 1)
    loss, truth = step_gradients(whole, 1)
    for k in (1, 2, 4):
        run = randomised(build(data, micro_batch=k))
        assert run.machine.share[0] == k
        other, gradients = step_gradients(run, 1)
        assert other == pytest.approx(loss, rel=1e-6)
        equal_gradients(gradients, truth, 1e-5)

    model = randomised(build(data)).model    # by plain autograd, and no code of the run
    batch = whole.train_data.micro_batch(list(range(8, 16)))
    view = train_gpt.make_view(batch, whole.stages[0], 200)
    logits = 30 * torch.sigmoid(model(batch, view) @ model.head[:300].T / 7.5)
    mean = torch.nn.functional.cross_entropy(logits, batch.targets_T)
    mean.backward()
    assert mean.item() == pytest.approx(loss, rel=1e-6)
    equal_gradients({n: p.grad for n, p in model.named_parameters()}, truth, 1e-5)


def test_training_does_not_depend_on_the_micro_batch(data):
    """Five steps, through the change of windows and into the floor of the learning rate."""
    curves = []
    for k in (1, 8):
        run = build(data, micro_batch=k)
        losses = [run.step(n, micro_batches(run, n)).item() for n in range(5)]
        curves.append([*losses, run.validate(5)])
    assert curves[0] == pytest.approx(curves[1], rel=2e-5)
    assert curves[0][0] - curves[0][4] > 0.05  # and it learns


def events(records: Path, kind: str) -> list[dict]:
    (log,) = records.glob("*/*.jsonl")
    return [e for e in map(json.loads, log.read_text().splitlines()) if e["event"] == kind]


def command_line(s: Settings, data: Path, records: Path) -> list[str]:
    """The settings as words, with `train_gpt.py` first."""
    changed = {n: v for n, v in vars(s).items() if v != getattr(TINY, n) and n != "data_dir"}
    words = [f"--{n}={str(v).lower() if isinstance(v, bool) else v}" for n, v in changed.items()]
    return ["train_gpt.py", "--track=tiny", *words, f"--data_dir={data}",
            f"--records_dir={records}", "--threads=1"]


def test_one_process_without_a_group_equals_two_with_gloo(data, tmp_path):
    """The whole program: `python train_gpt.py`, in which a process group is an error, and the
    launcher with two processes. The same losses, at full precision."""
    root, losses = Path(train_gpt.__file__).parent, []
    environment = {n: v for n, v in os.environ.items() if n not in (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1"}
    alone = """if True:
        import runpy, sys, torch.distributed as dist
        def init_process_group(*_, **__):
            raise AssertionError("one process needs no group")
        dist.init_process_group = init_process_group
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for words, k in ((["-c", alone], 4), (launcher, 2)):
        records = tmp_path / f"records{k}"
        s = replace(SMALL, micro_batch=k)
        done = subprocess.run([sys.executable, *words, *command_line(s, data, records)], cwd=root,
                              env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        (start,), (end,) = events(records, "start"), events(records, "end")
        assert start["environment"]["processes"] == (1 if k == 4 else 2)
        assert start["run"]["micro_batch_units"] == k and end["status"] == "complete"
        assert end["tokens"] == 5 * 2048     # of all processes together
        losses.append([e["loss"] for kind in ("step", "val") for e in events(records, kind)])
    assert len(losses[0]) == 5 + 4           # validated at 0, 2, 4 and 5
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)


@pytest.fixture
def deterministic():
    """As a run sets it before anything is compiled; which takes a compiler."""
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        pytest.skip("no C++ compiler here")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def test_compiled_equals_eager(data, deterministic):
    """Loss and every gradient of a micro-batch, in one graph and one for the head's chunks."""
    changes = dict(layers=2, no_attention=(), long_window=(2,), value_layers=((1, 0),),
                   skips=((2, 1),), head_chunk=128)
    results = []
    for compile in ("off", "on"):
        run, known = randomised(build(data, compile=compile, **changes)), train_gpt.graphs()
        counts = []
        for stage in (0, 0, 1, 0):
            loss = run.gradients(run.train_data.micro_batch([0]), run.stages[stage])
            counts.append(train_gpt.graphs() - known)
        gradients = {n: p.grad for n, p in run.model.named_parameters()}
        results.append((loss.item(), gradients, counts))
    (eager, truth, none), (loss, gradients, counts) = results
    # The model and the head's chunk; torch may compile the chunk again in the second call, when it
    # no longer runs inside the first one of the model. Then no more, nor at a change of windows.
    assert none == [0] * 4 and counts[0] == 2 and counts[1] <= 3 and counts[3] == counts[1]
    assert loss == pytest.approx(eager, rel=1e-6)
    equal_gradients(gradients, truth, 2e-5)


def test_compiled_updates_equal_eager_updates(deterministic):
    generator, results = torch.Generator().manual_seed(0), []
    p, g, m, v = torch.rand(4, 2, 32, 48, generator=generator)
    rate, mu, step = torch.tensor(0.02), torch.tensor(0.9), torch.tensor(3.0)
    for on in (False, True):
        muon, adam = [p.clone(), g, m.clone()], [p.clone(), g, m.clone(), v.clone()]
        train_gpt.compiled(train_gpt.muon_update, on)(*muon, rate, mu, torch.float32)
        train_gpt.compiled(train_gpt.adam_update, on)(*adam, rate, (0.8, 0.95), 1e-8, 0.1, step)
        results.append([*muon, *adam])
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
