"""Checkpoints, resumed runs, signals and full disks: nothing is lost, nothing is half-written.

Processes that are killed are forks of this one: they run `main` as a user would, but need no second
to import torch. RESUME_KILLS sets how many are killed at random moments.
"""
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_run import Record, process_as_before, record, shards, words  # noqa: F401

import train_gpt
from train_gpt import Run

sys.path.insert(0, str(Path(train_gpt.__file__).parent / "tools"))
from _model import read_checkpoint  # noqa: E402  # takes the folder from the path again

from tools import keep  # noqa: E402

KILLS = int(os.environ.get("RESUME_KILLS", 6))


@pytest.fixture
def train(shards, tmp_path):  # noqa: F811
    """A run by keep.py in this process; its record, from a fresh records folder."""
    count = iter(range(100))

    def run(**changes) -> Record:
        folder = tmp_path / f"records{next(count)}"
        return Record(folder, keep.main(words(shards, folder, **changes)))

    return run


class Crash(Exception):
    pass


def crash_behind(patch, step: int) -> None:
    """The next run dies in the step behind this one, as if the power went: nothing is told."""
    plain, warm = Run.step, []

    def failing(self, number, micro_batches):
        if warm and number == step:
            raise Crash
        return plain(self, number, micro_batches)

    patch.setattr(Run, "warm_up", lambda self: warm.append(True))
    patch.setattr(Run, "step", failing)


def files(records: Path) -> dict[str, Path]:
    """Checkpoints by the end of their names."""
    return {path.stem.partition("_step")[2]: path for path in records.glob("*/*.pt")}


@pytest.fixture
def crashed(shards, tmp_path):  # noqa: F811
    """Run until a crash behind `step`; where its records are."""
    def run(step: int, **changes) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            crash_behind(patch, step)
            with pytest.raises(Crash):
                keep.main(words(shards, tmp_path / "records",
                                     **dict(dict(checkpoint_every=1), **changes)))
        return tmp_path / "records"

    return run


def states(path: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(path)["state"]


def equal(a: Path, b: Path) -> None:
    ours, theirs = states(a), states(b)
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def refusal(arguments: list[str], capsys) -> str:
    assert keep.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# ---- a resumed run is the run --------------------------------------------------------------------

@pytest.mark.parametrize("step", range(1, 7))
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
        step, crashed, record, shards):  # noqa: F811
    """Behind every step: where stages change (2, 4), where it validates (3, 6), and where the
    stream goes over to the second shard."""
    records = crashed(step)
    assert keep.main(words(shards, records, resume="auto")) == 0
    ours = Record(records, 0)
    assert [e for e in ours.losses()] == record.losses()
    equal(ours.checkpoint, record.checkpoint)
    (resumed,) = ours.of("resume")
    assert resumed["resumed"]["step"] == step and resumed["id"] == ours.start["id"]
    kinds = [(e["event"], e.get("step")) for e in ours.events if e["event"] != "checkpoint"]
    whole = [(e["event"], e.get("step")) for e in record.events]
    at = whole.index(("step", step)) + 1
    assert kinds == [*whole[:at], ("resume", None), ("warmup", None), *whole[at:]]


