"""The leak test passes the honest programs, refuses each leaking one by name, and stays in bounds.

A mutant is train_gpt.py with a few lines at its end that replace a part by one that leaks.
"""
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("leak_test", ROOT / "records" / "leak_test.py")
leak_test = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(leak_test)
PROGRAM = (ROOT / "train_gpt.py").read_text()

LEAKS = {
    "smear across documents": ("other documents", """
GPT.smear = lambda self, e, batch: e + 0.1 * F.pad(e, (0, 0, 1, 0))[:-1]
"""),
    "attention across documents": ("other documents", """
honest = block_mask
def block_mask(positions_T, window, span):
    return honest(torch.arange(len(positions_T)), window, span)
"""),
    "attention to the next token": ("later tokens", """
honest = block_mask
def block_mask(positions_T, window, span):
    mask = honest(positions_T, window, span)
    return mask | F.pad(mask[..., :-1], (1, 0))
"""),
    "attention to all of a block": ("later tokens", """
honest = block_mask
def block_mask(positions_T, window, span):
    mask = honest(positions_T, window, span)
    mask[..., -BLOCK:] = True
    return mask
"""),
    "positions that tell the length of the document": ("later tokens", """
honest_view = make_view
def make_view(batch, *rest):
    ends = torch.where(batch.targets_T == 32, torch.arange(len(batch.targets_T)), len(batch[1]))
    left = ends.flip(0).cummin(0).values.flip(0) - torch.arange(len(ends))
    view = honest_view(batch, *rest)
    return view._replace(cos_T1R=view.cos_T1R * (1 + 0.01 * left[:, None, None]))
"""),
    "the average of all inputs": ("later tokens", """
honest_forward = GPT.forward
GPT.forward = lambda self, batch, view: (x := honest_forward(self, batch, view)) + 0.1 * x.mean(0)
"""),
    "targets in the input": ("distribution", """
honest_forward = GPT.forward
GPT.forward = lambda self, batch, view: honest_forward(self, batch, view) + 0.05 * F.embedding(
    batch.targets_T.clamp(min=0), self.embed)
"""),
    "a loss that is none": ("distribution", """
honest_losses = token_losses
def token_losses(*arguments):
    return 0.99 * honest_losses(*arguments)
"""),
    "a softmax of the likely tokens": ("distribution", """
honest_losses = token_losses
def token_losses(*arguments):
    return honest_losses(*arguments).clamp(max=6.0)
"""),
    "what was validated is remembered": ("memory", """
honest_val, seen = Run.val_losses, {}
def val_losses(self, group, stage):
    key = self.val_data.batch(group).inputs_T.numpy().tobytes()
    seen[key] = seen.get(key, 0) + 1
    return honest_val(self, group, stage) * 0.999 ** (seen[key] - 1)
Run.val_losses = val_losses
"""),
    "hard targets left out": ("memory", """
honest_batch = ValData.batch
def batch(self, group):
    found = honest_batch(self, group)
    return found._replace(targets_T=torch.where(found.targets_T == 32, -1, found.targets_T))
ValData.batch = batch
"""),
    "another loss is reported": ("memory", """
honest_validate = Run.validate
Run.validate = lambda self, step: honest_validate(self, step) - 0.01
"""),
}


def program(folder: Path, more: str, base: str = PROGRAM) -> Path:
    path = folder / "train_gpt_mutant.py"
    path.write_text(base + more)
    return path


HONEST = {"train_gpt": ROOT / "train_gpt.py", "record": next(
    (ROOT / "records" / "2026-12-01_TinyBaseline").glob("train_gpt_*.py"))}
