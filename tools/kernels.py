"""Compile every Triton launch of a FINEWEB step ahead of time, for six architectures.

    ./run.sh kernels           one row for each launch; exit code 1 if one breaks a rule
    ./run.sh kernels --floor   bytes and FLOPs of the head, and the time below which no card gets

No GPU is needed. The launches are not a second list: the trainer's own functions run on tensors
without memory, at the real sizes, and what they hand to each kernel is recorded. The rules: it
compiles, no register spills to memory, shared memory fits, and products use the matrix unit with
the right types. Registers and spills are ptxas's; whether a binary runs, only a GPU can tell.
"""
import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # tools/profile.py hides Python's own

import train_gpt  # noqa: E402
from train_gpt import FINEWEB, padded_vocab  # noqa: E402

# architecture -> shared memory of one block, bytes (CUDA programming guide, compute capabilities)
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
FP8_FROM = 89
INSTRUCTION = r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)\.\S+"
NAMES = ("product_kernel", "loss_kernel", "gradient_kernel")
TYPES = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.bfloat16: "bf16",
         torch.float32: "fp32", torch.int64: "i64"}
# dense FP8 and bf16 TFLOP/s, GB/s
CARDS = {"H200": (1979, 989, 4800), "H100 SXM": (1979, 989, 3350), "RTX 4090": (330.3, 165.2, 1008),
         "RTX 4070": (116.6, 58.3, 504)}

class Launch(NamedTuple):
    """One way in which a kernel is launched: all that its binary depends on."""

    kernel: str
    types: tuple                             # (argument, type); ints carry divisibility by 16
    constants: tuple                         # (argument, value)
    options: tuple                           # warps, stages

class Recorder:
    """Stands in a kernel's place and notes what it is launched with."""

    def __init__(self, name: str, kernel, found: dict):
        self.name, self.kernel, self.found = name, kernel, found

    def __getitem__(self, grid):
        return self.note

    def note(self, *values, num_warps: int = 4, num_stages: int = 3, **constants) -> None:
        types = []
        for name, value in zip(self.kernel.arg_names, values):
            if isinstance(value, torch.Tensor):
                types.append((name, "*" + TYPES[value.dtype], True))
            elif isinstance(value, float):
                types.append((name, "fp32", False))
            elif value is None or value == 1:
                constants[name] = value
            else:
                types.append((name, "i32", value % 16 == 0))
        key = Launch(self.name, tuple(types), tuple(constants.items()), (num_warps, num_stages))
        self.found[key] = None

def launches(units: int = 3, chunk: int = 8192) -> list[Launch]:
    """Every launch of the head and of the symmetric products at FINEWEB's sizes."""
    found, kernels = {}, {name: getattr(train_gpt, name) for name in NAMES}
    s, V = FINEWEB, padded_vocab(FINEWEB)
    x = torch.empty(units * s.unit_tokens, s.width, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(V, s.width, device="meta")
    targets = torch.empty(len(x), dtype=torch.int64, device="meta")
    banks = [torch.empty(2, s.width, width, dtype=torch.bfloat16, device="meta")
             for width in (s.width, s.mlp_width)]
    try:
        for name, kernel in kernels.items():
            setattr(train_gpt, name, Recorder(name, kernel, found))
        for kind in ("bf16", "fp8-triton"):
            train_gpt.head_loss_op._init_fn(x, weight, targets, s.vocab_size, s.logit_cap,
                                            s.logit_slope, chunk, False, kind)
        for bank in banks:
            square = train_gpt.symmetric_op._init_fn(bank, None, 1.0, 1.0)
            train_gpt.symmetric_op._init_fn(square, square, 0.5, 0.25)
    finally:
        for name, kernel in kernels.items():
            setattr(train_gpt, name, kernel)
    return list(found)

def compile_ahead(launch: Launch, architecture: int):
    """The compiled kernel, as Triton would build it for this launch on that architecture."""
    kernel, constants = getattr(train_gpt, launch.kernel), dict(launch.constants)
    signature = {name: "constexpr" for name in kernel.arg_names}
    signature |= {name: kind for name, kind, _ in launch.types}
    divisible = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]]
                 for name, _, divides in launch.types if divides}
    warps, stages = launch.options
    return triton.compile(ASTSource(kernel, signature, constants, divisible),
                          target=GPUTarget("cuda", architecture, 32),
                          options=dict(num_warps=warps, num_stages=stages))

def usage(compiled, architecture: int) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, as ptxas reports them."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(architecture).path, "-v", "-lineinfo", "--regAllocOptLevel=2", "-o",
                   "/dev/null", file.name, "--gpu-name=" + sm_arch_from_capability(architecture)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
    return int(re.search(r"Used (\d+) registers", report)[1]), spilled

def wanted(launch: Launch, architecture: int) -> str:
    """Part of the name of the matrix instruction that a product must use; "" for other kernels."""
    if launch.kernel != "product_kernel":
        return ""
    fp8 = "fp8" in dict((name, kind) for name, kind, _ in launch.types)["a"]
    if architecture >= 120 or architecture < 90:
        return "mma.sync" + (r".*e[45]m[23]\.e4m3" if fp8 else r".*bf16\.bf16")
    if architecture >= 100:
        return r"tcgen05\.mma.*kind::" + ("f8f6f4" if fp8 else "f16")
    return r"wgmma\.mma_async.*" + (r"e[45]m[23]\.e4m3" if fp8 else r"bf16\.bf16")