def test_the_stream_crosses_shards_in_these_runs(shards):  # noqa: F811
    s = train_gpt.parse_settings(words(shards, shards))[0]
    data = train_gpt.TrainData(s, shards)
    border = data.ribbon.borders[1]
    last = [data.pieces(unit)[-1].start // border for unit in range(14)]
    assert last[0] == 0 and last[-1] == 1


def test_timed_training_adds_up_and_the_files_agree(crashed, shards):  # noqa: F811
    records = crashed(4)
    path = next(records.glob("*/*.jsonl"))
    before = [json.loads(line) for line in path.read_text().splitlines()]
    saved = dict(read_checkpoint(files(records)["4"]))
    saved["end"]["wall_s"] = 1000.0
    torch.save(saved | dict(state={n: t.clone() for n, t in saved["state"].items()}),
               files(records)["4"])
    assert keep.main(words(shards, records, resume="auto")) == 0
    ours = Record(records, 0)
    times = [e["train_time_ms"] for e in ours.of("step")]
    assert times[:4] == [e["train_time_ms"] for e in before if e["event"] == "step"]
    assert times == sorted(set(times)) and ours.end["train_time_ms"] == times[-1]
    assert ours.end["tokens"] == 7 * 256
    assert ours.end["wait_ms"] == pytest.approx(sum(e["wait_ms"] for e in ours.of("step")))
    assert 1000 < ours.end["wall_s"] < 1100
    lines = [line for line in ours.text.splitlines() if line.startswith("step:")]
    assert [line.split("/")[0] for line in lines] == [
        f"step:{e['step']}" for e in ours.events if e["event"] in ("step", "val")]
    assert "resumed: file " in ours.text


def test_another_micro_batch_goes_on_up_to_rounding(crashed, record, shards):  # noqa: F811
    """The order of the sum of a gradient is that of its micro-batches."""
    records = crashed(3)
    assert keep.main(words(shards, records, resume="auto", micro_batch=2)) == 0
    ours = Record(records, 0)
    assert ours.losses()[:6] == record.losses()[:6]
    for (*_, a), (*_, b) in zip(ours.losses(), record.losses()):
        assert a == pytest.approx(b, rel=1e-4)


def test_a_slow_disk_delays_no_step_and_changes_nothing(
        crashed, record, shards, monkeypatch):  # noqa: F811
    """What is written is the state when it was asked for, not when it is written."""
    plain = torch.save
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *a: (time.sleep(1), plain(*a)))
        records = crashed(6, checkpoint_every=2)
    saved = [e for e in Record(records, None).of("checkpoint")]
    assert [e["step"] for e in saved] == [2, 3, 5, 6]
    assert saved[0]["stall_ms"] < 900
    for path in (path for name, path in files(records).items() if name != "5"):
        path.unlink()
    assert keep.main(words(shards, records, resume="auto")) == 0
    equal(Record(records, 0).checkpoint, record.checkpoint)


def test_warm_up_leaves_the_resumed_state(crashed, record, shards, monkeypatch):  # noqa: F811
    records, states, plain = crashed(5), [], Run.warm_up

    def watched(self):
        states.append({n: x.clone() for n, x in self.state().items()})
        plain(self)
        states.append({n: x.clone() for n, x in self.state().items()})

    monkeypatch.setattr(Run, "warm_up", watched)
    assert keep.main(words(shards, records, resume="auto")) == 0
    assert all(torch.equal(t, states[1][n]) for n, t in states[0].items())
    assert any(t.any() for n, t in states[0].items() if n.startswith("optimizer."))


def test_no_more_memory_than_a_fresh_start(shards, tmp_path):  # noqa: F811
    """Peak of the whole process, for a state of 130 MB."""
    big = dict(vocab_size=9999, width=256, head_dim=64, mlp_width=256, steps=2, extra_steps=0,
               windows=(2,), val_every=9, val_tokens=200, checkpoint_every=1)
    data = tmp_path / "data"
    data.mkdir()
    for path in shards.glob("*.bin"):        # the same text; EoS is the last id
        content = path.read_bytes()
        tokens = np.frombuffer(content[1024:], "<u2").copy()
        tokens[tokens == 96] = 9998
        (data / path.name).write_bytes(content[:1024] + tokens.tobytes())
    peaks = []
    for more in ({}, dict(resume=None)):
        if more:
            path = files(tmp_path / "records")["1"]
            files(tmp_path / "records")[""].unlink()
            more = dict(resume=path)
        done = subprocess.run([sys.executable, keep.__file__, *words(
            data, tmp_path / "records", **big, **more)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(next((tmp_path / "records").glob("*/*.jsonl")).read_text()
                                .splitlines()[-1])["peak_memory_mib"])
    assert peaks[1] < 1.03 * peaks[0], peaks


# ---- what is kept --------------------------------------------------------------------------------

def test_the_last_two_the_best_and_the_last_before_the_cool_down_are_kept(
        train, monkeypatch):  # noqa: F811
    losses = {0: 9.0, 3: 1.0, 6: 2.0, 7: 3.0}
    monkeypatch.setattr(Run, "validate", lambda self, step: losses[step])
    ours = train(checkpoint_every=1)
    assert set(files(ours.folder.parent)) == {"3", "4", "6", ""}  # the rate falls from step 4 on
    assert read_checkpoint(files(ours.folder.parent)["6"])["best"] == [1.0, 3]
    assert [e["step"] for e in ours.of("checkpoint")] == [1, 2, 3, 4, 5, 6]
    assert set(files(train(checkpoint_every=4, val_every=7).folder.parent)) == {"4", ""}
    assert not files(train(checkpoint_every=1, checkpoint="false").folder.parent)


def test_every_so_many_minutes(train, monkeypatch):  # noqa: F811
    now, plain = [0.0], Run.step
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: now[0])

    def step(self, *arguments):
        now[0] += 25.0
        return plain(self, *arguments)

    monkeypatch.setattr(Run, "warm_up", lambda self: None)
    monkeypatch.setattr(Run, "step", step)
    ours = train(checkpoint_every="1m", val_every=100)
    assert [e["step"] for e in ours.of("checkpoint")] == [3, 6]
    assert [e["train_time_ms"] for e in ours.of("step")] == [25000.0 * n for n in range(1, 8)]


