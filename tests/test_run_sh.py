"""run.sh, run for real in a folder whose name has spaces, with pip kept off the network.

Its train_gpt.py is a stand-in that prints what reached it. torch is a stand-in too where a test
needs a machine with a CUDA device, or torchrun; everywhere else it is absent.
"""
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOCK = shutil.which("flock")

STAND_IN = '''\
import os, sys
print("pid", os.getpid(), "cwd", os.getcwd())
print("argv", sys.argv[1:])
print("prefix", sys.prefix)
try:
    import added
    print("added", added.VERSION)
except ImportError:
    print("added none")
sys.exit(int(os.environ.get("STAND_IN_EXIT", "0")))
'''

TORCH = {
    "__init__.py": "from . import cuda, version\n",
    "version.py": "cuda = '13.0'\n",
    "cuda.py": "import os\ndef is_available(): return os.environ.get('STAND_IN_CUDA') == '1'\n",
    "distributed/__init__.py": "",
    "distributed/run.py": "import sys\nprint('torchrun', sys.argv[1:])\n",
}


def run(project, *arguments, cwd=None, script=None, **environment):
    """run.sh of the project, with no terminal of any kind."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "PYTHONPATH")}
    env |= {"XDG_CACHE_HOME": str(project.parent / "cache")} | environment
    return subprocess.run([str(script or project / "run.sh"), *map(str, arguments)],
                          cwd=cwd or project.parent, env=env, stdin=subprocess.DEVNULL,
                          start_new_session=True, capture_output=True, text=True, timeout=120)


def stand_in_torch(folder) -> str:
    for name, text in TORCH.items():
        path = folder / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def new_project(folder) -> Path:
    """A folder with run.sh, the stand-in, and two requirements to choose from."""
    project = folder / "a project with spaces"
    (project / "wheels").mkdir(parents=True)
    shutil.copy(ROOT / "run.sh", project / "run.sh")
    (project / "train_gpt.py").write_text(STAND_IN)
    for version in ("1.0", "2.0"):
        info = f"added-{version}.dist-info"
        wheel = project / "wheels" / f"added-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as z:
            z.writestr("added.py", f"VERSION = {version!r}\n")
            z.writestr(f"{info}/METADATA",
                       f"Metadata-Version: 2.1\nName: added\nVersion: {version}\n")
            z.writestr(f"{info}/WHEEL",
                       "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            z.writestr(f"{info}/RECORD", "")
    require(project, "added==1.0")
    return project


def require(project, line):
    (project / "requirements.txt").write_text(f"--no-index\n--find-links wheels\n{line}\n")


@pytest.fixture(scope="module")
def first_use(tmp_path_factory):
    """A project after its first use, and that use's result."""
    project = new_project(tmp_path_factory.mktemp("run_sh"))
    return project, run(project, PYTHON=sys.executable)


@pytest.fixture(scope="module")
def project(first_use) -> Path:
    return first_use[0]


@pytest.fixture()
def copy(project, tmp_path) -> Path:
    """A set-up project that the test may spoil."""
    return Path(shutil.copytree(project, tmp_path / "a copy", symlinks=True))


# ---- set-up -------------------------------------------------------------------------------------

def test_first_use_makes_the_environment(first_use):
    project, done = first_use
    assert done.returncode == 0, done.stderr
    assert "making .venv with Python" in done.stderr
    assert "added 1.0" in done.stdout
    version, digest = (project / ".venv/stamp").read_text().split()
    assert version == "%d.%d" % sys.version_info[:2] and len(digest) == 64


def test_path_of_the_packages_has_no_space(first_use):
    """torch.compile links against torch's own libraries, and cannot with a space in their path."""
    project, done = first_use
    (prefix,) = [line[7:] for line in done.stdout.splitlines() if line.startswith("prefix ")]
    assert " " in str(project) and " " not in prefix
    assert os.path.realpath(prefix) == os.path.realpath(project / ".venv")
    file = project.parent / "a file"
    file.touch()
    assert run(project, XDG_CACHE_HOME=str(file)).returncode == 0  # without, if it cannot be had


def test_later_uses_install_nothing(project):
    stamp = project / ".venv/stamp"
    before = stamp.stat().st_mtime_ns
    done = run(project, PIP_NO_INDEX="not even a valid value: pip would stop at it")
    assert done.returncode == 0 and done.stderr == ""
    assert stamp.stat().st_mtime_ns == before


def test_changed_requirements_are_installed_and_the_rest_stays(copy):
    (copy / ".venv/mine").touch()
    require(copy, "added==2.0")
    done = run(copy)
    assert done.returncode == 0 and "requirements.txt has changed" in done.stderr
    assert "added 2.0" in done.stdout and (copy / ".venv/mine").exists()
    assert run(copy).stderr == ""


