"""Whole runs of a minuscule model: what they write, how they end, what the clock counts.

Sections 7 (schedules), 9 (log and clock), 10 (run) and 11 (main) of train_gpt.py. The runs go
through `main`, with the command line that a user would write.
"""
import concurrent.futures
import doctest
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from train_gpt import FINEWEB, PRESETS, TINY, Run, lr_scale, stage_at, stages, total_steps

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(
    track="tiny", device="cpu", precision="fp32", compile="off", threads=1, micro_batch=1,
    vocab_size=97, width=64, head_dim=32, mlp_width=128, layers=3, no_attention=(2,),
    long_window=(3,), value_layers=((1, 0), (3, 1)), skips=((3, 1),), gate_width=8,
    unit_tokens=128, doc_cap=64,
    tokens_per_step=256, steps=6, extra_steps=1, epochs=1, momentum_warmup=4, window_unit=16,
    windows=(1, 2, 3), final_windows=(1, 3, 4), val_every=3, val_tokens=700, val_sequence=256,
    val_sha256="", optimizer="muon", muon_lr=0.03, adam_lr=0.004, embed_lr=20.0)
VALIDATED = [0, 3, 6, 7]


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """Two training shards and one for validation: text of a simple grammar, so that loss falls."""
    folder, rng = tmp_path_factory.mktemp("shards"), random.Random(0)
    for name, size in (("train_000000", 2501), ("train_000001", 4000), ("val_000000", 1500)):
        tokens = []
        while len(tokens) < size:
            at, length = rng.randrange(96), rng.randint(3, 120)
            tokens += [96, *((at + 5 * n + rng.randrange(2)) % 96 for n in range(length))]
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, size
        (folder / f"s_{name}.bin").write_bytes(
            header.tobytes() + np.array(tokens[:size], "<u2").tobytes())
    return folder


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch):
    """A run makes choices for its process; the next test starts without them."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a busy disk may take minutes
    before = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield
    signal.signal(signal.SIGTERM, before[0])
    torch.set_num_threads(before[1])
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


class Record:
    """The files of one run."""

    def __init__(self, folder: Path, code: int | None):
        (self.jsonl,) = folder.glob("*/*.jsonl")
        self.text = self.jsonl.with_suffix(".txt").read_text()
        self.checkpoint = self.jsonl.with_suffix(".pt")
        self.code, self.folder = code, self.jsonl.parent
        self.events = [json.loads(line) for line in self.jsonl.read_text().splitlines()]
        self.start, self.end = self.events[0], self.events[-1]

    def of(self, kind: str) -> list[dict]:
        return [e for e in self.events if e["event"] == kind]

    def losses(self) -> list[tuple]:
        return [(e["event"], e["step"], e["loss"]) for e in self.events if "loss" in e]


def words(shards: Path, records: Path, **changes) -> list[str]:
    return [f"--{name}={value}" for name, value in dict(
        SMALL, data_dir=shards, records_dir=records, **changes).items()]


@pytest.fixture
def train(shards, tmp_path):
    """Run main in this process with SMALL and changes; its record, from a fresh records folder."""
    count = iter(range(100))

    def run(**changes) -> Record:
        folder = tmp_path / f"records{next(count)}"
        code = train_gpt.main(words(shards, folder, **changes))
        return Record(folder, code)

    return run


@pytest.fixture(scope="module")
def record(shards, tmp_path_factory) -> Record:
    """One undisturbed run that many tests look at."""
    folder = tmp_path_factory.mktemp("record")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        return Record(folder, train_gpt.main(words(shards, folder)))


# ---- what a run writes ---------------------------------------------------------------------------

def test_events_come_in_order(record):
    assert record.code == 0
    kinds = [(e["event"], e.get("step")) for e in record.events]
    steps = [("step", n) for n in range(1, 8)]
    assert kinds == [("start", None), ("warmup", None), ("val", 0), *steps[:3], ("val", 3),
                     *steps[3:6], ("val", 6), steps[6], ("val", 7), ("end", 7)]
    assert all(line.startswith('{"event": "') for line in record.jsonl.read_text().splitlines())


def test_the_start_event_says_what_runs(record, shards):
    e, val = record.start, record.start["data"]["val"]
    assert (e["format"], e["track"], e["name"]) == (1, "tiny", "Tiny")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", e["utc"])
    assert e["id"] == record.jsonl.stem and record.folder.name == e["utc"][:10] + "_Tiny"
    s = train_gpt.parse_settings(words(shards, record.folder.parent))[0]
    assert set(e["settings"]) == set(vars(s)) and e["settings"]["skips"] == [[3, 1]]
    overrides = {**e["recipe_overrides"], **e["machine_overrides"]}
    assert set(e["recipe_overrides"]) <= train_gpt.RECIPE_FIELDS
    assert not set(e["machine_overrides"]) & train_gpt.RECIPE_FIELDS
    assert set(overrides) == {n for n in vars(s) if getattr(s, n) != getattr(TINY, n)}
    assert e["environment"]["device"] == "cpu" and e["environment"]["threads"] == 1
    assert {"python", "torch", "triton", "cuda", "capability", "cpu", "processes", "os"} <= set(
        e["environment"])
    assert e["run"]["precision"] == "float32" and e["run"]["compiled"] is False
    assert (e["run"]["steps"], e["run"]["tokens_per_step"]) == (7, 256)
    assert e["data"]["train"][0] == {"file": "s_train_000000.bin", "tokens": 2501}
    assert (val["file"], val["tokens_in_file"], val["tokens"], val["sequence"]) == (
        "s_val_000000.bin", 1500, 700, 256)
    assert val["sha256"] == hashlib.sha256((shards / val["file"]).read_bytes()).hexdigest()
    model = train_gpt.GPT(s)
    assert e["parameters"] == sum(p.numel() for p in model.parameters())
    warmup = record.of("warmup")[0]
    assert warmup["restored"] is True and warmup["graphs"] == 0 and warmup["seconds"] > 0


def test_numbers_of_the_events_agree(record):
    steps, vals, end = record.of("step"), record.of("val"), record.end
    assert [e["step"] for e in vals] == VALIDATED
    times = [e["train_time_ms"] for e in steps]
    assert times == sorted(times) and times[0] > 0 and vals[0]["train_time_ms"] == 0
    for e in vals[1:]:
        assert e["train_time_ms"] == times[e["step"] - 1]  # validation stops the clock
    s = replace(TINY, **{n: v for n, v in SMALL.items() if n in vars(TINY)})
    assert [e["lr_scale"] for e in steps] == [lr_scale(n, s) for n in range(7)]
    assert all(e["tokens"] == 700 for e in vals)
    assert abs(vals[0]["loss"] - math.log(97)) < 1e-4 and vals[-1]["loss"] < vals[0]["loss"] - 0.1
    assert abs(steps[0]["loss"] - math.log(97)) < 1e-4
    assert end["status"] == "complete" and end["reason"] is None and end["step"] == 7
    assert end["val_loss"] == vals[-1]["loss"] and end["mfu"] is None
    assert end["train_time_ms"] == times[-1] and end["tokens"] == 7 * 256
    assert math.isclose(end["wait_ms"], sum(e["wait_ms"] for e in steps), abs_tol=1e-6)
    assert end["recompiles"] == 0 and end["peak_memory_mib"] > 10
    assert 1000 * end["wall_s"] > end["train_time_ms"] + 1000 * record.of("warmup")[0]["seconds"]


FIELD = re.compile(r"^step:(\d+)/(\d+) (val|train)_loss:(\d+\.\d{4}) train_time:(\d+)ms "
                   r"step_avg:(\d+\.\d\d)ms$", re.M)


def test_the_text_log_is_in_the_fields_format(record):
    """And says the same as the events, rounded."""
    lines = [line for line in record.text.splitlines() if line.startswith("step:")]
    found = FIELD.findall(record.text)
    assert len(found) == len(lines) == 7 + 4
    for (step, total, kind, loss, ms, average), event in zip(
            found, [e for e in record.events if "loss" in e]):
        assert (kind == "val") == (event["event"] == "val") and total == "7"
        assert int(step) == event["step"] and loss == f"{event['loss']:.4f}"
        assert ms == f"{event['train_time_ms']:.0f}"
        assert average == f"{event['train_time_ms'] / max(1, event['step']):.2f}"


def test_the_text_log_says_what_was_changed(record):
    for group in ("recipe", "machine"):
        (line,) = re.findall(rf"^{group} overrides: (.*)$", record.text, re.M)
        changed = record.start[f"{group}_overrides"]
        assert changed and all(f"{name} " in line for name in changed)
    assert "an experiment, not a record" in record.text
    assert f"\nprogram: {record.start['program']} {record.start['program_sha256']}\n" in record.text


def test_the_summary_can_be_derived_from_the_events(record):
    e = record.end
    s = e["train_time_ms"] / 1000
    assert record.text.splitlines()[-1] == (
        f"summary: val_loss {e['val_loss']:.4f}, target {record.start['settings']['target_loss']}, "
        f"trained {s:.1f} s, {e['tokens'] / s:,.0f} tokens/s, MFU n/a, loader wait "
        f"{e['wait_ms'] / s / 10:.2f} %, recompiles 0, peak memory {e['peak_memory_mib']:,} MiB, "
        f"wall {e['wall_s']:.1f} s")
    assert record.text.count("summary:") == 1


def test_the_screen_shows_the_log(train, capsys):
    text = train().text
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if not line.startswith("log: ")] == [
        line for line in text.splitlines() if not line.startswith("program: ")]
    assert train(log_every=5).text.count("train_loss") == 7
    assert capsys.readouterr().out.count("train_loss") == 1


def test_the_program_is_kept_once_by_its_hash(shards, tmp_path):
    for seed in (0, 1):
        changes = dict(seed=seed, name="Two", checkpoint="false")
        assert train_gpt.main(words(shards, tmp_path, **changes)) == 0
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith("_Two")
    (program,) = folder.glob("*.py")
    digest = hashlib.sha256((ROOT / "train_gpt.py").read_bytes()).hexdigest()
    assert program.name == f"train_gpt_{digest[:8]}.py"
    assert program.read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    starts = [json.loads(path.read_text().splitlines()[0]) for path in folder.glob("*.jsonl")]
    assert {e["settings"]["seed"] for e in starts} == {0, 1}
    assert all((e["program"], e["program_sha256"]) == (program.name, digest) for e in starts)
    assert len(list(folder.iterdir())) == 5  # two logs of two files, nothing else


def test_the_checkpoint_is_the_final_state(train, monkeypatch):
    """Written before the last validation, so a fault there loses nothing."""
    runs, seen = [], []

    class Spied(Run):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            runs.append(self)

        def save(self, log, stem, end):
            super().save(log, stem, end)
            seen.append(("save", end["step"]))

        def validate(self, step):
            seen.append(("validate", step))
            return super().validate(step)

    monkeypatch.setattr(train_gpt, "Run", Spied)
    record = train()
    assert seen == [("validate", 0), ("validate", 3), ("validate", 6), ("save", 7),
                    ("validate", 7)]
    saved, state = torch.load(record.checkpoint, weights_only=True), runs[0].state()
    assert saved["step"] == 7 and saved["settings"] == vars(runs[0].s)
    assert set(saved["state"]) == set(state)
    assert {n.partition(".")[2] for n in state if n.startswith("model.")} == {
        n for n, _ in runs[0].model.named_parameters()}
    for name, tensor in state.items():
        assert torch.equal(saved["state"][name], tensor), name
    assert not train(checkpoint="false").checkpoint.exists()


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    done, path = [], tmp_path / "a.pt"
    replace_file = os.replace
    monkeypatch.setattr(os, "fsync", lambda _: done.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda *a: (done.append("replace"), replace_file(*a)))
    train_gpt.write_whole(path, lambda file: file.write(b"first"))
    assert path.read_bytes() == b"first" and done == ["fsync", "replace"]

    def half(file):
        file.write(b"sec")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        train_gpt.write_whole(path, half)
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("every, expected", [(4, [0, 4, 7]), (7, [0, 7]), (100, [0, 7]),
                                             (1, [0, 1, 2, 3, 4, 5, 6, 7])])
def test_validation_at_the_start_at_multiples_and_once_at_the_end(train, every, expected):
    assert [e["step"] for e in train(val_every=every).of("val")] == expected


def test_validation_uses_the_windows_of_its_step(train, monkeypatch):
    seen, plain = set(), Run.val_losses
    monkeypatch.setattr(Run, "warm_up", lambda self: None)
    monkeypatch.setattr(Run, "val_losses", lambda self, group, stage:
                        (seen.add((stage.short, stage.long)), plain(self, group, stage))[1])
    train(val_every=2)
    assert seen == {(0, 16), (16, 32), (16, 48), (16, 64)}


# ---- the same run, the same numbers --------------------------------------------------------------

def test_the_same_seed_gives_the_same_losses(record, train):
    """To the last bit; and from a reader that may be ahead by 1 or by 50 micro-batches."""
    assert train().losses() == record.losses()
    assert train(prefetch=1).losses() == record.losses()
    assert train(prefetch=50).losses() == record.losses()


def test_another_seed_gives_others(record, train):
    other = train(seed=1)
    assert other.losses()[-1] != record.losses()[-1]
    assert other.start["data"] == record.start["data"]


def test_a_slow_reader_thread_changes_no_loss(record, train, monkeypatch):
    rng, prompt, names = random.Random(0), train_gpt.TrainData.micro_batch, set()

    def slow(self, units):
        names.add(threading.current_thread().name)
        time.sleep(rng.choice([0, 0.01, 0.03]))
        return prompt(self, units)

    monkeypatch.setattr(train_gpt.TrainData, "micro_batch", slow)
    waiting = train(prefetch=1)
    assert waiting.losses() == record.losses() and "reader_0" in names
    assert waiting.end["wait_ms"] > 0


def test_micro_batches_are_tried_and_the_faster_one_is_taken(record, train, monkeypatch):
    """Over the same units, and what was tried leaves no trace in the run."""
    plain, seconds = Run.gradients, {128: 0.004, 256: 0.02}

    def slower(self, batch, stage):
        time.sleep(seconds[len(batch.inputs_T)])
        return plain(self, batch, stage)

    monkeypatch.setattr(Run, "gradients", slower)
    for best in (1, 2):
        tried = train(micro_batch="auto")
        (warmup,) = tried.of("warmup")
        assert warmup["micro_batch_units"] == best
        assert [line.split(":")[0] for line in warmup["tried"]] == [
            "micro-batch 2 units", "micro-batch 1 units", "micro-batch"]
        for (*_, a), (*_, b) in zip(tried.losses(), record.losses(), strict=True):
            assert math.isclose(a, b, rel_tol=1e-4)
        seconds[128] = 0.03


def test_larger_micro_batches_change_losses_by_rounding_only(record, train):
    both = train(micro_batch=2)
    assert both.start["run"]["micro_batch_units"] == 2
    for (*_, a), (*_, b) in zip(both.losses(), record.losses()):
        assert math.isclose(a, b, rel_tol=1e-4)


# ---- warm-up -------------------------------------------------------------------------------------

def test_a_run_without_warm_up_has_the_same_losses(record, train, monkeypatch):
    """So warm-up changes neither model nor optimizer nor random numbers nor the reader's place."""
    monkeypatch.setattr(Run, "warm_up", lambda self: None)
    assert train().losses() == record.losses()


