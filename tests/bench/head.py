"""Benchmark of the head and of the symmetric product on a CUDA device, at FINEWEB's sizes:

    python tests/bench/head.py [-n 20] [--units 3]

Forward and backward of the head in each of its kinds; the same FP8 computation from torch's own
pieces under torch.compile; torch's linear_cross_entropy, which knows no soft cap; Polar Express's
products against torch.bmm. All in one process, in turns, so that clocks drift alike: median
milliseconds of n, the quartiles' half distance, the peak of extra memory. For records/LOG.md.
"""
import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.nn.functional as F
from torch import Tensor

import train_gpt as t

S, PIECES = t.FINEWEB, "torch's pieces, FP8, compiled"


def in_turns(calls: dict, n: int) -> dict[str, list[float]]:
    """Milliseconds of n calls of each, by CUDA events, one after the other."""
    times = {name: [] for name in calls}
    for turn in range(n + 3):
        for name, call in calls.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            call()
            ended.record()
            ended.synchronize()
            if turn >= 3:                    # the first three warm up
                times[name].append(began.elapsed_time(ended))
    return times


def show(times: dict[str, list[float]], flops: float) -> dict[str, float]:
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, each in times.items():
        quarter = statistics.quantiles(each, n=4)
        print(f"  {name:42s} {medians[name]:9.3f} ms +- {(quarter[2] - quarter[0]) / 2:.3f}   "
              f"{flops / medians[name] / 1e9:7.1f} TFLOP/s", flush=True)
    return medians


def peak_mib(call) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2 ** 20


@torch.compile(dynamic=False)
def quantised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = x.float().abs().amax() / 448
    q = (x.float() / scale).to(torch.float8_e4m3fn)
    return q, q.T.contiguous(), scale


@torch.compile(dynamic=False)
def loss_and_gradient(z: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    gate = torch.sigmoid(z.float() / S.logit_slope)
    real = torch.arange(z.size(1), device=z.device) < S.vocab_size
    capped = torch.where(real, S.logit_cap * gate, -torch.inf)
    losses = F.cross_entropy(capped, targets, reduction="none")
    p = capped.softmax(1) - F.one_hot(targets, z.size(1))
    g = (p * gate * (1 - gate) * (factor * S.logit_cap / S.logit_slope)).to(torch.float8_e5m2)
    return losses, g, g.T.contiguous()


def torch_pieces(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> tuple:
    """What the FP8 head computes, without a kernel of ours."""
    one, factor = torch.ones((), device=x.device), 2.0 ** 15
    w8, w8_t, w_scale = quantised(weight)
    dweight, dxs, total = torch.zeros_like(weight), [], 0.0
    for part, aim in zip(x.split(chunk), targets.split(chunk)):
        x8, x8_t, x_scale = quantised(part)
        z = torch._scaled_mm(x8, w8.T, x_scale, w_scale, out_dtype=torch.bfloat16,
                             use_fast_accum=True)
        losses, g, g_t = loss_and_gradient(z, aim, factor)
        dxs.append(torch._scaled_mm(g, w8_t.T, one, w_scale / factor, out_dtype=torch.bfloat16))
        dweight += torch._scaled_mm(g_t, x8_t.T, one, x_scale / factor, out_dtype=torch.float32)
        total = total + losses.sum()
    return total, torch.cat(dxs), dweight


def heads(units: int, n: int) -> None:
    machine, V, D, T = t.choose_machine(S), t.padded_vocab(S), S.width, units * S.unit_tokens
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = t.norm(torch.randn(T, D, device="cuda", generator=generator)).bfloat16()
    weight = 0.1 * torch.randn(V, D, device="cuda", generator=generator)
    targets = torch.randint(S.vocab_size, (T,), device="cuda", generator=generator)
    chunk = machine.head.chunk
    kinds = ("bf16", *(t.FP8_HEADS if t.can(machine.device)[1] else ()))
    calls = {f"ours, {kind}": lambda h=machine.head._replace(kind=kind): t.head_loss_op(
        x, weight, targets, *h) for kind in kinds}
    if t.can(machine.device)[1]:
        calls[PIECES] = lambda: torch_pieces(x, weight, targets, chunk)
    if hasattr(F, "linear_cross_entropy"):
        w16 = weight.bfloat16().requires_grad_()
        xg = x.clone().requires_grad_()
        calls["linear_cross_entropy, bf16, no cap"] = lambda: torch.autograd.grad(
            F.linear_cross_entropy(xg, w16, targets, reduction="sum"), (xg, w16))
    print(f"head, forward and backward: {T:,} x {V:,} x {D}, chunks of {chunk:,}, n = {n}")
    for name, call in calls.items():
        print(f"  {name:42s} {peak_mib(call):9.0f} MiB")
    medians = show(in_turns(calls, n), 6 * T * V * D)
    if PIECES in medians:
        best = min(ms for name, ms in medians.items() if name.startswith("ours, fp8"))
        print(f"  torch's pieces / ours: {medians[PIECES] / best:.2f}")


def symmetric(n: int) -> None:
    for shape in ((24, 768, 3072), (40, 768, 768)):
        bank = torch.randn(shape, device="cuda").bfloat16()
        square = torch.bmm(bank, bank.mT)
        print(f"symmetric products of {list(shape)}, n = {n}; FLOPs counted as bmm's")
        medians = show(in_turns({
            "X X^T by bmm": lambda: torch.bmm(bank, bank.mT),
            "X X^T by ours": lambda: t.symmetric_op(bank, None, 1.0, 1.0)}, n),
            2 * bank.numel() * shape[1])
        show(in_turns({
            "b A + c A A by baddbmm": lambda: torch.baddbmm(square, square, square, beta=-2.0,
                                                            alpha=0.5),
            "b A + c A A by ours": lambda: t.symmetric_op(square, square, -2.0, 0.5)}, n),
            2 * square.numel() * shape[1])
        print(f"  bmm / ours: {medians['X X^T by bmm'] / medians['X X^T by ours']:.2f}")
        polar = torch.compile(t.polar_express, dynamic=False)
        show(in_turns({"Polar Express": lambda: polar(bank)}, n),
             10 * (bank.numel() + square.numel() / 2) * 2 * shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-n", type=int, default=20)
    parser.add_argument("--units", type=int, default=3, help="of 16,384 tokens")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("head.py: needs a CUDA device")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    heads(options.units, options.n)
    symmetric(options.n)


if __name__ == "__main__":
    main()
