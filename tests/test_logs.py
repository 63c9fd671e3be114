"""records/logs.py: every format that was published, its traps, and what damaged logs may not do.

All of upstream_logs is read in test_compare.py; what stands here are short excerpts of it."""
import json
import math
import shutil
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import logs  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures" / "logs"
TINY = ROOT / "records" / "2026-12-01_TinyBaseline"


def facts(run) -> tuple:
    return run.planned, run.last_step, run.final_loss, run.time_ms, run.step_avg_ms, run.complete


# ---- the published formats -----------------------------------------------------------------------

@pytest.mark.parametrize("name, expected", [
    ("grace_period.txt", [(6200, 6200, 3.2785, 1339067, 216.33, True)]),
    ("seeds_with_tails.txt", [(3040, 3040, 3.27569, 1081882, 355.88, True),
                              (3040, 3040, 3.27668, 1051091, 345.75, True)]),
    ("runs_end_to_end.txt", [(4150, 4150, 3.27611, 908504, 218.42, True),
                             (4150, 4150, 3.27686, 903629, 218.38, True),
                             (4150, 125, 4.88573, 26417, 211.34, False)]),
    ("early_stop.txt", [(2900, 2860, 3.27837, 2145235, 750.08, False)]),
    ("more_losses.txt", [(2900, 2900, 3.2709, 10678894, 3682.38, True)]),
    ("no_final.txt", [(1555, 1555, 3.2950, 91701, 61.13, False)]),
    ("one_gpu.txt", [(1375, 1375, 3.2767, 595779, 433.29, True)]),
    ("llmc.log", [(None, 19560, 3.2722, None, None, False)])])
def test_each_trap(name, expected):
    runs = logs.read_file(FIXTURES / name)
    assert [facts(run) for run in runs] == expected
    assert [run.index for run in runs] == list(range(len(expected)))


def test_what_excerpts_say_of_machine_and_seed():
    read = {path.stem: logs.read_file(path) for path in FIXTURES.iterdir()}
    assert [run.seed for run in read["seeds_with_tails"]] == [2, 3]
    assert [run.seed for run in read["runs_end_to_end"]] == [None] * 3
    assert [read[n][0].seed for n in ("early_stop", "more_losses")] == [13, 0]
    assert {name: runs[0].hardware for name, runs in read.items()} == {
        "grace_period": "1 x NVIDIA H100 80GB HBM3", "seeds_with_tails": "4 x NVIDIA H200",
        "runs_end_to_end": "8 x NVIDIA H100 80GB HBM3", "early_stop": "8 x NVIDIA L40S",
        "more_losses": "2 x NVIDIA A40", "no_final": "2 x NVIDIA H100 80GB HBM3",
        "one_gpu": "1 x NVIDIA H100 80GB HBM3", "llmc": None}
    one = read["one_gpu"][0]
    assert (one.torch, one.gpu, one.gpus) == ("2.11.0+cu130", "NVIDIA H100 80GB HBM3", 1)
    assert (one.peak_alloc_mib, one.peak_reserved_mib) == (36348, 52032)


def test_times_before_the_clock_restarts_are_untimed():
    (run,) = logs.read_file(FIXTURES / "grace_period.txt")
    assert run.validations[0] == (0, 10.9264, 0.0)
    assert [step.time_ms for step in run.steps][8:13] == [None, None, 214, 428, 641]
    assert len(run.steps) == 22 and run.steps[0] == (1, 10.9184, None)


def test_the_source_at_the_head_of_a_log_is_no_result(tmp_path):
    """Not even where it stands at the start of a line; it is counted."""
    text = (FIXTURES / "grace_period.txt").read_text()
    assert logs.read_file(FIXTURES / "grace_period.txt")[0].unplaced == 1
    line = "step:1/6200 val_loss:0.1000 train_time:1ms step_avg:1.00ms\n"
    (tmp_path / "a.txt").write_text(line + text)
    (run,) = logs.read_file(tmp_path / "a.txt")
    assert facts(run)[:3] == (6200, 6200, 3.2785) and run.unplaced == 2