def built(shards) -> Run:
    s = train_gpt.parse_settings(words(shards, shards))[0]
    machine = train_gpt.choose_machine(s)
    train_gpt.prepare(machine, s)
    return Run(s, machine)


def test_warm_up_restores_every_bit(shards):
    run = built(shards)
    run.step(0, [lambda: run.train_data.micro_batch([3])] * 2)  # so that no state is zero
    before = {name: tensor.clone() for name, tensor in run.state().items()}
    assert any(n.startswith("optimizer.") and t.any() for n, t in before.items())
    objects = {name: tensor.data_ptr() for name, tensor in run.state().items()}
    torch.manual_seed(7)
    random_state = torch.get_rng_state()
    run.warm_up()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {name: tensor.data_ptr() for name, tensor in run.state().items()} == objects
    for name, tensor in run.state().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is None for p in run.model.parameters())


def test_warm_up_restores_random_numbers_even_if_a_step_draws_some(shards, monkeypatch):
    run, plain = built(shards), Run.gradients
    monkeypatch.setattr(Run, "gradients", lambda *a: (torch.rand(3), plain(*a))[1])
    random_state = torch.get_rng_state()
    run.warm_up()
    assert torch.equal(torch.get_rng_state(), random_state)


def test_warm_up_meets_every_stage(shards, monkeypatch):
    """Training and validation of each; training of a step that accumulates, as the run does."""
    run, trained, validated = built(shards), [], []
    plain = Run.gradients, Run.val_losses
    monkeypatch.setattr(Run, "gradients", lambda self, batch, stage:
                        (trained.append(stage), plain[0](self, batch, stage))[1])
    monkeypatch.setattr(Run, "val_losses", lambda self, group, stage:
                        (validated.append(stage), plain[1](self, group, stage))[1])
    run.warm_up()
    assert set(trained) == {stage_at(n, run.stages) for n in range(total_steps(run.s))}
    assert set(validated) == set(run.stages) and len(run.stages) == 4
    assert all(trained.count(stage) > 1 for stage in set(trained))