def row(launch: Launch, architecture: int) -> tuple[str, list[str]]:
    """A line of the table, and the rules that it breaks."""
    constants, (warps, stages) = dict(launch.constants), launch.options
    kinds = [kind[1:] for _, kind, _ in launch.types if kind[0] == "*"]
    tile = "x".join(str(constants[n]) for n in ("BM", "BN", "BK", "B") if n in constants)
    tile += " mirror" if constants.get("MIRROR") else " promote" if constants.get("PROMOTE") else ""
    head = (f"sm_{architecture:<4}{launch.kernel.removesuffix('_kernel'):<9} "
            f"{' '.join(kinds):<32} {tile:<20} {stages:>6} {warps:>5}")
    try:
        compiled = compile_ahead(launch, architecture)
    except Exception as error:               # a compiler's exceptions have no common base
        return head, [f"does not compile: {(str(error).strip() or '-').splitlines()[-1][:80]}"]
    registers, spilled = usage(compiled, architecture)
    shared, limit = compiled.metadata.shared, SHARED[architecture]
    seen = sorted(set(re.findall(INSTRUCTION, compiled.asm["ptx"])))
    want, broken = wanted(launch, architecture), []
    if spilled:
        broken.append(f"{spilled} bytes spilled")
    if shared > limit:
        broken.append(f"{shared} bytes of shared memory, limit {limit}")
    if want and not any(re.search(want, name) for name in seen):
        broken.append(f"no instruction like {want}")
    return (f"{head} {registers:>4} {spilled:>6} {shared:>7} {limit:>7}  "
            + " ".join(seen).replace(".sync.aligned", "")), broken

def table(architectures: list[int]) -> int:
    """Print it; the number of rows that break a rule."""
    print("arch   kernel    tensors                          tile                 stages warps "
          "regs spills  shared   limit  matrix instruction")
    bad = 0
    for architecture in architectures:
        for launch in launches():
            if architecture < FP8_FROM and any("fp8" in kind for _, kind, _ in launch.types):
                continue                     # never chosen there
            line, broken = row(launch, architecture)
            print(line + "".join(f"  <- {rule}" for rule in broken), flush=True)
            bad += bool(broken)
    print(f"{bad} rows break a rule" if bad else "every row keeps the rules")
    return bad

def floor(tokens: int = 49152, chunk: int = 8192) -> None:
    """Bytes and FLOPs of each kernel of the head, forward and backward, and each card's floor."""
    T, V, D, n = tokens, padded_vocab(FINEWEB), FINEWEB.width, -(-tokens // chunk)
    flops = 2 * T * V * D
    for name, size in (("fp8", 1), ("bf16", 2)):
        transposed = 2 - size                # FP8 stores what meets two products twice
        rows = [  # kernel, FLOPs, bytes
            ("W, x to FP8 and transposed", 0, transposed * (15 * V * D + 13 * T * D)),
            ("z = x W^T", flops, size * (T * D + n * V * D) + 2 * T * V),
            ("losses", 0, 2 * T * V), ("g from z", 0, (2 + size + transposed) * T * V),
            ("dx = g W", flops, size * (T * V + n * V * D) + 2 * T * D),
            ("dW += g^T x", flops, size * (T * V + T * D) + n * (8 if size == 1 else 12) * V * D)]
        print(f"\n{name}: {T:,} tokens x {V:,} x {D}, chunks of {chunk:,}")
        print(f"{'kernel':<28}{'GFLOP':>9}{'GB':>8}" + "".join(f"{c:>12}" for c in CARDS))
        total = [0.0] * len(CARDS)
        for kernel, work, traffic in rows:
            times = [1e3 * max(work / (1e12 * peaks[size - 1]), traffic / (1e9 * peaks[2]))
                     for peaks in CARDS.values()]
            total = [a + b for a, b in zip(total, times)]
            print(f"{kernel:<28}{work / 1e9:>9,.0f}{traffic / 1e9:>8.2f}"
                  + "".join(f"{ms:>9.2f} ms" for ms in times))
        print(f"{'floor':<45}" + "".join(f"{ms:>9.2f} ms" for ms in total))
        kind = "fp8-triton" if name == "fp8" else "bf16"
        head = train_gpt.Head(FINEWEB.vocab_size, FINEWEB.logit_cap, FINEWEB.logit_slope, chunk,
                              False, kind)
        held = train_gpt.head_bytes(T, V, D, head)
        print(f"held at once: {held / 2 ** 20:,.0f} MiB, dx and dW included")

def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--floor", action="store_true", help="bytes, FLOPs and least times instead")
    parser.add_argument("--arch", type=int, choices=SHARED, action="append",
                        help="only this architecture; may be given again")
    given = parser.parse_args(arguments)
    if given.floor:
        floor()
        return 0
    return int(table(given.arch or list(SHARED)) > 0)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
