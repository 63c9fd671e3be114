"""A run that lasts: checkpoints on the way, exact resumption, signals that finish the step.

    ./run.sh --checkpoint_every=30m                  or steps: --checkpoint_every=500
    ./run.sh --checkpoint_every=30m --resume=auto    goes on from the newest unfinished checkpoint
    ./run.sh --resume=PATH --steps=N                 goes on under a longer schedule: an experiment
    ./run.sh --resume=PATH --resume_anyway           with another recipe, seed or program

All other words are settings of train_gpt.py, whose Run this is; only saving and resuming are added.
A checkpoint lies beside the log as `<id>_step<N>.pt`: the last two are kept, the best of those
validated, and the last before the cool-down, where a longer schedule can begin. Saving stops the
clock for the copy to the host; a thread writes it. SIGINT and SIGTERM end training behind their
step and its checkpoint (exit code 130, 143); a second one ends the process.

A run is its tensors and its end event so far: the stream of tokens follows from the step, and
nothing draws random numbers behind the initial values. So on a CPU a resumed run is bit for bit the
uninterrupted one. Its log goes on in the same files behind a `resume` event, and timed training
adds up; steps behind the checkpoint are cut off and done again.
"""
import fcntl
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from _model import read_checkpoint, t

OWN = ("checkpoint_every", "resume", "resume_anyway")
LOGS = ("txt", "jsonl")
BORN = time.perf_counter()                   # seconds; wall time counts from here
PROGRAM = sha256(Path(t.__file__).read_bytes()).hexdigest()  # now: it may be edited during the run


class Stop:
    """Of SIGINT and SIGTERM, the first ends training behind its step, the second the process."""

    name, stepping = "", False
    run: "KeptRun | None" = None             # of this process

    def __call__(self, number: int, frame) -> None:
        if self.name:
            os._exit(128 + number)
        self.name = signal.Signals(number).name
        if not self.stepping:
            raise KeyboardInterrupt(self.name)