def test_failed_install_is_said_and_tried_again(copy):
    require(copy, "added==3.0")
    for _ in range(2):  # the second time must not take the half-made environment for a ready one
        done = run(copy)
        assert done.returncode == 1 and "argv" not in done.stdout
        assert "added==3.0" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("run.sh: pip could not install")
    require(copy, "added==1.0")
    assert run(copy).stderr == ""  # what pip refused has changed nothing


def test_interrupted_update_is_begun_again(copy):
    require(copy, "added==2.0")
    pip = copy / ".venv/lib/python{}.{}/site-packages/pip/__main__.py".format(*sys.version_info)
    pip.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert run(copy).returncode == 1
    done = run(copy, PYTHON=sys.executable)
    assert "making .venv" in done.stderr and "added 2.0" in done.stdout


def test_interrupted_first_use_is_repaired(tmp_path):
    project = new_project(tmp_path)
    shims = tmp_path / "shims"  # a python3 with nothing behind it, and a Python that works
    shims.mkdir()
    script(shims / "python3", "echo 'python3: command not found' >&2; exit 127")
    script(shims / "python3.13", f'exec "{sys.executable}" "$@"')
    path = f"{shims}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache"),
                         "TMPDIR": str(tmp_path)}  # what the killed pip leaves behind
    child = subprocess.Popen([project / "run.sh"], env=env, start_new_session=True,
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    python = project / ".venv/bin/python"
    while not python.exists() and child.poll() is None:
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert python.exists() and not (project / ".venv/stamp").exists()
    # repaired by two at once: where flock is, the later one waits and finds it done
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: run(project, PATH=path), range(2 if FLOCK else 1)))
    for done in both:
        assert done.returncode == 0 and "added 1.0" in done.stdout, done.stderr
    assert sum("making .venv" in done.stderr for done in both) == 1


def test_exchanged_python_is_noticed(copy):
    (copy / ".venv/mine").touch()
    (copy / ".venv/stamp").write_text("3.9 " + (copy / ".venv/stamp").read_text().split()[1])
    done = run(copy, PYTHON=sys.executable)
    assert done.returncode == 0 and "making .venv" in done.stderr
    assert not (copy / ".venv/mine").exists()


def test_unsuitable_python_asked_for(copy):
    done = run(copy, PYTHON="/bin/false")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "PYTHON=/bin/false is not a Python 3.10 to 3.13" in done.stderr


