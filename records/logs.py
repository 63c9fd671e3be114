"""Reads the logs of training runs: ours, and every text format that modded-nanogpt has published.

    runs = read_runs("records/2026-12-01_TinyBaseline")      a folder, or one file

Ours are JSON lines, one event each; their text twin is read only where it stands alone. Theirs are
text, and three families of lines count, from the start of a line to its end:

    step:125/3040 val_loss:4.51317 train_time:76.628s step_avg:613.02ms key:value ...
    step:10/6200 train_loss:6.7231 train_time:77676ms step_avg:nanms      the loss may be missing
    s:250 tel:6.1710   and   s:250 trl:6.1818 lr:0.000215 norm:0.90       llm.c; no times

A file may hold several runs, one behind the other. A run ends where the next one is announced or
where steps go back; lines that say once more what it said already are the tail of a capture. What
comes before the first "Running PyTorch" is the source of a program that the log begins with.

What a log holds is data, never code: nothing is evaluated, imported or executed. A line that looks
like a result and has no place in a run is counted in `Run.unplaced`, never guessed at.
"""

import json
import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import verify

KINDS = (".jsonl", ".txt", ".log", ".out")       # of files that may be logs
APART = ("runs", "logs", "incomplete")           # folders that only sort a record's files
GRACE = 20               # early logs restart the clock behind step 10: what came before is untimed
MOST = 1e15              # above any loss, time, step or seed


class Validation(NamedTuple):
    step: int
    loss: float             # nats per token; may be nan
    time_ms: float | None   # timed training until here; None where the log has no time


class Step(NamedTuple):
    step: int
    loss: float | None      # training loss, where the log has it
    time_ms: float | None   # timed training until the end of this step


class Steps(Sequence):
    """Many `Step`s in little memory. nan stands for a loss or a time that the log lacks."""

    def __init__(self) -> None:
        self.step, self.loss, self.time_ms = array("q"), array("d"), array("d")

    def add(self, step: int, loss: float, time_ms: float) -> None:
        self.step.append(step)
        self.loss.append(loss)
        self.time_ms.append(time_ms)

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, at: int) -> Step:
        loss, time_ms = self.loss[at], self.time_ms[at]
        return Step(self.step[at], None if loss != loss else loss,
                    None if time_ms != time_ms else time_ms)


@dataclass(frozen=True)
class Run:
    """One run of one file. What the log does not say is None."""
    path: Path
    index: int                            # of the run within its file
    record: str                           # name of the folder that stands for the record
    format: str                           # "jsonl" (ours), "text", "llm.c"
    validations: tuple[Validation, ...]
    steps: Sequence[Step]                 # step lines, in order
    planned: int | None                   # steps of the schedule
    last_step: int
    complete: bool                        # the last planned step has a validation
    time_ms: float | None                 # timed training, as printed last with a validation
    step_avg_ms: float | None             # likewise
    seed: int | None = None
    tokens_per_step: float | None = None  # mean, where it changes within a run
    torch: str | None = None
    gpu: str | None = None                # "NVIDIA H100 80GB HBM3"; of ours on a CPU, its name
    gpus: int | None = None               # number listed
    hardware: str | None = None           # "8 x NVIDIA L40S", wherever the log says it
    peak_alloc_mib: int | None = None
    peak_reserved_mib: int | None = None
    program_sha256: str | None = None
    track: str | None = None              # ours: "fineweb" or "tiny"
    target: float | None = None           # nats per token, of the run's own settings
    versions: dict = field(default_factory=dict)    # python, torch, triton, cuda, driver ...
    conditions: tuple[dict, ...] = ()     # ours: clocks, power, temperature at each validation
    energy_j: float | None = None         # between first and last validation; not of resumed runs
    unplaced: int = 0                     # with the first run of a file: its lines without place

    @property
    def final_loss(self) -> float | None:
        """Loss of the last validation, nats per token; None without one."""
        return self.validations[-1].loss if self.validations else None


def track_of(run: Run) -> str:
    """A log that names no track is one of modded-nanogpt's."""
    return run.track or "fineweb"


def target_of(run: Run) -> float:
    """Nats per token."""
    return run.target or verify.TRACKS.get(track_of(run), verify.TRACKS["fineweb"])["target_loss"]


