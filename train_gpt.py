"""Train a 124M-class GPT to 3.28 validation loss on FineWeb on one GPU, or a tiny one on a CPU.

    python train_gpt.py                  the record run, where there are CUDA and FineWeb shards
    python train_gpt.py --track=tiny     anywhere: real text, two CPU cores, two minutes of training
    python train_gpt.py --help           every setting with its default, unit and group

The file reads as things happen: a token enters, a loss leaves, gradients return, the clock runs.

    1 Settings       what a run is: the recipe (defines a record) and the machine (free)
    2 Data           shards, documents, units, micro-batches: one stream on every machine
    3 Layers         norm, rotary positions, attention inside documents
    4 Head           the loss over the vocabulary, in chunks
    5 GPT            the model, its blocks as a table, its initial values
    6 Optimizers     Polar Express, Muon, Adam
    7 Schedules      learning rate, momentum, windows: pure functions of the step
    8 Machine        device, precision, processes and sizes
    9 Log and clock  a record's files, and the timer that validation stops
   10 Run            warm up, train, validate
   11 Main           parse, build, run, report

Shapes are suffixes: T tokens of a micro-batch (documents end to end, no batch axis), C of them in
a chunk or block, D width, H heads, K head width, F MLP width, V vocabulary (padded), N documents,
R rotary frequencies, B matrices of a bank.

[1] KellerJordan/modded-nanogpt, record 38, 2025: the recipe.  [2] Muon, K. Jordan et al., 2024.
[3] Polar Express, Amsel et al., arXiv 2505.16932.  [4] YaRN, Peng et al., arXiv 2309.00071.
[5] Adam, Kingma and Ba, 2014; AdamW, Loshchilov and Hutter, 2017.  [6] Gemma 2, 2024: soft caps.
"""
import ast
import bisect
import ctypes
import datetime
import difflib
import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl
except ImportError:                          # no wheel for this platform: a CPU needs none
    triton = None

# -- 1 Settings ------------------------------------------------------------------------------------
# Every number of a run stands here and nowhere else. A record is a run with no recipe override.

@dataclass(frozen=True)
class Recipe:
    """What defines a track; the defaults are FINEWEB's. `--help` prints the trailing comments."""
    track: Literal["fineweb", "tiny"] = "fineweb"  # name of the preset
    target_loss: float = 3.28                # nats per token, mean over the validation set
    vocab_size: int = 50257                  # the last id is EoS, which opens every document
    width: int = 768                         # D
    head_dim: int = 128                      # K; heads = width / head_dim
    mlp_width: int = 3072                    # F
    layers: int = 11                         # blocks, numbered from 1
    no_attention: tuple = (7,)               # blocks without attention
    long_window: tuple = (4, 11)             # blocks with the long window; others have the short
    value_layers: tuple = ((1, 1), (2, 2), (9, 0), (10, 1), (11, 2))  # (block, value table)
    skips: tuple = ((6, 5), (7, 4), (8, 3), (9, 2), (10, 1))  # U-Net: (block, added block)
    gate_width: int = 12                     # leading activations that the gates read
    skip_init: float = -1.5                  # before the sigmoid
    value_mix_init: float = 0.5              # factor of v, and of the value embedding
    logit_cap: float = 30.0                  # nats; cap * sigmoid(logit / logit_slope)
    logit_slope: float = 7.5                 # nats
    attention_scale: float = 0.1             # factor of q.k, at the first window
    rotary_base: float = 1024.0              # the slowest frequency is 1 / base radians per token
    unit_tokens: int = 16384                 # tokens of a unit, the atom of the training stream
    doc_cap: int = 2048                      # tokens of a document that are read, from its start
    epochs: int = 1                          # passes over the shards that the run may take
    tokens_per_step: int = 393216            # tokens
    steps: int = 1630                        # steps of the schedule
    extra_steps: int = 40                    # steps after it, at the floor of the learning rate
    cooldown: float = 0.5                    # last part of `steps`, in which the rate falls
    lr_floor: float = 0.1                    # fraction of the rate at the end
    window_unit: int = 128                   # tokens
    windows: tuple = (3, 7, 11)              # units; long, in equal parts of `steps`; short is half
    final_windows: tuple = (6, 13, 20)       # units; last validation: short, long, long sans YaRN
    optimizer: Literal["muon", "adamw"] = "muon"  # adamw: AdamW for every parameter
    muon_lr: float = 0.06                    # per step, in units of an orthogonal matrix
    momentum: tuple = (0.85, 0.95)           # Muon's, from first to last step of its warm-up
    momentum_warmup: int = 300               # steps
    adam_lr: float = 0.008                   # per step
    adam_betas: tuple = (0.8, 0.95)          # decay of first and second moment
    adam_eps: float = 2e-13                  # of a mean loss; [1]: 1e-8, sum over 49,152 tokens
    embed_lr: float = 75.0                   # times adam_lr: embedding and value tables
    head_lr: float = 1.0                     # times adam_lr
    scalar_lr: float = 5.0                   # times adam_lr
    adamw_lr: float = 6e-4                   # per step, of --optimizer=adamw
    adamw_decay: float = 0.1                 # weight decay of matrices, of --optimizer=adamw
    val_every: int = 250                     # steps between validations; always one at the end
    val_tokens: int = 10485760               # targets, from the start of the validation shard
    val_sequence: int = 262144               # tokens; no attention across sequences
    val_sha256: str = ""                     # of the validation shard; "" where not yet known

@dataclass(frozen=True)
class Settings(Recipe):
    """A recipe on a machine. No field below may change what is computed beyond rounding."""
    seed: int = 0                            # of the initial values
    name: str = ""                           # record folder = <date>_<name>; "" = the track's name
    data_dir: str = ""                       # folder of the shards; "" = the track's, below data/
    records_dir: str = ""                    # parent of the record folder; "" = records/ here
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # activations; auto: bf16 on CUDA and AMX
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where a compiler is found
    head: Literal["auto", "reference", "bf16", "fp8-triton", "fp8-torch"] = "auto"  # by trying
    attention: Literal["auto", "varlen_attn", "FA3", "FA4", "flex", "blocked"] = "auto"  # by trying
    recompute: Literal["auto", "off", "light", "blocks"] = "auto"  # activations; auto: by memory
    micro_batch: int = 0                     # units; 0 = what fits; auto (-1): by trying
    head_chunk: int = 0                      # tokens whose logits exist at once; 0 = chosen
    val_piece: int = 0                       # tokens validated at once; 0 = chosen
    prefetch: int = 8                        # micro-batches that the reader thread may be ahead
    threads: int = 0                         # of torch on a CPU; 0 = all cores
    checkpoint: bool = True                  # write <id>.pt before the last validation
    log_every: int = 0                       # steps between lines on the screen; 0 = chosen

RECIPE_FIELDS = frozenset(f.name for f in fields(Recipe))
FINEWEB = Settings()
TINY = replace(
    FINEWEB, track="tiny", target_loss=3.56, vocab_size=4097, width=192, head_dim=96,
    mlp_width=768, layers=6, no_attention=(), long_window=(3, 6),
    value_layers=((1, 0), (2, 1), (5, 0), (6, 1)), skips=((4, 3), (5, 2), (6, 1)),
    unit_tokens=512, doc_cap=512, epochs=2, tokens_per_step=2048, steps=600, extra_steps=20,
    window_unit=64, windows=(4, 4, 4), final_windows=(2, 4, 6), muon_lr=0.045, momentum_warmup=100,
    embed_lr=40.0, adamw_lr=8e-3, val_every=155, val_tokens=177071, val_sequence=16384,
    val_sha256="e454dfe00ab97d1041eb362e091e4438721ed023d8a245faec642410402baaa7")
PRESETS = {"fineweb": FINEWEB, "tiny": TINY}

class UserError(SystemExit):
    """Something that the user can mend: one line, no traceback, exit code 2."""
    def __init__(self, line: str):
        super().__init__(2)
        self.line = line

def help_text(preset: Settings) -> str:
    """All settings of `preset` with default, choices, unit and group; notes from this very file."""
    source = Path(__file__).read_text(encoding="utf-8")
    notes = dict(re.findall(r"^    (\w+): [^\n#]+ = [^\n#]*?# ([^\n]+)$", source, re.M))
    lines = [__doc__.split("\n\n")[0], "", "usage: python train_gpt.py [--setting=value ...]"]
    headings = {0: "recipe: defines the record; a change makes it an experiment",
                len(RECIPE_FIELDS): "machine: free, may not change what is computed"}
    for number, f in enumerate(fields(Settings)):
        choice = f" {'|'.join(get_args(f.type))}" if get_origin(f.type) is Literal else ""
        default = str(getattr(preset, f.name)).replace(" ", "") or '""'
        lines += ["", headings[number]] if number in headings else []
        lines.append(f"  --{f.name}={default}{choice}  {notes[f.name]}")
    return "\n".join(lines)

def nearest(word: str, words: tuple | dict) -> str:
    return difflib.get_close_matches(word, words, 1, 0)[0]

def parse_value(name: str, kind: type, text: str):
    """`text` as a value of a field's type; UserError says what was expected and what was found."""
    choices, value = get_args(kind), None
    if kind is str or text in choices:
        return text
    if (name, text) == ("micro_batch", "auto"):
        return -1
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = ast.literal_eval(text.capitalize() if kind is bool else text)
        value = float(value) if kind is float and type(value) is int else value
    if not choices and type(value) is kind and (kind is not float or math.isfinite(value)):
        return value
    examples = {int: "8", float: "0.5", bool: "true", tuple: "(3,7,11)"}
    raise UserError(f"--{name}={text}: expected " + (
        f"one of {', '.join(choices)}; did you mean {nearest(text, choices)}?" if choices else
        f"{kind.__name__}, as in --{name}={examples[kind]}"))

def parse_settings(arguments: list[str]) -> tuple[Settings, dict]:
    """`--name=value` words -> settings, and those that differ from the preset's."""
    kinds, given = {f.name: f.type for f in fields(Settings)}, {}
    for word in arguments:
        name, equals, text = word.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name not in kinds:
            raise UserError(f"{word}: no such setting; the nearest is --{nearest(name, kinds)}; "
                            "--help lists all")
        if not equals:
            raise UserError(f"{word}: expected --{name}=value")
        given[name] = parse_value(name, kinds[name], text)
    preset = PRESETS[given.get("track", "fineweb" if torch.cuda.is_available() else "tiny")]
    settings = replace(preset, **given)
    check_settings(settings)
    return settings, {n: v for n, v in given.items() if v != getattr(preset, n)}

def check_settings(s: Settings) -> None:
    """Refuse values that cannot work, by name, before anything is built."""
    def whole(values: tuple, low: int, high: float = math.inf) -> bool:
        return all(type(v) is int and low <= v <= high for v in values)
    def pairs(values: tuple) -> bool:        # (block, number), no block twice
        return (all(type(p) is tuple and len(p) == 2 and whole(p, 0) for p in values)
                and len(dict(values)) == len(values) and whole(tuple(dict(values)), 1, s.layers))
    def fractions(values: tuple) -> bool:
        return len(values) == 2 and all(type(v) in (int, float) and 0 <= v < 1 for v in values)
    lows = dict.fromkeys(("extra_steps", "momentum_warmup", "seed", "head_chunk", "val_piece",
                          "threads", "log_every"), 0) | dict(micro_batch=-1)
    ints = [(f.name, lows.get(f.name, 1)) for f in fields(s) if f.type is int]
    for name, low in ints:                   # first: the rules below divide by some of them
        if getattr(s, name) < low:
            raise UserError(f"--{name}={getattr(s, name)}: expected at least {low}")
    blocks = f"among blocks 1 to {s.layers}"
    for name, holds, expected in (
            ("width", s.width % s.head_dim == 0, f"a multiple of head_dim {s.head_dim}"),
            ("head_dim", s.head_dim % 4 == 0, "a multiple of 4, for rotary pairs"),
            ("gate_width", s.gate_width <= s.width, f"at most width {s.width}"),
            ("vocab_size", 1 < s.vocab_size <= 65536, "2 to 65,536: tokens are uint16"),
            ("logit_cap", 0 < s.logit_cap <= 60, "0 to 60: e^cap must stay far inside fp32"),
            ("unit_tokens", s.unit_tokens % BLOCK == 0, f"a multiple of {BLOCK}"),
            ("doc_cap", s.doc_cap <= s.unit_tokens, f"at most unit_tokens {s.unit_tokens}"),
            ("tokens_per_step", s.tokens_per_step % s.unit_tokens == 0,
             f"a whole number of units of {s.unit_tokens} tokens"),
            ("cooldown", 0 <= s.cooldown <= 1, "0 to 1"),
            ("lr_floor", 0 <= s.lr_floor <= 1, "0 to 1"),
            ("windows", s.windows != () and whole(s.windows, 1),
             "whole numbers of units, at least one"),
            ("final_windows", len(s.final_windows) == 3 and whole(s.final_windows, 1),
             "three whole numbers of units"),
            ("no_attention", whole(s.no_attention, 1, s.layers), blocks),
            ("long_window", whole(s.long_window, 1, s.layers), blocks),
            ("value_layers", pairs(s.value_layers), f"pairs (block, table) {blocks}, none twice"),
            ("skips", pairs(s.skips) and all(0 < b < a for a, b in s.skips),
             f"pairs (block, earlier block) {blocks}, none twice"),
            ("momentum", fractions(s.momentum), "two numbers from 0 to below 1"),
            ("adam_betas", fractions(s.adam_betas), "two numbers from 0 to below 1"),
            ("name", re.fullmatch(r"([A-Za-z0-9][\w.-]*)?", s.name, re.A) is not None,
             "letters, digits, '_', '-' and '.', as it becomes a folder")):
        if not holds:
            raise UserError(f"--{name}={getattr(s, name)}: expected {expected}")

