"""The house rules for train_gpt.py that a program can check, and that importing it does nothing."""
import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import train_gpt

ROOT = Path(__file__).resolve().parent.parent
SOURCE = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
LINES, TREE = SOURCE.splitlines(), ast.parse(SOURCE)
FUNCTIONS = [node for node in ast.walk(TREE) if isinstance(node, ast.FunctionDef)]
LINE_BUDGET, COLUMNS = 1800, 100
LONGEST, LONGER = 60, {"train": 80}


def comments() -> dict[int, str]:
    return {token.start[0]: token.string
            for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline)
            if token.type == tokenize.COMMENT}


def docstrings() -> list[ast.Constant]:
    nodes = [n for n in ast.walk(TREE)
             if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    return [n.body[0].value for n in nodes if ast.get_docstring(n) is not None]


# ---- order and size ------------------------------------------------------------------------------

def test_contents_equal_the_banners():
    banners = [re.match(r"# -- (\d+) (.+?) -+$", line) for line in LINES]
    banners = [(int(b[1]), b[2]) for b in banners if b]
    contents = re.findall(r"^ {3,4}(\d+) (\S+(?: \S+)*)  +\S.*$", train_gpt.__doc__, re.M)
    assert [(int(number), name) for number, name in contents] == banners
    assert [number for number, _ in banners] == list(range(1, len(banners) + 1))
    assert [name for _, name in banners] == [
        "Settings", "Data", "Layers", "Head", "GPT", "Optimizers", "Schedules", "Machine",
        "Log and clock", "Run", "Main"]
    assert all(len(line) == COLUMNS for line in LINES if line.startswith("# -- "))
    assert len([line for line in LINES if line.startswith("# --")]) == len(banners)


def test_the_front_docstring_has_its_parts():
    """One sentence, three commands, contents, key of the dimensions, sources that are used."""
    parts = train_gpt.__doc__.split("\n\n")
    assert len(parts[0].splitlines()) == 1 and parts[0].endswith(".")
    assert parts[1].count("python train_gpt.py") == 3
    sources = re.findall(r"\[(\d)\] [A-Z]", train_gpt.__doc__)
    assert [int(n) for n in sources] == list(range(1, len(sources) + 1))
    prose = "".join(comments().values()) + "".join(node.value for node in docstrings()[1:])
    cited = set(re.findall(r"(?<![\w\])])\[(\d)\]", prose))
    cited |= set(re.findall(r"\[(\d)\]", parts[-1].split("[2]")[0]))  # the recipe, named above
    assert cited == set(sources), "cited and listed sources differ"


def test_line_budget_and_width():
    assert len(LINES) <= LINE_BUDGET
    long = [n for n, line in enumerate(LINES, 1) if len(line) > COLUMNS]
    assert not long, f"lines beyond {COLUMNS} columns: {long}"
    assert SOURCE.endswith("\n") and "\t" not in SOURCE and "\r" not in SOURCE


def test_between_a_fifth_and_nearly_half_is_prose():
    """Of the characters behind the indentation, comments and docstrings."""
    prose = sum(map(len, comments().values()))
    for node in docstrings():
        prose += sum(len(line.strip()) for line in LINES[node.lineno - 1:node.end_lineno])
    share = prose / sum(len(line.strip()) for line in LINES)
    assert 0.20 <= share <= 0.45, f"{share:.1%}"


def test_no_function_is_long():
    long = {f.name: f.end_lineno - f.lineno + 1 for f in FUNCTIONS}
    assert {n: size for n, size in long.items() if size > LONGER.get(n, LONGEST)} == {}


# ---- what the house does without -----------------------------------------------------------------

def test_no_keyword_catching_no_locals_no_own_decorators():
    catching = [f.name for f in FUNCTIONS if f.args.kwarg]
    assert catching == [], "**kwargs"
    called = {n.func.id for n in ast.walk(TREE)
              if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not called & {"locals", "globals", "vars", "eval", "exec", "setattr", "__import__"}
    own = {f.name for f in TREE.body if isinstance(f, ast.FunctionDef)}
    for node in ast.walk(TREE):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for decorator in node.decorator_list:
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                assert getattr(called, "id", None) not in own, f"{node.name}: our own decorator"
    assert not [n for n in ast.walk(TREE) if isinstance(n, (ast.Global, ast.Nonlocal))]


def test_every_setting_has_a_unit_or_meaning_behind_it():
    notes = comments()
    for node in TREE.body:
        if isinstance(node, ast.ClassDef) and node.name in ("Recipe", "Settings"):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            assert len(fields) > 10
            for item in fields:
                assert item.lineno == item.end_lineno
                assert len(notes.get(item.lineno, "").strip("# ")) > 0, item.target.id


def test_functions_say_their_types():
    """Public ones: every parameter but self, and what returns."""
    public = [n for n in TREE.body if isinstance(n, ast.FunctionDef)]
    public += [f for c in TREE.body if isinstance(c, ast.ClassDef) for f in c.body
               if isinstance(f, ast.FunctionDef)]
    for f in public:
        if f.name.startswith("_") and f.name != "__init__":
            continue                         # hooks whose form torch dictates
        for argument in f.args.posonlyargs + f.args.args + f.args.kwonlyargs:
            if argument.arg not in ("self", "function", "item", "write", "frame"):
                assert argument.annotation is not None, f"{f.name}({argument.arg})"


def test_nothing_is_used_before_its_section():
    """The file reads from top to bottom: no section names a function or class of a later one."""
    line = {n.name: n.lineno for n in TREE.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    banners = [n for n, text in enumerate(LINES, 1) if text.startswith("# -- ")]

    def section(n: int) -> int:
        return sum(b <= n for b in banners)

    late = set()
    for node in TREE.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own = {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}
            own |= {n.id for n in ast.walk(node)
                    if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            late |= {f"{node.name} uses {use.id}" for use in ast.walk(node)
                     if isinstance(use, ast.Name) and use.id not in own
                     and section(line.get(use.id, 0)) > section(node.lineno)}
    # the data know how long the run is; nothing else looks ahead
    assert late <= {"Reader uses total_steps", "TrainData uses total_steps"}


def test_every_definition_is_used():
    names = [n.name for n in TREE.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    tools = "".join(path.read_text() for path in (ROOT / "tools").glob("*.py"))
    for name in names:
        if not name.startswith("_"):
            assert len(re.findall(rf"\b{name}\b", SOURCE + tools)) > 1, f"{name} is never used"


def test_ruff_is_content():
    try:
        import ruff  # noqa: F401
        command = [sys.executable, "-m", "ruff"]
    except ImportError:
        command = [shutil.which("ruff")]
    if command[0] is None:
        pytest.skip("ruff is not installed")
    done = subprocess.run([*command, "check", "--no-cache", "train_gpt.py", "tests", "records",
                           "data"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- importing does nothing ----------------------------------------------------------------------

PROBE = """
import json, os, signal, sys, threading
import numpy, torch, torch.distributed
root, opened, started = sys.argv[1], [], []

def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        own = (isinstance(path, (str, bytes)) and os.fsdecode(path).startswith(root)
               and not os.fsdecode(path).startswith(sys.prefix))
        if (writes or own) and isinstance(path, (str, bytes)):
            opened.append(os.fsdecode(path))
    elif event in ("socket.connect", "socket.bind", "subprocess.Popen", "os.system", "os.fork",
                   "os.mkdir", "os.remove", "os.rename", "os.posix_spawn"):
        started.append(event)

def facts():
    return dict(
        threads=[t.name for t in threading.enumerate()], cores=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(), cwd=os.listdir(),
        dtype=str(torch.get_default_dtype()), seed=torch.initial_seed(),
        random=torch.get_rng_state().sum().item(), environment=dict(os.environ),
        signals=[str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)])

before = facts()
sys.addaudithook(watch)
sys.path.insert(0, root)
import train_gpt
after = facts()
origins = [getattr(m, "__file__", None) or "" for m in list(sys.modules.values())]
print(json.dumps(dict(
    same=before == after, opened=opened, started=started, cuda=torch.cuda.is_initialized(),
    group=torch.distributed.is_initialized(), compiler="torch._inductor" in sys.modules,
    own=[o for o in origins if o.startswith(root + os.sep) and not o.startswith(sys.prefix)])))
"""


def test_importing_has_no_side_effect(tmp_path):
    done = subprocess.run([sys.executable, "-B", "-c", PROBE, ROOT], cwd=tmp_path,
                          capture_output=True, text=True, timeout=120,
                          env=dict(os.environ, OMP_NUM_THREADS="2"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout.count("\n") == 1, "importing prints"
    facts = json.loads(done.stdout)
    assert facts["same"], "importing changed threads, seeds, signals, environment or folder"
    assert not facts["cuda"] and not facts["group"] and not facts["compiler"]
    assert facts["started"] == [] and list(tmp_path.iterdir()) == []
    assert facts["own"] == [str(ROOT / "train_gpt.py")], "imports from the project"
    assert {Path(path).name.split(".")[0] for path in facts["opened"]} <= {"train_gpt"}