def hardware_of(run: Run) -> str | None:
    """`8 x NVIDIA H100 80GB HBM3`; None unless the log says both."""
    return run.hardware or (f"{run.gpus} x {run.gpu}" if run.gpus and run.gpu else None)


# -------------------------------------------------------------------------------------------------
# Text

LINE = re.compile(rb"""^(?:
    step:(?P<step>\d{1,15})/(?P<planned>\d{1,15})
        (?:[ ](?P<kind>val|train)_loss:(?P<loss><n>|nan))?(?:[ ]<more>){0,30}?
        [ ]train_time:(?P<time><n>)(?P<unit>m?s)[ ]step_avg:(?P<average><n>|nan)ms
        (?:[ ]<more>){0,30}
  | s:(?P<s>\d{1,15})[ ](?P<t>tel|trl):(?P<l><n>|nan)(?:[ ]<more>){0,30}
  | Running[ ][Pp]y[Tt]orch[ ](?P<torch>\S+)(?:[^\n]{0,300}?[ ]on[ ]
        (?P<on>[^\n]{1,80})[ ]with[ ]world_size[ =](?P<world>\d{1,4}))?[^\n]*
  | Running[ ]on[ ]device_name=(?P<device>[^\n]{1,80})[ ]with[ ]world_size=(?P<size>\d{1,4})
  | (?:\|[ ]{1,9}(?P<row>\d{1,3})[ ]{1,9}|GPU[ ](?P<id>\d{1,3}):[ ])
        (?P<gpu>NVIDIA[ ][\w .-]{1,80}?)[ ]{1,40}(?:O(?:n|ff)[ ]+\||\(UUID)[^\n]*
  | (?:Using[ ]|===[ ]?|)seed[ =:](?P<seed>\d{1,15})(?P<begins>[ ]start\b)?[^\n]*
  | peak[ ]memory[ ](?:consumption|allocated):[ ](?P<alloc>\d{1,9})[ ]MiB
        (?:[ ]reserved:[ ](?P<reserved>\d{1,9})[ ]MiB)?
  | (?:environment|machine):[ ][^\n]{0,300}?\btorch[ ](?P<our_torch>[^\s,]{1,80})
        (?:[^\n]{0,300}?,[ ]device[ ](?P<our_gpu>[^\n,]{1,80}))?[^\n]*
)\r?$""".replace(b"<n>", rb"\d{1,15}(?:\.\d{1,15})?").replace(b"<more>", rb"[\w.]{1,80}:\S{1,80}"),
                  re.M | re.X)       # every repeat that others follow has a bound: no line is slow
LOOKS = re.compile(rb"step:\d{1,30}/\d{1,30}[^\n]{0,300}?(?:_loss|train_time):[\dn]"
                   rb"|\bs:\d{1,30} t[er]l:")


class Draft:
    """A run while its lines are read."""

    def __init__(self, planned: int | None, seed: int | None):
        self.planned, self.seed, self.last = planned, seed, -1
        self.validations: list[Validation] = []
        self.steps = Steps()
        self.time, self.average, self.peaks = math.nan, None, (None, None)

    def follows(self, planned: int | None, step: int, is_val: bool) -> bool:
        """Is this the next line of the run?"""
        if planned != self.planned or step < self.last:
            return False
        done = [val.step for val in self.validations[-1:]] if is_val else self.steps.step[-1:]
        return step > self.last or step not in done

    def repeats(self, step: int, is_val: bool, loss: float, time: float) -> bool:
        """Did the run say just this?"""
        def same(a: float, b: float) -> bool:
            return a == b or a != a and b != b

        if is_val:
            at = bisect_left(self.validations, step, key=lambda val: val.step)
            val = self.validations[at] if at < len(self.validations) else None
            return bool(val) and val.step == step and same(val.loss, loss) and same(
                math.nan if val.time_ms is None else val.time_ms, time)
        at = bisect_left(self.steps.step, step)
        return (at < len(self.steps) and self.steps.step[at] == step
                and same(self.steps.loss[at], loss) and same(self.steps.time_ms[at], time))

    def add(self, step: int, is_val: bool, loss: float, time: float, average: bytes) -> None:
        if time < self.time and step <= GRACE:
            self.validations = [val._replace(time_ms=0.0) for val in self.validations]
            self.steps.time_ms = array("d", [math.nan] * len(self.steps))
        self.last, self.time = step, time
        if is_val:
            self.validations.append(Validation(step, loss, None if time != time else time))
        else:
            self.steps.add(step, loss, time)
        if is_val or not self.validations:
            self.average = None if average == b"nan" else float(average)

    def finish(self, path: Path, index: int, facts: dict, unplaced: int, llmc: bool) -> Run:
        vals = tuple(self.validations)
        time = vals[-1].time_ms if vals else self.time
        return Run(
            path, index, record_of(path), "llm.c" if llmc else "text", vals, self.steps,
            self.planned, self.last, bool(vals) and vals[-1].step == self.planned,
            None if time is None or time != time else time, self.average, self.seed,
            peak_alloc_mib=self.peaks[0], peak_reserved_mib=self.peaks[1], unplaced=unplaced,
            **facts)


