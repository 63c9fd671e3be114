"""tools/profile.py, on true steps of a small model: rows add up, operators are in the right row."""
import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch._dynamo  # Run sets what it brings

import train_gpt as t
from tools import profile as tool

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 2
SMALL = ["--track=tiny", "--layers=2", "--value_layers=((1,0),)", "--skips=((2,1),)",
         "--long_window=(2,)", "--tokens_per_step=512", "--val_tokens=512", "--val_sequence=512",
         "--threads=1"]


def profile(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "tools/profile.py", *SMALL, *arguments],
                          capture_output=True, text=True, timeout=300)


def measured(mode: str) -> tuple:
    """`measure` of a small run in this process, and how often the profiler saw which product."""
    s, _ = t.parse_settings([*SMALL, f"--compile={mode}"])
    machine = t.choose_machine(s)
    run = t.Run(s, machine._replace(head=machine.head._replace(compile=False)))
    run.optimizer.compile = False            # ranges hold these anyway; compiling takes long
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        plain, profiled, found, seen = tool.measure(run, 0)
    finally:
        torch.set_num_threads(threads)
    products = Counter(tool.part(e, s.mlp_width) for e in seen.events()
                       if e.name in ("aten::mm", "aten::addmm"))
    return plain, profiled, found, products


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> tuple[str, Path]:
    trace = tmp_path_factory.mktemp("profile") / "mine.trace.json.gz"
    done = profile("--compile=off", f"--trace={trace}")
    assert done.returncode == 0, done.stderr
    return done.stdout, trace


def test_every_row_is_there_and_the_rows_are_the_step(printed):
    text, _ = printed
    rows = dict(re.findall(r"^(\w+) +([\d.]+) +[\d.]+%  \w", text, re.M))
    assert list(rows) == list(tool.PARTS)
    rows = {name: float(ms) for name, ms in rows.items()}
    profiled = float(re.search(r"under the profiler ([\d.]+) ms", text)[1])
    assert sum(rows.values()) == pytest.approx(profiled, rel=0.01)
    assert all(rows[name] > 0 for name in ("attention", "MLP", "head", "optimizer", "rest"))
    assert rows["loader"] < 0.1 * profiled


def test_speed_mfu_and_memory(printed):
    text, _ = printed
    ms, rate = re.search(r"^step ([\d.]+) ms.*\n([\d,]+) tokens/s", text, re.M).groups()
    assert 512 / float(ms) * 1000 == pytest.approx(float(rate.replace(",", "")), rel=0.01)
    assert "MFU n/a" in text and re.search(r"peak memory [\d,]+ MiB", text)


def test_the_trace_holds_ten_steps(printed):
    text, trace = printed
    assert f"trace: {trace}" in text and [path.name for path in trace.parent.iterdir()] == [
        trace.name]
    with gzip.open(trace, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    starts = sorted(e["ts"] for e in events if e["name"] == tool.OPTIMIZER)
    assert len(starts) == tool.STEPS == sum(e["name"] == tool.LOADER for e in events)
    profiled = float(re.search(r"under the profiler ([\d.]+) ms", text)[1])
    between = (starts[-1] - starts[0]) / 1000 / (tool.STEPS - 1)
    assert 0.6 * profiled < between < 1.6 * profiled


@pytest.mark.parametrize("mode", ["off", "on"])
def test_products_are_counted_where_they_belong(mode):
    """Forward one product each, backward two: the MLP's up and down, attention's qkv, o and gate,
    and the gate of the smear, once."""
    plain, profiled, found, products = measured(mode)
    assert products["MLP"] == tool.STEPS * LAYERS * 6
    assert products["head"] == tool.STEPS * 3
    assert products["attention"] == tool.STEPS * (LAYERS * 9 + 3)
    assert set(products) <= {"MLP", "head", "attention", "optimizer"}
    assert 0 < found["gaps"] < profiled
    assert sum(found.values()) == pytest.approx(profiled, rel=0.01)


@pytest.mark.parametrize("word, expected", [
    ("--at=601", "--at=601: expected 0 to 600"), ("--at=x", "--at=x: expected int"),
    ("--heds=1", "--heds=1: no such setting; the nearest is --head"),
    ("--trace=no/such/x.json", "its folder is not there")])
def test_wrong_usage_is_one_line(word, expected, capsys):
    assert tool.main([*SMALL, word]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("profile: ") and err.count("\n") == 1 and expected in err


def test_no_tool_keeps_its_folder_on_the_path():
    """Python's own `profile`, which torch.compile imports, would be tools/profile.py there."""
    lines = [line for path in (ROOT / "tools").glob("*.py")
             for line in path.read_text().splitlines() if line.startswith("sys.path")]
    assert lines and all(re.match(r"sys\.path\[(0|:1)\] = ", line) for line in lines), lines


@pytest.mark.pretended_gpu
def test_a_gpu_without_counters_is_one_line():
    done = profile("--compile=off", "--device=cuda", "--attention=varlen_attn", "--head=bf16")
    assert done.returncode == 2 and "tokens/s" in done.stdout
    assert "profile: the profiler saw no kernel" in done.stderr
