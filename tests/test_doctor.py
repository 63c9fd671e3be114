"""tools/doctor.py: what it says of this machine, of broken ones, and of cards that are not here."""
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt as t
from tools import doctor as tool

ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"^(ok|warn|fail) +([\w' ]+): +(.+)$")


def doctor(capsys, *arguments) -> tuple[int, list[tuple]]:
    """Exit code and (level, about, text) of each line."""
    code = tool.main(list(arguments))
    out, err = capsys.readouterr()
    assert err == ""
    return code, [LINE.match(line).groups() for line in out.splitlines()]


def texts(lines, about, level="ok") -> list[str]:
    return [text for a, b, text in lines if (a, b) == (level, about)]


# ---- a card that is not here ---------------------------------------------------------------------

@pytest.mark.parametrize("name", t.CARDS)
def test_the_plan_of_every_card(name, capsys):
    asks = torch.cuda.is_available, torch.cuda.mem_get_info
    code, lines = doctor(capsys, f"--gpu={name}")
    assert code == 0 and not [line for line in lines if line[0] != "ok"]
    assert (torch.cuda.is_available, torch.cuda.mem_get_info) == asks
    card = t.CARDS[name]
    units, each, count = map(int, re.match(r"(\d+) units of ([\d,]+) tokens a micro-batch, (\d+) ",
                                           texts(lines, "plan")[0].replace(",", "", 1)).groups())
    assert units * each * count == t.FINEWEB.tokens_per_step
    chunk = 128 * (256 * card.processors // 768)  # dx has two tiles for each multiprocessor
    assert f"at once: {chunk:,} tokens in the head" in texts(lines, "plan")[0]
    *parts, total = texts(lines, "memory")
    sizes = [int(part.split()[0].replace(",", "")) for part in parts]
    needed, free = (int(n.replace(",", "")) for n in re.findall(r"[\d,]+", total))
    assert needed == pytest.approx(sum(sizes), abs=len(sizes)) and needed <= free
    assert free == int(0.95 * card.memory * 1024)
    assert ("fp8-triton" in texts(lines, "head")[0]) == (card.capability >= (8, 9))
    assert ("FA3" in texts(lines, "attention")[0]) == (card.capability == (9, 0))
    recompute = "recompute blocks" in texts(lines, "plan")[0]
    assert recompute == (card.memory == 8)
    # 114M matrix parameters, 6 FLOPs each a token; attention adds less than a tenth
    rate = float(re.match(r"[\d,]+", texts(lines, "estimate")[0])[0].replace(",", ""))
    bound = 0.4e12 * card.tflops / (6 * 114.1e6) * (0.75 if recompute else 1)
    assert 0.9 * bound < rate < bound


def test_the_time_is_tokens_over_rate(capsys):
    for name, unit in (("H200", 60), ("RTX 3060", 3600)):
        text = texts(doctor(capsys, f"--gpu={name}")[1], "estimate")[0]
        rate, time = re.match(r"([\d,]+) tokens/s, ([\d.]+) (?:min|h) of training", text).groups()
        tokens = t.total_steps(t.FINEWEB) * t.FINEWEB.tokens_per_step
        assert tokens / float(rate.replace(",", "")) / unit == pytest.approx(float(time), rel=0.03)


@pytest.mark.parametrize("name, nearest", [("RTX 4071", "RTX 4070"), ("4090", "RTX 4090"),
                                           ("RTX 4070 Ti", "RTX 4070"), ("h20", "H200")])
def test_an_unknown_card_is_one_line_with_the_nearest(name, nearest, capsys):
    assert tool.main([f"--gpu={name}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"--gpu={name}: not in the table; the nearest: {nearest}" in err


def test_names_are_found_as_drivers_write_them_and_in_any_case(capsys):
    plans = [doctor(capsys, f"--gpu={name}")[1][1:]
             for name in ("RTX 4090", "rtx 4090", "NVIDIA GeForce RTX 4090")]
    assert plans[0] == plans[1] == plans[2]


def test_a_card_that_is_too_small_fails(capsys):
    code, lines = doctor(capsys, "--gpu=RTX 4060", "--recompute=off")
    assert code == 1 and "GPU memory: even 1 units" in texts(lines, "plan", "fail")[0]
    assert not texts(lines, "estimate")


# ---- this machine --------------------------------------------------------------------------------

def test_track_tiny_is_well_here(capsys):
    code, lines = doctor(capsys, "--track=tiny", "--device=cpu")
    assert code == 0 and not [line for line in lines if line[0] == "fail"]
    abouts = [about for _, about, _ in lines]
    assert abouts == sorted(abouts, key=["python", "packages", "driver", "device", "compiler",
                                         "shards", "plan", "attention", "head", "disk",
                                         "estimate"].index)
    assert "validation tiny_val_000000.bin, sha256 e454dfe00ab9" in texts(lines, "shards")[0]
    assert texts(lines, "estimate") == ["n/a: no peak is known for cpu"]


def test_damaged_shards_fail_and_the_rest_is_still_told(tmp_path, capsys):
    for path in (ROOT / "data/tiny").glob("*.bin"):
        shutil.copy(path, tmp_path)
    with open(tmp_path / "tiny_val_000000.bin", "r+b") as file:
        file.truncate(5000)
    code, lines = doctor(capsys, "--track=tiny", "--device=cpu", f"--data_dir={tmp_path}")
    assert code == 1 and texts(lines, "plan")
    assert "tiny_val_000000.bin: truncated or damaged" in texts(lines, "shards", "fail")[0]


def test_fineweb_shards_are_checked_against_their_manifest(tmp_path, capsys):
    rng, files = np.random.default_rng(0), {}
    for name in ("fineweb_train_000001.bin", "fineweb_val_000000.bin"):
        tokens = rng.integers(0, 50256, 40000).astype("<u2")
        tokens[::400] = 50256
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(tokens)
        data = header.tobytes() + tokens.tobytes()
        (tmp_path / name).write_bytes(data)
        files[name] = dict(size=len(data), sha256=hashlib.sha256(data).hexdigest(),
                           tokens=len(tokens), documents=100)
    (tmp_path / "manifest.json").write_text(json.dumps(dict(
        format=1, vocab_size=50257, repository="r", revision="v", files=files)))
    small = ("--track=fineweb", "--device=cpu", f"--data_dir={tmp_path}", "--steps=1",
             "--extra_steps=0", "--tokens_per_step=16384", "--val_tokens=30000")
    code, lines = doctor(capsys, *small)
    assert code == 0, lines
    assert "16,384 in the schedule" in texts(lines, "shards")[0]
    assert "needed for shards" in texts(lines, "disk")[0]
    path = tmp_path / "fineweb_train_000001.bin"
    data = bytearray(path.read_bytes())
    data[30000] ^= 1                         # still a valid token: only the hash can tell
    path.write_bytes(data)
    code, lines = doctor(capsys, *small)
    assert code == 1
    assert "fineweb_train_000001.bin: wrong bytes" in texts(lines, "shards", "fail")[0]


def test_without_a_compiler_it_warns_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, lines = doctor(capsys, "--track=tiny", "--device=cpu")
    assert code == 0
    assert "no C++ compiler no-such-compiler; apt install g++" in texts(lines, "compiler",
                                                                        "warn")[0]


def test_other_versions_than_the_pins_are_named(tmp_path, monkeypatch):
    (tmp_path / "requirements.txt").write_text("numpy==0.1  # old\nno_such_thing==2.0\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    lines = [line for line in tool.packages() if line.level == "warn"]
    assert len(lines) == 1
    assert f"numpy {np.__version__}, pinned 0.1, no_such_thing missing, pinned 2.0" in lines[0].text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_driver_that_torch_cannot_use_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.driver().level == "warn" and "no NVIDIA driver" in tool.driver().text
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 580.95, NVIDIA GeForce RTX 4070\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    line = tool.driver()
    assert line.level == "fail" and "580.95, NVIDIA GeForce RTX 4070, but torch" in line.text
    assert ("CPU build" in line.text) == (torch.version.cuda is None)


def test_the_disk(tmp_path):
    assert tool.space(tmp_path / "not/yet/there", 1, "shards").level == "ok"
    full = tool.space(tmp_path, 1 << 60, "shards")
    assert full.level == "fail" and full.text.endswith("needed for shards: make room")
    if os.getuid():
        tmp_path.chmod(0o500)
        assert "cannot be written to" in tool.space(tmp_path, 1, "shards").text


# ---- a pretended GPU -----------------------------------------------------------------------------

def pretended(*arguments, **card) -> tuple[int, list[tuple]]:
    done = subprocess.run([sys.executable, ROOT / "tools/doctor.py", *arguments], timeout=120,
                          capture_output=True, text=True, env=os.environ | card)
    assert "Traceback" not in done.stderr
    return done.returncode, [LINE.match(line).groups() for line in done.stdout.splitlines()]


CARD = dict(PRETEND_NAME="NVIDIA GeForce RTX 4070", PRETEND_CC="89", PRETEND_GIB="12",
            PRETEND_SMS="46", PRETEND_SMEM="101376", PRETEND_THREADS="1536")


@pytest.mark.pretended_gpu
def test_the_plan_of_a_card_is_the_same_from_afar(capsys):
    code, here = pretended("--track=fineweb", **CARD)
    assert code == (0 if (ROOT / "data/fineweb10B/manifest.json").exists() else 1)
    _, afar = doctor(capsys, "--gpu=RTX 4070")
    for about in ("plan", "attention", "head", "estimate"):
        assert texts(here, about) == texts(afar, about) != []
    assert texts(here, "memory")[:-1] == texts(afar, "memory")[:-1]
    assert "RTX 4070, capability 8.9" in texts(here, "device")[0]
    assert "sm_86" in texts(here, "torch is for")[0]


@pytest.mark.pretended_gpu
def test_a_shared_and_an_old_card():
    code, lines = pretended("--track=tiny", PRETEND_TAKEN_MIB="3000", **CARD)
    assert code == 0 and "of 12,288 MiB are taken" in texts(lines, "memory", "warn")[0]
    code, lines = pretended("--track=tiny", **CARD | dict(PRETEND_CC="75"))
    assert code == 1 and "capability 7.5, expected 8.0" in texts(lines, "plan", "fail")[0]