class KeptRun(t.Run):
    """A run that saves what it is, at the intervals of `every`, and begins where `saved` ends."""

    written: Path | None = None              # its newest checkpoint

    def __init__(self, s: t.Settings, machine: t.Machine, every: str, saved: dict | None,
                 stop: Stop):
        super().__init__(s, machine)
        self.every, self.stop, self.last, self.failed = every, stop, time.perf_counter(), False
        self.saved_step, self.best = saved["step"] if saved else 0, (1e9, 0)  # loss, step
        self.pool, stop.run, self.norms = ThreadPoolExecutor(1, "writer"), self, []
        self.writing = self.pool.submit(int)
        if saved:
            for path in saved["path"].parent.glob(f".{saved['id']}*.tmp"):
                path.unlink()                # its writer was killed
            state = saved.pop("state")       # mapped from the file: it goes when it was copied
            for name, tensor in self.state().items():
                if name not in state or state[name].shape != tensor.shape:
                    raise t.UserError(f"{saved['path']}: its tensors are not those of this model: "
                                      f"{name}")
                tensor.copy_(state[name])
            self.best, self.written = tuple(saved["best"]), saved["path"]
            stages = [stage.first_step for stage in self.stages]
            self.resumed = dict(end=saved["end"], facts=dict(
                file=saved["path"].name, step=saved["step"], stages=stages, **saved["differs"]))
            if not saved["differs"]:
                self.resumed["stem"] = saved["path"].with_name(saved["id"])

    def step(self, number: int, micro_batches: list) -> torch.Tensor:
        self.stop.stepping = True
        norms = torch._foreach_norm(list(self.optimizer.parameters.values()))
        self.norms = [*self.norms[-1:], norms]  # what this step and the one before it met
        return super().step(number, micro_batches)

    def first_bad(self) -> str:
        """The parameters that were not finite when a step met them first, as far as that is known.
        Losses are read a step late, and by then all are bad."""
        for norms in self.norms:
            if bad := [name for name, norm in zip(self.optimizer.parameters, norms)
                       if not norm.isfinite()]:
                return ", ".join(bad)
        return "none"

    def validate(self, step: int) -> float:
        self.stop.stepping = False           # nothing is lost by leaving a validation
        loss = super().validate(step)
        self.best = min(self.best, (loss, step))
        return loss

    def due(self, step: int) -> bool:
        number, minutes, _ = self.every.partition("m")
        since = (time.perf_counter() - self.last) / 60 if minutes else step - self.saved_step
        return bool(self.stop.name or super().due(step) or step % self.s.val_every == 0
                    or number and since >= int(number))

    def save(self, log: t.Log, stem: Path, end: dict) -> None:
        """Begin to write how things stand behind step end["step"], then stop if that was asked."""
        began, _ = time.perf_counter(), self.writing.result()
        state = {name: x.to("cpu", copy=True) for name, x in self.state().items()}
        self.saved_step, self.last = end["step"], time.perf_counter()
        earlier = self.resumed["end"]["wall_s"] if self.resumed else 0.0
        end = end | dict(wall_s=earlier + self.last - BORN)
        total = t.total_steps(self.s)
        if log.writes and self.s.checkpoint:
            if "stem" not in self.resumed:   # else `reopen` did: nobody else may go on with the log
                for file in log.files:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if end["step"] < total:          # the last one is no event: every record has it
                log.event("checkpoint", dict(step=end["step"],
                                             stall_ms=1000 * (self.last - began)))
            self.writing = self.pool.submit(self.write, log, stem, dict(
                format=1, id=stem.name, program_sha256=PROGRAM, settings=asdict(self.s),
                step=end["step"], state=state, end=end, best=list(self.best),
                sizes={kind: file.tell() for kind, file in zip(LOGS, log.files)}))
        if end["step"] == total or self.stop.name:
            self.writing.result()            # whole, or what is not finite in it
        if self.stop.name:
            raise KeyboardInterrupt(self.stop.name)

    def write(self, log: t.Log, stem: Path, content: dict) -> None:
        """In the thread: write, then remove what is no longer kept."""
        step = content["step"]
        if bad := [name for name, x in content["state"].items() if not x.isfinite().all()]:
            raise t.NonFinite(f"not finite behind step {step}: {bad[0]}, one of {len(bad)}")
        path = stem.with_name(f"{stem.name}_step{step}.pt")
        try:
            for file in log.files:           # the checkpoint names how far they go
                if not file.closed:
                    file.flush()
                    os.fsync(file)
            t.write_whole(path, partial(torch.save, content))
            self.written = path
            found = {int(p.stem.rpartition("step")[2]): p
                     for p in stem.parent.glob(f"{stem.name}_step*.pt")}
            flat = [n for n in found if t.lr_scale(n - 1, self.s) == 1]
            kept = {*sorted(found)[-2:], self.best[1], max(flat, default=0)}
            for number in set(found) - kept:
                found[number].unlink()
            self.failed = False
        except (OSError, RuntimeError) as error:  # torch.save hides the one behind the other
            if not self.failed:
                log.line(f"checkpoint of step {step} not written: older ones are whole, training "
                         f"goes on: {error.__context__ or error}")
            self.failed = True


def newest(s: t.Settings) -> Path | None:
    """The newest whole checkpoint of this name and seed whose run is not complete."""
    name = s.name or dict(fineweb="FineWeb", tiny="Tiny")[s.track]
    parent = Path(s.records_dir) if s.records_dir else Path(t.__file__).parent / "records"
    files = parent.glob(f"????-??-??_{name}/*_seed{s.seed}_*_step*.pt")
    for path in sorted(files, key=os.path.getmtime, reverse=True):
        if not path.with_name(path.name.partition("_step")[0] + ".pt").exists():
            with suppress(t.UserError):      # one that is damaged
                read_checkpoint(path)
                return path
    return None


