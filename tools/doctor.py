"""Will it run here, with what choices, and about how fast? Nothing is changed or fetched.

    ./run.sh doctor                   this machine: one line for each fact, ok, warn or fail
    ./run.sh doctor --track=tiny      every setting of train_gpt.py works here too
    ./run.sh doctor --gpu="RTX 4070"  the plan for a card that is not here

Checks and plan are the trainer's own functions. Speed and time are an estimate: the recipe's FLOPs
over the card's peak, at a utilisation that is assumed and stated.
Exit code: 0, 1 if a line says fail, 2 wrong usage.
"""
import difflib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(ROOT), str(ROOT / "data")]  # this folder's profile.py hides Python's own

import torch  # noqa: E402

import train_gpt as t  # noqa: E402

# Of the bf16 peak, by the model's FLOPs. Published: 43 % for a run of this kind on one H100, with
# an FP8 head; 55 % for nanoGPT on an RTX 4090; 60 % for llm.c on an A100.
UTILISATION = 0.4
FREE = 0.95                                  # of a card's memory; CUDA and a screen have the rest

class Line(NamedTuple):
    level: Literal["ok", "warn", "fail"]
    about: str
    text: str                                # with a remedy, where it is not ok

def packages() -> Iterator[Line]:
    """Python and what is installed, against the pins."""
    version, fits = platform.python_version(), (3, 10) <= sys.version_info[:2] <= (3, 13)
    yield Line("ok" if fits else "fail", "python", version if fits else
               f"{version}, expected 3.10 to 3.13: PYTHON=/path/to/one ./run.sh")
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.M))
    wrong, right = [], []
    for name, wanted in pinned.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "missing"
        as_pinned = found.split("+")[0] == wanted
        (right if as_pinned else wrong).append(f"{name} {found}" + f", pinned {wanted}" * (
            not as_pinned))
    yield Line("ok", "packages", f"{', '.join(right[:3])}: {len(right)} of {len(pinned)} as pinned")
    if wrong:
        yield Line("warn", "packages", f"{', '.join(wrong)}: pip install -r requirements.txt")

def driver() -> Line:
    """The NVIDIA driver, and whether this torch can use it."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
        found = found.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        found = ""
    if torch.cuda.is_available():
        return Line("ok", "driver", f"{found or 'answers'}, CUDA {torch.version.cuda}")
    if not found:
        return Line("warn", "driver", "no NVIDIA driver answers, so runs use the CPU; install one "
                    "from nvidia.com (WSL2: in Windows; docker: --gpus all)")
    if torch.version.cuda is None:
        return Line("fail", "driver", f"{found}, but torch {torch.__version__} is a CPU build: "
                    "remove .venv and run ./run.sh again, with pip's index at PyPI")
    return Line("fail", "driver", f"{found}, but torch {torch.__version__} finds no device: "
                f"install a driver for CUDA {torch.version.cuda}")

def gpu(device: torch.device) -> Iterator[Line]:
    """The device that the trainer takes."""
    if device.type == "cpu":
        yield Line("ok", "device", f"cpu, {t.cores()} cores")
        return
    p, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
    yield Line("ok", "device", f"{p.name}, capability {p.major}.{p.minor}, {total >> 20:,} MiB, "
               f"{p.multi_processor_count} multiprocessors")
    yield Line("ok", "torch is for", ", ".join(torch.cuda.get_arch_list()))
    if (p.major, p.minor) not in t.CAPABILITIES:
        yield Line("warn", "device", f"capability {p.major}.{p.minor} is not in the table: no FP8 "
                   "and no FlashAttention 3 or 4; a newer version of this program may know it")
    if total - free > 1 << 30:               # CUDA itself takes about half of that
        yield Line("warn", "memory", f"{total - free >> 20:,} of {total >> 20:,} MiB are taken: "
                   "nvidia-smi names who has them")

def compiler(s: t.Settings, device: torch.device) -> Iterator[Line]:
    """Whether torch.compile will be used."""
    on, notes = t.choose_compile(s, device)
    for note in notes:
        yield Line("warn", "compiler", note)
    if on:
        name = os.environ.get("CXX") or "g++"
        triton = f", Triton {t.triton.__version__}" if device.type == "cuda" else ""
        yield Line("ok", "compiler", f"{shutil.which(name)}, Python.h{triton}")
    elif not notes:
        yield Line("ok", "compiler", "not used: --compile=off")

def space(folder: Path, needed: int, what: str) -> Line:
    """Room on the disk for `what`, and the right to write there."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return Line("fail", "disk", f"{folder} cannot be written to: chown it, or name another "
                    "with --data_dir or --records_dir")
    text = f"{folder}: {free / 1e9:,.1f} GB free, {needed / 1e9:,.1f} needed for {what}"
    return Line("ok", "disk", text) if free > needed else Line("fail", "disk", f"{text}: make room")