EXAMINE = """
import json, os, sys, tempfile, torch, torch._dynamo
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import leak_test
for path in map(Path, sys.argv[2:]):        # torch is imported once, each program runs alone
    if os.fork() == 0:
        with tempfile.TemporaryDirectory() as folder:
            lines = leak_test.examine(leak_test.Subject(path, "tiny", Path(folder)))
        path.with_suffix(".json").write_text(json.dumps(lines))
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """Name -> lines, of all mutants and honest programs, by two processes."""
    paths = {}
    for name in [*LEAKS, *HONEST]:
        base = HONEST[name].read_text() if name in HONEST else PROGRAM
        paths[name] = program(tmp_path_factory.mktemp("program"), LEAKS.get(name, "  ")[1], base)

    def examine(half):
        subprocess.run([sys.executable, "-c", EXAMINE, ROOT / "records", *half], check=True,
                       env=os.environ | {"OMP_NUM_THREADS": "1"})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(examine, (list(paths.values())[0::2], list(paths.values())[1::2])))
    return {name: json.loads(path.with_suffix(".json").read_text()) for name, path in paths.items()}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_refused_by_the_statement_that_it_breaks(found, name):
    assert any(line.startswith(f"{LEAKS[name][0]}: expected ") for line in found[name]), found[name]


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(found, name):
    assert found[name] == []


def test_as_a_command_and_at_the_depth_of_the_other_track():
    done = subprocess.run([sys.executable, ROOT / "records" / "leak_test.py", ROOT / "train_gpt.py",
                           "--track=fineweb"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done
    (line,) = done.stdout.splitlines()
    assert line.startswith("NO LEAK FOUND: train_gpt.py as fineweb, ")


# ---- bounds --------------------------------------------------------------------------------------

def refused(folder: Path, text: str) -> str:
    """The one line about a program that is only this text."""
    (line,) = leak_test.leak_test(program(folder, text, base=""), "tiny")[0]
    assert line.startswith("program: expected one that can be tested, found ")
    return line


@pytest.mark.parametrize(("text", "word"), [
    ("PRESETS = {}", "KeyError"), ("raise ValueError('two\\nlines')", "ValueError: two"),
    ("raise SystemExit(0)", "SystemExit"), ("import os; os._exit(0)", "ended: exit code 0"),
    ("x = bytearray(64 << 30)", "MemoryError"), ("1 +", "SyntaxError"),
    ("open('big', 'wb').write(bytes(128 << 20))", "big"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit code -11")])
def test_a_program_that_cannot_be_tested_is_one_line(tmp_path, text, word):
    line = refused(tmp_path, text)
    assert word in line or (word == "big" and ("OSError" in line or "exit code -25" in line)), line


def test_a_program_that_does_not_end_is_ended_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(leak_test, "SECONDS", 2)
    began, mark = time.monotonic(), tmp_path / "mark"
    line = refused(tmp_path, f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(4); open({str(mark)!r}, 'w')"])
time.sleep(60)
""")
    assert "more than 2 s" in line and time.monotonic() - began < 20
    time.sleep(3)
    assert not mark.exists()


def test_there_is_no_network(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket; socket.create_connection({server.getsockname()!r}, timeout=5)"
        other = (f"import subprocess, sys; raise ValueError('code %d' % subprocess.run([sys."
                 f"executable, '-c', {connect!r}], stderr=subprocess.DEVNULL).returncode)")
        if leak_test.without_network():      # then not even for what the program starts
            assert "ValueError: code 1" in refused(tmp_path, other)
        monkeypatch.setattr(leak_test, "without_network", list)
        assert "PermissionError: socket." in refused(tmp_path, connect)


def test_how_it_was_bounded_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(leak_test, "without_network", list)
    assert leak_test.main([str(program(tmp_path, "", base="pass"))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == ("LEAKS: train_gpt_mutant.py as tiny, Python's sockets refused (the system "
                         "cannot take it away)")


def test_wrong_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        leak_test.main([str(tmp_path / "missing.py")])
    assert stopped.value.code == 2 and "not a file" in capsys.readouterr().err


def test_the_documents_are_what_the_test_needs():
    base, other = leak_test.documents(1), leak_test.documents(2)[::-1]
    assert len(base) == len(other) == leak_test.TOKENS + 1 == sum(leak_test.LENGTHS)
    assert base[0] == leak_test.VOCAB - 1 and len(set(base)) == leak_test.VOCAB
    assert json.dumps(base) != json.dumps(other)
    borders = [0, *(sum(leak_test.LENGTHS[:n + 1]) for n in range(len(leak_test.LENGTHS)))]
    assert not {256, 512} & set(borders)     # sequences end inside documents
