"""Benchmarks of the parts of a tiny step, and of the loader:

    python tests/bench/bench.py                        parts of a step, compiled against eager
    python tests/bench/bench.py --shards=FOLDER        the loader alone, on GPT-2 shards

Medians of n timed calls after one warm-up call, in milliseconds, on the machine as it is: leave it
alone while this runs. These are figures for records/LOG.md, not tests.
"""
import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

import train_gpt as t


def median_ms(call, n: int) -> tuple[float, float]:
    """Median and half the spread between the quartiles."""
    call()
    times = []
    for _ in range(n):
        began = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - began))
    quarter = statistics.quantiles(times, n=4)
    return statistics.median(times), (quarter[2] - quarter[0]) / 2


def show(name: str, call, n: int) -> float:
    ms, spread = median_ms(call, n)
    print(f"  {name:34s} {ms:8.2f} ms +- {spread:.2f}", flush=True)
    return ms


def loader(folder: Path, units: int) -> None:
    """Units of track fineweb, assembled on this thread alone."""
    s = replace(t.FINEWEB, steps=1, extra_steps=0, tokens_per_step=units * t.FINEWEB.unit_tokens)
    began = time.perf_counter()
    data = t.TrainData(s, folder)
    indexed = data.ribbon.borders[-1] / (time.perf_counter() - began)
    began = time.perf_counter()
    for first in range(0, units, 3):
        data.micro_batch(list(range(first, min(first + 3, units))))
    rate = units * s.unit_tokens / (time.perf_counter() - began)
    print(f"loader: {rate / 1e6:.1f}M tokens/s assembled, {indexed / 1e6:.1f}M tokens/s indexed "
          f"({units} units of {s.unit_tokens:,}, one thread)")


def step_parts(compile: str, n: int) -> float:
    """Parts of a tiny step; tokens a second of the whole."""
    s = replace(t.TINY, compile=compile)
    machine = t.choose_machine(s)
    t.prepare(machine, s)
    run, k = t.Run(s, machine), machine.share[0]
    batch, stage = run.train_data.micro_batch(list(range(k))), run.stages[0]
    print(f"compile={compile}, {machine.dtype}, {torch.get_num_threads()} threads, n = {n}")
    whole = show("whole step", lambda: run.step(0, [lambda: batch]), n)
    show("forward and backward", lambda: run.gradients(batch, stage), n)
    grads = {name: p.grad for name, p in run.optimizer.parameters.items()}

    def update() -> None:
        for name, p in run.optimizer.parameters.items():
            p.grad = grads[name]
        run.optimizer.step(0, 1.0, 0.95)

    show("optimizer", update, n)
    x = torch.randn(len(batch.inputs_T), s.width, dtype=machine.dtype)
    show("head of it, forward and backward", lambda: t.head_loss_op(
        x, run.model.head.detach(), batch.targets_T, *machine.head), n)
    show("masks and rotary tables", lambda: t.make_view(batch, stage, s.doc_cap), n)
    show("loader, one step's units", lambda: run.train_data.micro_batch(list(range(k))), n)
    show("validation, one group", lambda: run.val_losses(0, run.stages[-1]), max(3, n // 5))
    return 1000 * s.tokens_per_step / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=Path, help="folder with *_train_*.bin in GPT-2 tokens")
    parser.add_argument("-n", type=int, default=15)
    options = parser.parse_args()
    if options.shards:
        return loader(options.shards, 600)
    rates = {compile: step_parts(compile, options.n) for compile in ("on", "off")}
    print(f"compiled {rates['on']:,.0f} tokens/s, eager {rates['off']:,.0f}: "
          f"ratio {rates['on'] / rates['off']:.2f}")


if __name__ == "__main__":
    main()