def words(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip()


def hardware(name: bytes, count: bytes | int) -> dict:
    return dict(hardware=f"{int(count)} x {words(name)}")


def read_text(path: Path, data: bytes) -> list[Run]:
    """The runs of a text log."""
    drafts: list[tuple[Draft, dict]] = []
    draft, seed, placed, llmc = None, None, 0, False
    gpus: dict[bytes, bytes] = {}
    facts: dict = {}
    head = re.search(rb"^Running [Pp]y[Tt]orch ", data, re.M)
    for m in LINE.finditer(data, head.start() if head else 0):
        if m["step"] or m["s"]:
            placed += 1
            llmc, step = bool(m["s"]), int(m["s"] or m["step"])
            planned = None if llmc else int(m["planned"])
            is_val = m["kind"] == b"val" or m["t"] == b"tel"
            loss = float(m["l"] or m["loss"] or "nan")
            time = round(float(m["time"] or "nan") * (1000 if m["unit"] == b"s" else 1), 6)
            if draft is None or not draft.follows(planned, step, is_val):
                if (draft and step and planned == draft.planned
                        and draft.repeats(step, is_val, loss, time)):
                    continue                 # step 0 says the same in every run: it begins one
                draft, seed = Draft(planned, seed), None
                drafts.append((draft, facts))
            draft.add(step, is_val, loss, time, m["average"] or b"nan")
        elif m["alloc"] and draft:
            draft.peaks = int(m["alloc"]), int(m["reserved"]) if m["reserved"] else None
        elif m["seed"]:
            seed, draft = int(m["seed"]), None if m["begins"] else draft
        elif m["row"] or m["id"]:
            gpus = gpus | {m["row"] or m["id"]: m["gpu"]}
            facts = facts | hardware(m["gpu"], len(gpus))
            if m["row"]:
                facts |= dict(gpu=words(m["gpu"]), gpus=len(gpus))
        elif m["torch"]:
            gpus, facts = {}, dict(torch=words(m["torch"]))
            if m["on"]:
                facts |= dict(gpu=words(m["on"])) | hardware(m["on"], m["world"])
        elif m["device"]:
            facts = facts | hardware(m["device"], m["size"])
        elif m["our_torch"]:
            facts = facts | dict(torch=words(m["our_torch"]))
            if m["our_gpu"] not in (None, b"cpu"):
                facts |= dict(gpu=words(m["our_gpu"]), gpus=1) | hardware(m["our_gpu"], 1)
    unplaced = sum(1 for _ in LOOKS.finditer(data)) - placed
    kept: dict[object, tuple[Draft, dict]] = {}
    for number, pair in enumerate(drafts):
        kept.setdefault(tuple(pair[0].validations) or number, pair)
    return [one.finish(path, index, about, 0 if index else unplaced, llmc)
            for index, (one, about) in enumerate(kept.values())]


# -------------------------------------------------------------------------------------------------
# Our JSON lines

def number(value: object) -> float | None:
    """A finite number of JSON, else None: true, "3" and 1e999 are none."""
    fits = type(value) in (int, float) and abs(value) < MOST
    return value if fits else None


def whole(value: object) -> int | None:
    return value if type(value) is int and abs(value) < MOST else None


def text(value: object) -> str | None:
    return value if type(value) is str else None


def at(event: dict, name: str) -> object:
    """The value at a dotted name such as `run.steps`; None where there is none."""
    value: object = event
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def read_events(data: bytes) -> tuple[list[dict], int]:
    """The events, and how many lines are none: the last may have been cut when its writer died."""
    events, broken = [], 0
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            broken += bool(line.strip())
    return events, broken


def read_jsonl(path: Path, data: bytes) -> list[Run]:
    """The runs of a log of ours: each begins with its start, and a resumed one goes on."""
    events, unplaced = read_events(data)
    runs: list[list[dict]] = []
    for event in events:
        if event["event"] == "start":
            runs.append([event])
        elif runs:
            runs[-1].append(event)
        else:
            unplaced += event["event"] in ("val", "step")
    return [our_run(path, index, run, 0 if index else unplaced) for index, run in enumerate(runs)]


def our_run(path: Path, index: int, events: list[dict], unplaced: int) -> Run:
    """The run of its events, start first. Steps that do not go on are counted as unplaced."""
    validations, steps, conditions = [], Steps(), []
    for event in events:
        step, loss, time = (of(event.get(name)) for of, name in (
            (whole, "step"), (number, "loss"), (number, "train_time_ms")))
        done = validations if event["event"] == "val" else steps
        if event["event"] not in ("val", "step"):
            continue
        if step is None or step <= (done[-1].step if len(done) else -1):
            unplaced += 1
        elif event["event"] == "val":
            validations.append(Validation(step, math.nan if loss is None else loss, time))
            told = event.get("conditions")
            conditions.append(told if isinstance(told, dict) else {})
        else:
            steps.add(step, *(math.nan if x is None else x for x in (loss, time)))
    start, end = events[0], events[-1] if events[-1]["event"] == "end" else {}
    env = start.get("environment") if isinstance(start.get("environment"), dict) else {}
    gpu = text(env.get("device"))
    if gpu == "cpu":
        gpu = f"{env.get('cpu')} ({env.get('threads')} threads)"
    count, planned = whole(env.get("processes")), whole(at(start, "run.steps"))
    last = max([0, *steps.step, *(val.step for val in validations)])
    time = validations[-1].time_ms if validations else steps[-1].time_ms if len(steps) else None
    joules = [x for told in conditions if (x := number(told.get("energy_j"))) is not None]
    metered = len(joules) > 1 and all(event["event"] != "resume" for event in events)
    return Run(
        path, index, record_of(path), "jsonl", tuple(validations), steps, planned, last,
        bool(validations) and validations[-1].step == planned and end.get("status") == "complete",
        time, time / last if time and last else None, whole(at(start, "settings.seed")),
        number(at(start, "settings.tokens_per_step")), text(env.get("torch")), gpu, count,
        f"{count} x {gpu}" if count and gpu else None, whole(end.get("peak_memory_mib")), None,
        text(start.get("program_sha256")), text(start.get("track")),
        number(at(start, "settings.target_loss")),
        {name: value for name in ("python", "torch", "numpy", "triton", "cuda", "driver", "os")
         if (value := text(env.get(name)))},
        tuple(conditions), joules[-1] - joules[0] if metered else None, unplaced)


# -------------------------------------------------------------------------------------------------
# Files and folders

def record_of(path: Path) -> str:
    """The folder that stands for the record."""
    folder = path.resolve().parent
    return (folder.parent if folder.name in APART else folder).name


def read_file(path: Path | str) -> list[Run]:
    """The runs of one file, in order; none where it is no log. Raises OSError."""
    path = Path(path)
    data = path.read_bytes()
    return (read_jsonl if path.suffix == ".jsonl" else read_text)(path, data)


def log_files(path: Path) -> Iterator[Path]:
    """The logs of a folder and those below it, sorted; of a run of ours the JSON lines alone."""
    if path.is_file():
        yield path
        return
    for file in sorted(p for p in path.rglob("*") if p.suffix in KINDS and p.is_file()):
        if file.suffix == ".jsonl" or not file.with_suffix(".jsonl").is_file():
            yield file


def read_runs(path: Path | str) -> list[Run]:
    """The runs of a file or a folder. Only one file's text is held at a time."""
    return [run for file in log_files(Path(path)) for run in read_file(file)]