@pytest.mark.parametrize("text", ["30x", "m", "0", "-5", "1.5m", "0m", "30m5"])
def test_other_intervals_are_refused(shards, tmp_path, text, capsys):  # noqa: F811
    line = refusal(words(shards, tmp_path, checkpoint_every=text), capsys)
    assert f"--checkpoint_every={text}: expected steps, as in 500, or minutes" in line


# ---- which checkpoint ----------------------------------------------------------------------------

def test_auto_without_a_checkpoint_begins_at_the_start(train, record):  # noqa: F811
    assert train(resume="auto").losses() == record.losses()


def test_auto_takes_this_name_and_seed_and_no_complete_run(crashed, shards, capsys):  # noqa: F811
    records = crashed(3)
    for changes in (dict(seed=1), dict(name="Other")):
        assert keep.main(words(shards, records, resume="auto", **changes)) == 0
        assert "resumed: " not in capsys.readouterr().out
    for resumed in (True, False):            # then it is complete
        assert keep.main(words(shards, records, resume="auto")) == 0
        assert ("resumed: " in capsys.readouterr().out) is resumed


def test_auto_passes_over_a_damaged_file(crashed, record, shards, tmp_path):  # noqa: F811
    records = crashed(5)
    path = files(records)["5"]
    path.write_bytes(path.read_bytes()[:5000])
    assert keep.main(words(shards, records, resume="auto")) == 0
    ours = Record(records, 0)                # its last step was done again
    assert ours.of("resume")[0]["resumed"]["step"] == 4 and ours.losses() == record.losses()
    equal(ours.checkpoint, record.checkpoint)


def test_resuming_a_complete_run_does_nothing(train, shards, capsys):  # noqa: F811
    ours = train()
    before = {p: p.stat().st_mtime_ns for p in ours.folder.iterdir()}
    capsys.readouterr()
    assert keep.main(words(shards, ours.folder.parent, resume=ours.checkpoint)) == 0
    assert capsys.readouterr().out == (
        f"{ours.checkpoint}: its run is complete, nothing is left to do\n")
    assert {p: p.stat().st_mtime_ns for p in ours.folder.iterdir()} == before