@pytest.mark.parametrize("line", [
    "ema step:11/6200 val_loss:1.0 train_time:1ms step_avg:1.00ms",
    " step:11/6200 val_loss:1.0 train_time:1ms step_avg:1.00ms",
    "step:11/6200 val_loss:1.0 train_time:1ms step_avg:1.00ms and more words",
    "step:11/6200 val_loss:1.0 train_time:1h step_avg:1.00ms",
    "step:11/6200 val_loss:-1.0 val_loss:1.0 train_time:1", "x s:11 tel:1.0"])
def test_what_only_looks_like_a_result_is_counted(tmp_path, line):
    text = (FIXTURES / "one_gpu.txt").read_text()
    (tmp_path / "a.txt").write_text(text + line + "\n")
    (run,) = logs.read_file(tmp_path / "a.txt")
    (plain,) = logs.read_file(FIXTURES / "one_gpu.txt")
    assert facts(run) == facts(plain) and run.validations == plain.validations
    assert (plain.unplaced, run.unplaced) == (0, 1)


def test_a_capture_that_holds_a_run_twice_has_one(tmp_path):
    text = (FIXTURES / "one_gpu.txt").read_text()
    (tmp_path / "a.txt").write_text(text + text)
    assert len(logs.read_file(tmp_path / "a.txt")) == 1


def test_runs_keep_their_order_and_unplaced_lines_count_once(tmp_path):
    first, second = ((FIXTURES / f"{name}.txt").read_text() for name in ("one_gpu", "early_stop"))
    (tmp_path / "a.txt").write_text(first + second + first + "x s:11 tel:1.0\n")
    runs = logs.read_file(tmp_path / "a.txt")
    assert [(run.index, run.planned, run.unplaced) for run in runs] == [(0, 1375, 1), (1, 2900, 0)]


@pytest.mark.parametrize("data", [
    b"step:1/1 " * 100_000, b"Running PyTorch 2 " + b" on a" * 100_000,
    b"| 0 NVIDIA " + b" " * 100_000 + b"x", b"environment: " + b"torch a, device " * 50_000,
    b"step:1/1 " + b"train_time:1ms step_avg:1ms " * 25_000 + b" x",
    b"".join(b"step:%d/30000 val_loss:1.0 train_time:1ms step_avg:1ms\n" % n
             for n in range(20_000, 0, -1))],
    ids=["steps", "on", "spaces", "environment", "tokens", "backwards"])
def test_no_line_and_no_number_of_runs_makes_the_reader_slow(data):
    began = time.process_time()
    logs.read_text(Path("a.txt"), data)
    assert time.process_time() - began < 3   # half a second; a quadratic pattern takes minutes


# ---- ours ----------------------------------------------------------------------------------------

def test_our_logs_by_their_json_lines_and_by_their_text(tmp_path):
    runs = logs.read_runs(TINY)
    assert [run.seed for run in runs] == list(range(10))
    assert {run.format for run in runs} == {"jsonl"} and {run.record for run in runs} == {TINY.name}
    first, events = runs[0], [json.loads(line) for line in open(runs[0].path)]
    end = events[-1]
    assert (first.final_loss, first.time_ms) == (end["val_loss"], end["train_time_ms"])
    assert (first.planned, len(first.steps), first.complete) == (620, 620, True)
    assert (first.track, first.target, first.tokens_per_step) == ("tiny", 3.56, 2048)
    assert first.hardware == "1 x Intel(R) Xeon(R) Processor (2 threads)"
    assert first.versions["python"] == "3.11.7" and first.unplaced == 0
    shutil.copy(first.path.with_suffix(".txt"), tmp_path)
    (text,) = logs.read_runs(tmp_path)
    assert text.format == "text" and text.torch == first.torch
    assert facts(text)[:2] == facts(first)[:2] and text.complete
    assert text.final_loss == round(first.final_loss, 4) and text.time_ms == round(first.time_ms)


def test_a_resumed_run_goes_on_and_a_killed_one_is_incomplete(tmp_path):
    lines = open(next(TINY.glob("*.jsonl"))).read().splitlines()
    at = next(n for n, line in enumerate(lines) if '"step", "step": 300' in line)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*lines[:at], '{"event": "checkpoint", "step": 299}',
                               '{"event": "resume", "step": 299}', *lines[at:]]))
    assert facts(logs.read_file(path)[0]) == facts(logs.read_file(next(TINY.glob("*.jsonl")))[0])
    path.write_text("\n".join(lines[:at]) + "\n" + lines[at][:30])
    (run,) = logs.read_file(path)
    assert not run.complete and run.last_step == 299 and run.unplaced == 1


