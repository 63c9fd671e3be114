"""The files of the repository: data as described, pins exact, scripts and code clean."""
import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "data/tiny"
SPLITS = ("train", "val")
# GPT-2's rule for where text may be cut before its bytes are paired
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def sha256(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """Every file that is in the repository, or would be with `git add .`."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                           cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def ranks() -> list[bytes]:
    """Bytes of every token of GPT-2's vocabulary but EoS, by rank."""
    pairs = [line.split() for line in (ROOT / "data/gpt2.tiktoken").read_text().splitlines()]
    assert [int(rank) for _, rank in pairs] == list(range(50256))
    return [base64.b64decode(token, validate=True) for token, _ in pairs]


def documents(split) -> list[np.ndarray]:
    """Tokens of each document of a tiny shard, its EoS left out."""
    path = TINY / f"tiny_{split}_000000.bin"
    header, tokens = np.fromfile(path, "<i4", 256), np.fromfile(path, "<u2", offset=1024)
    assert list(header[:3]) == [20240520, 1, len(tokens)] and not header[3:].any()
    assert tokens.max() == 4096 and tokens[0] == 4096
    return [part[1:] for part in np.split(tokens, np.flatnonzero(tokens == 4096)[1:])]


def decoded(split, ranks) -> list[str]:
    return [b"".join([ranks[token] for token in document]).decode("utf-8", "strict")
            for document in documents(split)]


# ---- data ---------------------------------------------------------------------------------------

def test_sums():
    listed = dict(line.split()[::-1] for line in (TINY / "SHA256SUMS").read_text().splitlines())
    assert set(listed) == {path.name for path in TINY.glob("*.bin")} and len(listed) == 2
    for name, digest in listed.items():
        assert sha256(TINY / name) == digest, name
    assert sha256(ROOT / "data/gpt2.tiktoken") in (ROOT / "data/README.md").read_text()


def test_every_prefix_of_the_ranks_is_a_tokenizer(ranks):
    assert len(set(ranks)) == len(ranks) == 50256
    assert set(ranks[:256]) == {bytes([byte]) for byte in range(256)}
    known = set(ranks[:256])
    for token in ranks[256:]:
        assert any(token[:cut] in known and token[cut:] in known for cut in range(1, len(token)))
        known.add(token)


@pytest.mark.parametrize("split", SPLITS)
def test_tiny_shard_is_as_its_readme_says(split, ranks):
    texts = decoded(split, ranks)
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in (TINY / "README.md").read_text().splitlines() if line.startswith("|")]
    stated = {row[0]: row[1 + SPLITS.index(split)] for row in rows}
    size = sum(len(text.encode()) for text in texts)
    lengths = [1 + len(document) for document in documents(split)]
    assert all(texts)
    assert stated["documents"] == f"{len(texts):,}"
    assert stated["bytes of UTF-8 text"] == f"{size:,}"
    assert stated["tokens, each document's EoS among them"] == f"{sum(lengths):,}"
    assert (stated["bytes of text a token, EoS not counted"]
            == f"{size / (sum(lengths) - len(lengths)):.2f}")
    assert (stated["tokens in a document: least, median, most"]
            == f"{min(lengths):,}, {np.median(lengths):,.0f}, {max(lengths):,}")


@pytest.mark.parametrize("split", SPLITS)
def test_tiny_shard_is_what_the_tokenizer_makes_of_its_text(split, ranks):
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding("gpt2-4096", pat_str=GPT2_PATTERN, special_tokens={},
                                 mergeable_ranks={token: i for i, token in enumerate(ranks[:4096])})
    for text, document in zip(decoded(split, ranks), documents(split), strict=True):
        assert encoding.encode_ordinary(text) == document.tolist()


@pytest.mark.parametrize("split", SPLITS)
def test_tiny_shard_is_the_source_text(split, ranks, shared):
    lines = (shared / f"corpus/sample/sample_{split}.jsonl").read_text(encoding="utf-8")
    assert decoded(split, ranks) == [json.loads(line)["text"] for line in lines.splitlines()]


# ---- pins ---------------------------------------------------------------------------------------

def pins() -> dict[str, str]:
    lines = (re.sub(r"(^|\s)#.*", "", line).strip()
             for line in (ROOT / "requirements.txt").read_text().splitlines())
    found = {}
    for line in filter(None, lines):
        match = re.fullmatch(r'([a-z_-]+)==([0-9.]+)( ; sys_platform == "linux")?', line)
        assert match, f"not one exact released version: {line}"
        assert match[1] not in found
        found[match[1]] = match[2]
    return found


def test_pins_are_exact_releases():
    assert {"torch", "triton", "numpy", "tiktoken", "huggingface_hub", "scipy"} <= set(pins())


def test_triton_is_the_one_that_torch_asks_for():
    from importlib import metadata
    wanted = [r for r in metadata.requires("torch") or [] if r.startswith("triton")]
    if not wanted or metadata.version("torch").split("+")[0] != pins()["torch"]:
        # CPU builds of torch ask for no Triton: the pair as the CUDA build of this torch has it
        assert (pins()["torch"], pins()["triton"]) == ("2.13.0", "3.7.1")
    else:
        assert f"triton=={pins()['triton']};" in wanted[0].replace(" ", "")


# ---- the repository -----------------------------------------------------------------------------

def test_licence():
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("MIT License\n\nCopyright (c) 2026 the single-GPU speedrun authors\n")
    assert "Software Copyright (c) 2019 OpenAI" in (
        ROOT / "data/LICENSE-gpt2.tiktoken.txt").read_text()


def test_no_large_file(files):
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in files}
    assert not {name: size for name, size in sizes.items() if size > 4_000_000}
    assert sum(sizes.values()) < 50_000_000


def test_no_path_of_one_machine(files):
    # put together here, so that this file passes its own test
    paths = re.compile("|".join("(?<![\\w.~])/" + home + "/" for home in ("work", "root", "home")))
    hits = {}
    for path in files:
        if path.suffix in (".bin", ".png"):
            continue
        if found := paths.search(path.read_text(encoding="utf-8")):
            hits[str(path.relative_to(ROOT))] = found[0]
    assert not hits


def test_ignored(files):
    ignored = [".venv/bin/python", "data/fineweb10B/fineweb_val_000000.bin", "checkpoint.pt",
               "records/2026-01-01_Mine/state.pt", "__pycache__/train_gpt.cpython-312.pyc"]
    done = subprocess.run(["git", "check-ignore", "--no-index", *ignored], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.stdout.splitlines() == ignored
    wanted = ["data/tiny/tiny_val_000000.bin", "records/2026-01-01_Mine/1.jsonl", ".ci/run"]
    assert subprocess.run(["git", "check-ignore", "--no-index", *wanted], cwd=ROOT,
                          capture_output=True).returncode == 1


def test_scripts_pass_shellcheck():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    tool = str(shellcheck) if shellcheck.exists() else shutil.which("shellcheck")
    assert tool, "shellcheck is missing: pip install -r requirements.txt"
    scripts = ["run.sh", ".ci/run", "tests/pretended_gpu/setup.sh"]
    done = subprocess.run([tool, "--shell=bash", *scripts], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for script in scripts:
        text = (ROOT / script).read_text()
        assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
        assert (ROOT / script).stat().st_mode & 0o111, f"{script} is not executable"
        assert max(map(len, text.splitlines())) <= 100, script


def test_code_passes_ruff():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--output-format=concise", "."],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