# -- 2 Data ----------------------------------------------------------------------------------------
# A shard is 256 little-endian int32 (20240520, 1, token count, zeros) and then uint16 tokens. The
# last id of the vocabulary, EoS, opens every document. Shards are laid end to end to one ribbon. A
# unit is `unit_tokens` tokens of consecutive documents, each cut at `doc_cap` and the last one to
# fit. What is cut away is not trained on; the next unit begins with the next document. A step is a
# whole number of units and a micro-batch is k of them: k is the machine's choice, and neither the
# stream nor the gradient depends on it.
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
SCAN_TOKENS = 1 << 23                        # read at once while a shard is indexed: 16 MB

def shard_tokens(path: Path) -> int:
    """Tokens in the shard at `path`, after checking that the file is one and holds them all."""
    try:
        size, header = path.stat().st_size, np.fromfile(path, dtype="<i4", count=256)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); see --data_dir") from None
    found = f"{size} bytes" if len(header) < 256 else f"{header[0]}, {header[1]}"
    if found != f"{MAGIC}, {VERSION}":
        raise UserError(f"{path}: not a token shard: expected a header of 1,024 bytes beginning "
                        f"with {MAGIC}, {VERSION}, found {found}; remove it or make it again")
    tokens = int(header[2])
    if tokens <= 0 or size != HEADER_BYTES + 2 * tokens:
        raise UserError(f"{path}: truncated or damaged: its header says {tokens:,} tokens, that is "
                        f"{HEADER_BYTES + 2 * tokens:,} bytes, found {size:,}; fetch it again")
    return tokens

class Shard(NamedTuple):
    """What one reading of a shard tells; lengths are in tokens, EoS included."""
    tokens: int
    documents: int                           # that begin in it
    median: int                              # length; the last document as far as the shard has it
    longest: int
    starts_N: np.ndarray                     # positions of EoS, int64

def check_shard(path: Path, vocab_size: int) -> Shard:
    """Read all of a shard once, and refuse one that is not whole or not of this vocabulary."""
    tokens, starts, eos = shard_tokens(path), [], vocab_size - 1
    for first in range(0, tokens, SCAN_TOKENS):
        count = min(SCAN_TOKENS, tokens - first)
        part = np.fromfile(path, dtype="<u2", count=count, offset=HEADER_BYTES + 2 * first)
        if part.max() > eos:
            at = int(np.argmax(part > eos))
            raise UserError(f"{path}: token {part[at]} at position {first + at:,}: expected ids "
                            f"below {vocab_size:,}; was it made with another tokenizer?")
        starts.append(np.flatnonzero(part == eos) + first)
    starts_N = np.concatenate(starts)
    if len(starts_N) == 0:
        raise UserError(f"{path}: no EoS ({eos}) in {tokens:,} tokens: expected one before every "
                        "document; was it made with another tokenizer?")
    lengths_N = np.diff(starts_N, append=tokens)
    return Shard(tokens, len(starts_N), int(np.median(lengths_N)), int(lengths_N.max()), starts_N)

def up_to(n: int, unit: int) -> int:
    """The least multiple of `unit` that is not below n."""
    return -(-n // unit) * unit

class Ribbon:
    """Shards laid end to end."""
    def __init__(self, vocab_size: int):
        self.vocab_size, self.paths, self.borders = vocab_size, [], [0]
        self.starts_N = np.empty(0, np.int64)

    def add(self, path: Path) -> None:
        shard = check_shard(path, self.vocab_size)
        self.starts_N = np.concatenate([self.starts_N, shard.starts_N + self.borders[-1]])
        self.paths.append(path)
        self.borders.append(self.borders[-1] + shard.tokens)

    def read(self, a: int, b: int) -> np.ndarray:
        """Tokens [a, b), uint16, across borders, from any thread. Nothing stays in memory."""
        parts, shard = [], bisect.bisect_right(self.borders, a) - 1
        while a < b:
            end, skip = min(b, self.borders[shard + 1]), a - self.borders[shard]
            path, offset = self.paths[shard], HEADER_BYTES + 2 * skip
            parts.append(np.fromfile(path, "<u2", end - a, offset=offset))
            assert len(parts[-1]) == end - a, f"{path} changed during the run"
            a, shard = end, shard + 1
        return np.concatenate(parts)

    def lengths(self) -> np.ndarray:
        """Tokens of each document that have a successor, int64 [N]: the very last has none."""
        return np.diff(np.append(self.starts_N, self.borders[-1] - 1))

def pack_units(lengths_N: np.ndarray, unit_tokens: int, doc_cap: int) -> np.ndarray:
    """First document of each unit, and the one after the last unit: int64 [units + 1]."""
    ends = np.cumsum(np.minimum(lengths_N, doc_cap))
    firsts, before = [0], 0
    while (last := int(np.searchsorted(ends, before + unit_tokens))) < len(ends):
        firsts.append(last + 1)
        before = ends[last]
    return np.array(firsts)

class Piece(NamedTuple):
    """Tokens [start, start + size) of one document; losses count from `scored` on."""
    start: int
    size: int
    scored: int

class Batch(NamedTuple):
    """T tokens of documents laid end to end."""
    inputs_T: Tensor                         # int32
    targets_T: Tensor                        # int64; -1 where no loss counts
    positions_T: Tensor                      # int32, index inside the document: 0 opens one
    cu_seqlens: Tensor                       # int32, borders 0 .. T; padded with T to a fixed size

def make_batch(ribbon: Ribbon, groups: list[list[Piece]], tokens: int, documents: int) -> Batch:
    """Lay pieces end to end in `tokens` places; free places become a document without targets."""
    inputs, targets = np.full(tokens, ribbon.vocab_size - 1, np.int32), np.full(tokens, -1)
    positions = np.arange(tokens, dtype=np.int32)
    borders, at, n = np.full(documents + 1, tokens, np.int32), 0, 0
    for group in groups:
        base = group[0].start
        text = ribbon.read(base, group[-1].start + group[-1].size + 1)
        for start, size, scored in group:
            here, skip = start - base, scored - start
            inputs[at:at + size] = text[here:here + size]
            targets[at + skip:at + size] = text[here + skip + 1:here + size + 1]
            positions[at:at + size] -= at
            borders[n] = at
            at, n = at + size, n + 1
    positions[at:] -= at
    borders[n] = at
    return Batch(*map(torch.from_numpy, (inputs, targets, positions, borders)))

class TrainData:
    """The units of the training shards in order; too few are found before any work is done."""
    def __init__(self, s: Settings, folder: Path):
        self.s, self.ribbon = s, Ribbon(s.vocab_size)
        needed, self.units = total_steps(s) * s.tokens_per_step // s.unit_tokens, 0
        paths = find_shards(folder, "train")
        for path in paths:
            self.ribbon.add(path)
            self.lengths_N = self.ribbon.lengths()
            self.firsts = pack_units(self.lengths_N, s.unit_tokens, s.doc_cap)
            self.units = len(self.firsts) - 1
            if self.units >= needed:
                break
        if self.units * s.epochs < needed:
            raise UserError(f"{folder}: the schedule needs {needed * s.unit_tokens:,} tokens, "
                            f"found {self.units * s.unit_tokens:,} in {paths[0].name} to "
                            f"{paths[-1].name}; add shards, lower --steps or raise --epochs")
        self.documents = up_to(int(np.diff(self.firsts).max()), 64)  # a constant: shapes stay

    def pieces(self, unit: int) -> list[Piece]:
        """Documents of a unit of the stream, which begins anew after the last one: an epoch."""
        unit, room, pieces = unit % self.units, self.s.unit_tokens, []
        for n in range(self.firsts[unit], self.firsts[unit + 1]):
            start = int(self.ribbon.starts_N[n])
            size = int(min(self.lengths_N[n], self.s.doc_cap, room))
            pieces.append(Piece(start, size, start))
            room -= size
        return pieces

    def micro_batch(self, units: list[int]) -> Batch:
        return make_batch(self.ribbon, [self.pieces(unit) for unit in units],
                          len(units) * self.s.unit_tokens, len(units) * self.documents)

def find_shards(folder: Path, part: str) -> list[Path]:
    paths = sorted(folder.glob(f"*_{part}_*.bin"))
    if not paths:
        raise UserError(f"{folder}: no *_{part}_*.bin shards; data/README.md says how to get them, "
                        "--data_dir names another folder")
    return paths

def unit_schedule(step: int, units_per_step: int, k: int, rank: int, world: int) -> list[list[int]]:
    """Units of one step for one process, in micro-batches of k: dealt round-robin to processes."""
    mine = list(range(step * units_per_step + rank, (step + 1) * units_per_step, world))
    return [mine[i:i + k] for i in range(0, len(mine), k)]

class Reader:
    """A background thread that keeps up to `prefetch` micro-batches ready, in order."""
    def __init__(self, data: TrainData, s: Settings, machine: "Machine", first_step: int = 0):
        self.data, self.pin, self.waited = data, machine.device.type == "cuda", 0.0
        per_step, k, rank, world = s.tokens_per_step // s.unit_tokens, *machine.share
        plan = (units for step in range(first_step, total_steps(s))
                for units in unit_schedule(step, per_step, k, rank, world))
        self.pool = ThreadPoolExecutor(1, "reader")
        self.coming = (self.pool.submit(self.read, units) for units in plan)
        self.ahead = deque(islice(self.coming, s.prefetch))

    def read(self, units: list[int]) -> Batch:
        batch = self.data.micro_batch(units)
        return Batch(*(t.pin_memory() for t in batch)) if self.pin else batch

    def next(self) -> Batch:
        began = time.perf_counter()
        batch = self.ahead.popleft().result()  # or the error of its reading
        self.waited += time.perf_counter() - began
        self.ahead.extend(islice(self.coming, 1))
        return batch

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)

def cut_sequence(starts_N: np.ndarray, first: int, end: int, room: int,
                 context: int) -> list[list[Piece]]:
    """Cut the validation sequence [first, end) into groups of up to `room` tokens, where documents
    end. One longer than `room` goes on in the next group behind `context` of its tokens again,
    uncounted: all that its windows can see, so the losses are those of the uncut sequence."""
    inside = starts_N[(starts_N > first) & (starts_N < end)].tolist()
    borders, groups, left = [first, *inside, end], [], 0
    for start, stop in zip(borders, borders[1:]):
        scored = start
        while scored < stop:
            if stop - start > left:          # does not fit behind the others
                groups.append([])
                left = room
            size = min(stop - start, left)
            groups[-1].append(Piece(start, size, scored))
            scored = start + size
            left = left - size if scored == stop else 0
            start = max(start, scored - context)
    return groups