# ---- the clock -----------------------------------------------------------------------------------

def test_the_clock_counts_steps_and_nothing_else(train, monkeypatch):
    """On a clock that only this test moves: a step takes 1 s, all else takes longer."""
    now, costs = [0.0], dict(step=1, warm_up=1000, validate=100, save=10_000)
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: now[0])
    warm = []

    def slowed(name, plain):
        def method(self, *arguments):
            result = plain(self, *arguments)
            now[0] += costs[name] if name != "step" or warm else 50
            if name == "warm_up":
                warm.append(True)
            return result
        return method

    for name in costs:
        monkeypatch.setattr(Run, name, slowed(name, getattr(Run, name)))
    record = train()
    assert [e["train_time_ms"] for e in record.of("step")] == [1000.0 * n for n in range(1, 8)]
    assert [e["train_time_ms"] for e in record.of("val")] == [1000.0 * n for n in VALIDATED]
    warm_up = 3 * 50 + 1000                  # three stages of training
    assert record.of("warmup")[0]["seconds"] == warm_up
    assert record.end["train_time_ms"] == 7000.0
    assert record.end["wall_s"] == warm_up + 7 + 4 * 100 + 10_000
    assert record.end["wait_ms"] == 0
    assert "step:6/7 val_loss:" in record.text and "train_time:7000ms step_avg:1000.00ms" in \
        record.text.splitlines()[-2]


