"""The whole run of track fineweb, at full width and compiled, from first to last stage, on a card
whose kernels do nothing: it must end well, compile nothing after its warm-up, and be no record."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.pretended_gpu

H100 = {"PRETEND_NAME": "NVIDIA H100", "PRETEND_CC": "90", "PRETEND_GIB": "80",
        "PRETEND_SMS": "132", "PRETEND_SMEM": "232448", "PRETEND_THREADS": "2048"}


def gpt2_shards(tiny: Path, folder: Path) -> None:
    """The tiny shards in GPT-2's ids: their 4,096 ranks are GPT-2's first, only EoS differs."""
    for part in ("train", "val"):
        path = tiny / f"tiny_{part}_000000.bin"
        header, tokens = np.fromfile(path, "<i4", 256), np.fromfile(path, "<u2", offset=1024)
        tokens[tokens == 4096] = 50256
        with open(folder / path.name, "wb") as file:
            file.write(header.tobytes() + tokens.tobytes())


def test_fineweb_from_first_to_last_stage(tmp_path, root, capsys):
    gpt2_shards(root / "data" / "tiny", tmp_path)
    # 3 + 1 steps meet all three windows; a quarter of a step's tokens, in true micro-batches
    settings = dict(track="fineweb", data_dir=tmp_path, records_dir=tmp_path / "records", steps=3,
                    extra_steps=1, tokens_per_step=98304, val_tokens=177071, val_every=2,
                    attention="varlen_attn", head="fp8-triton")  # numbers there choose nothing
    done = subprocess.run(
        [sys.executable, root / "train_gpt.py", *(f"--{n}={v}" for n, v in settings.items())],
        env=os.environ | H100, text=True, capture_output=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "records").glob("*/*.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    by_name = {e["event"]: e for e in events}
    start, end = by_name["start"], by_name["end"]
    assert start["environment"]["device"] == "Pretended NVIDIA H100"
    assert start["parameters"] == 268_665_612
    assert start["run"] | dict(compiled=True, attention="varlen_attn", micro_batch_units=3) \
        == start["run"]
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 4]
    assert [e["step"] for e in events if e["event"] == "val"] == [0, 2, 4]
    assert end["status"] == "complete" and end["recompiles"] == 0
    assert log.with_suffix(".pt").stat().st_size > 2 << 30  # parameters and moments, in fp32
    assert end["peak_memory_mib"] < 30_000   # 3 units of activations are most of it
    planned = re.search(r"in all ([\d,]+) of", log.with_suffix(".txt").read_text())[1]
    assert abs(int(planned.replace(",", "")) / end["peak_memory_mib"] - 1) < 0.1
    assert end["flops"] > 1e12 and end["mfu"] > 0
    warmup = by_name["warmup"]
    with capsys.disabled():
        print(f"\npretended H100: warm-up {warmup['seconds']:.0f} s, {warmup['graphs']} graphs, "
              f"peak {end['peak_memory_mib']:,} MiB allocated")
    judged = subprocess.run([sys.executable, root / "records" / "verify.py", log.parent],
                            text=True, capture_output=True, timeout=60)
    assert judged.returncode == 1 and "retended" in judged.stdout + judged.stderr