def script(path, line):
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@pytest.fixture()
def bare_path(tmp_path) -> Path:
    """A PATH of the few tools that run.sh needs, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "sh", "env", "dirname", "readlink", "cat", "rm", "mv", "sed", "tr",
                 "cksum", "mkdir", "ln"):
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def test_no_suitable_python(tmp_path, bare_path):
    script(bare_path / "python3", "exit 127")
    script(bare_path / "python3.10", "echo")  # what run.sh's question prints for another version
    done = run(new_project(tmp_path), PATH=str(bare_path))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "no Python 3.10 to 3.13 found" in done.stderr and "apt install" in done.stderr


def test_python_without_venv(tmp_path, bare_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['ensurepip'] = None\n")
    script(bare_path / "python3", f'exec "{sys.executable}" "$@"')
    done = run(new_project(tmp_path), PATH=str(bare_path), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    version = "%d.%d" % sys.version_info[:2]
    assert f"sudo apt install python{version}-venv" in done.stderr


# ---- what reaches train_gpt.py ------------------------------------------------------------------

def test_arguments_pass_through_untouched(project, tmp_path):
    given = ["--name=two words", "--records_dir=", "--data_dir=own data", "--x=$HOME *", "--seed=3"]
    done = run(project, "--nproc_per_node=1", *given, cwd=tmp_path)
    assert f"argv {['--track=tiny', *given]}" in done.stdout
    assert f"cwd {tmp_path}" in done.stdout  # relative paths stay the user's


def test_reached_through_a_link(project, tmp_path):
    (tmp_path / "one").symlink_to(os.path.relpath(project / "run.sh", tmp_path))
    (tmp_path / "two words").symlink_to("one")
    done = run(project, script=tmp_path / "two words", cwd="/", CDPATH="/tmp")
    assert done.returncode == 0 and "argv ['--track=tiny']" in done.stdout, done.stderr


def test_reached_by_a_relative_path(project):
    script = f"{project.name}/run.sh"  # CDPATH would make cd print, and go elsewhere
    done = run(project, script=script, CDPATH=str(project.parent))
    assert done.returncode == 0 and "argv ['--track=tiny']" in done.stdout, done.stderr


@pytest.mark.parametrize("code", [0, 2, 3])
def test_exit_code(project, code):
    assert run(project, STAND_IN_EXIT=str(code)).returncode == code


def test_a_word_runs_its_tool(project):
    (project / "tools").mkdir(exist_ok=True)
    (project / "tools" / "show.py").write_text(
        "import sys\nprint(sys.prefix, sys.argv[1:])\nsys.exit(3)")
    done = run(project, "show", "--x=1", "a b")
    assert done.returncode == 3 and "['--x=1', 'a b']" in done.stdout
    done = run(project, "other")
    assert done.returncode == 2 and done.stderr.endswith("or nothing\n") and "show" in done.stderr


def test_python_takes_the_place_of_the_shell(project):
    child = subprocess.Popen([project / "run.sh"], stdout=subprocess.PIPE, text=True,
                             stdin=subprocess.DEVNULL,
                             env=os.environ | {"XDG_CACHE_HOME": str(project.parent / "cache")})
    assert f"pid {child.pid} " in child.communicate(timeout=60)[0]


@pytest.mark.parametrize("arguments", [
    ["--nproc_per_node=0"], ["--nproc_per_node=-1"], ["--nproc_per_node=two"],
    ["--nproc_per_node="], ["--nproc_per_node=1.5"], ["--nproc_per_node"], ["tset"], ["", "test"]])
def test_wrong_command_is_one_line_and_2(tmp_path, arguments):
    done = run(new_project(tmp_path), *arguments)  # not set up: nothing may be installed for it
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "whole number" in done.stderr or "./run.sh test" in done.stderr
    assert not list(tmp_path.rglob(".venv"))


def test_runs_make_a_set(project):
    (project / "records").mkdir(exist_ok=True)
    (project / "records" / "run_set.py").write_text("import sys\nprint('set', sys.argv[1:])\n")
    done = run(project, "--runs=3", "--name=two words", "--seed=1")
    assert f"set {['--track=tiny', '--runs=3', '--name=two words', '--seed=1']}" in done.stdout
    done = run(project, "--runs=3", "--nproc_per_node=2")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "set" in done.stderr


def test_a_run_that_lasts_is_keeps(project):
    for name, text in (("tools/keep.py", "keep"), ("records/run_set.py", "set")):
        path = project / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import sys\nprint('{text}', sys.argv[1:])\n")
    for word in ("--checkpoint_every=30m", "--resume=auto", "--resume-anyway"):
        done = run(project, "--track=tiny", word, "--seed=1")
        assert f"keep ['--track=tiny', '{word}', '--seed=1']\n" in done.stdout, done.stderr


def test_more_processes_go_to_torchrun(project, tmp_path):
    torch = stand_in_torch(tmp_path)
    for given in (["--nproc_per_node=2"], ["--nproc_per_node", "2"]):
        done = run(project, *given, "--seed=1", PYTHONPATH=torch)
        assert ("torchrun " + str(["--standalone", "--nproc_per_node=2",
                                   str(project / "train_gpt.py"), "--track=tiny", "--seed=1"])
                in done.stdout)


# ---- the track ----------------------------------------------------------------------------------

def track_line(done) -> str:
    lines = [line for line in done.stdout.splitlines() if line.startswith("run.sh: track")]
    assert len(lines) == 1 and done.returncode == 0, done
    return lines[0]


def test_track_without_cuda(project, tmp_path):
    assert "track tiny: no CUDA device" in track_line(run(project))
    done = run(project, PYTHONPATH=stand_in_torch(tmp_path))
    assert "track tiny: no CUDA device" in track_line(done)


def test_track_with_cuda(project, tmp_path):
    cuda = {"PYTHONPATH": stand_in_torch(tmp_path), "STAND_IN_CUDA": "1"}
    shards = tmp_path / "some shards"
    shards.mkdir()
    (shards / "fineweb_train_000001.bin").touch()
    data = f"--data_dir={shards}"

    done = run(project, **cuda)
    assert "track tiny: a CUDA device, but no FineWeb shards" in track_line(done)
    assert str(project / "data/fineweb10B") in track_line(done)
    assert "track tiny" in track_line(run(project, data, **cuda))  # no validation shard yet
    (shards / "fineweb_val_000000.bin").touch()
    done = run(project, data, **cuda)
    assert "track fineweb: a CUDA device, and shards in " in track_line(done)
    assert f"argv {['--track=fineweb', data]}" in done.stdout
    assert "--device=cpu" in track_line(run(project, data, "--device=cpu", **cuda))


def test_track_given(project):
    done = run(project, "--seed=1", "--track=fineweb")
    assert "track fineweb: --track was given" in track_line(done)
    assert "argv ['--seed=1', '--track=fineweb']" in done.stdout


# ---- help, tests --------------------------------------------------------------------------------

def test_help(project, tmp_path):
    done = run(project, "--help", "--track=tiny")
    assert done.returncode == 0 and "What a run costs" in done.stdout
    assert "argv ['--help', '--track=tiny']" in done.stdout and "set -euo" not in done.stdout
    fresh = new_project(tmp_path)
    done = run(fresh, "--help")
    assert done.returncode == 0 and "What a run costs" in done.stdout
    assert not (fresh / ".venv").exists()


def test_tests_run_in_the_project(copy):
    (copy / "pytest.py").write_text("import os, sys; print(os.getcwd(), sys.argv[1:])\n")
    done = run(copy, "test", "-k", "some name", cwd="/")
    assert done.stdout == f"{copy} ['-k', 'some name']\n"