def test_waiting_for_the_reader_is_timed(train, monkeypatch):
    """It belongs to the step: the clock runs, and the wait is reported beside it."""
    now, plain = [0.0], concurrent.futures.Future.result
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: now[0])

    def get(self, *arguments, **options):
        now[0] += 0.25
        return plain(self, *arguments, **options)

    monkeypatch.setattr(concurrent.futures.Future, "result", get)
    record = train()
    assert [e["train_time_ms"] for e in record.of("step")] == [500.0 * n for n in range(1, 8)]
    assert [e["wait_ms"] for e in record.of("step")] == [500.0] * 7
    assert record.end["wait_ms"] == 3500.0


def test_clock_sums_are_exact():
    now = [0.0]
    clock = train_gpt.Clock(torch.device("cpu"))
    clock.now = lambda: now[0]
    assert clock.ms() == 0
    for seconds in (0.5, 2.0, 0.25):
        clock.start()
        now[0] += seconds
        clock.stop()
        now[0] += 1000
    assert clock.ms() == 2750.0


# ---- how a run ends ------------------------------------------------------------------------------

def test_a_training_loss_that_is_no_number_stops_the_run(train):
    record = train(adam_lr=1e39)             # fp32 ends at 3.4e38
    assert record.code == 3 and record.end["status"] == "non-finite"
    last = record.of("step")[-1]
    assert not math.isfinite(last["loss"]) and 1 < last["step"] < 7
    assert all(math.isfinite(e["loss"]) for e in record.of("step")[:-1])
    assert record.end["step"] == last["step"]
    assert record.end["reason"] == f"train_loss nan at step {last['step']}"
    assert record.text.splitlines()[-1] == f"non-finite: {record.end['reason']}"
    assert not record.checkpoint.exists() and "reader" not in [
        t.name for t in threading.enumerate()]


