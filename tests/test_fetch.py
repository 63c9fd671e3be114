"""data/cached_fineweb10B.py against a real HTTP server on loopback (hub_server.py) and its faults.

Everything that is asked for more than once runs in this process; kills and interrupts need a
process of their own.
"""
import email.utils
import fcntl
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from hub_server import COMMIT, serving

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "data/cached_fineweb10B.py"
sys.path.insert(0, str(PROGRAM.parent))

import cached_fineweb10B as fetcher  # noqa: E402

REPOSITORY = "kjj0/fineweb10B-gpt2"
VAL, TRAIN = "fineweb_val_000000.bin", "fineweb_train_{:06d}.bin"
NAMES = [VAL] + [TRAIN.format(n) for n in (1, 2, 3)]
NEXT = "f" * 40                              # a later commit


def shard(seed: int, tokens: int = 70_000, ids: int = 50_256, eos: bool = True) -> bytes:
    generator = np.random.default_rng(seed)
    body = generator.integers(0, ids, tokens).astype("<u2")
    if eos:
        body[::700] = 50_256
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    return header.tobytes() + body.tobytes()


FILES = {name: shard(seed) for seed, name in enumerate(NAMES)}
SIZE = len(FILES[VAL])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def part(folder: Path, name: str, data: bytes | None = None) -> Path:
    return folder / f"{name}.{sha256(data or FILES[name])[:16]}.part"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(fetcher, "FIRST_WAIT", 0.01)
    with serving(REPOSITORY, FILES) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint + "/")
        huggingface_hub.close_session()      # the session reads the proxies
        yield hub
        huggingface_hub.close_session()


@pytest.fixture
def dest(tmp_path) -> Path:
    return tmp_path / "shards of mine"


def run(dest, *words, revision=COMMIT) -> int:
    given = [f"--revision={revision}"] if revision else []
    return fetcher.main([*map(str, words), f"--dest={dest}", *given])


def manifest(dest) -> dict:
    return json.loads((dest / "manifest.json").read_text())


def check(dest, names=NAMES, files=FILES) -> None:
    """The folder holds these files, right and listed, and nothing else."""
    assert {p.name for p in dest.iterdir()} == {*names, "manifest.json"}
    listed = manifest(dest)["files"]
    assert set(listed) == set(names)
    for name in names:
        data = files[name]
        assert (dest / name).read_bytes() == data, name
        assert listed[name] == {"size": len(data), "sha256": sha256(data), "tokens": 70_000,
                                "documents": 100}


# ---- the straight way ---------------------------------------------------------------------------

