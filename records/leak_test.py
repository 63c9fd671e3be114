"""Do a recorded program's validation losses use what they may not see?

    python records/leak_test.py records/<folder>/train_gpt_<hash>.py [--track=fineweb]

The program builds its model small on the CPU, at random values, and validates made-up documents
through its own loader, views, model and head. Four statements must hold, for every token of them:

  later tokens     a loss depends on its document up to the target, and on nothing behind it
  other documents  it depends on no other document
  distribution     the losses of all possible next tokens at one place are those of a probability
                   distribution: sum over v of exp(-loss_v) = 1. A model that was shown its target,
                   or a loss that is none, fails this whatever it does with it
  memory           the same documents give the same losses again, and the loss that a run reports
                   is the mean of these

It finds mistakes, not malice: a program can see that it is being tested. The program runs in a
process of its own with bounds on time, memory and files, and without a network where the system
lets us take it away; apart from that it has your rights, so read it first. What it must offer is
what train_gpt.py has: PRESETS, choose_machine, prepare, and Run with model, stages, val_data,
val_losses and validate.

Exit code: 0 no leak, 1 a leak, or a program that cannot be tested, 2 wrong usage.
"""
import argparse
import bisect
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS, MEMORY, FILE = 300, 4 << 30, 64 << 20  # of the program: wall and CPU time, bytes
TOLERANCE = 1e-3          # nats, and of a sum of probabilities; rounding in fp32 is below 1e-5
VOCAB = 33                # the last token opens a document
TOKENS = 640              # targets; sequences of 256, so two borders lie inside documents
LENGTHS = (1, 2, 3, 70, 1, 150, 20, 64, 90, 5, 129, 16, 1, 89)  # of the documents
SMALL = dict(width=32, head_dim=16, mlp_width=64, vocab_size=VOCAB, unit_tokens=64, doc_cap=64,
             tokens_per_step=64, steps=3, extra_steps=1, epochs=1, window_unit=8, val_sequence=256,
             val_tokens=TOKENS, val_sha256="", device="cpu", precision="fp32", compile="off",
             threads=1)


def documents(seed: int) -> list[int]:
    """One more token than there are targets, in documents of LENGTHS."""
    rng = random.Random(seed)
    tokens = [t for n in LENGTHS for t in (VOCAB - 1, *rng.choices(range(VOCAB - 1), k=n - 1))]
    return tokens[:TOKENS + 1]


def write_shard(path: Path, tokens: list[int]) -> None:
    import numpy as np

    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())


class Subject:
    """The program, and the losses that it gives to documents."""

    def __init__(self, path: Path, track: str, folder: Path):
        import dataclasses
        import importlib.util

        spec = importlib.util.spec_from_file_location("recorded", path)
        self.program, self.folder = importlib.util.module_from_spec(spec), folder
        sys.modules["recorded"] = self.program
        spec.loader.exec_module(self.program)
        preset = self.program.PRESETS[track]
        self.settings = dataclasses.replace(preset, data_dir=str(folder), **SMALL)
        self.machine = self.program.choose_machine(self.settings)
        self.program.prepare(self.machine, self.settings)
        write_shard(folder / "a_train_000000.bin", documents(0))

    def losses(self, tokens: list[int]) -> list[float]:
        """The loss of each target, in the order of the text."""
        import torch

        write_shard(self.folder / "a_val_000000.bin", tokens)
        s = self.settings
        self.run = run = self.program.Run(s, self.machine)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in run.model.parameters():  # a head of zeros would hide everything
                parameter.normal_(0.0, 0.4, generator=generator)
        losses = []
        for group in range(len(run.val_data.groups)):
            counted = run.val_data.batch(group).targets_T >= 0
            losses += run.val_losses(group, run.stages[-1])[counted].tolist()
        return losses

    def reported(self) -> float:
        """The loss that a run reports at its end, of the documents last seen."""
        return self.run.validate(self.settings.steps + self.settings.extra_steps)