def test_a_validation_loss_that_is_no_number_stops_the_run(train, monkeypatch):
    plain = Run.warm_up

    def poisoned(self):
        plain(self)
        self.model.embed.data[5, 0] = math.nan

    monkeypatch.setattr(Run, "warm_up", poisoned)
    record = train()
    assert record.code == 3 and record.end["status"] == "non-finite"
    assert record.end["reason"] == "val_loss nan at step 0" and record.of("step") == []


def test_an_error_leaves_an_end_event_and_a_traceback(shards, tmp_path, monkeypatch):
    plain = Run.step

    def failing(self, number, micro_batches):
        if number == 5:                      # no stage begins there: not in warm-up
            raise RuntimeError("out of luck\nsecond line")
        return plain(self, number, micro_batches)

    monkeypatch.setattr(Run, "step", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        train_gpt.main(words(shards, tmp_path))
    record = Record(tmp_path, None)
    assert record.end["event"] == "end" and record.end["status"] == "error"
    assert record.end["reason"] == "RuntimeError: out of luck"
    last = record.of("step")[-1]["step"]     # losses are read a step late
    assert 4 <= last <= 5 and record.end["step"] == last and record.end["tokens"] == last * 256
    assert record.end["val_loss"] == record.of("val")[-1]["loss"]
    assert record.text.splitlines()[-1] == "error: RuntimeError: out of luck"
    assert "reader" not in [t.name for t in threading.enumerate()]


def test_an_error_of_the_reader_thread_ends_the_run(shards, tmp_path, monkeypatch, capsys):
    plain = train_gpt.TrainData.micro_batch

    def failing(self, units):
        if units == [9]:
            raise OSError("disk gone")
        return plain(self, units)

    monkeypatch.setattr(train_gpt.TrainData, "micro_batch", failing)
    assert train_gpt.main(words(shards, tmp_path)) == 2
    assert capsys.readouterr().err == "train_gpt.py: disk gone\n"
    assert Record(tmp_path, None).end["reason"] == "OSError: disk gone"


def test_an_error_in_warm_up_is_logged(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "gradients", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_gpt.main(words(shards, tmp_path))
    record = Record(tmp_path, None)
    assert [e["event"] for e in record.events] == ["start", "end"]
    assert record.end["status"] == "error" and record.end["step"] == 0


@pytest.mark.parametrize("parts", [
    dict(skips=()), dict(value_layers=()), dict(no_attention=(1, 2), long_window=()),
    dict(optimizer="adamw"), dict(extra_steps=0), dict(windows=(2,)), dict(cooldown=0.0),
    dict(no_attention=(1, 2, 3), value_layers=())], ids=str)
def test_parts_can_be_left_out(train, parts):
    """What an experiment takes away, the rest must do without."""
    assert train(**parts).end["status"] == "complete"


@pytest.fixture
def started(shards, tmp_path):
    """A run in a process of its own that would last for hours; stopped behind the test."""
    processes = []

    def start(*more: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, ROOT / "train_gpt.py", *words(
                shards, tmp_path, steps=1_000_000, epochs=1_000_000, val_every=1_000_000), *more],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=dict(os.environ, OMP_NUM_THREADS="1"))
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_the_run_and_the_log_says_so(started, tmp_path, name, code):
    process, deadline = started(), time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        logs = list(tmp_path.glob("*/*.jsonl"))
        if logs and '"step": 3,' in logs[0].read_text():
            break
        time.sleep(0.05)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=30)
    record = Record(tmp_path, process.returncode)
    assert record.code == code and "Traceback" not in err
    assert record.end["event"] == "end" and record.end["status"] == "interrupted"
    assert record.end["reason"] == name and record.end["step"] >= 3
    assert record.end["step"] == record.of("step")[-1]["step"]
    assert record.end["tokens"] == 256 * record.end["step"]
    assert record.text.splitlines()[-1] == f"interrupted: {name}"
    assert out.splitlines()[-1].startswith("log: ") and not record.checkpoint.exists()