class ValData:
    """The pinned validation set: `val_tokens` targets, in sequences, in groups of pieces."""
    def __init__(self, s: Settings, folder: Path, room: int, context: int):
        self.s, self.context, self.ribbon = s, context, Ribbon(s.vocab_size)
        self.path = find_shards(folder, "val")[0]
        self.ribbon.add(self.path)
        tokens = self.ribbon.borders[-1]
        self.sha256 = hashlib.sha256(np.memmap(self.path, np.uint8, "r")).hexdigest()
        if s.val_sha256 not in ("", self.sha256):
            raise UserError(f"{self.path}: not the pinned validation shard: expected sha256 "
                            f"{s.val_sha256[:12]}.., found {self.sha256[:12]}..; fetch it again, "
                            "or set --val_sha256= and --val_tokens for an experiment")
        if tokens <= s.val_tokens:
            raise UserError(f"{self.path}: validation needs {s.val_tokens + 1:,} tokens, found "
                            f"{tokens:,}; fetch it again, or set --val_tokens for an experiment")
        self.cut(room)

    def cut(self, room: int) -> None:
        """Make the groups, of at most `room` tokens."""
        s, self.room = self.s, room
        if room <= self.context and room < s.val_sequence:
            raise UserError(f"--val_piece={room}: expected more than the {self.context:,} tokens "
                            "that the windows can look back")
        ends = [(first, min(first + s.val_sequence, s.val_tokens))
                for first in range(0, s.val_tokens, s.val_sequence)]
        self.groups = [group for pair in ends for group in cut_sequence(
            self.ribbon.starts_N, *pair, room, self.context)]
        self.documents = up_to(max(map(len, self.groups)) + 1, 64)

    def batch(self, group: int) -> Batch:
        return make_batch(self.ribbon, [self.groups[group]], self.room, self.documents)

# -- 3 Layers --------------------------------------------------------------------------------------
BLOCK = 64                                   # tokens, tile of the reference attention

@cache
def compiled(function, on: bool):
    """`function` under torch.compile from its first call on; or itself."""
    return torch.compile(function, fullgraph=True, dynamic=False) if on else function

def norm(x: Tensor) -> Tensor:
    """RMSNorm without parameters: x / sqrt(mean(x^2) + 1e-6) over the last axis."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)

class View(NamedTuple):
    """What attention may see of a batch at one stage of the schedule."""
    cos_T1R: Tensor                          # fp32 [T, 1, K/2]; the second half is 1: no rotation
    sin_T1R: Tensor                          # fp32 [T, 1, K/2]; the second half is 0
    scale: Tensor                            # fp32 [], factor of q.k
    short: int | Tensor | BlockMask          # window in tokens; masks of blocked and FlexAttention
    long: int | Tensor | BlockMask
    longest: int                             # bound of a document's tokens

def rotate(x_THK: Tensor, view: View) -> Tensor:
    """Rotary positions, half-truncated: of the pairs (i, i + K/2) the first K/4 turn. fp32."""
    x1, x2 = x_THK.float().chunk(2, -1)
    cos, sin = view.cos_T1R, view.sin_T1R
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], -1)

def block_mask(positions_T: Tensor, window: int, span: int) -> Tensor:
    """Mask of `blocked_attention`, bool [T/C, 1, C, (span + 1) C], C = BLOCK.

    Query i sees key j of its own document where i - window <= j <= i."""
    C, device = BLOCK, positions_T.device
    query, key = torch.arange(C, device=device), torch.arange(-span * C, C, device=device)
    back = query[:, None] - key              # i - j; a document's first token sees only itself
    return (back >= 0) & (back <= positions_T.clamp(max=window).view(-1, 1, C, 1))

def blocked_attention(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, mask: Tensor) -> Tensor:
    """softmax(q.k) v over the visible keys: the reference for every other implementation.

    Each block of C queries meets its own keys and those of `span` blocks before it, as far as a
    window reaches. Memory grows with T * window, never with T * T."""
    (T, H, K), C, span = q_THK.shape, BLOCK, mask.size(-1) // BLOCK - 1
    def neighbours(x_THK: Tensor) -> Tensor:  # [T/C, H, (span + 1) C, K]
        past = F.pad(x_THK, (0, 0, 0, 0, span * C, 0))
        shifted = [past[n * C:n * C + T].view(T // C, C, H, K) for n in range(span + 1)]
        return torch.cat(shifted, 1).transpose(1, 2)
    q = q_THK.view(T // C, C, H, K).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, neighbours(k_THK), neighbours(v_THK), mask, scale=1.0)
    return y.transpose(1, 2).reshape(T, H, K)

def flex_mask(positions_T: Tensor, window: int) -> BlockMask:
    """What `block_mask` says, for FlexAttention: the blocks in which any query sees any key."""
    def visible(_, head, query, key):
        back = query - key
        return (back >= 0) & (back <= back_T[query])

    back_T, T = positions_T.clamp(max=window), len(positions_T)
    return compiled(create_block_mask, True)(visible, None, None, T, T, device=back_T.device)

def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, visible: int | Tensor, cu_seqlens: Tensor,
           longest: int) -> Tensor:
    """Causal attention inside documents and window; q carries the scale of the softmax."""
    if isinstance(visible, Tensor):
        return blocked_attention(q_THK, k_THK, v_THK, visible)
    if isinstance(visible, BlockMask):
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_THK, v_THK))
        return flex_attention(q, k, v, block_mask=visible, scale=1.0)[0].transpose(0, 1)
    from torch.nn.attention.varlen import varlen_attn  # FlashAttention, CUDA only
    return varlen_attn(q_THK, k_THK, v_THK, cu_seqlens, cu_seqlens, longest, longest,
                       scale=1.0, window_size=(visible, 0))

# -- 4 Head ----------------------------------------------------------------------------------------
# The logits of a micro-batch would be its largest tensor by far: 49,152 x 50,304 in bf16 take
# 4.9 GB, and their gradient as much again. So tokens go in chunks. The gradient of a chunk's logits
# is known as soon as its loss is, but for one factor: forward computes dx and dW at once, as if the
# incoming gradient were 1, and backward multiplies by it. Three products, no logit twice.
# FP8 doubles the rate of those products where the tensor cores have it (capability 8.9 or higher),
# and halves what they read. It works here, in this layer, for three reasons.
#   Range. x leaves a norm and the head is one matrix, so one scale a tensor is enough: the largest
#   magnitude goes to 448, the largest e4m3 number. The gradient of a summed loss for a logit is
#   (p - [target]) * cap / slope * s (1 - s), never above cap / (4 slope): its scale is a constant,
#   and it is e5m2, as probabilities span many powers of two: here 2^-31 .. 1 of that bound.
#   Error. e4m3 keeps 3 bits behind the point, e5m2 2: a number moves by at most 1/16, or 1/8, of
#   itself, up or down, so that in a sum of 768 products (logits), 50,304 (dx) or a chunk's (dW)
#   most of it cancels. The soft cap bounds the rest: a logit that is off by e moves its capped
#   value by at most e cap / (4 slope). Sums are fp32; the longer ones are promoted every 128 terms,
#   as Hopper's FP8 tensor cores alone keep about 14 bits of a sum.
#   Bias. Rounding is to nearest, so it has no direction. Validation never rounds to FP8.
# FP8 tensor cores want both factors with the summed index innermost, so whatever meets two products
# (x, W, the gradient g) is stored twice, once transposed.
#   a chunk of C tokens     FLOPs     reads and writes, bytes          held at once, bytes
#   z  = x W^T              2 C V D   C D + V D + 2 C V                2 C V
#   losses, then g and g^T  -         4 C V + 2 C V                    2 C V more
#   dx = g W                2 C V D   C V + V D + 2 C D                -
#   dW += g^T x             2 C V D   C V + C D + 8 V D                -
# In bf16, z becomes its own gradient in place: 2 C V are held. `head_bytes` adds the rest.
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

class Head(NamedTuple):
    """cap * sigmoid(logit / slope) [6] of the first `vocab` rows, and how the device gets there."""
    vocab: int
    cap: float
    slope: float
    chunk: int                               # tokens whose logits exist at once
    compile: bool                            # of the reference
    kind: str                                # reference, bf16, fp8-triton, fp8-torch; auto: to try

def capped_losses(x_CD: Tensor, weight_VD: Tensor, targets_C: Tensor,
                  h: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy fp32 [C], 0 where the target is -1; softmax and d capped / d logit, [C, V].
    Rows beyond the vocabulary are padding: their probability is exactly 0. Capped logits lie
    between 0 and the cap, so their exponentials need no maximum taken off."""
    gate_CV = torch.sigmoid((x_CD @ weight_VD.T).float() / h.slope)
    real_V = torch.arange(len(weight_VD), device=x_CD.device) < h.vocab
    exp_CV = torch.where(real_V, (h.cap * gate_CV).exp(), 0.0)
    sum_C1 = exp_CV.sum(1, keepdim=True)
    aim_C1 = h.cap * gate_CV.gather(1, targets_C.clamp(min=0)[:, None])
    losses_C = (sum_C1.log() - aim_C1)[:, 0] * (targets_C >= 0)
    return losses_C, exp_CV / sum_C1, h.cap / h.slope * gate_CV * (1 - gate_CV)

def chunk_losses(x_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, h: Head) -> Tensor:
    return capped_losses(x_CD, weight_VD, targets_C, h)[0]