def shards(s: t.Settings) -> Iterator[Line]:
    """The data: room for them, there, enough and intact."""
    own = ROOT / "data" / dict(fineweb="fineweb10B", tiny="tiny")[s.track]
    folder = Path(s.data_dir) if s.data_dir else own
    if s.track == "fineweb":
        import cached_fineweb10B as fetch
        full = 2 * fetch.SHARD_TOKENS * (1 + fetch.shards_needed())
        missing = full - sum(path.stat().st_size for path in folder.glob("*.bin"))
        if missing > fetch.SHARD_TOKENS:     # half a shard: the last ones are shorter
            yield space(folder, missing, "shards")
        if (folder / "manifest.json").exists():
            command = [sys.executable, fetch.__file__, "--verify", f"--dest={folder}"]
            done = subprocess.run(command, capture_output=True, text=True)
            for line in done.stderr.splitlines():
                yield Line("fail", "shards", line.removeprefix("cached_fineweb10B.py: "))
    try:
        train = t.TrainData(s, folder)
        val = t.ValData(s, folder, s.val_sequence, t.look_back(s))
    except t.UserError as error:
        yield Line("fail", "shards", error.line)
        return
    yield Line("ok", "shards", f"{folder}: {train.units * s.unit_tokens:,} tokens to train on, "
               f"{t.total_steps(s) * s.tokens_per_step:,} in the schedule; validation "
               f"{val.path.name}, sha256 {val.sha256[:12]}..")

def choices(s: t.Settings, m: t.Machine) -> Iterator[Line]:
    """The trainer's plan: sizes, memory, attention, head."""
    cuda = m.device.type == "cuda"
    yield Line("ok", "plan", f"{m.share[0]} units of {s.unit_tokens:,} tokens a micro-batch, "
               f"{s.tokens_per_step // s.unit_tokens // m.share[0]} micro-batches a step; "
               f"recompute {m.recompute}; at once: {m.head.chunk:,} tokens in the head, "
               f"{m.val_piece:,} in validation")
    if cuda:
        plan = t.memory_plan(s, m)
        for name, size in plan.items():
            yield Line("ok", "memory", f"{size >> 20:>8,} MiB {name}")
        yield Line("ok", "memory", f"{sum(plan.values()) >> 20:>8,} MiB of "
                   f"{torch.cuda.mem_get_info(m.device)[0] >> 20:,} free")
    attentions, heads = ["blocked"], ["reference"]
    if cuda:
        _, fp8, flash = t.can(m.device)
        attentions += ["varlen_attn", *flash, *["flex"] * m.compile]
        heads += ["bf16", *(t.FP8_HEADS if fp8 else ())]
    for about, chosen, tried in (("attention", m.attention, attentions),
                                 ("head", m.head.kind, heads)):
        yield Line("ok", about, chosen if chosen != "auto" else f"{', '.join(tried)}: the warm-up "
                   "tries them and takes the fastest that is right")

