"""tools/watch.py: a log that grows, is cut and ends, in Weights & Biases' place a recorder."""
import csv
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "watch.py"
RECORDER = """
import json, os
class Run:
    def log(self, numbers, step):
        with open(os.environ["SHOWN"], "a") as file:
            file.write(json.dumps([step, numbers]) + "\\n")
def init(project, id, resume):
    assert id == "a"
    return Run()
"""


def line(event: str, step: int, loss: float = 0.0) -> str:
    return json.dumps(dict(event=event, step=step, loss=loss, train_time_ms=1.0)) + "\n"


def test_it_follows_a_log_through_a_cut_to_its_end(tmp_path):
    (tmp_path / "wandb.py").write_text(RECORDER)
    log, shown = tmp_path / "a.jsonl", tmp_path / "shown"
    log.write_text(line("start", 0) + line("val", 0, 9.0) + line("step", 1, 8.0) + '{"event": "st')
    process = subprocess.Popen(
        [sys.executable, TOOL, log, "--to=wandb", "--pause=0.02"],
        env=dict(os.environ, PYTHONPATH=str(tmp_path), SHOWN=str(shown)))
    try:
        deadline = time.monotonic() + 30

        def until(count: int) -> None:
            while not shown.exists() or shown.read_text().count("\n") < count:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.01)

        until(2)
        whole = line("start", 0) + line("val", 0, 9.0) + line("step", 1, 8.0) + line("step", 2, 7.0)
        log.write_text(whole + line("step", 3, 6.0))
        until(4)
        log.write_text(whole)                # a resumed run does its last step again
        time.sleep(0.2)
        with log.open("a") as file:
            file.write(line("step", 3, 6.0) + line("val", 3, 5.0) + line("end", 3))
        assert process.wait(30) == 0
    finally:
        process.kill()
    found = [json.loads(text) for text in shown.read_text().splitlines()]
    assert [(step, *numbers.items())[:2] for step, numbers in found] == [
        (0, ("val/loss", 9.0)), (1, ("step/loss", 8.0)), (2, ("step/loss", 7.0)),
        (3, ("step/loss", 6.0)), (3, ("val/loss", 5.0))]


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_without_the_library_one_line_says_so(tmp_path, kind):
    if importlib.util.find_spec(kind):
        pytest.skip(f"{kind} is installed")
    done = subprocess.run([sys.executable, TOOL, tmp_path / "a.jsonl", f"--to={kind}"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"pip install {kind}" in done.stderr


def test_a_missing_log_is_named(tmp_path):
    (tmp_path / "wandb.py").write_text(RECORDER)
    done = subprocess.run([sys.executable, TOOL, tmp_path / "a.jsonl", "--to=wandb"],
                          capture_output=True, text=True,
                          env=dict(os.environ, PYTHONPATH=str(tmp_path)))
    assert done.returncode == 2 and "No such file" in done.stderr and done.stderr.count("\n") == 1


def test_a_record_as_csv(tmp_path):
    """Every step and validation of TinyBaseline's first run, at full precision."""
    source = next((TOOL.parent.parent / "records" / "2026-12-01_TinyBaseline").glob("*.jsonl"))
    log = tmp_path / "a.jsonl"
    log.write_text(source.read_text())
    assert subprocess.run([sys.executable, TOOL, log, "--to=csv"]).returncode == 0
    events = [json.loads(text) for text in log.read_text().splitlines()]
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    shown = [e for e in events if e["event"] in ("step", "val")]
    assert len(rows) == len(shown) == 625
    for row, event in zip(rows, shown):
        kind = event["event"]
        assert (int(row["step"]), float(row[f"{kind}/loss"])) == (event["step"], event["loss"])
        assert float(row[f"{kind}/train_time_ms"]) == event["train_time_ms"]