def test_a_run_that_died_in_its_last_validation_needs_no_step(
        shards, tmp_path, record, monkeypatch):  # noqa: F811
    plain = Run.validate
    with monkeypatch.context() as patch:
        patch.setattr(Run, "validate", lambda self, n: plain(self, n) if n < 7 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            keep.main(words(shards, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Run, "warm_up", lambda self: None)
        patch.setattr(Run, "step", lambda *_: 1 / 0)
        assert keep.main(words(shards, tmp_path, resume="auto")) == 0
    ours = Record(tmp_path, 0)
    assert ours.losses() == record.losses() and ours.end["status"] == "complete"
    equal(ours.checkpoint, record.checkpoint)


def test_another_run_is_refused_with_what_differs(crashed, shards, tmp_path, capsys):  # noqa: F811
    path = files(crashed(3))["3"]
    capsys.readouterr()
    arguments = words(shards, tmp_path / "records", resume=path)
    line = refusal([*arguments, "--seed=5", "--muon_lr=0.02"], capsys)
    assert f"{path}: step 3 of another run: " in line
    assert "muon_lr 0.03 there, 0.02 here" in line and "seed 0 there, 5 here" in line
    line = refusal([*arguments, "--steps=1", "--resume_anyway=true"], capsys)
    assert "steps 6 there, 1 here" in line   # nothing would be left
    line = refusal([*arguments, "--width=32", "--resume_anyway=true"], capsys)
    assert "its tensors are not those of this model" in line
    old = read_checkpoint(path)    # as they were before runs could be resumed
    torch.save({name: old[name] for name in ("settings", "step", "state")}, tmp_path / "old.pt")
    for more in ({}, dict(resume_anyway="true")):
        assert "begin it with --checkpoint_every" in refusal(
            words(shards, tmp_path, resume=tmp_path / "old.pt", **more), capsys)


def test_another_program_is_refused_unless_asked_for(
        crashed, shards, tmp_path, capsys, monkeypatch):  # noqa: F811
    records = crashed(3)
    other = tmp_path / "train_gpt.py"
    other.write_text(Path(train_gpt.__file__).read_text() + "# another\n")
    monkeypatch.setattr(train_gpt, "__file__", str(other))
    monkeypatch.setattr(keep, "PROGRAM", hashlib.sha256(other.read_bytes()).hexdigest())
    capsys.readouterr()
    assert "program " in refusal(words(shards, records, resume="auto"), capsys)
    before = next(records.glob("*/*.jsonl")).read_text()
    assert keep.main(words(shards, records, resume="auto", resume_anyway="true")) == 0
    old, new = sorted(records.glob("*/*.jsonl"), key=os.path.getmtime)
    assert old.read_text() == before         # an experiment has a log of its own
    start = json.loads(new.read_text().splitlines()[0])
    assert start["event"] == "start" and start["resumed"]["step"] == 3
    assert len(start["resumed"]["program"]) == 2


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"settings": {}, "step": 3}, path)
    whole = path.read_bytes()
    for content in (None, b"", b"text", whole[:len(whole) // 2], whole):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(train_gpt.UserError) as refused:
            read_checkpoint(path)
        said = "cannot be read" if content is None else "not a checkpoint"
        assert f"{path}: {said}" in refused.value.line and "\n" not in refused.value.line


class Foreign:
    def __reduce__(self):
        return os.mkdir, ("/tmp/foreign_code_ran",)


def test_foreign_code_in_a_checkpoint_does_not_run(tmp_path):
    torch.save({"settings": Foreign(), "step": 3, "state": {}}, tmp_path / "a.pt")
    with pytest.raises(train_gpt.UserError, match=".*"):
        read_checkpoint(tmp_path / "a.pt")
    assert not os.path.exists("/tmp/foreign_code_ran")


def test_what_a_killed_writer_left_is_removed(crashed, shards):  # noqa: F811
    path = files(crashed(3))["3"]
    ours, other = (path.with_name(f".{n}_step4.pt.77.tmp") for n in (path.stem[:-6], "another"))
    ours.touch(), other.touch()
    assert keep.main(words(shards, path.parent.parent, resume="auto")) == 0
    assert other.exists() and not ours.exists()


# ---- longer after all ----------------------------------------------------------------------------

def test_a_longer_schedule_goes_on_before_the_cool_down(
        crashed, train, shards, tmp_path, capsys):  # noqa: F811
    """While no stage has changed, the run is that which was longer from the start."""
    records, longer = crashed(4, windows=(2,)), dict(windows=(2,), steps=10)
    path, whole = files(records)["4"], train(**longer)
    capsys.readouterr()
    assert keep.main(words(shards, records, resume=path, **longer)) == 0
    new = max(records.glob("*/*.jsonl"), key=os.path.getmtime)
    events = [json.loads(line) for line in new.read_text().splitlines()]
    equal(new.with_suffix(".pt"), whole.checkpoint)
    losses = [(e["event"], e["step"], e["loss"]) for e in events if "loss" in e]
    assert losses == [e for e in whole.losses() if e[1] > 4]
    assert events[0]["recipe_overrides"]["steps"] == 10
    assert events[0]["resumed"] == {"file": path.name, "step": 4, "stages": [0, 11],
                                    "steps": [6, 10]}
    assert "an experiment, not a record" in capsys.readouterr().out
    assert "before the cool-down" in refusal(words(
        shards, records, resume=files(records)["3"], windows=(2,), steps=3), capsys)


def test_inside_the_cool_down_it_is_too_late(crashed, shards, capsys):  # noqa: F811
    path = files(crashed(5))["5"]
    capsys.readouterr()
    assert "steps 6 there, 30 here; only --steps may change, before the cool-down" in refusal(
        words(shards, path.parent.parent, resume=path, steps=30, epochs=9), capsys
    ).replace("epochs 1 there, 9 here; ", "")


# ---- the end of a run that is not its end --------------------------------------------------------

def test_a_tensor_that_is_not_finite_is_named_and_never_saved(
        shards, tmp_path, monkeypatch, capsys):  # noqa: F811
    plain, warm = Run.step, []
    monkeypatch.setattr(Run, "warm_up", lambda self: warm.append(True))

    def poisoned(self, number, micro_batches):
        loss = plain(self, number, micro_batches)
        if number == 3:
            self.model.mlp_bank.data[2, 5, 7] = float("nan")
        return loss

    monkeypatch.setattr(Run, "step", poisoned)
    for every in (1, 2, 5):
        records = tmp_path / str(every)
        assert keep.main(words(shards, records, checkpoint_every=every)) == 3
        ours, (line,) = Record(records, 3), capsys.readouterr().err.splitlines()
        assert ours.end["status"] == "non-finite" and ours.end["reason"].startswith(
            ("train_loss nan at step 5", "not finite behind step 4: model.mlp_bank"))
        assert "not finite first: mlp_bank; the last good checkpoint: " in line
        assert line.endswith("_step3.pt") and set(files(records)) <= {"1", "2", "3"}
        for path in files(records).values():
            assert all(x.isfinite().all() for x in states(path).values())


def fork(arguments: list[str], out: Path) -> int:
    """`main` in a process of its own, but for its memory; its number."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    try:
        os.setsid()
        log = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
        code = keep.main(arguments)
        sys.stdout.flush()
    except BaseException:
        code = 99
        import traceback
        traceback.print_exc()
    os._exit(code)


def wait(child: int, seconds: float = 60.0) -> int:
    """Its exit code; negative: the signal that ended it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("it did not end")


def until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


LONG = dict(steps=40, extra_steps=1, epochs=9, val_every=20)


@pytest.fixture
def whole_long(shards, tmp_path) -> Record:  # noqa: F811
    assert keep.main(words(shards, tmp_path / "whole", **LONG)) == 0
    return Record(tmp_path / "whole", 0)


def test_killed_at_random_moments_nothing_is_lost_or_half_written(shards, tmp_path):  # noqa: F811
    records, rng, kills, code = tmp_path / "records", random.Random(1), 0, None
    long = dict(steps=40 + 20 * KILLS, epochs=999, val_every=50)
    assert keep.main(words(shards, tmp_path / "whole", **long)) == 0
    whole = Record(tmp_path / "whole", 0)
    while code != 0:
        child = fork(words(shards, records, resume="auto", checkpoint_every=2, **long),
                     tmp_path / "out")
        if kills < KILLS:
            time.sleep(rng.uniform(0.0, 0.6))
            os.kill(child, signal.SIGKILL)
        code = wait(child, 120)
        assert code in (0, -signal.SIGKILL), (tmp_path / "out").read_text()
        kills += code != 0
        for path in records.glob("*/*.pt"):
            assert all(x.isfinite().all() for x in states(path).values())
        for log in records.glob("*/*.jsonl"):
            for line in log.read_text().splitlines():
                json.loads(line)
    assert kills > KILLS // 2
    (log,) = [p for p in records.glob("*/*.jsonl") if p.with_suffix(".pt").exists()]
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(e["event"], e["step"], e["loss"]) for e in events if "loss" in e] == whole.losses()
    equal(log.with_suffix(".pt"), whole.checkpoint)
    assert not [p for p in log.parent.iterdir() if p.name.startswith(f".{log.stem}")]
    print(f"killed {kills} times, resumed {sum(e['event'] == 'resume' for e in events)} times")


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_stopped_run_goes_on(shards, tmp_path, whole_long, name, code):  # noqa: F811
    records = tmp_path / "records"
    child = fork(words(shards, records, **LONG), tmp_path / "out")
    until(lambda: any('"step": 3,' in p.read_text() for p in records.glob("*/*.jsonl")))
    os.kill(child, getattr(signal, name))
    assert wait(child) == code
    stopped = Record(records, code)
    assert stopped.end["status"] == "interrupted" and stopped.end["reason"] == name
    assert list(files(records)) == [str(stopped.end["step"])]
    assert keep.main(words(shards, records, resume="auto", **LONG)) == 0
    ours = Record(records, 0)
    assert ours.losses() == whole_long.losses() and ours.end["status"] == "complete"
    equal(ours.checkpoint, whole_long.checkpoint)


def test_a_signal_in_a_validation_does_not_wait_for_its_end(
        shards, tmp_path, monkeypatch):  # noqa: F811
    plain = Run.validate

    def slow(self, step):
        if step == 3:
            (tmp_path / "validates").touch()
            time.sleep(60)
        return plain(self, step)

    monkeypatch.setattr(Run, "validate", slow)
    child = fork(words(shards, tmp_path / "records"), tmp_path / "out")
    until((tmp_path / "validates").exists)
    os.kill(child, signal.SIGINT)
    assert wait(child, 30) == 130 and list(files(tmp_path / "records")) == ["3"]


def test_a_second_signal_ends_it_at_once(shards, tmp_path, monkeypatch):  # noqa: F811
    plain, warm = Run.step, []
    monkeypatch.setattr(Run, "warm_up", lambda self: warm.append(True))

    def slow(self, number, micro_batches):
        if number == 4:
            (tmp_path / "steps").touch()
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                time.sleep(0.05)
        return plain(self, number, micro_batches)

    monkeypatch.setattr(Run, "step", slow)
    child = fork(words(shards, tmp_path / "records", checkpoint_every=2), tmp_path / "out")
    until((tmp_path / "steps").exists)
    os.kill(child, signal.SIGTERM)
    time.sleep(0.3)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it finishes its step
    os.kill(child, signal.SIGTERM)
    assert wait(child, 5) == 143 and set(files(tmp_path / "records")) == {"2", "3"}


def test_a_run_that_still_goes_on_is_not_resumed(
        shards, tmp_path, capsys, monkeypatch):  # noqa: F811
    plain, records = Run.step, tmp_path / "records"
    monkeypatch.setattr(Run, "warm_up", lambda self: None)
    monkeypatch.setattr(Run, "step", lambda self, n, m: (time.sleep(20 * (n == 4)), plain(
        self, n, m))[1])
    child = fork(words(shards, records, checkpoint_every=2), tmp_path / "out")
    until(lambda: "3" in files(records) and any(
        '"val", "step": 3' in p.read_text() for p in records.glob("*/*.jsonl")))
    log = next(records.glob("*/*.jsonl"))
    before = log.read_text()
    assert "its run is still going on" in refusal(words(shards, records, resume="auto"), capsys)
    assert log.read_text() == before
    os.kill(child, signal.SIGKILL)
    wait(child)


# ---- disks ---------------------------------------------------------------------------------------

@pytest.fixture
def disk(tmp_path):
    """Mount a small disk of memory; skips where this is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = []

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no mount here")
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_a_warning_and_nothing_else(
        shards, disk, record, capsys):  # noqa: F811
    """There is room for one checkpoint beside the logs and the program, not for two."""
    records = disk(f"size={int(1.7 * record.checkpoint.stat().st_size)}")
    assert keep.main(words(shards, records, checkpoint_every=2, val_every=100)) == 0
    out = capsys.readouterr().out
    assert out.count("whole, training goes on: [Errno 28] No space left on device") == 1
    ours = Record(records, 0)
    assert ours.end["status"] == "complete" and list(files(records)) == ["2"]
    assert read_checkpoint(files(records)["2"])["step"] == 2
    assert [e["loss"] for e in ours.of("step")] == [e["loss"] for e in record.of("step")]
    assert not list(ours.folder.glob(".*"))


def test_lines_wait_for_room(shards, disk, record, monkeypatch):  # noqa: F811
    records, plain = disk("size=1m"), Run.step
    monkeypatch.setattr(Run, "warm_up", lambda self: None)

    def step(self, number, micro_batches):
        filler = records / "filler"
        if number == 2:
            with open(filler, "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
        if number == 5:
            filler.unlink()
        return plain(self, number, micro_batches)

    monkeypatch.setattr(Run, "step", step)
    assert keep.main(words(shards, records, checkpoint="false")) == 0
    assert Record(records, 0).losses() == record.losses()


def test_a_folder_that_cannot_be_written_is_named(shards, tmp_path, disk, capsys):  # noqa: F811
    (tmp_path / "file").touch()
    line = refusal(words(shards, tmp_path / "file"), capsys)
    assert "Not a directory" in line and str(tmp_path / "file") in line
    folder = disk("ro")
    line = refusal(words(shards, folder / "records"), capsys)
    assert "Read-only file system" in line and str(folder) in line


# ---- what it shows -------------------------------------------------------------------------------

def test_a_terminal_shows_where_the_run_is(train, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(train_gpt.shutil, "get_terminal_size", lambda: os.terminal_size((150, 9)))
    train()
    shown = [part for part in capsys.readouterr().out.split("\r\x1b[K") if " left " in part]
    assert len(shown) == 7 + 4 and all(len(part) < 150 for part in shown)
    assert shown[4].startswith("########............ step:3/7 val_loss:") and "tokens/s" in shown[4]
    assert " 0:00:0" in shown[4] and "step:7/7" in shown[-1]