def test_energy_is_that_between_the_validations(tmp_path):
    start, path = open(next(TINY.glob("*.jsonl"))).readline(), tmp_path / "a.jsonl"
    vals = [dict(event="val", step=n, loss=3.0, train_time_ms=1.0 * n,
                 conditions=dict(energy_j=1000.0 + 5 * n)) for n in (0, 310, 620)]
    path.write_text(start + "\n".join(map(json.dumps, vals)))
    assert logs.read_file(path)[0].energy_j == 3100


def test_a_resumed_run_has_no_energy_and_its_steps_never_go_back(tmp_path):
    """The counter ran on, or began anew, while the run did not."""
    start, path = open(next(TINY.glob("*.jsonl"))).readline(), tmp_path / "a.jsonl"
    vals = [json.dumps(dict(event="val", step=n, loss=3.0, train_time_ms=1.0 * n,
                            conditions=dict(energy_j=1000.0 + n))) for n in (0, 310, 155, 620)]
    path.write_text("\n".join([start.strip(), *vals[:2], '{"event": "resume"}', *vals[2:]]))
    (run,) = logs.read_file(path)
    assert [val.step for val in run.validations] == [0, 310, 620] and run.unplaced == 1
    assert run.energy_j is None and len(run.conditions) == 3


def test_two_logs_in_one_file_are_two_runs(tmp_path):
    one, two = sorted(TINY.glob("*.jsonl"))[:2]
    (tmp_path / "a.jsonl").write_bytes(one.read_bytes() + two.read_bytes())
    runs = logs.read_file(tmp_path / "a.jsonl")
    assert [facts(run) for run in runs] == [facts(logs.read_file(p)[0]) for p in (one, two)]
    assert [(run.index, run.seed, run.unplaced) for run in runs] == [(0, 0, 0), (1, 1, 0)]


# ---- damaged logs --------------------------------------------------------------------------------

SAMPLES = sorted(FIXTURES.iterdir())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SAMPLES), st.integers(0, 5000))
def test_a_cut_changes_nothing_before_it(sample, cut):
    data = sample.read_bytes()
    whole, part = logs.read_text(sample, data), logs.read_text(sample, data[:cut])
    assert len(part) <= len(whole)
    for ours, theirs in zip(part, whole):
        held = ours.validations if ours is not part[-1] else ours.validations[:-1]
        assert theirs.validations[:len(held)] == held or any(
            val.time_ms == 0 for val in theirs.validations)  # the clock restarts behind the cut
        assert ours.planned == theirs.planned or ours is part[-1]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SAMPLES), st.data())
def test_garbage_is_no_result(sample, data):
    """Lines of any bytes between the lines of a log: nothing moves, nothing is raised."""
    lines = sample.read_bytes().splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        junk = b"~" + data.draw(st.binary(max_size=60)).replace(b"\n", b"").replace(b"\r", b"")
        lines.insert(data.draw(st.integers(0, len(lines))), junk)
    ours, plain = logs.read_text(sample, b"\n".join(lines)), logs.read_file(sample)
    assert [facts(run) for run in ours] == [facts(run) for run in plain]
    assert [run.validations for run in ours] == [run.validations for run in plain]


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["event", "step", "loss", "train_time_ms", "settings", "run", "steps",
                         "environment", "conditions", "energy_j"]), inner, max_size=5),
    max_leaves=12)))
def test_any_bytes_and_any_json_raise_nothing(content):
    if not isinstance(content, bytes):
        content = (json.dumps({"event": "start", "run": content}) + "\n" + json.dumps(
            dict(content, event="val") if isinstance(content, dict) else content)).encode()
    for run in logs.read_jsonl(Path("a.jsonl"), content) + logs.read_text(Path("a.txt"), content):
        assert run.time_ms is None or math.isfinite(run.time_ms)
