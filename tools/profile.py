"""Where the time of a training step goes: ten true steps under torch.profiler.

    ./run.sh profile                        the track's recipe on this machine
    ./run.sh profile --at=1100              from that step on (windows grow on the way); default 0
    ./run.sh profile --compile=off          every setting of train_gpt.py works here too
    ./run.sh profile --trace=FILE.json.gz   default: profile.trace.json.gz in the records' folder

After the run's own warm-up come ten steps without the profiler, for speed and MFU, and ten under
it, for the shares. The trace opens in https://ui.perfetto.dev.

What is counted: on CUDA the device time of the kernels that an operator launches, on a CPU the
time that the main thread spends in it and in no other. Where it goes follows from the operator: the
optimizer and the head are ranges of their own, compiled or not; attention is named so; a matrix
product with a side of the MLP's width is the MLP's, others are attention's (q, k, v, o, gates).
All else between them is one row, because the compiler fuses it into kernels that serve several
parts: norms, rotary positions, gates, activations, embeddings, copies.
"""
import os
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)                      # this folder's profile.py hides Python's own

from torch.autograd.profiler_util import FunctionEvent  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

import train_gpt as t  # noqa: E402

STEPS = 10
OPTIMIZER, LOADER = "speedrun: optimizer", "speedrun: loader"  # ranges, as the trace shows them
PARTS = {"attention": "q k v o, softmax, gates", "MLP": "its products",
         "head": "logits, loss, their gradients", "optimizer": "Muon and Adam",
         "rest": "norms, rotary, activations, embeddings, copies",
         "loader": "the host waited for a batch", "gaps": ""}
GAPS = {"cpu": "Python, outside of any operator", "cuda": "the device had nothing to do"}

def ranged(name: str, function):
    """`function` in a named range of the profile."""
    def inside(*arguments):
        with record_function(name):
            return function(*arguments)
    return inside

def part(event: FunctionEvent, mlp_width: int) -> str:
    """The row of PARTS to which the time of an operator belongs.

    The operator and what called it decide, from the outermost in.
    """
    chain = [event]
    while chain[-1].cpu_parent is not None:
        chain.append(chain[-1].cpu_parent)
    names = [e.name for e in chain]
    if OPTIMIZER in names:
        return "optimizer"
    if LOADER in names:
        return "loader"
    if any("head_loss" in name for name in names):
        return "head"
    if any(re.search("attention|attn|flash", name, re.IGNORECASE) for name in names):
        return "attention"
    for e in chain:
        if re.fullmatch(r"(aten|mkldnn)::\w*(mm|linear\w*)", e.name):
            sizes = {size for shape in e.input_shapes for size in shape}
            return "MLP" if mlp_width in sizes else "attention"
    return "rest"

def shares(events: list[FunctionEvent], cuda: bool, mlp_width: int) -> Counter:
    """Milliseconds of each part but the gaps, over all steps."""
    found = Counter()
    main = next(e.thread for e in events if e.name == OPTIMIZER)
    for e in events:
        if e.device_type.name != "CPU":      # the kernels themselves: their operators count them
            continue
        if cuda:                             # backward has a thread of its own there
            found[part(e, mlp_width)] += e.self_device_time_total / 1000
        elif e.thread == main:
            found[part(e, mlp_width)] += e.self_cpu_time_total / 1000
    return found

def measure(run: t.Run, first: int) -> tuple[float, float, Counter, profile]:
    """Milliseconds of a step without and with the profiler, and of the parts under it."""
    s, m = run.s, run.machine
    reader = t.Reader(run.train_data, s, m, first)
    batches = [ranged(LOADER, reader.next)] * (s.tokens_per_step // s.unit_tokens // m.share[0])
    run.optimizer.step = ranged(OPTIMIZER, run.optimizer.step)
    cuda, times = m.device.type == "cuda", []

    def steps(number: int) -> None:
        clock = t.Clock(m.device)
        clock.start()
        for n in range(number, number + STEPS):
            run.step(n, batches)
        clock.stop()
        times.append(clock.ms() / STEPS)

    try:
        steps(first)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        waited = reader.waited
        with profile(activities=activities, record_shapes=True) as seen:
            steps(first + STEPS)
        waited = reader.waited - waited
    finally:
        reader.close()
    found = shares(seen.events(), cuda, s.mlp_width)
    found["loader"] = 1000 * waited          # of the host, on CUDA too
    for name in found:
        found[name] /= STEPS
    found["gaps"] = max(0.0, times[1] - sum(found.values()))
    return times[0], times[1], found, seen

def report(run: t.Run, first: int, trace: Path) -> None:
    """Measure, print the table, write the trace."""
    s, m = run.s, run.machine
    stage = t.stage_at(first, run.stages)
    print(f"track {s.track}, steps from {first} on, {s.tokens_per_step:,} tokens each, windows "
          f"{stage.short} and {stage.long}\n{'compiled' if m.compile else 'not compiled'}, "
          f"{str(m.dtype).removeprefix('torch.')}, micro-batch {m.share[0]} units, attention "
          f"{m.attention}, head {m.head.kind}")
    plain, profiled, found, seen = measure(run, first)
    units = list(range(s.tokens_per_step // s.unit_tokens))
    flops = t.flops_per_token(s, run.train_data.micro_batch(units).positions_T, stage)
    rate, card = 1000 * s.tokens_per_step / plain, t.card_of(t.environment(m)["device"])
    mfu = f"{rate * flops / (1e12 * card.tflops):.1%}" if card else "n/a"
    print(f"step {plain:.2f} ms, under the profiler {profiled:.2f} ms\n{rate:,.0f} tokens/s, "
          f"{flops / 1e6:,.1f} MFLOP a token, MFU {mfu}, peak memory "
          f"{t.peak_memory_mib(m.device):,} MiB\n")
    if not found["MLP"]:
        raise t.UserError("the profiler saw no kernel: CUPTI's warning above says why; often the "
                          "driver keeps its counters to the administrator (ERR_NVGPUCTRPERM)")
    print(f"{'part':<11}{'ms/step':>9}{'share':>9}")
    for name, what in PARTS.items():
        print(f"{name:<11}{found[name]:>9.2f}{found[name] / profiled:>9.1%}  "
              f"{what or GAPS[m.device.type]}")
    temporary = trace.with_name(f".{os.getpid()}.{trace.name}")
    try:
        seen.export_chrome_trace(str(temporary))
        os.replace(temporary, trace)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"\ntrace: {trace} ({trace.stat().st_size / 1e6:.1f} MB)")

def main(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    own, others = {"--at": "0", "--trace": ""}, []
    for word in arguments:
        name, equals, value = word.partition("=")
        if equals and name in own:
            own[name] = value
        else:
            others.append(word)
    try:
        s, _ = t.parse_settings(others)
        first, last = t.parse_value("at", int, own["--at"]), t.total_steps(s) - 2 * STEPS
        if not 0 <= first <= last:
            raise t.UserError(f"--at={first}: expected 0 to {last}: {2 * STEPS} steps follow")
        folder = Path(s.records_dir) if s.records_dir else ROOT / "records"
        trace = Path(own["--trace"] or folder / "profile.trace.json.gz")
        if not os.access(trace.parent, os.W_OK):
            raise t.UserError(f"--trace={trace}: its folder is not there or cannot be written to; "
                              "name another file")
        machine = t.choose_machine(s)
        t.prepare(machine, s)
        run = t.Run(s, machine)
        run.warm_up()
        report(run, first, trace)
    except t.UserError as error:
        print(f"profile: {error.line}", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