def test_fetch_and_fetch_again(hub, dest, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert run(dest, 3) == 0
    check(dest)
    assert (manifest(dest)["repository"], manifest(dest)["revision"]) == (REPOSITORY, COMMIT)
    assert hub.served == 4 * SIZE and len(hub.asked("/api/")) == 1
    assert all(r[3].get("authorization") == "Bearer hf_secret" for r in hub.asked(""))
    assert len(hub.asked("", "cdn")) == 4    # the token stays with the hub
    assert not any("authorization" in {k.lower() for k in r[3]} for r in hub.asked("", "cdn"))
    assert "all 4 files are there and intact, 210,000 tokens to train on" in capsys.readouterr().out

    del hub.requests[:]
    assert run(dest, 3) == 0 and run(dest, 2, revision="") == 0
    assert hub.requests == []                # the manifest is enough
    check(dest)


def test_the_default_is_what_the_recipe_needs(hub, dest, monkeypatch):
    assert fetcher.shards_needed() == 9
    monkeypatch.setattr(fetcher, "shards_needed", lambda: 2)
    assert run(dest) == 0
    check(dest, NAMES[:3])


def test_only_the_validation_shard(hub, dest):
    assert run(dest, 0) == 0
    check(dest, [VAL])


def test_pinned_sets():
    sets = fetcher.DATASETS
    assert [s.repository for s in sets.values()] == [
        "kjj0/fineweb10B-gpt2", "kjj0/fineweb100B-gpt2", "kjj0/finewebedu10B-gpt2"]
    assert re.fullmatch("[0-9a-f]{40}", sets["fineweb10B"].revision)
    assert re.fullmatch("[0-9a-f]{64}", sets["fineweb10B"].known[VAL])
    for word in (sets["fineweb10B"].revision, sets["fineweb10B"].known[VAL]):
        assert word in (ROOT / "data/README.md").read_text()


def test_first_use_pins_main(hub, dest, monkeypatch, capsys):
    monkeypatch.setitem(fetcher.DATASETS, "fineweb10B",
                        fetcher.Dataset(REPOSITORY, "fineweb", "", {}))
    assert run(dest, 1, revision="") == 0
    assert manifest(dest)["revision"] == COMMIT
    later = FILES | {TRAIN.format(1): shard(77)}
    hub.commits[NEXT], hub.main = later, NEXT
    assert run(dest, 2, revision="") == 0    # main has moved, we have not
    check(dest, NAMES[:3])
    assert manifest(dest)["revision"] == COMMIT
    served = hub.served
    assert run(dest, 2, revision="main") == 0
    assert "has another one" in capsys.readouterr().out
    check(dest, NAMES[:3], later)
    assert manifest(dest)["revision"] == NEXT and hub.served == served + SIZE


def test_another_validation_shard_is_refused(hub, dest, monkeypatch, capsys):
    monkeypatch.setitem(fetcher.DATASETS, "fineweb10B",
                        fetcher.Dataset(REPOSITORY, "fineweb", COMMIT, {VAL: "ab" * 32}))
    assert run(dest, 1, revision="") == 1
    assert f"{VAL}: {hub.endpoint} publishes sha256" in capsys.readouterr().err
    assert not (dest / VAL).exists() and (dest / NAMES[1]).exists()
    assert run(dest, 1) == 0                 # --revision: asked for by hand
    check(dest, NAMES[:2])


def test_the_hub_may_not_change_its_mind(hub, dest, capsys):
    assert run(dest, 1) == 0
    (dest / VAL).unlink()
    hub.published[VAL] = "cd" * 32
    assert run(dest, 1) == 1
    assert "at the same revision" in capsys.readouterr().err and not (dest / VAL).exists()


def test_dry_run_writes_nothing(hub, dest, capsys):
    assert run(dest, 2, "--dry-run") == 0
    said = capsys.readouterr().out
    assert not dest.exists() and hub.served == 0
    assert all(f"{name}: {SIZE:,} bytes, sha256 {sha256(FILES[name])}" in said
               for name in NAMES[:3])


def test_progress(hub, dest, capsys, monkeypatch):
    monkeypatch.setattr(fetcher, "REPORT_EVERY", 0.0)
    assert run(dest, 1) == 0                 # without a terminal: lines
    said = capsys.readouterr()
    assert re.search(r"^\d of 0 MB, [\d.]+ MB/s, \d+ s left$", said.out, re.M) and said.err == ""
    shutil.rmtree(dest)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run(dest, 1) == 0
    assert re.search(r"fetching: +\d+%\|.*B/s", terminal.getvalue())


# ---- faults that pass ---------------------------------------------------------------------------

DATE = email.utils.formatdate(time.time() - 5, usegmt=True)
PASSING = {
    "429 with seconds": [dict(status=429, retry_after="0")] * 2,
    "429 with a date": [dict(status=429, retry_after=DATE)],
    "429 with the hub's header": [dict(status=429, ratelimit='"resolvers";r=0;t=0')],
    "429 bare": [dict(status=429)], "500": [dict(status=500)], "502": [dict(status=502)],
    "503": [dict(status=503)] * 3, "408": [dict(status=408)],
    "cut at once": [dict(cut=0)], "cut": [dict(cut=30_000)] * 4,
    "cut, then the range ignored": [dict(cut=60_000), dict(whole=True)],
    "cut, then another range": [dict(cut=60_000), dict(shift=8)],
    "cut, then 503": [dict(cut=60_000), dict(status=503)],
    "wrong bytes, once": [dict(body=shard(99))],
    "too short, once": [dict(body=FILES[VAL][:-100])],
    "too long, once": [dict(body=FILES[VAL] + b"more")],
}


@pytest.mark.parametrize("faults", PASSING.values(), ids=PASSING)
def test_passing_faults(hub, dest, faults):
    hub.faults = {VAL: list(faults), NAMES[1]: [dict(fault) for fault in faults
                                                if "body" not in fault]}
    assert run(dest, 1) == 0
    check(dest, NAMES[:2])
    assert hub.faults[VAL] == []
    if all(set(fault) <= {"cut", "status", "retry_after", "ratelimit"} for fault in faults):
        assert hub.served == 2 * SIZE        # every byte once, however often it was cut


@pytest.mark.parametrize("fault", [dict(status=500), dict(status=429, retry_after="0")],
                         ids=["500", "429"])
def test_the_listing_is_retried_too(hub, dest, fault):
    hub.faults = {"listing": [fault, dict(fault)]}
    assert run(dest, 1) == 0
    check(dest, NAMES[:2])


def test_retry_after_is_kept_by_all_threads(hub, dest):
    hub.faults = {name: [dict(status=429, retry_after="1")] for name in NAMES}
    began = time.monotonic()
    assert run(dest, 3) == 0
    assert time.monotonic() - began >= 1
    check(dest)
    assert len(hub.asked("", "cdn")) == 8    # nobody asked in between


def test_ordered_wait():
    in_a_minute = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert fetcher.ordered_wait({"retry-after": "120"}) == 120
    assert 55 < fetcher.ordered_wait({"retry-after": in_a_minute}) <= 60
    assert fetcher.ordered_wait({"retry-after": "soon", "ratelimit": '"api";r=0;t=55'}) == 55
    assert fetcher.ordered_wait({"ratelimit": '"api";r=3;t=55'}) is None
    assert fetcher.ordered_wait({}) is None


# ---- faults that stay ---------------------------------------------------------------------------

LASTING = {
    "wrong bytes": (dict(body=shard(99)), "wrong bytes"),
    "too short": (dict(body=FILES[VAL][:-100]), "gave up"),
    "404": (dict(status=404), "HTTP 404"), "403": (dict(status=403), "HF_TOKEN"),
    "503": (dict(status=503), "gave up after 7 tries"),
    "429, an hour": (dict(status=429, retry_after="3600"), "a wait of 3,600 s"),
    "cut at once": (dict(cut=0), "gave up after 7 tries"),
}


@pytest.mark.parametrize("fault, line", LASTING.values(), ids=LASTING)
def test_lasting_faults(hub, dest, capsys, fault, line):
    hub.faults = {VAL: [dict(fault) for _ in range(30)]}
    assert run(dest, 2) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and told[0].startswith(f"cached_fineweb10B.py: {VAL}: "), told
    assert line in told[0] and "1 of 3 files" in told[1]
    assert not (dest / VAL).exists() and set(manifest(dest)["files"]) == set(NAMES[1:3])
    hub.faults = {}
    assert run(dest, 2) == 0                 # the others were worth it
    check(dest, NAMES[:3])


CONTENT = {
    "ids": (shard(1, ids=60_000), "expected ids below 50,257"),
    "no EoS": (shard(1, eos=False), "no EoS"),
    "header": (b"<html>" + FILES[VAL][6:], "not a token shard"),
    "count": (FILES[VAL] + b"xx", "truncated or damaged"),
}


@pytest.mark.parametrize("data, line", CONTENT.values(), ids=CONTENT)
def test_what_is_no_shard_gets_no_name(hub, dest, capsys, data, line):
    hub.commits[COMMIT][VAL] = data          # the hub's hash is right, what is hashed is not
    assert run(dest, 1) == 1
    told = capsys.readouterr().err.splitlines()
    assert line in told[0] and VAL + ":" in told[0] and ".part" not in told[0] and len(told) == 2
    assert {p.name for p in dest.iterdir()} == {NAMES[1], "manifest.json"}


def test_shards_that_the_hub_has_not(hub, dest, capsys):
    assert run(dest, 5) == 1
    check(dest)
    told = capsys.readouterr().err
    assert f"{TRAIN.format(4)}: no such file in {REPOSITORY} at revision {COMMIT[:12]}" in told
    assert "2 of 6 files" in told


LISTINGS = {
    "a page": ([dict(body=b"<html>log in to this network</html>")], "did not answer as the hub"),
    "other JSON": ([dict(body=b"[]")], "did not answer as the hub"),
    "500": ([dict(status=500)] * 9, "gave up after 7 tries"),
    "401": ([dict(status=401)], "HF_TOKEN"),
}


@pytest.mark.parametrize("faults, line", LISTINGS.values(), ids=LISTINGS)
def test_no_listing(hub, dest, capsys, faults, line):
    hub.faults = {"listing": list(faults)}
    assert run(dest, 1) == 1
    told = capsys.readouterr().err
    assert line in told and told.count("\n") == 1


def test_no_hub(hub, dest, capsys, monkeypatch):
    monkeypatch.setattr(fetcher, "TRIES", 2)
    for endpoint in ("http://127.0.0.1:9", "no-scheme.example", "ftp://127.0.0.1"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert run(dest, 1) == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert run(dest, 1, revision="e" * 40) == 1


def test_revision_that_does_not_exist(hub, dest, capsys):
    assert run(dest, 1, revision="e" * 40) == 1
    assert "HTTP 404" in capsys.readouterr().err


# ---- what is already in the folder --------------------------------------------------------------

def test_partial_files(hub, dest, capsys):
    """One to continue, one of another version, one too long, one that was finished, one broken."""
    dest.mkdir()
    part(dest, VAL).write_bytes(FILES[VAL][:100_000])
    part(dest, VAL, b"older").write_bytes(b"older")
    part(dest, NAMES[1]).write_bytes(FILES[NAMES[1]] + b"x")
    part(dest, NAMES[2]).write_bytes(FILES[NAMES[2]])
    part(dest, NAMES[3]).write_bytes(bytes(90_000))
    assert run(dest, 3) == 0
    check(dest)
    # the broken one shows at its end only, and is then fetched whole
    assert hub.sent == {VAL: SIZE - 100_000, NAMES[1]: SIZE, NAMES[3]: 2 * SIZE - 90_000}
    assert "part of another file, removed" in capsys.readouterr().out


def test_files_of_another_program(hub, dest):
    """Right ones are taken in, wrong ones replaced: also those that only look right."""
    dest.mkdir()
    damaged = bytearray(FILES[NAMES[1]])
    damaged[5000] ^= 1
    (dest / VAL).write_bytes(FILES[VAL])
    (dest / NAMES[1]).write_bytes(damaged)
    (dest / NAMES[2]).write_bytes(FILES[NAMES[2]][:-2])
    assert run(dest, 3) == 0
    check(dest)
    assert hub.sent == {NAMES[1]: SIZE, NAMES[2]: SIZE, NAMES[3]: SIZE}


def test_a_damaged_file_does_not_stay(hub, dest):
    assert run(dest, 1) == 0
    (dest / NAMES[1]).write_bytes(FILES[NAMES[2]])
    hub.faults = {NAMES[1]: [dict(status=404)]}
    assert run(dest, 1) == 1
    assert not (dest / NAMES[1]).exists()
    assert run(dest, 1) == 0
    check(dest, NAMES[:2])


def test_free_disk_is_checked_first(hub, dest, capsys, monkeypatch):
    usage = shutil.disk_usage(dest.parent)._replace(free=3 * SIZE - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    assert run(dest, 2) == 1
    assert "--dest=FOLDER" in capsys.readouterr().err and hub.served == 0
    part(dest, VAL).write_bytes(FILES[VAL][:1])  # what is there needs no room
    assert run(dest, 2) == 0


def test_one_run_at_a_time(hub, dest, capsys):
    dest.mkdir()
    descriptor = os.open(dest, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert run(dest, 1) == 1
    assert "another run" in capsys.readouterr().err and hub.requests == []
    os.close(descriptor)
    assert run(dest, 1) == 0 and run(dest, 2) == 0


def test_damaged_manifest(hub, dest, capsys):
    assert run(dest, 1) == 0
    for text in ("", "[]", "{}", '{"repository": "a", "revision": "b", "files": {"c": {}}}'):
        (dest / "manifest.json").write_text(text)
        for words in ([1], [1, "--verify"]):
            assert run(dest, *words) == 1
            told = capsys.readouterr().err
            assert "manifest.json: damaged" in told and told.count("\n") == 1
    (dest / "manifest.json").unlink()
    served = hub.served
    assert run(dest, 1) == 0 and hub.served == served
    check(dest, NAMES[:2])


# ---- without the network ------------------------------------------------------------------------

def test_offline(hub, dest, capsys, monkeypatch):
    assert run(dest, 1) == 0
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    del hub.requests[:]
    assert run(dest, 1) == 0 and run(dest, 1, "--verify") == 0
    capsys.readouterr()
    assert run(dest, 2) == 1
    assert f"{NAMES[2]}: not here intact, and HF_HUB_OFFLINE" in capsys.readouterr().err
    (dest / VAL).write_bytes(FILES[NAMES[1]])
    assert run(dest, 1) == 1 and hub.requests == []


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


WRONG = {
    "a bit": (lambda d: damage(d / VAL, 77_000), f"{VAL}: wrong bytes"),
    "size": (lambda d: (d / VAL).write_bytes(FILES[VAL][:-2]), f"{VAL}: expected {SIZE:,} bytes"),
    "gone": (lambda d: (d / VAL).unlink(), f"{VAL}: missing"),
    "one more": (lambda d: shutil.copy(d / VAL, d / "mine_train_000000.bin"),
                 "mine_train_000000.bin: not in manifest.json"),
    "documents": (lambda d: (d / "manifest.json").write_text(
        (d / "manifest.json").read_text().replace('"documents": 100', '"documents": 99')),
        "99 documents, found 70,000 and 100"),
}


@pytest.mark.parametrize("spoil, line", WRONG.values(), ids=WRONG)
def test_verify(hub, dest, capsys, spoil, line):
    assert run(dest, 1) == 0
    del hub.requests[:]
    capsys.readouterr()
    assert run(dest, "--verify", revision="") == 0
    assert "2 of 2 files intact, 140,000 tokens" in capsys.readouterr().out
    before = sorted(p.name for p in dest.iterdir())
    assert before == sorted([*NAMES[:2], "manifest.json"])
    spoil(dest)
    before = {p.name: p.read_bytes() for p in dest.iterdir()}
    assert run(dest, "--verify", revision="") == 1
    assert line in capsys.readouterr().err and hub.requests == []
    assert before == {p.name: p.read_bytes() for p in dest.iterdir()}


def test_verify_wants_what_is_asked_for(hub, dest, capsys):
    assert run(dest, "--verify") == 1        # there is nothing
    assert run(dest, 1) == 0
    assert run(dest, 2, "--verify") == 1
    assert f"{NAMES[2]}: missing" in capsys.readouterr().err


# ---- wrong usage --------------------------------------------------------------------------------

@pytest.mark.parametrize("words", [["-1"], ["x"], ["1.5"], ["1", "2"], ["--set=c4"], ["--jobs=0"],
                                   ["--nonsense"]], ids=" ".join)
def test_wrong_usage(words, capsys):
    with pytest.raises(SystemExit) as refusal:
        fetcher.main(words)
    assert refusal.value.code == 2 and "usage:" in capsys.readouterr().err


def test_two_sets_do_not_mix(hub, dest, capsys):
    assert run(dest, 0) == 0
    assert run(dest, 1, "--set=fineweb100B") == 2
    assert "have the same names" in capsys.readouterr().err
    check(dest, [VAL])


def test_a_folder_that_cannot_be_made(hub, dest, capsys):
    dest.write_text("a file")
    assert run(dest, 1) == 1
    assert capsys.readouterr().err.count("\n") == 1


# ---- interrupts and kills -----------------------------------------------------------------------

def start(hub, dest, *words, code=None) -> subprocess.Popen:
    command = [sys.executable, str(PROGRAM)] if code is None else [sys.executable, "-c", code]
    return subprocess.Popen([*command, *map(str, words), f"--dest={dest}", f"--revision={COMMIT}"],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            # also where the tests themselves run in the background of a shell
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def wait_for(reached, seconds=30.0) -> None:
    limit = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
                         ids=["SIGINT", "SIGTERM"])
def test_interrupted(hub, dest, number, code):
    hub.rate = 60_000
    process = start(hub, dest, 1)
    wait_for(lambda: hub.served > SIZE // 2)
    process.send_signal(number)
    _, told = process.communicate(timeout=20)
    assert process.returncode == code and told.count("\n") == 1
    assert "interrupted; partial files are kept" in told
    assert sorted(dest.glob("*.part")) == sorted(part(dest, name) for name in NAMES[:2])
    hub.rate = None
    assert run(dest, 1) == 0
    check(dest, NAMES[:2])
    assert hub.served < 2 * SIZE + 65_536    # it went on where it was


def test_killed_again_and_again(hub, dest):
    """After every SIGKILL each named file is right; no run begins anew what another has begun."""
    generator, rounds, total = random.Random(5), 8, 4 * SIZE
    hub.rate, served = 400_000, 0
    for _ in range(rounds):
        until = hub.served + generator.randrange(total // 20, total // 8)
        process = start(hub, dest, 3)
        wait_for(lambda: hub.served >= until or process.poll() is not None)
        process.kill()
        process.communicate(timeout=20)
        served = hub.served
        for path in dest.glob("*.bin"):
            assert path.read_bytes() == FILES[path.name]
        for path in dest.glob("fineweb_*.part"):
            data = path.read_bytes()
            assert data == FILES[path.name[:path.name.index(".bin") + 4]][:len(data)]
        if (dest / "manifest.json").exists():
            assert set(manifest(dest)["files"]) <= set(NAMES)
    hub.rate = None
    assert run(dest, 3) == 0
    check(dest)
    # what a killed run had not yet written: at most some pieces of each of its connections
    assert served > total // 4 and hub.served <= total + rounds * 4 * 2 * 4096


KILLS = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import cached_fineweb10B as fetcher
real = os.replace
def replace(part, final):
    if str(final).endswith({name!r}):
        if {after}:
            real(part, final)
        os.kill(os.getpid(), signal.SIGKILL)
    real(part, final)
os.replace = replace
fetcher.main(sys.argv[1:])
"""


@pytest.mark.parametrize("name, after", [(VAL, True), (VAL, False)],
                         ids=["named, not listed", "proven, not named"])
def test_killed_at_the_worst_moment(hub, dest, name, after):
    code = KILLS.format(folder=str(PROGRAM.parent), name=name, after=after)
    process = start(hub, dest, 0, code=code)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert (dest / VAL).exists() == after and manifest(dest)["files"] == {}
    assert run(dest, 0) == 0
    check(dest, [VAL])
    assert hub.served == SIZE                # nothing was fetched twice