def reference_chunk(x_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, h: Head,
                    dweight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Losses fp32 [C] and dx [C, D] of their sum, in the dtype of x; dweight_VD += dW."""
    losses_C, softmax_CV, slope_CV = capped_losses(x_CD, weight_VD, targets_C, h)
    onehot_CV = torch.arange(len(weight_VD), device=x_CD.device) == targets_C[:, None]
    d_CV = (softmax_CV - onehot_CV.float()) * slope_CV * (targets_C >= 0)[:, None]
    d_CV = d_CV.to(x_CD.dtype)
    dweight_VD += d_CV.T @ x_CD
    return losses_C, d_CV @ weight_VD

if triton:                                   # the same in kernels, for CUDA
    @triton.jit
    def product_kernel(a, b, add, c, scale, alpha, beta, M, N, K, MIRROR: tl.constexpr,
                       PROMOTE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                       BK: tl.constexpr):
        """c = alpha scale a b^T + beta add, for each of a bank of a [M, K], b [N, K] and c [M, N],
        K in whole tiles. MIRROR: c is symmetric, so what lies above the diagonal is copied."""
        tile, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
        bank = tl.program_id(1).to(tl.int64)
        if tiles_m < tiles_n:                # the short side first: neighbours share the L2 cache
            m, n = tile % tiles_m, tile // tiles_m
        else:
            m, n = tile // tiles_n, tile % tiles_n
        if MIRROR:
            if n > m:
                return
        rows, cols, ks = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), tl.arange(0, BK)
        a += bank * M * K + (rows % M).to(tl.int64)[:, None] * K + ks[None, :]
        b += bank * N * K + (cols % N).to(tl.int64)[None, :] * K + ks[:, None]
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            if PROMOTE:
                total += tl.dot(tl.load(a + k), tl.load(b + k))
            else:
                total = tl.dot(tl.load(a + k), tl.load(b + k), total)
        total *= alpha
        if scale is not None:
            total *= tl.load(scale)
        at = bank * M * N + rows.to(tl.int64)[:, None] * N + cols[None, :]
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        if add is not None:
            total += beta * tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
        value = total.to(c.dtype.element_ty)
        tl.store(c + at, value, mask=inside)
        if MIRROR:
            at = bank * M * N + cols.to(tl.int64)[:, None] * M + rows[None, :]
            tl.store(c + at, tl.trans(value), mask=tl.trans(inside))

    @triton.jit
    def loss_kernel(z, targets, losses, sums, V, vocab, cap, slope, B: tl.constexpr):
        """Of one row of logits z [C, V]: the sum of exp(capped), and the cross-entropy."""
        row = tl.program_id(0)
        z += row.to(tl.int64) * V
        total = tl.zeros((B,), tl.float32)
        for first in range(0, vocab, B):
            cols = first + tl.arange(0, B)
            logit = tl.load(z + cols, mask=cols < vocab, other=0.0).to(tl.float32)
            total += tl.where(cols < vocab, tl.exp(cap * tl.sigmoid(logit / slope)), 0.0)
        target, total = tl.load(targets + row), tl.sum(total)
        aim = cap * tl.sigmoid(tl.load(z + tl.maximum(target, 0)).to(tl.float32) / slope)
        tl.store(sums + row, total)
        tl.store(losses + row, tl.where(target >= 0, tl.log(total) - aim, 0.0))

    @triton.jit
    def gradient_kernel(z, targets, sums, g, g_t, factor, C, V, vocab, cap, slope,
                        B: tl.constexpr):
        """g [C, V] = factor d loss / d z, over z itself or beside it; g_t [V, C], if not None."""
        rows = tl.program_id(0) * B + tl.arange(0, B)
        cols = tl.program_id(1) * B + tl.arange(0, B)
        at = rows.to(tl.int64)[:, None] * V + cols[None, :]
        inside = (rows < C)[:, None] & (cols < V)[None, :]
        target = tl.load(targets + rows, mask=rows < C, other=-1)[:, None]
        total = tl.load(sums + rows, mask=rows < C, other=1.0)[:, None]
        gate = tl.sigmoid(tl.load(z + at, mask=inside, other=0.0).to(tl.float32) / slope)
        p = tl.where((cols < vocab)[None, :], tl.exp(cap * gate) / total, 0.0)
        d = (p - (cols[None, :] == target).to(tl.float32)) * gate * (1 - gate) * (cap / slope)
        d = tl.where(target >= 0, d * factor, 0.0).to(g.dtype.element_ty)
        tl.store(g + at, d, mask=inside)
        if g_t is not None:
            at = cols.to(tl.int64)[:, None] * C + rows[None, :]
            tl.store(g_t + at, tl.trans(d), mask=tl.trans(inside))

def triton_product(a_MK: Tensor, b_NK: Tensor, scale: Tensor, dtype: torch.dtype,
                   add_to: Tensor | None = None) -> Tensor:
    """scale a b^T of FP8 matrices; or added to the first rows, as far as `add_to` has them."""
    (N, K), promote = b_NK.shape, b_NK.size(1) > 1024
    out = torch.empty(len(a_MK), N, dtype=dtype, device=a_MK.device) if add_to is None else add_to
    M, BM, BN, BK = len(out), 128, 128 if promote else 256, math.gcd(K, 128)
    grid = (triton.cdiv(M, BM) * triton.cdiv(N, BN), 1)
    product_kernel[grid](a_MK, b_NK, add_to, out, scale, 1.0, 1.0, M, N, K, MIRROR=False,
                         PROMOTE=promote, BM=BM, BN=BN, BK=BK, num_warps=8, num_stages=3)
    return out

def torch_product(a_MK: Tensor, b_NK: Tensor, scale: Tensor, dtype: torch.dtype,
                  add_to: Tensor | None = None) -> Tensor:
    """The same by torch's own product, that is cuBLASLt."""
    y_MN = torch._scaled_mm(a_MK, b_NK.T, scale, torch.ones_like(scale), out_dtype=dtype,
                            use_fast_accum=b_NK.size(1) <= 1024)
    return y_MN if add_to is None else add_to.add_(y_MN[:len(add_to)])

def quantise(x_MN: Tensor, scale: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """x / scale in e4m3, filled up with zeros to [rows, N], and its transpose."""
    q = F.pad(x_MN.float() / scale, (0, 0, 0, rows - len(x_MN))).to(E4M3)
    return q, q.T.contiguous()

def fp8_scale(x: Tensor) -> Tensor:
    """fp32 []: the largest magnitude becomes 448. All on the device: nothing waits for it."""
    return torch.linalg.vector_norm(x, math.inf, dtype=torch.float32).clamp(min=1e-20) / 448

def capped_loss(z_CV: Tensor, targets_C: Tensor, h: Head, factor: float = 1.0,
                g_CV: Tensor | None = None, g_VC: Tensor | None = None) -> Tensor:
    """Losses of logits, fp32 [C]; g = factor d loss / d z and its transpose, where given."""
    (C, V), B = z_CV.shape, 64
    losses_C, sums_C = torch.empty(2, C, device=z_CV.device)
    loss_kernel[(C,)](z_CV, targets_C, losses_C, sums_C, V, *h[:3], B=4096, num_warps=8)
    if g_CV is not None:
        gradient_kernel[(triton.cdiv(C, B), triton.cdiv(V, B))](
            z_CV, targets_C, sums_C, g_CV, g_VC, factor, C, V, *h[:3], B=B)
    return losses_C

def bf16_chunk(x_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, h: Head,
               dweight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """`reference_chunk` with kernels between torch's products, in the dtype of x."""
    z_CV = x_CD @ weight_VD.T
    losses_C = capped_loss(z_CV, targets_C, h, g_CV=z_CV)
    dweight_VD += z_CV.T @ x_CD
    return losses_C, z_CV @ weight_VD

def fp8_chunk(x_CD: Tensor, weight: tuple, targets_C: Tensor, h: Head,
              dweight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """`reference_chunk` in FP8. `weight`: W and its transpose in e4m3, V filled up to a multiple of
    128, their scale, that of x in all chunks, and the product to use."""
    (w_VD, w_DV, w_scale, x_scale, product), T, device = weight, len(x_CD), x_CD.device
    C, V, factor = up_to(T, 128), len(w_VD), 2 ** 15 * 4 * h.slope / h.cap
    targets_C = F.pad(targets_C, (0, C - T), value=-1)
    x8_CD, x8_DC = quantise(x_CD, x_scale, C)
    z_CV = product(x8_CD, w_VD, x_scale * w_scale, torch.bfloat16)
    g_CV, g_VC = (torch.empty(s, dtype=E5M2, device=device) for s in ((C, V), (V, C)))
    losses_C = capped_loss(z_CV, targets_C, h, factor, g_CV, g_VC)
    del z_CV
    product(g_VC, x8_DC, x_scale / factor, torch.float32, dweight_VD)
    return losses_C[:T], product(g_CV, w_DV, w_scale / factor, x_CD.dtype)[:T]

FP8_HEADS = {"fp8-triton": triton_product, "fp8-torch": torch_product}  # others: bf16, reference

@torch.library.custom_op("speedrun::head_loss", mutates_args=())
def head_loss_op(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, vocab: int, cap: float,
                 slope: float, chunk: int, compile: bool,
                 kind: str) -> tuple[Tensor, Tensor, Tensor]:
    x_TD, h = x_TD.contiguous(), Head(vocab, cap, slope, chunk, compile, kind)
    if kind in FP8_HEADS:
        step, scale = fp8_chunk, fp8_scale(weight_VD)
        weight = (*quantise(weight_VD, scale, up_to(len(weight_VD), 128)), scale,
                  fp8_scale(x_TD), FP8_HEADS[kind])
    else:
        step = bf16_chunk if kind == "bf16" else compiled(reference_chunk, compile)
        weight = weight_VD.to(x_TD.dtype)
    dx_TD, dweight_VD = torch.empty_like(x_TD), torch.zeros_like(weight_VD)
    total = torch.zeros((), device=x_TD.device)
    for x, dx, targets in zip(x_TD.split(chunk), dx_TD.split(chunk), targets_T.split(chunk)):
        losses, d = step(x, weight, targets, h, dweight_VD)
        dx.copy_(d)
        total += losses.sum()
    return total, dx_TD, dweight_VD

head_loss_op.register_fake(lambda x_TD, weight_VD, *rest: (
    x_TD.new_empty((), dtype=torch.float32), torch.empty_like(x_TD), torch.empty_like(weight_VD)))

def _backward(ctx, d_loss, d_dx, d_dweight):
    dx_TD, dweight_VD = ctx.saved_tensors
    return dx_TD * d_loss.to(dx_TD.dtype), dweight_VD * d_loss, *[None] * 7

head_loss_op.register_autograd(_backward, setup_context=lambda ctx, inputs, output:
                               ctx.save_for_backward(*output[1:]))

def head_loss(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, h: Head) -> Tensor:
    """Sum of the losses of T tokens, fp32 [], with gradients for x (its dtype) and weight (fp32).

    loss = sum_t logsumexp(z_t) - z_t[target_t] with z = cap * sigmoid(W x / slope) over the real
    vocabulary. Targets of -1 count nothing. At most `chunk` rows of logits exist at once."""
    return head_loss_op(x_TD, weight_VD, targets_T, *h)[0]

def token_losses(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, h: Head) -> Tensor:
    """Cross-entropy of each token without gradients, fp32 [T]: what validation measures, never in
    FP8."""
    weight, reference = weight_VD.to(x_TD.dtype), compiled(chunk_losses, h.compile)
    return torch.cat([
        reference(x_CD, weight, targets_C, h) if h.kind == "reference" else
        capped_loss(x_CD @ weight.T, targets_C, h)
        for x_CD, targets_C in zip(x_TD.split(h.chunk), targets_T.split(h.chunk))])

def head_bytes(tokens: int, V: int, D: int, h: Head) -> int:
    """Most bytes that `head_loss` holds at once for bf16 activations, its results included."""
    C, bf16 = min(h.chunk, tokens), 2 * V * D
    both = 2 * tokens * D + 2 * bf16 + bf16  # dx, dW; the weight in bf16, or in FP8 twice
    if h.kind not in ("bf16", "reference"):  # auto may become FP8
        temporary = 2 * bf16 if h.kind != "fp8-triton" else 0  # a chunk's dW, before it is added
        return both + 2 * C * D + 2 * C * V + max(2 * C * V, temporary)
    return both + 2 * C * V + max(bf16, 2 * C * D)

# -- 5 GPT -----------------------------------------------------------------------------------------
class Block(NamedTuple):
    """Facts of one block. Numbers index the model's banks; None: the block has no such part."""
    attention: int | None
    long: bool                               # long or short window
    table: int | None                        # of value embeddings
    skip: int | None                         # gate of the U-Net skip
    source: int | None                       # block (from 0) whose output the skip adds

def block_table(s: Settings) -> list[Block]:
    """The blocks in order; the settings number them from 1."""
    attentions = [n for n in range(1, s.layers + 1) if n not in s.no_attention]
    skips, tables = dict(s.skips), dict(s.value_layers)
    return [Block(attentions.index(n) if n in attentions else None, n in s.long_window,
                  tables.get(n), list(skips).index(n) if n in skips else None,
                  skips[n] - 1 if n in skips else None) for n in range(1, s.layers + 1)]

def padded_vocab(s: Settings) -> int:
    """Rows of embedding and head: the vocabulary rounded up to 128, for the tensor cores."""
    return up_to(s.vocab_size, 128)

class GPT(nn.Module):
    """The modernised GPT of [1]: packed documents in, activations for the head out. Matrices of
    equal shape live in one bank, one batch for the optimizer. Parameters are fp32 and cast where
    they are used to the dtype of the activations."""
    def __init__(self, s: Settings, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.s, self.dtype, self.blocks = s, dtype, block_table(s)
        self.recompute = False               # activations of blocks in backward, to save memory
        V, D, H = padded_vocab(s), s.width, s.width // s.head_dim
        attentions = sum(b.attention is not None for b in self.blocks)
        tables = 1 + max((b.table for b in self.blocks if b.table is not None), default=-1)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape))
        self.embed = weight(V, D)
        self.value_embeds = weight(tables, V, D)
        self.smear_gate = weight(1, 1, s.gate_width)
        self.smear_scale = weight(1)
        self.attention_bank = weight(4 * attentions, D, D)  # q, k, v, o of each, [out, in]
        self.attention_gates = weight(attentions, H, s.gate_width)
        self.mlp_bank = weight(2 * s.layers, D, s.mlp_width)  # up, down of each block, both [D, F]
        self.residual_mix = weight(s.layers, 2)  # x <- a x + b x0
        self.value_mix = weight(attentions, 2)  # v <- c v + d (value embedding)
        self.skip_gates = weight(len(s.skips))
        self.head = weight(V, D)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Every parameter, in one place, on the CPU. The zero head makes the first loss
        ln(vocab_size), of the unpadded vocabulary."""
        bound = math.sqrt(3) * 0.5 / math.sqrt(self.s.width)
        constants = dict(
            residual_mix=[1.0, 0.0], value_mix=self.s.value_mix_init, skip_gates=self.s.skip_init,
            head=0.0, smear_gate=0.0, smear_scale=0.0, attention_gates=0.0)
        for name, p in self.named_parameters():
            if name in ("embed", "value_embeds"):
                p.normal_(generator=generator)
            elif every := dict(attention_bank=4, mlp_bank=2).get(name):
                p.uniform_(-bound, bound, generator=generator)
                p[every - 1::every] = 0      # o, down
            else:
                p.copy_(torch.tensor(constants[name]).expand_as(p))

    def forward(self, batch: Batch, view: View) -> Tensor:
        """x_TD behind the last norm, in the model's dtype: the input of the head."""
        x = x0 = norm(self.smear(F.embedding(batch.inputs_T, self.embed).to(self.dtype), batch))
        values = [F.embedding(batch.inputs_T, t).to(self.dtype) for t in self.value_embeds]
        again, outputs = self.recompute and torch.is_grad_enabled(), []
        run = partial(checkpoint, self.block, use_reentrant=False) if again else self.block
        for n, block in enumerate(self.blocks):
            ve_TD = values[block.table] if block.table is not None else None
            skip_TD = outputs[block.source] if block.skip is not None else None
            x = run(n, block, x, x0, ve_TD, skip_TD, batch, view)
            outputs.append(x)
        return norm(x)

    def block(self, n: int, block: Block, x: Tensor, x0: Tensor, ve_TD: Tensor | None,
              skip_TD: Tensor | None, batch: Batch, view: View) -> Tensor:
        if skip_TD is not None:
            x = x + torch.sigmoid(self.skip_gates[block.skip]) * skip_TD
        x = self.residual_mix[n, 0] * x + self.residual_mix[n, 1] * x0
        if block.attention is not None:
            x = x + self.attention(norm(x), ve_TD, block, batch, view)
        up_DF, down_DF = self.mlp_bank[2 * n:2 * n + 2].to(self.dtype)
        return x + F.linear(F.relu(norm(x) @ up_DF).square(), down_DF)  # down relu(up x)^2

    def smear(self, e_TD: Tensor, batch: Batch) -> Tensor:
        """Each token takes a gated part of the one before it in its document."""
        gate_T1 = F.linear(e_TD[:, :self.s.gate_width], self.smear_gate[0].to(e_TD.dtype))
        gate_T1 = torch.sigmoid(gate_T1) * (batch.positions_T > 0)[:, None]
        return e_TD + self.smear_scale.to(e_TD.dtype) * gate_T1 * F.pad(e_TD, (0, 0, 1, 0))[:-1]

    def attention(self, x_TD: Tensor, ve_TD: Tensor | None, block: Block, batch: Batch,
                  view: View) -> Tensor:
        (T, D), K, n = x_TD.shape, self.s.head_dim, block.attention
        w = self.attention_bank[4 * n:4 * n + 4].to(x_TD.dtype)
        q, k, v = F.linear(x_TD, w[:3].view(3 * D, D)).view(T, 3, D // K, K).unbind(1)
        q = (rotate(norm(q), view) * view.scale).to(x_TD.dtype)
        k = rotate(norm(k), view).to(x_TD.dtype)
        v = self.value_mix[n, 0] * v
        if ve_TD is not None:
            v = v + self.value_mix[n, 1] * ve_TD.view(T, D // K, K)
        y = attend(q, k, v, view.long if block.long else view.short, batch.cu_seqlens, view.longest)
        gate_TH = F.linear(x_TD[:, :self.s.gate_width], self.attention_gates[n].to(x_TD.dtype))
        return F.linear((y * torch.sigmoid(gate_TH)[:, :, None]).reshape(T, D), w[3])

    def loss(self, batch: Batch, view: View, head: Head) -> Tensor:
        """Summed loss of a micro-batch, fp32 []."""
        return head_loss(self(batch, view), self.head, batch.targets_T, head)

# -- 6 Optimizers ----------------------------------------------------------------------------------
# Muon [2] for matrices: the step is the semi-orthogonal matrix nearest to the momentum, so that all
# directions move alike. Adam [5] for the rest. The updates are pure; `Optimizer` keeps their state.

POLAR_EXPRESS = (                            # (a, b, c) of 5 iterations, safety factor 1.02 [3]
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))

@torch.library.custom_op("speedrun::symmetric", mutates_args=())
def symmetric_op(x_BMK: Tensor, add_BMM: Tensor | None, b: float, c: float) -> Tensor:
    (B, M, K), BM, BK = x_BMK.shape, 128, math.gcd(x_BMK.size(2), 64)
    out_BMM, grid = x_BMK.new_empty(B, M, M), (triton.cdiv(M, BM) ** 2, B)
    product_kernel[grid](x_BMK, x_BMK, add_BMM, out_BMM, None, c, b, M, M, K, MIRROR=True,
                         PROMOTE=False, BM=BM, BN=BM, BK=BK, num_warps=8, num_stages=3)
    return out_BMM

symmetric_op.register_fake(lambda x_BMK, *rest: x_BMK.new_empty(*x_BMK.shape[:2], x_BMK.size(1)))

def symmetric(x_BMK: Tensor, add_BMM: Tensor | None = None, b: float = 1.0,
              c: float = 1.0) -> Tensor:
    """c X X^T + b add, itself symmetric, for each of a bank. Compiled, half of it is computed."""
    kernel = torch.compiler.is_compiling()   # eager code needs no Triton, and no C compiler for it
    if kernel and x_BMK.is_cuda and x_BMK.dtype == torch.bfloat16 and x_BMK.size(1) >= 128:
        return symmetric_op(x_BMK.contiguous(), add_BMM, b, c)
    return c * (x_BMK @ x_BMK.mT) + (0.0 if add_BMM is None else b * add_BMM)

def polar_express(g_BMN: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """U V^T of each U S V^T of a bank, nearly: singular values close to 1. In `dtype`. [3]

    X <- X / (1.02 |X|_F); 5 times X <- a X + (b A + c A^2) X with A = X X^T, on the wide side."""
    tall = g_BMN.size(-2) > g_BMN.size(-1)
    x = g_BMN.mT if tall else g_BMN
    x = (x / (1.02 * x.norm(dim=(-2, -1), keepdim=True) + 2e-11)).to(dtype)  # 1e-6 in [1]
    for a, b, c in POLAR_EXPRESS:
        A = symmetric(x)
        x = a * x + symmetric(A, A, b, c) @ x
    return x.mT if tall else x

def muon_update(p: Tensor, g: Tensor, m: Tensor, lr: Tensor, mu: Tensor,
                dtype: torch.dtype) -> None:
    """m <- mu m + (1 - mu) g;  p <- p - lr sqrt(max(1, rows/cols)) polar(mu m + (1 - mu) g). [2]"""
    m.lerp_(g, 1 - mu)
    step = polar_express(torch.lerp(g, m, mu), dtype).to(p.dtype)
    p.sub_(step * (lr * math.sqrt(max(1, p.size(-2) / p.size(-1)))))

def adam_update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: Tensor, betas: tuple, eps: float,
                decay: float, step: Tensor) -> None:
    """AdamW: p <- (1 - lr decay) p - lr m^ / (sqrt(v^) + eps), bias-corrected; step >= 1. [5]"""
    m.lerp_(g, 1 - betas[0])
    v.lerp_(g * g, 1 - betas[1])
    denominator = (v / (1 - betas[1] ** step)).sqrt() + eps
    p.mul_(1 - lr * decay).sub_(lr * (m / (1 - betas[0] ** step)) / denominator)

class Group(NamedTuple):
    """How a parameter is trained."""
    kind: Literal["muon", "adam"]
    lr: float                                # before the schedule
    betas: tuple = ()
    eps: float = 0.0
    decay: float = 0.0

def parameter_groups(model: GPT, s: Settings) -> dict[str, Group]:
    """Parameter name -> group, covering the model exactly."""
    def adam(times: float) -> Group:
        return Group("adam", s.adam_lr * times, s.adam_betas, s.adam_eps)
    table, scalar, muon = adam(s.embed_lr), adam(s.scalar_lr), Group("muon", s.muon_lr)
    groups = dict(embed=table, value_embeds=table, head=adam(s.head_lr), smear_scale=scalar,
                  residual_mix=scalar, value_mix=scalar, skip_gates=scalar, smear_gate=muon,
                  attention_bank=muon, attention_gates=muon, mlp_bank=muon)
    names = {n for n, _ in model.named_parameters()}
    assert names == set(groups), f"groups do not cover the parameters: {names ^ set(groups)}"
    if s.optimizer == "adamw":
        decayed = {"attention_bank", "mlp_bank", "head"}
        groups = {n: Group("adam", s.adamw_lr, (0.9, 0.95), 1e-8, s.adamw_decay * (n in decayed))
                  for n in groups}
    return groups

class Optimizer:
    """Groups and their state. Rates are tensors, so that compiled updates meet no new constant."""
    def __init__(self, model: GPT, s: Settings, compile: bool):
        self.groups = parameter_groups(model, s)
        self.parameters = {n: p for n, p in model.named_parameters() if p.numel()}
        self.dtype, self.compile = model.dtype, compile
        self.state = {n: [torch.zeros_like(p) for _ in range(1 + (self.groups[n].kind == "adam"))]
                      for n, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, number: int, lr_scale: float, momentum: float) -> None:
        """Apply and drop the gradients of step `number`, counted from 0."""
        count, mu = torch.tensor(number + 1.0), torch.tensor(momentum)
        for name, p in self.parameters.items():
            kind, lr, betas, eps, decay = self.groups[name]
            rate, on = torch.tensor(lr * lr_scale), self.compile and p.numel() > 1 << 16
            update, more = dict(muon=(muon_update, (mu, self.dtype)),
                                adam=(adam_update, (betas, eps, decay, count)))[kind]
            compiled(update, on)(p, p.grad, *self.state[name], rate, *more)
            p.grad = None

# -- 7 Schedules -----------------------------------------------------------------------------------
def total_steps(s: Settings) -> int:
    return s.steps + s.extra_steps

def lr_scale(step: int, s: Settings) -> float:
    """Factor of the rates: 1, falling linearly to the floor over the last `cooldown` of `steps`."""
    left = max(0.0, 1 - step / s.steps)
    high = min(1.0, left / s.cooldown) if s.cooldown else float(left > 0)
    return high + (1 - high) * s.lr_floor

def momentum(step: int, s: Settings) -> float:
    """Muon's momentum, rising linearly over its warm-up."""
    first, last = s.momentum
    return first + (last - first) * min(1.0, step / max(1, s.momentum_warmup))

class Stage(NamedTuple):
    """A stretch of the schedule with constant windows."""
    first_step: int
    short: int                               # tokens that a query looks back, beside itself
    long: int
    scale: float                             # of q.k
    freqs_R: tuple                           # rotary, radians per token
    spans: tuple                             # blocks that the reference lays out: short, long

def yarn(freqs_R: np.ndarray, scale: float, old: int, new: int) -> tuple[np.ndarray, float]:
    """Rotary frequencies and softmax scale for a window of `new` instead of `old` tokens. [4]

    What turns often in the old window keeps its speed; what turns less than once is stretched."""
    keep = np.clip((old * freqs_R / (2 * math.pi) - 1) / (32 - 1), 0, 1)
    return freqs_R * (old / new + keep * (1 - old / new)), scale * (1 + 0.2 * math.log(new / old))

def stages(s: Settings) -> list[Stage]:
    """Stages of training, and last that of the final validation, which begins at the total.

    >>> [(g.first_step, g.short, g.long) for g in stages(FINEWEB)]
    [(0, 128, 384), (543, 384, 896), (1086, 640, 1408), (1670, 768, 2560)]
    """
    unit, total, before, result = s.window_unit, total_steps(s), s.windows[0], []
    freqs, scale = (1 / s.rotary_base) ** np.linspace(0, 1, s.head_dim // 4), s.attention_scale
    plan = [(i * s.steps // len(s.windows), w // 2, w, w) for i, w in enumerate(s.windows)]
    for first, short, long, shown in [*plan, (total, *s.final_windows)]:
        if long != before:
            freqs, scale = yarn(freqs, scale, before * unit, long * unit)
        before = long                        # below: one layout for all of training compiles once
        widest = (short, shown) if first == total else (max(s.windows) // 2, max(s.windows))
        spans = tuple(-(-w * unit // BLOCK) for w in widest)
        result.append(Stage(first, short * unit, shown * unit, scale, tuple(freqs.tolist()), spans))
    return result

def stage_at(step: int, all_stages: list[Stage]) -> Stage:
    return [g for g in all_stages if g.first_step <= step][-1]

def look_back(s: Settings) -> int:
    """Tokens before it that a token's loss depends on: all windows, and one for the smear."""
    blocks = [b for b in block_table(s) if b.attention is not None]
    return 1 + max(sum(g.long if b.long else g.short for b in blocks) for g in stages(s))

def make_view(batch: Batch, stage: Stage, longest: int, attention: str = "blocked") -> View:
    """Rotary tables and windows of a batch, on its device, or masks where attention takes them."""
    freqs_R, scale = (torch.tensor(x).to(batch.inputs_T.device, non_blocking=True)
                      for x in (stage.freqs_R, stage.scale))  # so that the host does not wait
    angle_T1R = batch.positions_T[:, None, None] * F.pad(freqs_R, (0, len(freqs_R)))
    windows = (stage.short, stage.long)
    if attention == "blocked":
        windows = [block_mask(batch.positions_T, *pair) for pair in zip(windows, stage.spans)]
    if attention == "flex":
        windows = [flex_mask(batch.positions_T, window) for window in windows]
    return View(angle_T1R.cos(), angle_T1R.sin(), scale, *windows, longest)

# -- 8 Machine -------------------------------------------------------------------------------------
# What a device can do stands in tables, matched exactly. What is fast on it, the warm-up tries.

class Card(NamedTuple):
    """A GPU by NVIDIA's data sheet, or its architecture's paper where the sheet gives no peak."""
    capability: tuple
    memory: int                              # GiB
    tflops: float                            # dense bf16, fp32 sums; FP8 has twice that
    bandwidth: int                           # GB/s
    processors: int                          # streaming multiprocessors

CARDS = {
    "RTX 3060": Card((8, 6), 12, 25.5, 360, 28), "RTX 4060": Card((8, 9), 8, 30.2, 272, 24),
    "RTX 4070": Card((8, 9), 12, 58.3, 504, 46), "RTX 3090": Card((8, 6), 24, 71.2, 936, 82),
    "RTX 4090": Card((8, 9), 24, 165.2, 1008, 128), "RTX 5090": Card((12, 0), 32, 209.5, 1792, 170),
    "A100": Card((8, 0), 80, 312, 2039, 108), "A100 PCIe": Card((8, 0), 80, 312, 1935, 108),
    "H100 PCIe": Card((9, 0), 80, 756, 2039, 114), "H100": Card((9, 0), 80, 989, 3350, 132),
    "H200": Card((9, 0), 141, 989, 4800, 132)}

# capability -> bytes of shared memory (CUDA programming guide), FP8, FlashAttention to be tried
CAPABILITIES = {
    (8, 0): (166912, False, ()), (8, 6): (101376, False, ()), (8, 9): (101376, True, ()),
    (9, 0): (232448, True, ("FA3", "FA4")), (10, 0): (232448, True, ("FA4",)),
    (10, 3): (232448, True, ("FA4",)), (12, 0): (101376, True, ()), (12, 1): (101376, True, ())}

def card_of(name: str) -> Card | None:
    """The card of a device's name, as drivers write it; None: it runs, but its peak is unknown."""
    name = re.sub(r"^(Pretended )?(NVIDIA )?(GeForce )?|[ -](SXM\d?|\d+GB|HBM\de?)\b", "", name)
    return CARDS.get(name)

def runs_on(architectures: list[str], capability: tuple) -> bool:
    """CUDA's rule: binaries of the same major and no later minor version, or PTX of any earlier."""
    built = [(a, divmod(int(re.search(r"\d+", a)[0]), 10)) for a in architectures]
    return any(version <= capability and (version[0] == capability[0] or "compute" in name)
               for name, version in built)

class Machine(NamedTuple):
    """Where a run happens and what was chosen for it; none of it changes what is computed."""
    device: torch.device
    dtype: torch.dtype                       # of activations
    compile: bool
    attention: str                           # varlen_attn, FA3, FA4, flex, blocked; auto: to try
    head: Head
    share: tuple                             # units per micro-batch, rank, processes
    recompute: str                           # off, light, blocks
    val_piece: int                           # tokens
    notes: tuple                             # lines for the log: what could not be had, and why

def choose_device(s: Settings) -> torch.device:
    if s.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda: torch finds no CUDA device; see nvidia-smi, and whether "
                        "torch is a CUDA build")
    if s.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    capability, built = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    who = f"{name_of(device)}: capability {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        raise UserError(f"{who}, expected 8.0 or higher for bf16 and Triton; --device=cpu "
                        "--track=tiny runs anywhere")
    if not runs_on(built, capability):
        raise UserError(f"{who}, expected one of {', '.join(built)}, for which torch "
                        f"{torch.__version__} was built; install a build for this card")
    return device

def choose_compile(s: Settings, device: torch.device) -> tuple[bool, tuple]:
    """Whether to compile, and notes where not."""
    compiler, cuda = os.environ.get("CXX") or "g++", device.type == "cuda"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    old = cuda and torch.__version__[:5] == "2.10." and not can(device)[1]
    lacks = [lack for lack, found in {
        "on a CPU the full size is for checking": not cuda and s.track == "fineweb",
        f"no C++ compiler {compiler}; apt install g++": shutil.which(compiler) is None,
        "no Triton; pip install triton (on Windows: use WSL2)": cuda and triton is None,
        f"no {header}; apt install python3-dev": cuda and not header.exists(),
        "torch 2.10 compiles to NaN here; install the pinned version": old}.items() if found]
    notes = tuple(f"not compiled, so slower: {lack}" for lack in lacks)
    return (not lacks, notes) if s.compile == "auto" else (s.compile == "on", ())

def can(device: torch.device) -> tuple:
    """Its line of CAPABILITIES; of a device that has none, the least."""
    known = device.type == "cuda" and CAPABILITIES.get(torch.cuda.get_device_capability(device))
    return known or (0, False, ())

def choose_head(s: Settings, device: torch.device) -> str:
    """The head that was asked for, if it can be had; "auto": to be tried. A CPU: the reference."""
    if s.head in FP8_HEADS and not can(device)[1]:
        raise UserError(f"--head={s.head}: FP8 needs a GPU of capability 8.9 or higher, found "
                        f"{device}; --head=auto chooses")
    return "reference" if s.head == "auto" and (device.type == "cpu" or not triton) else s.head

# What activations take, bytes a token, block and unit of width: kept for backward, most in it; then
# bytes a parameter of early gradients. Compiled, measured by a caching allocator for FINEWEB.
ACTIVATIONS = {"off": (41.6, 41.6, 0), "light": (23.4, 30.3, 0), "blocks": (7.6, 17.3, 2.4)}

def memory_plan(s: Settings, m: Machine) -> dict[str, int]:
    """Bytes on a CUDA device by purpose, at the worst moment of a run, before anything is there."""
    with torch.device("meta"):
        model = GPT(s)
    sizes, groups = {n: p.numel() for n, p in model.named_parameters()}, parameter_groups(model, s)
    states = sum(n * (1 + (groups[name].kind == "adam")) for name, n in sizes.items())
    weights = 4 * sum(sizes.values())
    tokens, V, wide = m.share[0] * s.unit_tokens, len(model.head), s.layers * s.width
    logits = head_bytes(tokens, V, s.width, m.head) - 4 * sizes["head"]  # dW is a gradient below
    kept, most, early = ACTIVATIONS[m.recompute]
    train = int(max(kept * tokens * wide + logits, most * tokens * wide + early * weights / 4))
    val = int(4.2 * m.val_piece * wide) + 2 * min(m.head.chunk, m.val_piece) * V + 2 * sizes["head"]
    return dict(parameters=weights, optimizer=4 * states, gradients=weights, head=logits,
                weights_bf16=2 * (sizes["attention_bank"] + sizes["mlp_bank"]),
                activations=max(train, val) - logits)

def fit_memory(s: Settings, m: Machine, room: int) -> Machine:
    """`m` with the least recomputation, then most units a micro-batch (49,152 tokens fill a card),
    then the largest piece of validation, which the clock does not see, that fit in `room` bytes."""
    units, bound = s.tokens_per_step // s.unit_tokens // m.share[2], max(1, 49152 // s.unit_tokens)
    ks = m.share[:1] if s.micro_batch > 0 else [k for k in range(bound, 0, -1) if units % k == 0]
    levels = [n for n in ACTIVATIONS if n == s.recompute or s.recompute == "auto"]
    halves = [] if s.val_piece else [up_to(m.val_piece >> n, BLOCK) for n in range(1, 5)]
    pieces = [m.val_piece, *(n for n in halves if n > look_back(s))]
    for level, k, piece in product(levels if m.compile else levels[::2], ks, pieces):
        m = m._replace(share=(k, *m.share[1:]), recompute=level, val_piece=piece)
        plan = memory_plan(s, m)
        needed = sum(plan.values())
        if needed <= room:
            table = "".join(f"\n  {size >> 20:7,}  {name}" for name, size in plan.items())
            return m._replace(notes=(
                *m.notes, f"memory plan, MiB: in all {needed >> 20:,} of {room >> 20:,} with {k} "
                f"units a micro-batch, recompute {level}, validation {piece:,} tokens{table}"))
    raise UserError(f"GPU memory: even {k} units with recompute {level} need {needed >> 20:,} MiB, "
                    f"{room >> 20:,} are there; close what else uses the GPU, or try "
                    "--micro_batch=1 --recompute=blocks --head_chunk=1024")

def choose_machine(s: Settings) -> Machine:
    """Device, precision, processes and sizes, from the settings and what is there."""
    device, units = choose_device(s), s.tokens_per_step // s.unit_tokens
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if units % world:
        raise UserError(f"--nproc_per_node={world}: expected a divisor of the {units} units a step")
    cuda, (compile, notes) = device.type == "cuda", choose_compile(s, device)
    bf16 = s.precision == "bf16" or (
        s.precision == "auto" and (cuda or torch.cpu._is_amx_tile_supported()))
    room = s.val_piece or min(s.val_sequence, max(65536 if cuda else 16384, 2 * look_back(s)))
    sms = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 0
    chunk = s.head_chunk or (128 * max(1, 256 * sms // s.width) if cuda else 2048)  # dx: 2 tiles
    head = Head(s.vocab_size, s.logit_cap, s.logit_slope, chunk, compile, choose_head(s, device))
    bound = min(units // world, max(0, s.micro_batch) or max(1, 4096 // s.unit_tokens))  # caches
    k = max(d for d in range(1, bound + 1) if units // world % d == 0)
    m = Machine(device, torch.bfloat16 if bf16 else torch.float32, compile,
                s.attention if cuda else "blocked", head, (k, rank, world), "off",
                up_to(room, BLOCK), notes)
    return fit_memory(s, m, torch.cuda.mem_get_info(device)[0]) if cuda else m

def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"

def fastest(what: str, trials: dict[str, Callable], bounds: dict[str, float],
            device: torch.device, lines: list[str]) -> str:
    """Name of the fastest right trial; `lines` gets one for each. A trial returns tensors, none of
    which may differ from the first one's by more than the bound, relative and by norm. What raises
    is out: that a thing runs on a device is known when it was seen there."""
    best, reference, wait = (math.inf, ""), None, torch.get_device_module(device).synchronize
    blind = name_of(device).startswith("Pretended")  # has no numbers
    for name, trial in trials.items():
        try:
            found, times = trial(), []
            reference = reference or found
            errors = [((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)).item()
                      for a, b in zip(found, reference)]
            right = blind or all(error <= bounds[name] for error in errors)  # false for NaN
            fault = "" if right else "off by " + ", ".join(f"{error:.2g}" for error in errors)
            for _ in range(3):               # nothing is under way: the errors were read
                began = time.perf_counter()
                trial()
                wait()
                times.append(1000 * (time.perf_counter() - began))
            best = best if fault else min(best, (sorted(times)[1], name))
        except Exception as error:           # compilers, drivers, memory: they have no common base
            fault = first_line(error)
        lines.append(f"{what} {name}: {'out: ' + fault if fault else f'{sorted(times)[1]:.2f} ms'}")
    if not best[1]:
        raise UserError(f"no {what} runs right here: {'; '.join(lines)}")
    lines.append(f"{what}: {best[1]}{', nothing compared on a pretended GPU' if blind else ''}")
    return best[1]

def flops_per_token(s: Settings, positions_T: Tensor, stage: Stage) -> float:
    """FLOPs of training on a token: 6 for each parameter of a matrix product, 12 D for each key
    that a query sees, on average over these positions in their documents."""
    matrices = sum(b.attention is not None for b in block_table(s)) * 4 * s.width ** 2
    matrices += s.layers * 2 * s.width * s.mlp_width + padded_vocab(s) * s.width
    keys = sum((positions_T.clamp(max=stage.long if b.long else stage.short) + 1).double().mean()
               for b in block_table(s) if b.attention is not None)
    return 6 * matrices + 12 * s.width * float(keys)

def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

def environment(machine: Machine) -> dict:
    """What a stranger needs to judge a timing."""
    path = Path("/proc/cpuinfo")             # not everywhere
    cpu = re.search(r"model name\s*:\s*(.+)", path.read_text() if path.exists() else "")
    cuda, device = machine.device.type == "cuda", machine.device
    return dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__,
                triton=triton and triton.__version__, cuda=torch.version.cuda,
                device=name_of(device),
                capability=list(torch.cuda.get_device_capability(device)) if cuda else None,
                cpu=cpu[1] if cpu else platform.machine(), cores=cores(),
                threads=torch.get_num_threads(), processes=machine.share[2],
                os=platform.platform(terse=True))

def conditions(device: torch.device) -> dict:
    """What a GPU's driver says now, as far as it answers; the bits of why clocks are lowered."""
    asked = dict(power_limit_w=("EnforcedPowerLimit", 1000), power_w=("PowerUsage", 1000),
                 energy_j=("TotalEnergyConsumption", 1000), temperature_c=("Temperature", 1, 0),
                 sm_mhz=("ClockInfo", 1, 1), memory_mhz=("ClockInfo", 1, 2),
                 throttle_reasons=("CurrentClocksThrottleReasons", 1))
    card, found, value = ctypes.c_void_p(), {}, ctypes.c_uint64()
    with suppress(OSError, AttributeError):  # no such library, or one that lacks a question
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # nvidia-smi is slow, pynvml one package more
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(card)):
            return {}
        for name, (question, unit, *of) in asked.items():
            value.value = 0
            if not getattr(nvml, f"nvmlDeviceGet{question}")(card, *of, ctypes.byref(value)):
                found[name] = value.value / unit
    return found

# -- 9 Log and clock -------------------------------------------------------------------------------
class Clock:
    """Timed training, between `start` and `stop`; at both the device has finished its work."""
    def __init__(self, device: torch.device, total: float = 0.0):
        self.device, self.total, self.began = device, total, None  # total: seconds

    def now(self) -> float:
        torch.get_device_module(self.device).synchronize()
        return time.perf_counter()

    def start(self) -> None:
        self.began = self.now()

    def stop(self) -> None:
        self.total, self.began = self.total + self.now() - self.began, None

    def ms(self) -> float:
        """Milliseconds so far; while the clock runs, without waiting for the device."""
        running = 0.0 if self.began is None else time.perf_counter() - self.began
        return 1000 * (self.total + running)

class Log:
    """A record's two files and the screen; rank 0 alone writes, line by line. `mode`: x, a new
    record; a, one that goes on. What a full disk refuses waits in the buffer for the next line."""
    def __init__(self, stem: Path, writes: bool, mode: str = "x"):
        self.writes, self.terminal = writes, writes and sys.stdout.isatty()
        self.files = [open(f"{stem}.{kind}", f"{mode}b", buffering=1 << 24)
                      for kind in ("txt", "jsonl") if writes]

    def write(self, file: int, text: str) -> None:
        self.files[file].write(text.encode() + b"\n")
        with suppress(OSError):              # `close` raises it, if it stays
            self.files[file].flush()

    def line(self, text: str, screen: bool = True) -> None:
        if self.writes:
            self.write(0, text)
            if screen:
                print(("\r\x1b[K" if self.terminal else "") + text, flush=True)

    def progress(self, text: str) -> None:
        """A line that the next one overwrites, on a terminal."""
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r\x1b[K" + text[:width], end="", flush=True)

    def event(self, event: str, facts: dict) -> None:
        if self.writes:
            self.write(1, json.dumps(dict(event=event) | facts))

    def close(self) -> None:
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
            file.close()

def write_whole(path: Path, write) -> None:
    """A file that is there whole or not at all: temporary name, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

def keep_program(folder: Path) -> tuple[str, str]:
    """Copy this file into the record folder once, named by its hash; its name there and sha256."""
    source = Path(__file__).read_bytes()
    sha256 = hashlib.sha256(source).hexdigest()
    name = f"train_gpt_{sha256[:8]}.py"
    if not (folder / name).exists():
        write_whole(folder / name, lambda file: file.write(source))
    return name, sha256

# -- 10 Run ----------------------------------------------------------------------------------------
class NonFinite(Exception):
    """A loss that is no number: the run stops."""

def late(loss: Tensor) -> Callable[[], float]:
    """Reads a loss a step after it was computed, so that the device never waits for us."""
    host = loss.to("cpu", non_blocking=True)
    wait = torch.cuda.current_stream().record_event().synchronize if loss.is_cuda else lambda: None
    return lambda: (wait(), host.item())[1]

class Run:
    """Model, optimizer and data of one run, and the steps that tie them together."""
    resumed = {}                             # of tools/keep.py: how it goes on, and where
    def __init__(self, s: Settings, machine: Machine):
        own = Path(__file__).parent / "data" / dict(fineweb="fineweb10B", tiny="tiny")[s.track]
        folder = Path(s.data_dir) if s.data_dir else own
        self.s, self.stages, self.tried = s, stages(s), []  # lines on what was tried, for the log
        self.train_data = TrainData(s, folder)
        self.val_data = ValData(s, folder, machine.val_piece, look_back(s))
        self.model = GPT(s, machine.dtype)
        self.model.init_weights(torch.Generator().manual_seed(s.seed))
        self.model.to(machine.device)
        self.optimizer = Optimizer(self.model, s, machine.compile)
        self.use(machine)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, by name."""
        tensors = {f"model.{n}": p.data for n, p in self.model.named_parameters()}
        for name, state in self.optimizer.state.items():
            tensors |= {f"optimizer.{name}.{i}": t for i, t in enumerate(state)}
        return tensors

    def gradients(self, batch: Batch, stage: Stage) -> Tensor:
        """Add a micro-batch's share of the gradient of the step's mean loss; its summed loss."""
        m = self.machine
        batch = Batch(*(t.to(m.device, non_blocking=True) for t in batch))
        view = make_view(batch, stage, self.s.doc_cap, m.attention)
        loss = compiled(GPT.loss, m.compile)(self.model, batch, view, m.head)
        loss.backward(torch.full((), 1 / self.s.tokens_per_step, device=m.device))
        return loss.detach()

    def step(self, number: int, micro_batches: list) -> Tensor:
        """Optimizer step `number` (from 0); `micro_batches` are callables. Mean loss, fp32 []."""
        stage, total = stage_at(number, self.stages), torch.zeros((), device=self.machine.device)
        for get in micro_batches:
            total += self.gradients(get(), stage)
        if self.machine.share[2] > 1:
            for tensor in [total, *(p.grad for p in self.optimizer.parameters.values())]:
                dist.all_reduce(tensor)
        self.optimizer.step(number, lr_scale(number, self.s), momentum(number, self.s))
        return total / self.s.tokens_per_step

    @torch.no_grad()
    def val_losses(self, group: int, stage: Stage) -> Tensor:
        """Losses of one group of validation pieces, fp32 [val_piece]; 0 where none counts."""
        m = self.machine
        batch = Batch(*(t.to(m.device) for t in self.val_data.batch(group)))
        view = make_view(batch, stage, m.val_piece, m.attention)
        x_TD = compiled(GPT.forward, m.compile)(self.model, batch, view)
        return token_losses(x_TD, self.model.head, batch.targets_T, m.head)

    def validate(self, step: int) -> float:
        """Mean loss over the pinned validation set, summed in fp64."""
        stage, (_, rank, world) = stage_at(step, self.stages), self.machine.share
        while True:
            total = torch.zeros((), dtype=torch.float64, device=self.machine.device)
            try:
                for group in range(rank, len(self.val_data.groups), world):
                    total += self.val_losses(group, stage).double().sum()
                break
            except torch.OutOfMemoryError:
                m, piece = self.machine, up_to(self.machine.val_piece // 2, BLOCK)
                if piece <= look_back(self.s) or world > 1:  # others cut theirs as before
                    raise
            torch.cuda.empty_cache()         # here nothing holds the tensors of the attempt
            self.use(m._replace(val_piece=piece))  # not the head: training would compile again
        if world > 1:
            dist.all_reduce(total)
        return total.item() / self.s.val_tokens

    def use(self, machine: Machine) -> None:
        """Take `machine` for all that follows."""
        self.machine, self.model.recompute = machine, machine.recompute == "blocks"
        self.optimizer.compile = machine.compile
        self.val_data.cut(machine.val_piece)
        torch._functorch.config.activation_memory_budget = {"light": 0.7}.get(machine.recompute, 1)
        if machine.attention in ("FA3", "FA4"):
            torch.nn.attention.activate_flash_attention_impl(machine.attention)
        elif machine.device.type == "cuda":
            torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)

    def try_attention(self, batch: Batch) -> None:
        """Every implementation forward and backward on random q, k, v, against the reference."""
        m, s = self.machine, self.s
        shape = 3, len(batch.inputs_T), s.width // s.head_dim, s.head_dim
        qkv = torch.randn(shape, device=m.device, dtype=m.dtype).unbind(0)
        q, k, v = (x.requires_grad_() for x in qkv)
        def trial(kind: str) -> tuple:
            self.use(m._replace(attention=kind))
            visible = make_view(batch, self.stages[0], s.doc_cap, kind).long
            y = compiled(attend, m.compile)(q, k, v, visible, batch.cu_seqlens, s.doc_cap)
            return y, *torch.autograd.grad(y, (q, k, v), torch.ones_like(y))
        kinds = "blocked", "varlen_attn", *can(m.device)[2], *["flex"] * m.compile
        name = fastest("attention", {kind: partial(trial, kind) for kind in kinds},
                       dict.fromkeys(kinds, 0.03), m.device, self.tried)
        self.use(m._replace(attention=name))

    @torch.no_grad()
    def try_heads(self, batch: Batch) -> None:
        """Every kind of head forward and backward on real activations and random weights."""
        m = self.machine
        x_TD = self.model(batch, make_view(batch, self.stages[0], self.s.doc_cap, m.attention))
        weight_VD = 0.1 * torch.randn_like(self.model.head)  # the model's own is zero at first
        heads = {"reference": m.head._replace(kind="reference", chunk=1024, compile=False)}
        for kind in ("bf16", *(FP8_HEADS if can(m.device)[1] else ())):
            heads[kind] = m.head._replace(kind=kind)
        trials = {kind: partial(head_loss_op, x_TD, weight_VD, batch.targets_T, *head)
                  for kind, head in heads.items()}
        bounds = {kind: 0.1 if kind in FP8_HEADS else 0.02 for kind in heads}
        self.use(m._replace(head=heads[fastest("head", trials, bounds, m.device, self.tried)]))

    def try_micro_batches(self) -> None:
        """The largest micro-batch that fits and the next smaller one, over the same units."""
        m, units = self.machine, self.s.tokens_per_step // self.s.unit_tokens
        ks = [k for k in range(m.share[0], 0, -1) if units // m.share[2] % k == 0][:2]
        def trial(k: int) -> list[Tensor]:
            batches = (range(first, first + k) for first in range(0, math.lcm(*ks), k))
            return [sum(self.gradients(self.train_data.micro_batch([*batch]), self.stages[0])
                        for batch in batches)]

        with suppress(UserError):            # where none fits, the steps that follow will say so
            trials = {f"{k} units": partial(trial, k) for k in ks}
            best = fastest("micro-batch", trials, dict.fromkeys(trials, 0.02), m.device, self.tried)
            self.use(m._replace(share=(int(best.split()[0]), *m.share[1:])))
        self.model.zero_grad()

    def meet_graphs(self) -> bool:
        """Try what is to be tried, meet every graph; False: again, smaller or not compiled."""
        m, s = self.machine, self.s
        try:
            batch = self.train_data.micro_batch(list(range(m.share[0])))
            there = Batch(*(t.to(m.device) for t in batch))
            if m.attention == "auto":
                self.try_attention(there)
            if m.head.kind == "auto":
                self.try_heads(there)
            if s.micro_batch < 0:
                self.try_micro_batches()
                batch = self.train_data.micro_batch(list(range(self.machine.share[0])))
            for stage in self.stages[:-1]:
                self.step(stage.first_step, [lambda: batch] * 2)
            for stage in self.stages:
                self.val_losses(0, stage)
            return True
        except torch.OutOfMemoryError:
            if m.share[2] > 1:               # the others would go on as they are
                raise
            smaller = fit_memory(s, self.machine, sum(memory_plan(s, self.machine).values()) - 1)
            why = f"out of memory, so {smaller.notes[-1]}"
        except torch._dynamo.exc.TorchDynamoException as error:
            if s.compile == "on" or not m.compile:
                raise
            smaller = choose_machine(replace(s, compile="off"))
            why = f"not compiled, so slower: {first_line(error)}; ./run.sh doctor names remedies"
        self.tried.append(why)
        self.use(smaller)
        self.model.zero_grad()
        return False

    def warm_up(self) -> None:
        """Meet every graph of the schedule on throw-away state, then restore it bit for bit."""
        before = {n: t.to("cpu", copy=True) for n, t in self.state().items()}
        random = torch.get_rng_state()
        while not self.meet_graphs():
            torch.cuda.empty_cache()         # here nothing holds the tensors of the attempt
            torch._dynamo.reset()            # what is compiled does not notice a new budget
        torch.set_rng_state(random)
        for name, tensor in self.state().items():
            tensor.copy_(before[name])
            assert torch.equal(tensor.cpu(), before[name]), f"warm-up changed {name}"

    def due(self, step: int) -> bool:
        """Whether to save behind this step: here the last, before anything else can go wrong."""
        return step == total_steps(self.s)

    def save(self, log: Log, stem: Path, end: dict) -> None:
        """Settings, step, and the state of model and optimizer. tools/keep.py does more."""
        content = dict(settings=asdict(self.s), step=end["step"], state=self.state())
        if self.s.checkpoint and log.writes:
            write_whole(stem.with_name(f"{stem.name}.pt"), partial(torch.save, content))

def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]

def train(run: Run, log: Log, stem: Path, end: dict) -> None:
    """The timed part; `end` holds the facts of the end event, true at every moment."""
    s, total, known = run.s, total_steps(run.s), graphs() - end["recompiles"]
    clock, waits = Clock(run.machine.device, end["train_time_ms"] / 1000), end["wait_ms"]
    (k, _, world), units = run.machine.share, s.tokens_per_step // s.unit_tokens
    batches, every = units // world // k, s.log_every or max(1, total // 40)
    reader, before = Reader(run.train_data, s, run.machine, end["step"]), None
    card = card_of(name_of(run.machine.device))
    positions_T = run.train_data.micro_batch(list(range(units))).positions_T
    flops = [s.tokens_per_step * flops_per_token(s, positions_T, stage) for stage in run.stages]
    def show(number: int, kind: str, loss: float, ms: float, screen: bool = True) -> None:
        text = (f"step:{number}/{total} {kind}_loss:{loss:.4f} train_time:{ms:.0f}ms "
                f"step_avg:{ms / max(1, number):.2f}ms")
        log.line(text, screen)
        left = datetime.timedelta(seconds=(total - number) * ms // max(1, number) // 1000)
        log.progress(f"{'#' * (20 * number // total):.<20} {text} {left} left "
                     f"{1000 * number * s.tokens_per_step / max(1.0, ms):,.0f} tokens/s "
                     f"MFU {end['mfu'] or 0:.1%}")
        if not math.isfinite(loss):
            raise NonFinite(f"{kind}_loss {loss} at step {number}")
    def report(number: int, loss: Callable, ms: float, waited: float) -> None:
        value, stage = loss(), run.stages.index(stage_at(number - 1, run.stages))
        log.event("step", dict(step=number, loss=value, lr_scale=lr_scale(number - 1, s),
                               train_time_ms=ms, wait_ms=1000 * waited))
        end.update(step=number, train_time_ms=ms, tokens=number * s.tokens_per_step,
                   wait_ms=waits + 1000 * reader.waited, flops=end["flops"] + flops[stage])
        if card:
            end["mfu"] = end["flops"] / (1e9 * ms * card.tflops * world)
        show(number, "train", value, ms, number % every == 0 and not log.terminal)
    def validate(number: int) -> None:
        loss, ms, device = run.validate(number), clock.ms(), run.machine.device
        end.update(val_loss=loss, val_piece=run.machine.val_piece)
        log.event("val", dict(step=number, loss=loss, tokens=s.val_tokens, train_time_ms=ms,
                              conditions=conditions(device) if device.type == "cuda" else {}))
        show(number, "val", loss, ms)
    try:
        if end["step"] % s.val_every == 0 or end["step"] == total:
            validate(end["step"])
        clock.start()
        for number in range(end["step"] + 1, total + 1):
            waited = reader.waited
            loss = late(run.step(number - 1, [reader.next] * batches))
            if before:
                report(*before)
            before = (number, loss, clock.ms(), reader.waited - waited)
            validates, saves = number % s.val_every == 0 or number == total, run.due(number)
            if validates or saves:
                clock.stop()
                report(number, loss, clock.ms(), before[3])
                before = None
                if saves:
                    run.save(log, stem, end)
                if validates:
                    validate(number)
                clock.start()
    finally:
        reader.close()
        end.update(recompiles=graphs() - known)

# -- 11 Main ---------------------------------------------------------------------------------------
def start_facts(run: Run, given: dict, identity: dict) -> dict:
    """What the start event says."""
    s, m, val, ribbon = run.s, run.machine, run.val_data, run.train_data.ribbon
    sizes = np.diff(ribbon.borders).tolist()
    return dict(
        format=1, track=s.track, **identity, settings=asdict(s),
        recipe_overrides={n: v for n, v in given.items() if n in RECIPE_FIELDS},
        machine_overrides={n: v for n, v in given.items() if n not in RECIPE_FIELDS},
        environment=environment(m), parameters=sum(p.numel() for p in run.model.parameters()),
        run=dict(precision=str(m.dtype).removeprefix("torch."), compiled=m.compile,
                 micro_batch_units=m.share[0], val_piece=m.val_piece, attention=m.attention,
                 steps=total_steps(s), tokens_per_step=s.tokens_per_step),
        data=dict(train=[dict(file=p.name, tokens=n) for p, n in zip(ribbon.paths, sizes)],
                  val=dict(file=val.path.name, tokens_in_file=val.ribbon.borders[-1],
                           sha256=val.sha256, tokens=s.val_tokens, sequence=s.val_sequence)),
        resumed=run.resumed.get("facts", {}))

def announce(log: Log, notes: tuple, facts: dict) -> None:
    """The head of the text log: what runs, where, and what was changed."""
    s, steps = facts["settings"], facts["run"]["steps"]
    log.line(f"track {facts['track']}: {facts['parameters']:,} parameters, {steps:,} steps of "
             f"{s['tokens_per_step']:,} tokens, target {s['target_loss']}, seed {s['seed']}")
    for name in ("environment", "run", "recipe_overrides", "machine_overrides", "resumed"):
        if facts[name]:
            log.line(f"{name}: ".replace("_", " ")
                     + ", ".join(f"{k} {v}" for k, v in facts[name].items()))
    warning = ["a recipe override makes this run an experiment, not a record"]
    for note in [*warning * bool(facts["recipe_overrides"]), *notes]:
        log.line(note)
    log.line(f"program: {facts['program']} {facts['program_sha256']}", screen=False)

def finish(log: Log, target: float, end: dict) -> None:
    """The end event and the summary, however the run ended."""
    log.event("end", end)
    ms = end["train_time_ms"] or 1.0
    log.line(f"{end['status']}: {end['reason']}" if end["reason"] else
             f"summary: val_loss {end['val_loss']:.4f}, target {target}, trained "
             f"{ms / 1000:.1f} s, {1000 * end['tokens'] / ms:,.0f} tokens/s, MFU "
             f"{end['mfu'] and format(end['mfu'], '.1%') or 'n/a'}, loader wait "
             f"{100 * end['wait_ms'] / ms:.2f} %, recompiles {end['recompiles']}, peak memory "
             f"{end['peak_memory_mib']:,} MiB, wall {end['wall_s']:.1f} s")
    log.close()

def peak_memory_mib(device: torch.device) -> int:
    import resource  # not on Windows
    return (torch.cuda.max_memory_allocated() >> 20 if device.type == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)

def prepare(machine: Machine, s: Settings) -> None:
    """Choices that hold for the whole process: threads, determinism, process group."""
    if machine.device.type == "cuda":
        torch.cuda.set_device(machine.device)
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # fewer gaps
        if not machine.compile:              # torch 2.13 has products in Triton, which may not work
            torch._native.triton_utils.deregister_op_overrides()
    else:
        torch.set_num_threads(s.threads or max(1, cores() // machine.share[2]))
        torch.use_deterministic_algorithms(True)  # compiled code sums with atomics otherwise
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch._dynamo.config.recompile_limit = 64  # one compiled function serves many shapes
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "train_gpt"))
    if machine.share[2] > 1:
        dist.init_process_group("nccl" if machine.device.type == "cuda" else "gloo")

def run_once(s: Settings, given: dict, kind: Callable | None = None) -> int:
    """One run, of another `kind` for tools/keep.py, and its record; the exit code."""
    wall, machine = time.perf_counter(), choose_machine(s)
    prepare(machine, s)
    run, now = (kind or Run)(s, machine), datetime.datetime.now(datetime.timezone.utc)
    name, writes = s.name or dict(fineweb="FineWeb", tiny="Tiny")[s.track], machine.share[1] == 0
    parent = Path(s.records_dir) if s.records_dir else Path(__file__).parent / "records"
    stem = parent / f"{now:%Y-%m-%d}_{name}" / f"{now:%H%M%S}_seed{s.seed}_{os.urandom(2).hex()}"
    stem, goes_on = run.resumed.get("stem", stem), "stem" in run.resumed
    stem.parent.mkdir(parents=True, exist_ok=True)
    program, sha256 = keep_program(stem.parent) if writes else ("", "")
    log = Log(stem, writes, "a" if goes_on else "x")
    facts = start_facts(run, given, dict(name=name, id=stem.name, utc=f"{now:%Y-%m-%dT%H:%M:%SZ}",
                                         program=program, program_sha256=sha256))
    log.event("resume" if goes_on else "start", facts)
    announce(log, machine.notes, facts)
    end = dict(status="error", reason=None, step=0, val_loss=None, tokens=0, train_time_ms=0.0,
               wait_ms=0.0, recompiles=0, flops=0.0, mfu=None, wall_s=0.0)
    end |= run.resumed.get("end", {})
    wall -= end["wall_s"]
    try:
        began, known = time.perf_counter(), graphs()
        run.warm_up()
        seconds, made, m = time.perf_counter() - began, graphs() - known, run.machine
        log.event("warmup", dict(
            seconds=seconds, graphs=made, restored=True, tried=run.tried, compiled=m.compile,
            attention=m.attention, head=m.head.kind, head_chunk=m.head.chunk,
            micro_batch_units=m.share[0], recompute=m.recompute, val_piece=m.val_piece))
        for text in (*run.tried, f"warm-up: {seconds:.1f} s, {made} graphs compiled, state "
                     f"restored; ready {time.perf_counter() - wall:.1f} s after the start"):
            log.line(text)
        train(run, log, stem, end)
        end["status"] = "complete"
    except NonFinite as error:
        end.update(status="non-finite", reason=str(error))
    except KeyboardInterrupt as error:
        end.update(status="interrupted", reason=str(error) or "SIGINT")
    except BaseException as error:
        end.update(reason=first_line(error))
        raise
    finally:
        end.update(wall_s=time.perf_counter() - wall,
                   peak_memory_mib=peak_memory_mib(machine.device))
        finish(log, s.target_loss, end)
        if machine.share[2] > 1:
            dist.destroy_process_group()
    if writes:
        print(f"log: {stem}.txt")
    stopped = 143 if end["reason"] == "SIGTERM" else 130
    return {"complete": 0, "non-finite": 3}.get(end["status"], stopped)

def interrupt(number: int, frame) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)

def main(arguments: list[str]) -> int:
    try:
        if "--help" in arguments or "-h" in arguments:
            print(help_text(PRESETS["tiny" if "--track=tiny" in arguments else "fineweb"]))
            return 0
        settings, given = parse_settings(arguments)
        signal.signal(signal.SIGTERM, interrupt)
        return run_once(settings, given)
    except (UserError, OSError) as error:    # of folders and disks
        print(f"train_gpt.py: {getattr(error, 'line', error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:       # before there was a log to say so
        print("train_gpt.py: interrupted before the run began", file=sys.stderr)
        return 143 if str(error) == "SIGTERM" else 130

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
