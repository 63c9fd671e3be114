"""A record in one command: a set that is killed goes on; what is refused; what the README says."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import run_set  # noqa: E402

RECORD = ROOT / "records" / "2026-12-01_TinyBaseline"
SMALL = ["--track=tiny", "--compile=off", "--threads=1", "--device=cpu", "--precision=fp32",
         "--width=32", "--head_dim=16", "--mlp_width=32", "--layers=2", "--no_attention=()",
         "--long_window=(2,)", "--value_layers=()", "--skips=()", "--unit_tokens=128",
         "--doc_cap=128", "--tokens_per_step=128", "--steps=5", "--extra_steps=1", "--val_every=3",
         "--val_tokens=500", "--val_sequence=256"]


def command(records: Path, *more: str) -> list[str]:
    return [sys.executable, str(ROOT / "records" / "run_set.py"), "--name=Try", *SMALL,
            f"--records_dir={records}", *more]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A set that was killed during its second run, and went on with the same command."""
    records = tmp_path_factory.mktemp("set") / "records"
    first = subprocess.Popen(command(records, "--runs=2", "--seed=3"), start_new_session=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while len(list(records.glob("*/*_seed4_*.jsonl"))) < 1:
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGSTOP)     # in its second run, until the next line is through
    busy = subprocess.run(command(records, "--runs=2", "--seed=3"), capture_output=True, text=True)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    kept = next(records.glob("*/*_seed3_*.jsonl"))
    before = kept.read_bytes(), kept.stat().st_mtime_ns
    done = subprocess.run(command(records, "--runs=2", "--seed=3"), capture_output=True, text=True)
    assert (kept.read_bytes(), kept.stat().st_mtime_ns) == before  # a complete run is not repeated
    return kept.parent, busy, done


def test_a_set_goes_on_where_it_was_killed(killed):
    folder, _, done = killed
    assert "seed 3: is there" in done.stdout and "seed 4: run 2 of 2" in done.stdout
    assert "Traceback" not in done.stderr
    assert sorted(run_set.finished(folder)) == [3, 4] and len(list(folder.glob("*.jsonl"))) == 2
    (apart,) = (folder / "incomplete").glob("*.jsonl")
    assert "_seed4_" in apart.name and f"{apart.name}: cut short" in done.stdout
    assert '"complete"' not in apart.read_text()


def test_an_experiment_ends_in_a_clear_verdict(killed):
    folder, _, done = killed
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("experiment, not a record: ") and "steps" in last
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# Try\n") and "\nparent: none\nseeds: 3 to 4\n" in readme
    assert "recipe_overrides: expected none" in readme and "NOT VALID" in readme
    assert "## Cost" in readme and "there is no parent" in readme and "device cpu" in readme
    assert str(folder.parent) not in readme  # no path of this machine


def test_two_sets_in_one_folder_do_not_meet(killed):
    _, busy, _ = killed
    assert busy.returncode == 2 and "still going on" in busy.stderr
    assert len(busy.stderr.splitlines()) == 1


def test_other_settings_or_programs_need_another_name(killed, monkeypatch, tmp_path):
    folder = killed[0]
    settings = run_set.parse(command(folder.parent)[2:])[2]
    assert run_set.choose_folder(folder.parent, settings) == folder
    other = run_set.parse(command(folder.parent, "--muon_lr=0.01")[2:])[2]
    with pytest.raises(run_set.UserError) as refused:
        run_set.choose_folder(folder.parent, other)
    assert "another muon_lr; choose another --name" in refused.value.line
    program = tmp_path / "train_gpt.py"
    program.write_text("pass\n")
    monkeypatch.setattr(run_set, "TRAINER", program)
    with pytest.raises(run_set.UserError) as refused:
        run_set.choose_folder(folder.parent, settings)
    assert "another program; choose another --name" in refused.value.line


def test_an_interrupt_ends_the_run_and_puts_it_apart(tmp_path):
    long = command(tmp_path / "records", "--runs=2", "--steps=2000", "--epochs=9")
    child = subprocess.Popen(long, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("records/*/*_seed0_*.jsonl")) and child.poll() is None:
        time.sleep(0.05)
    child.terminate()
    error = child.communicate(timeout=120)[1]
    assert child.returncode == 143 and error.endswith("the same command goes on where it was\n")
    (log,) = tmp_path.glob("records/*/incomplete/*.jsonl")
    assert '"interrupted"' in log.read_text() and not list(tmp_path.glob("records/*/*.jsonl"))


def test_a_wrong_setting_ends_the_set(tmp_path, capfd):
    missing = f"--data_dir={tmp_path / 'missing'}"
    assert run_set.main(command(tmp_path / "records", missing, "--runs=3")[2:]) == 2
    out, error = capfd.readouterr()
    assert "no *_train_*.bin shards" in error and "Traceback" not in error
    assert "seed 0 ended with exit code 2: the same command goes on" in error
    assert "seed 1" not in out + error


# ---- settings ------------------------------------------------------------------------------------

@pytest.mark.parametrize("words", [
    ["--name="], [], ["--name=../up"], ["--name=a/b"], ["--name=.hidden"], ["--name=two words"],
    ["--name=" + 61 * "a"], ["--name=ends."], ["--name=a:b"], ["--name=\u00e9"],
    ["--name=A", "--runs=0"], ["--name=A", "--runs=ten"], ["--name=A", "--runs="],
    ["--name=A", "--runs=-1"], ["--name=A", "--parent=../x"], ["--name=A", "--what=1"],
    ["--name=A", "--seed=-1"]])