def examine(subject: Subject) -> list[str]:
    """One line for each statement that does not hold."""
    base, other = documents(1), documents(2)[::-1]  # reversed: its documents begin elsewhere
    starts = [n for n, token in enumerate(base) if token == VOCAB - 1]
    middles = [(a + b) // 2 for a, b in zip(starts, [*starts[1:], TOKENS]) if b - a > 2]
    longest = max(zip([b - a for a, b in zip(starts, starts[1:])], starts))[1]
    edges = [longest + n for n in (1, 63, 64, 65, 127, 128, 129)]  # of tiles
    losses = subject.losses(base)
    lines = {}                               # a statement is broken once
    if len(losses) != TOKENS:
        return [f"memory: expected the losses of {TOKENS} targets, found {len(losses)}"]

    def change(name: str, what: str, tokens: list[int], still: list[int]) -> list[float]:
        """How far each loss moves with these tokens instead; those of `still` may not."""
        moved = [abs(a - b) for a, b in zip(losses, subject.losses(tokens))]
        for n in still:
            if not moved[n] <= TOLERANCE:    # nan is no number to trust
                lines.setdefault(name, f"{name}: expected no loss to move with {what}, found that "
                                       f"of token {n} moved by {moved[n]:.3g} nats")
        return moved

    for cut in sorted({*middles, *edges}):   # loss n has the target n + 1
        moved = change("later tokens", f"the tokens from {cut} on", base[:cut] + other[cut:],
                       list(range(cut - 1)))
        if not max(moved[cut:]) > TOLERANCE:
            lines.setdefault("input", "input: expected losses that depend on the text, found none")
    for odd in (0, 1):
        same = [(bisect.bisect_right(starts, n)) % 2 == odd for n in range(TOKENS + 1)]
        change("other documents", "the text of other documents",
               [t if t == VOCAB - 1 or same[n] else (t + 5) % (VOCAB - 1)
                for n, t in enumerate(base)], [n for n in range(TOKENS) if same[n]])
    sums = dict.fromkeys(middles, 0.0)
    for token in range(VOCAB):
        found = subject.losses([token if n in sums else t for n, t in enumerate(base)])
        sums = {n: total + math.exp(-found[n - 1]) for n, total in sums.items()}
    for n, total in sums.items():
        if not abs(total - 1) <= TOLERANCE:
            lines.setdefault("distribution", "distribution: expected probabilities that add up to "
                             f"1, found {total:.4g} for token {n}")
    change("memory", "other documents seen before", base, list(range(TOKENS)))
    mean, reported = sum(losses) / TOKENS, subject.reported()
    if not abs(mean - reported) <= TOLERANCE:
        lines["mean"] = f"memory: expected the mean loss {mean:.5f} reported, found {reported:.5f}"
    return list(lines.values())


# -------------------------------------------------------------------------------------------------
# Two processes: this one bounds, the other one runs the program

def run_inside(program: Path, track: str, folder: Path) -> None:
    """In the bounded process: examine the program and leave the lines in `folder`."""
    import resource

    for limit, value in ((resource.RLIMIT_DATA, MEMORY), (resource.RLIMIT_FSIZE, FILE),
                         (resource.RLIMIT_CPU, SECONDS)):
        resource.setrlimit(limit, (value, value))
    sys.addaudithook(refuse_network)
    try:
        lines = examine(Subject(program, track, folder))
    except (Exception, SystemExit) as error:  # a UserError is a SystemExit with a line
        text = (getattr(error, "line", "") or str(error) or "-").splitlines()[0]
        lines = [f"program: expected one that can be tested, found {type(error).__name__}: {text}"]
    (folder / "lines.json").write_text(json.dumps(lines))


def refuse_network(event: str, _: tuple) -> None:
    """Where the system cannot take the network away, Python's own sockets are refused."""
    if event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname"):
        raise PermissionError(f"{event} in a test without network")


def without_network() -> list[str]:
    """The command in front of a command that takes its network away; [] where there is none."""
    if shutil.which("unshare"):
        for command in (["unshare", "-n"], ["unshare", "-rn"]):
            if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
                return command
    return []


def leak_test(program: Path, track: str) -> tuple[list[str], str]:
    """Lines on what does not hold, none for an honest program; and how it was kept in bounds."""
    guard = without_network()
    how = "no network" if guard else "Python's sockets refused (the system cannot take it away)"
    with tempfile.TemporaryDirectory() as name:
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": name, "TMPDIR": name,
                       "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            [*guard, sys.executable, "-B", str(Path(__file__).resolve()), "--inside", name,
             f"--track={track}", str(program.resolve())], cwd=name, env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True)
        try:
            errors = child.communicate(timeout=SECONDS)[1].decode(errors="replace").splitlines()
        except subprocess.TimeoutExpired:
            errors = [f"more than {SECONDS} s"]
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # and whatever it started
            except ProcessLookupError:
                pass
            child.wait()
        try:
            return json.loads((Path(name) / "lines.json").read_bytes()), how
        except (OSError, ValueError):
            last = errors[-1] if errors else f"exit code {child.returncode}"
            return [f"program: expected one that can be tested, found that it ended: {last}"], how


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="PROGRAM", type=Path, help="the recorded program")
    parser.add_argument("--track", default="tiny", help="the preset whose blocks it has")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if not given.program.is_file():
        parser.error(f"{str(given.program)!a} is not a file")
    if given.inside:
        run_inside(given.program, given.track, given.inside)
        return 0
    lines, how = leak_test(given.program, given.track)
    for line in lines:
        print(ascii(f"{given.program}: {line}")[1:-1])
    print(f"{'LEAKS' if lines else 'NO LEAK FOUND'}: {given.program.name} as {given.track}, {how}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