def test_a_signal_before_training_is_no_traceback(shards, tmp_path, monkeypatch, capsys):
    """While shards are indexed and the model is built, there is no log yet."""
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        monkeypatch.setattr(train_gpt.TrainData, "__init__",
                            lambda *_: os.kill(os.getpid(), number) or time.sleep(5))
        try:
            found = train_gpt.main(words(shards, tmp_path))
        except KeyboardInterrupt:
            pytest.fail(f"{number.name} came out of main")  # for the user: a traceback
        assert found == code and capsys.readouterr().out == ""


# ---- compiled ------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX") or "g++"), reason="no C++ compiler")
def test_nothing_is_compiled_after_warm_up(shards, tmp_path):
    """Every stage of training and validation in one compiled run: warm-up has met all graphs."""
    done = subprocess.run(
        [sys.executable, ROOT / "train_gpt.py", *words(
            shards, tmp_path, compile="on", layers=2, no_attention=(), long_window=(2,),
            value_layers=((1, 0),), skips=((2, 1),))],
        capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    record = Record(tmp_path, done.returncode)
    assert record.start["run"]["compiled"] is True and record.of("warmup")[0]["graphs"] > 0
    assert record.end["recompiles"] == 0
    assert f"{record.of('warmup')[0]['graphs']} graphs compiled" in record.text


def test_a_graph_after_warm_up_is_counted(train, monkeypatch):
    """The count that the test above trusts."""
    made, plain = [0], Run.validate
    monkeypatch.setattr(train_gpt, "graphs", lambda: made[0])

    def validate(self, step):
        made[0] += step == 3
        return plain(self, step)

    monkeypatch.setattr(Run, "validate", validate)
    record = train()
    assert record.end["recompiles"] == 1 and "recompiles 1," in record.text


# ---- schedules -----------------------------------------------------------------------------------

def test_worked_examples_in_docstrings():
    failed, tried = doctest.testmod(train_gpt)
    source = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
    assert failed == 0 and tried == source.count("\n    >>> ") > 0
    rate, by_hand = [lr_scale(n, FINEWEB) for n in (0, 815, 1222, 1630, 1669)], [1, 1, .551, .1, .1]
    assert rate == pytest.approx(by_hand, abs=5e-4)
    assert [train_gpt.momentum(n, FINEWEB) for n in (0, 150, 300, 1000)] == pytest.approx(
        [0.85, 0.9, 0.95, 0.95])
    freqs, _ = train_gpt.yarn(np.array([1.0, 0.01]), 0.1, old=384, new=896)
    assert freqs.round(4).tolist() == [1.0, 0.0043]  # it turns less than once, so it is stretched


@pytest.mark.parametrize("s", [FINEWEB, TINY, replace(TINY, cooldown=0.0),
                               replace(TINY, cooldown=1.0, lr_floor=0.0)])
def test_the_learning_rate_is_flat_then_falls_to_its_floor(s):
    rates = [lr_scale(n, s) for n in range(total_steps(s))]
    flat = math.ceil(s.steps * (1 - s.cooldown))
    assert all(r == 1 for r in rates[:flat])
    assert all(math.isclose(r, s.lr_floor, abs_tol=1e-12) for r in rates[s.steps:])
    falls = [a - b for a, b in zip(rates, rates[1:])]
    assert min(falls) >= 0                   # never rises
    if s.cooldown:
        one = (1 - s.lr_floor) / (s.cooldown * s.steps)
        assert max(falls) <= one * 1.000001  # no jump
        middle = lr_scale(s.steps * (1 - s.cooldown / 2), s)
        assert math.isclose(middle, (1 + s.lr_floor) / 2)
    assert math.isclose(lr_scale(s.steps, s), s.lr_floor, abs_tol=1e-12)


def test_fineweb_rates_of_the_recipe():
    assert [lr_scale(n, FINEWEB) for n in (0, 814, 815)] == [1, 1, 1] and lr_scale(816, FINEWEB) < 1
    assert math.isclose(lr_scale(1222.5, FINEWEB), 0.55) and lr_scale(1629, FINEWEB) > 0.1
    assert all(lr_scale(n, FINEWEB) == 0.1 for n in range(1630, 1670))


def test_every_step_is_taken_with_its_own_rate_momentum_and_windows(train, monkeypatch):
    taken, seen, plain = [], [], (train_gpt.Optimizer.step, Run.gradients)
    monkeypatch.setattr(Run, "warm_up", lambda self: None)
    monkeypatch.setattr(Run, "gradients", lambda self, batch, stage:
                        (seen.append(stage.long), plain[1](self, batch, stage))[1])
    monkeypatch.setattr(train_gpt.Optimizer, "step", lambda self, *schedule:
                        (taken.append(schedule), plain[0](self, *schedule))[1])
    train(cooldown=0.5, lr_floor=0.1, momentum=(0.85, 0.95))
    rates = [1, 1, 1, 1, 0.7, 0.4, 0.1]      # the last is the extra step
    momenta = [0.85, 0.875, 0.9, 0.925, 0.95, 0.95, 0.95]
    assert np.allclose(taken, [*zip(range(7), rates, momenta)], rtol=1e-12)
    assert seen == [16] * 4 + [32] * 4 + [48] * 6  # two micro-batches a step


@pytest.mark.parametrize("s", [FINEWEB, TINY, replace(TINY, momentum_warmup=0)])
def test_momentum_rises_linearly_and_stays(s):
    values = [train_gpt.momentum(n, s) for n in range(total_steps(s))]
    first, last = s.momentum
    warm = s.momentum_warmup
    assert values[0] == first or warm == 0
    assert all(math.isclose(v, last) for v in values[max(1, warm):])
    rises = [b - a for a, b in zip(values, values[1:])]
    assert min(rises) >= 0 and max(rises) <= (last - first) / max(1, warm) * 1.000001
    assert math.isclose(train_gpt.momentum(warm / 2, s), (first + last) / 2) or warm == 0


@pytest.mark.parametrize("track", PRESETS)
def test_windows_grow_by_equal_parts_of_the_schedule(track):
    s, plan = PRESETS[track], stages(PRESETS[track])
    assert len(plan) == len(s.windows) + 1 and plan[0].first_step == 0
    for n in range(total_steps(s)):
        part = min(len(s.windows) - 1, n * len(s.windows) // s.steps)
        stage = stage_at(n, plan)
        if n in [g.first_step for g in plan]:  # rounded down
            part = [g.first_step for g in plan].index(n)
        assert stage.long == s.windows[part] * s.window_unit
        assert stage.short == s.windows[part] // 2 * s.window_unit
    assert stage_at(s.steps, plan) == stage_at(total_steps(s) - 1, plan) == plan[-2]
    final = stage_at(total_steps(s), plan)
    assert final == plan[-1]
    assert (final.short, final.long) == tuple(
        s.window_unit * s.final_windows[n] for n in (0, 2))


def test_fineweb_stages_of_the_recipe():
    windows = [(stage_at(n, stages(FINEWEB)).short, stage_at(n, stages(FINEWEB)).long)
               for n in (0, 542, 543, 1085, 1086, 1630, 1669, 1670)]
    assert windows == [(128, 384)] * 2 + [(384, 896)] * 2 + [(640, 1408)] * 3 + [(768, 2560)]


@pytest.mark.parametrize("track", PRESETS)
def test_yarn_over_the_stages(track):
    """Frequencies fall along the head and never rise over the stages; the fastest keep theirs."""
    s, plan = PRESETS[track], stages(PRESETS[track])
    assert len(plan[0].freqs_R) == s.head_dim // 4 and plan[0].scale == s.attention_scale
    assert plan[0].freqs_R[0] == 1 and math.isclose(plan[0].freqs_R[-1], 1 / s.rotary_base)
    ratios = [b / a for a, b in zip(plan[0].freqs_R, plan[0].freqs_R[1:])]
    assert max(ratios) - min(ratios) < 1e-9  # geometric
    shown, freqs, scale = s.windows[0], np.array(plan[0].freqs_R), s.attention_scale
    for stage, window in zip(plan, [*s.windows, s.final_windows[1]]):
        assert all(a > b > 0 for a, b in zip(stage.freqs_R, stage.freqs_R[1:]))
        ratio = shown / window               # the published rule, written out
        for n, f in enumerate(freqs):
            turns = s.window_unit * shown * f / (2 * math.pi)
            freqs[n] = f * (ratio + min(1, max(0, (turns - 1) / 31)) * (1 - ratio))
        scale, shown = scale * (1 + 0.2 * math.log(window / shown)), window
        assert np.allclose(stage.freqs_R, freqs, rtol=1e-12) and math.isclose(stage.scale, scale)
    for a, b in zip(plan, plan[1:]):
        assert all(x >= y for x, y in zip(a.freqs_R, b.freqs_R)) and a.scale <= b.scale


def test_fineweb_scale_of_the_recipe():
    scales = [round(stage.scale, 5) for stage in stages(FINEWEB)]
    assert scales == [0.1, 0.11695, 0.12752, 0.13178]
    assert stages(FINEWEB)[-1].freqs_R[0] == 1


def test_the_final_long_window_is_not_adapted_to():
    """YaRN goes by the second of the final windows, the mask by the third."""
    wide = replace(FINEWEB, final_windows=(6, 13, 40))
    assert stages(wide)[-1].freqs_R == stages(FINEWEB)[-1].freqs_R
    assert stages(wide)[-1].scale == stages(FINEWEB)[-1].scale
    assert stages(wide)[-1].long == 40 * 128


def test_a_folder_that_cannot_be_written_is_named(shards, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train_gpt.main(words(shards, tmp_path / "file" / "records")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train_gpt.py: ") and "records" in line and "Traceback" not in line