def choose(s: t.Settings, resume: str, anyway: bool) -> dict | None:
    """The checkpoint to go on from, its path and what `differs`: then the run is an experiment with
    a log of its own. The number of steps may differ before the cool-down, all else if asked for."""
    path = newest(s) if resume == "auto" else Path(resume) if resume else None
    if path is None:
        return None
    saved = read_checkpoint(path)
    if "end" not in saved:
        raise t.UserError(f"{path}: written by train_gpt.py, at the end of a run; to go on "
                          "from a run, begin it with --checkpoint_every")
    here = asdict(s) | {"program": PROGRAM}
    there = saved["settings"] | {"program": saved["program_sha256"]}
    bound = t.RECIPE_FIELDS | {"seed", "program"}
    differs = {name: (there.get(name), value) for name, value in here.items()
               if name in bound and there.get(name) != value}
    longer = set(differs) == {"steps"} and all(
        t.lr_scale(max(0, saved["step"] - 1), replace(s, steps=n)) == 1 for n in differs["steps"])
    if differs and not (longer or anyway) or saved["step"] > t.total_steps(s):
        found = "; ".join(f"{name} {a} there, {b} here" for name, (a, b) in differs.items())
        raise t.UserError(f"{path}: step {saved['step']} of another run: {found}; only --steps may "
                          "change, before the cool-down, or all with --resume_anyway")
    return saved | dict(path=path, differs=differs)


def reopen(saved: dict) -> list:
    """Cut the log to where the checkpoint was written. The open files keep others from going on."""
    files = []
    for kind in LOGS:
        files.append(open(saved["path"].with_name(f"{saved['id']}.{kind}"), "r+b"))
        try:
            fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise t.UserError(f"{files[-1].name}: its run is still going on") from None
        files[-1].truncate(saved["sizes"][kind])
    return files


def own_words(words: list[str]) -> tuple[dict, list[str]]:
    """What is for this program, and the settings of train_gpt.py."""
    given, rest = dict.fromkeys(OWN, ""), []
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if name in OWN and (equals or name == "resume_anyway"):
            given[name] = value or "true"
        else:
            rest.append(word)
    if not re.fullmatch("([1-9][0-9]*m?)?", given["checkpoint_every"]):
        raise t.UserError(f"--checkpoint_every={given['checkpoint_every']}: expected steps, as in "
                          "500, or minutes, as in 30m")
    return given, rest


def run(words: list[str], stop: Stop) -> int:
    given, rest = own_words(words)
    s, changed = t.parse_settings(rest)
    saved = choose(s, given["resume"], given["resume_anyway"] == "true")
    locks = []
    if saved:
        if saved["step"] == t.total_steps(s) and saved["path"].stem == saved["id"]:
            print(f"{saved['path']}: its run is complete, nothing is left to do")
            return 0
        print(f"resume: {saved['path']}, step {saved['step']}", flush=True)
        if saved["differs"]:
            print("an experiment, as these differ (there, here): " + ", ".join(
                f"{name} {pair}" for name, pair in saved["differs"].items()))
        elif int(os.environ.get("RANK", 0)) == 0:
            locks = reopen(saved)
    part = partial(KeptRun, every=given["checkpoint_every"], saved=saved, stop=stop)
    try:
        code, total = t.run_once(s, changed, part), f"_step{t.total_steps(s)}"
        last = stop.run.written
        if code == 3:
            print(f"keep.py: parameters that were not finite first: {stop.run.first_bad()}; the "
                  f"last good checkpoint: {last}", file=sys.stderr)
        if code == 0 and last and last.stem.endswith(total):
            last.rename(last.with_name(last.name.replace(total, "")))  # until then it can go on
        return code
    finally:
        if stop.run:
            stop.run.pool.shutdown()         # what is being written is there before we leave
        for file in locks:
            file.close()


def main(words: list[str]) -> int:
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        return run(words, stop)
    except (t.UserError, OSError) as error:
        print(f"keep.py: {getattr(error, 'line', error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:       # before there was a log to say so
        print("keep.py: interrupted before the run began", file=sys.stderr)
        return 143 if str(error) == "SIGTERM" else 130


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