def estimate(s: t.Settings, m: t.Machine, name: str) -> Line:
    """Tokens/s and time of the whole schedule on the card of this name."""
    card = t.card_of(name)
    if card is None:
        return Line("ok", "estimate", f"n/a: no peak is known for {name}")
    positions_T = torch.arange(s.unit_tokens) % s.doc_cap  # the longest documents that are read
    stages, tokens = t.stages(s), t.total_steps(s) * s.tokens_per_step
    flops = sum((b.first_step - a.first_step) * s.tokens_per_step
                * t.flops_per_token(s, positions_T, a) for a, b in zip(stages, stages[1:]))
    rate = UTILISATION * 1e12 * card.tflops * tokens / flops
    rate *= 0.75 if m.recompute == "blocks" else 1  # forward is done twice
    minutes = tokens / rate / 60
    time = f"{minutes:,.0f} min" if minutes < 120 else f"{minutes / 60:,.1f} h"
    return Line("ok", "estimate", f"{rate:,.0f} tokens/s, {time} of training to {s.target_loss} at "
                f"{UTILISATION:.0%} of {card.tflops} TFLOP/s, which is assumed, not measured")

def here(s: t.Settings) -> Iterator[Line]:
    """All lines on this machine."""
    yield from packages()
    yield driver()
    try:
        device = t.choose_device(s)
        yield from gpu(device)
        yield from compiler(s, device)
        yield from shards(s)
        m = t.choose_machine(s)
        yield from choices(s, m)
    except t.UserError as error:
        yield Line("fail", "plan", error.line)
        return
    plan = t.memory_plan(s, m)
    records = Path(s.records_dir) if s.records_dir else ROOT / "records"
    yield space(records, plan["parameters"] + plan["optimizer"], "a checkpoint")
    yield estimate(s, m, t.environment(m)["device"])

def elsewhere(s: t.Settings, name: str) -> Iterator[Line]:
    """The plan on a card of the table: the trainer asks torch.cuda, which answers for that card."""
    names = {known.lower(): known for known in t.CARDS}
    name = names.get(name.lower(), name)
    card = t.card_of(name)
    if card is None:
        near = difflib.get_close_matches(name.lower(), names, 3, 0.4) or list(names)
        raise t.UserError(f"--gpu={name}: not in the table; the nearest: "
                          f"{', '.join(names[word] for word in near)}")
    free = int(FREE * card.memory * 2 ** 30)
    answers = dict(
        is_available=lambda: True, get_device_name=lambda device: name,
        get_device_capability=lambda device: card.capability,
        get_arch_list=lambda: ["sm_{}{}".format(*card.capability)],
        get_device_properties=lambda device: SimpleNamespace(
            multi_processor_count=card.processors),
        mem_get_info=lambda device: (free, card.memory * 2 ** 30))
    yield Line("ok", "card", f"{name}, capability {card.capability[0]}.{card.capability[1]}, "
               f"{card.memory} GiB, {card.bandwidth:,} GB/s, {card.tflops} TFLOP/s in bf16; not "
               f"here: {FREE:.0%} of its memory are taken as free")
    with mock.patch.multiple(torch.cuda, **answers):
        try:
            compile = "on" if s.compile == "auto" else s.compile
            m = t.choose_machine(replace(s, device="cuda", compile=compile))
            yield from choices(s, m)
        except t.UserError as error:
            yield Line("fail", "plan", error.line)
            return
    yield estimate(s, m, name)

def main(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    names = [word.removeprefix("--gpu=") for word in arguments if word.startswith("--gpu=")]
    others = [word for word in arguments if not word.startswith("--gpu=")]
    failed = False
    try:
        s, _ = t.parse_settings(["--track=fineweb"] * bool(names) + others)
        for line in elsewhere(s, names[-1]) if names else here(s):
            print(f"{line.level:<5} {line.about + ':':<14}{line.text}", flush=True)
            failed |= line.level == "fail"
    except t.UserError as error:
        print(f"doctor: {error.line}", file=sys.stderr)
        return 2
    return int(failed)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