def test_what_is_refused_before_anything_is_made(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_set, "HERE", tmp_path)
    assert run_set.main(["--track=tiny", *words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and len(error.splitlines()) == 1 and error.startswith("run_set.py: --")
    assert list(tmp_path.iterdir()) == []


def test_what_is_understood():
    runs, parent, settings, words, changed = run_set.parse(
        ["--runs=10", "--track=tiny", "--name=My.Idea-2", "--seed=5", "--steps=9", "--parent=none"])
    assert (runs, parent, settings.seed, settings.name) == (10, "none", 5, "My.Idea-2")
    assert words == ["--track=tiny", "--name=My.Idea-2", "--steps=9"] and changed == ["steps"]


def test_help(capsys):
    assert run_set.main(["--help"]) == 0 and "--runs=10" in capsys.readouterr().out


# ---- the folder ----------------------------------------------------------------------------------

@pytest.fixture
def records(tmp_path) -> Path:
    """A records folder with the committed record."""
    shutil.copytree(RECORD, tmp_path / "records" / RECORD.name)
    return tmp_path / "records"


def test_what_was_run_after_midnight_is_brought_in(records):
    folder, later = records / RECORD.name, records / "2026-12-02_TinyBaseline"
    later.mkdir()
    for path in [*folder.glob("*_seed9_*"), *folder.glob("*_seed8_*.txt")]:
        os.replace(path, later / path.name)
    shutil.copy(next(folder.glob("train_gpt_*.py")), later)
    log = next(folder.glob("*_seed8_*.jsonl"))
    (later / log.name).write_text("".join(log.read_text().splitlines(True)[:-1]))
    log.unlink()                             # killed in its last step
    run_set.sort_out(folder, "TinyBaseline")
    assert sorted(run_set.finished(folder)) == [0, 1, 2, 3, 4, 5, 6, 7, 9] and not later.exists()
    assert {p.suffix for p in (folder / "incomplete").iterdir()} == {".txt", ".jsonl"}


def test_a_run_that_was_not_finite_is_not_hidden(records):
    folder = records / RECORD.name
    log = next(folder.glob("*_seed9_*.jsonl"))
    log.write_text(log.read_text().replace('"complete"', '"non-finite"'))
    run_set.sort_out(folder, "TinyBaseline")
    assert log.exists() and 9 in run_set.finished(folder)


# ---- what is said of the set ---------------------------------------------------------------------

def test_the_parent_is_the_newest_record_that_the_judge_accepts(records):
    new = records / "2026-12-05_New"
    shutil.copytree(RECORD, new)
    forged = records / "2026-12-04_Forged"
    shutil.copytree(RECORD, forged)
    next(forged.glob("*_seed4_*.txt")).unlink()
    assert run_set.choose_parent(new, "tiny") == RECORD.name
    assert run_set.choose_parent(new, "fineweb") == "none"


def test_a_valid_set_is_written_up_and_what_was_written_by_hand_stays(records, capsys):
    """The record again, as if it were its own child: its program has a line more."""
    new = records / "2026-12-05_New"
    shutil.copytree(records / RECORD.name, new)
    (new / "README.md").unlink()
    settings = run_set.parse(["--track=tiny", "--name=New"])[2]
    parent = records / RECORD.name
    assert run_set.conclude(new, settings, "", []) == 0
    assert capsys.readouterr().out.endswith("\na record, by the judge\n")
    text = (new / "README.md").read_text()
    assert f"parent: {RECORD.name}\nseeds: 0 to 9\n" in text and "\nVALID: p must be" in text
    assert f"against {RECORD.name}: the curve is in its band" in text and "NO LEAK FOUND" in text
    lines = len(run_set.program_of(parent))
    assert f"{lines:,} lines, the parent's program has {lines:,}: 0 added, 0 removed." in text
    (new / "README.md").write_text(text.replace("to be written.", "MINE.")
                                   .replace("To be written.", "NOTHING."))
    run_set.write_up(new, "New", "none", "OTHER\n")
    again = (new / "README.md").read_text()
    assert "MINE." in again and "NOTHING." in again and "OTHER" in again
    assert "VALID: p" not in again and again.count("seeds:") == 1 and "parent: none" in again


def test_cost_in_lines(records):
    new = records / "2026-12-05_New"
    shutil.copytree(records / RECORD.name, new)
    program = next(new.glob("train_gpt_*.py"))
    lines = program.read_text().splitlines(True)
    program.write_text("".join(["# one\n", "# two\n", *lines[1:]]))
    total = len(lines)
    assert run_set.cost(new, RECORD.name) == (
        f"{total + 1:,} lines, the parent's program has {total:,}: 2 added, 1 removed.")


def test_an_unknown_parent_is_one_line(records):
    new = records / "2026-12-05_New"
    shutil.copytree(records / RECORD.name, new)
    settings = run_set.parse(["--track=tiny", "--name=New"])[2]
    with pytest.raises(run_set.UserError) as refused:
        run_set.conclude(new, settings, "2020-01-01_None", [])
    assert "no runs in" in refused.value.line


def test_settings_of_a_log_are_those_of_the_command(killed):
    """What choose_folder compares is written the same way by the trainer."""
    start = run_set.finished(killed[0])[3]
    settings = run_set.parse(command(killed[0].parent, "--seed=3")[2:])[2]
    assert start["settings"] == json.loads(json.dumps(run_set.asdict(settings)))
