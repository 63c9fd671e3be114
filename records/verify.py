"""The judge: are these logs a valid set of runs of their track?

    python records/verify.py records/2026-12-01_TinyBaseline     one record folder
    python records/verify.py records/*_Mine/*.jsonl              logs of one set, from any folders

Every folder is judged as one set; all .jsonl files named one by one are one more set. A set is
valid when every run keeps every rule below and the mean of the final validation losses is below
the track's target with p < 0.01 (one-sided one-sample t-test). One broken run refuses the whole
set: statistics over the rest would be a selection.

The judge only reads. It never imports or runs the recorded program, and holds its own copy of
what a track is (TRACKS), so that editing the trainer does not move the target. It cannot see
whether the program tells the truth about what it did: the program lies beside the log to be read.

Exit code: 0 every set is valid, 1 a set is refused, 2 wrong usage.
"""

import argparse
import hashlib
import json
import math
import re
import statistics
import sys
from pathlib import Path

MAX_P = 0.01
TOO_LARGE = 1e20         # above any loss, time, count or seed; keeps the arithmetic finite
TINY_TARGET_LOSS = 3.56  # nats per token; fixed by TinyBaseline, 2026-12-01

TRACKS = {
    "fineweb": {
        "target_loss": 3.28,      # nats per token
        "val_tokens": 10_485_760, # targets evaluated
        "val_sequence": 262_144,  # tokens per sequence
        "val_file": "fineweb_val_000000.bin",
        "val_sha256": None,       # not known yet: recorded, not pinned
    },
    "tiny": {
        "target_loss": TINY_TARGET_LOSS,
        "val_tokens": 177_071,    # the whole file: every token but the first is a target
        "val_sequence": 16_384,
        "val_file": "tiny_val_000000.bin",
        "val_sha256": "e454dfe00ab97d1041eb362e091e4438721ed023d8a245faec642410402baaa7",
    },
}


class Refused(Exception):
    """A broken rule: its name, what it expects, what the log says."""

    def __init__(self, rule: str, expected: str, found: str):
        super().__init__(f"{rule}: expected {expected}, found {found}")


# -------------------------------------------------------------------------------------------------
# Reading: whatever a file holds, the answer is a value or a Refused, never a traceback

def shown(value: object) -> str:
    """A value as one short ASCII line."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = ascii(", ".join(value) if isinstance(value, dict) else value)
    return text if len(text) <= 90 else text[:87] + "..."


def expect(rule: str, found: object, expected: object) -> None:
    """Refuse unless both are equal and of one type (true is not 1)."""
    if type(found) is not type(expected) or found != expected:
        raise Refused(rule, shown(expected), shown(found))


def field(event: dict, name: str, kind: type) -> object:
    """The value at a dotted name such as `data.val.tokens`, if it has exactly this type."""
    value: object = event
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if type(value) is not kind or kind is int and not abs(value) < TOO_LARGE:
        raise Refused("field", f"{name} ({kind.__name__}) in line {event['line']}", shown(value))
    return value


def number(event: dict, name: str) -> float:
    """A finite number, 0 or more. JSON's NaN and Infinity, bare or as strings, are refused."""
    value = event.get(name)
    if type(value) not in (int, float) or not 0 <= value < TOO_LARGE:
        raise Refused("finite", f"a finite {name} >= 0 in line {event['line']}", shown(value))
    return value


def read(path: Path, rule: str) -> bytes:
    """The bytes of a regular file."""
    try:
        if path.is_file():
            return path.read_bytes()
    except OSError as error:
        raise Refused(rule, f"to read {path.name}", str(error)) from None
    raise Refused(rule, f"a file {path.name}", "none")


def unique_keys(pairs: list) -> dict:
    """A JSON object. Readers differ in which of two equal keys they take, so that is an error."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a repeated key")
    return dict(pairs)


def read_events(path: Path) -> list[dict]:
    """One dict a line, its line number added as "line"."""
    events = []
    for at, line in enumerate(read(path, "log").removesuffix(b"\n").split(b"\n"), 1):
        try:
            event = json.loads(line.decode(), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise Refused("readable", f"a JSON object in line {at}", str(error)) from None
        if not isinstance(event, dict):
            raise Refused("readable", f"a JSON object in line {at}", shown(event))
        events.append(event | {"line": at})
    return events


class Run:
    """One log of a complete run: its events, and the pins of its track."""

    def __init__(self, path: Path):
        self.path = path
        self.events = read_events(path)
        check_frame(self.events)
        self.start, self.end = self.events[0], self.events[-1]
        self.steps = [event for event in self.events if event["event"] == "step"]
        self.vals = [event for event in self.events if event["event"] == "val"]
        self.track = field(self.start, "track", str)
        if self.track not in TRACKS:
            raise Refused("track", f"one of {', '.join(TRACKS)}", shown(self.track))
        self.pins = TRACKS[self.track]

    def planned(self) -> int:
        """Steps that the run set out to do."""
        return sum(field(self.start, f"settings.{name}", int) for name in ("steps", "extra_steps"))


def check_frame(events: list[dict]) -> None:
    """start first, end last, each once, a complete run, no event that format 1 does not know."""
    kinds = [field(event, "event", str) for event in events]
    for kind, at, place in (("start", 0, "first"), ("end", -1, "last")):
        if kinds[at] != kind or kinds.count(kind) != 1:
            raise Refused(f"{kind} event", f"one, in the {place} line",
                          f"{kinds.count(kind)}, and {shown(kinds[at])} in the {place} line")
    expect("format", events[0].get("format"), 1)
    expect("status", events[-1].get("status"), "complete")  # else most other rules break as well
    for kind, event in zip(kinds, events):
        if kind not in ("start", "warmup", "val", "step", "end"):
            raise Refused("event kind", "start, warmup, val, step or end",
                          f"{shown(kind)} in line {event['line']}")


# -------------------------------------------------------------------------------------------------
# The rules of one run, one function each

def check_identity(run: Run) -> None:
    """The log is named by its run id."""
    expect("run id", field(run.start, "id", str), run.path.stem)


def check_program(run: Run) -> None:
    """The program lies beside the log, named by its hash, and still has that hash."""
    digest = field(run.start, "program_sha256", str)
    name = f"train_gpt_{digest[:8]}.py"
    expect("program name", field(run.start, "program", str), name)
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise Refused("program sha256", "64 hexadecimal digits", shown(digest))
    program = read(run.path.parent / name, "program file")
    expect("program sha256", hashlib.sha256(program).hexdigest(), digest)


def check_overrides(run: Run) -> None:
    """A run with another recipe than its program's is an experiment."""
    found = field(run.start, "recipe_overrides", dict)
    if found:
        raise Refused("recipe_overrides", "none", shown(found))


def check_settings(run: Run) -> None:
    """Target and validation settings are the track's."""
    for name in ("target_loss", "val_tokens", "val_sequence", "val_sha256"):
        pin = "" if run.pins[name] is None else run.pins[name]
        expect(f"setting {name}", field(run.start, f"settings.{name}", type(pin)), pin)


def check_val_data(run: Run) -> None:
    """The validation file is the pinned one, cut as pinned."""
    name = field(run.start, "data.val.file", str).rsplit("/", 1)[-1]
    expect("validation file", name, run.pins["val_file"])
    digest = field(run.start, "data.val.sha256", str)
    if not re.fullmatch(run.pins["val_sha256"] or "[0-9a-f]{64}", digest):
        raise Refused("validation sha256", run.pins["val_sha256"] or "64 hex digits", shown(digest))
    for name in ("tokens", "sequence"):
        expect(f"validation {name}", field(run.start, f"data.val.{name}", int),
               run.pins[f"val_{name}"])


def check_val_tokens(run: Run) -> None:
    """Every validation covered the pinned set, not a part of it."""
    for event in run.vals:
        expect(f"tokens of the validation in line {event['line']}",
               field(event, "tokens", int), run.pins["val_tokens"])


def check_device(run: Run) -> None:
    """A pretended device computes nothing and times nothing."""
    name = field(run.start, "environment.device", str)
    if name.strip().lower().startswith("pretended"):
        raise Refused("pretended device", "a real device", shown(name))


def bits_per_byte(event: dict) -> float | None:
    """The loss in bits per byte, where the run gives it."""
    return None if event.get("bits_per_byte") is None else number(event, "bits_per_byte")


def check_finite(run: Run) -> None:
    """Losses and times are finite numbers, and no loss is exactly 0 (as an idle device gives)."""
    for event in run.steps + run.vals:
        number(event, "train_time_ms")
        if number(event, "loss") == 0:
            raise Refused("finite", f"a loss above 0 in line {event['line']}", "0")
    for event in run.vals + [run.end]:
        bits_per_byte(event)
    for event in run.steps + [run.end]:
        number(event, "wait_ms")
    for name in ("val_loss", "train_time_ms", "wall_s"):
        number(run.end, name)


def check_warmup(run: Run) -> None:
    """Warm-up came once, before the first step, and gave back the state that it found."""
    warmups = [at for at, event in enumerate(run.events) if event["event"] == "warmup"]
    if len(warmups) != 1 or run.steps and run.steps[0]["line"] < warmups[0] + 1:
        raise Refused("warm-up", "one, before the first step",
                      f"{len(warmups)}, in lines {[at + 1 for at in warmups][:5]}")
    number(run.events[warmups[0]], "seconds")
    expect("warm-up restored", run.events[warmups[0]].get("restored"), True)


def check_recompiles(run: Run) -> None:
    """Warm-up had met every graph."""
    expect("recompiles", run.end.get("recompiles"), 0)


def check_steps(run: Run) -> None:
    """Steps 1 .. planned, each once, in order."""
    for wanted, event in enumerate(run.steps, 1):
        expect(f"step in line {event['line']}", field(event, "step", int), wanted)
    if not len(run.steps) == run.planned() > 0:
        raise Refused("steps", f"all {run.planned()} planned, at least 1", str(len(run.steps)))


def check_validations(run: Run) -> None:
    """A validation follows its own step, with the clock stopped; the last one is at the end."""
    done, clock, validated = 0, 0, -1
    for event in run.events:
        if event["event"] == "step":
            done, clock = field(event, "step", int), number(event, "train_time_ms")
        elif event["event"] == "val":
            expect(f"step of the validation in line {event['line']}", event.get("step"), done)
            if validated == done:
                raise Refused("validation step", "each step once", f"{done} again")
            if number(event, "train_time_ms") != clock:
                raise Refused(f"time of the validation in line {event['line']}", f"{clock}, as "
                              f"step {done}", shown(event["train_time_ms"]))
            validated = done
    if validated != run.planned():
        raise Refused("final validation", f"at step {run.planned()}", f"last at {validated}")


def check_times(run: Run) -> None:
    """The clock never runs backwards, and every step takes time."""
    before = 0
    for event in run.events:
        if event["event"] in ("step", "val", "end"):
            now, is_step = number(event, "train_time_ms"), event["event"] == "step"
            if now < before or is_step and now == before:
                raise Refused("train_time_ms", f"{'more than' if is_step else 'at least'} {before} "
                              f"in line {event['line']}", shown(now))
            before = now


def check_summary(run: Run) -> None:
    """What the end event sums up follows from the events before it."""
    tokens_per_step = field(run.start, "settings.tokens_per_step", int)
    expect("run.steps", field(run.start, "run.steps", int), run.planned())
    expect("run.tokens_per_step", field(run.start, "run.tokens_per_step", int), tokens_per_step)
    expect("summary step", field(run.end, "step", int), len(run.steps))
    expect("summary tokens", field(run.end, "tokens", int), len(run.steps) * tokens_per_step)
    step, val = (run.steps or [{}])[-1], (run.vals or [{}])[-1]
    for name, found, source in (("val_loss", number(run.end, "val_loss"), val.get("loss")),
                                ("bits_per_byte", bits_per_byte(run.end), val.get("bits_per_byte")),
                                ("train_time_ms", number(run.end, "train_time_ms"),
                                 step.get("train_time_ms"))):
        if found != source:
            raise Refused(f"summary {name}", shown(source), shown(found))


def printed_as(text: str, value: float) -> bool:
    """Does this decimal text show this value?

    A little over half a unit of the last digit is allowed: the value may be rounded as well.

    >>> printed_as("3.2787", 3.27866), printed_as("3.2787", 3.2788), printed_as("1200", 1199.6)
    (True, False, True)
    """
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?", text):
        return False
    return abs(float(text) - value) <= 0.56 * 10.0 ** -len(text.partition(".")[2])


def check_text_log(run: Run) -> None:
    """The lines `step:N/M val_loss:X train_time:Yms ...` of the text log tell the same."""
    text = read(run.path.with_suffix(".txt"), "text log").decode("utf-8", "replace")
    lines = [dict(part.split(":", 1) for part in line.split() if ":" in part)
             for line in text.splitlines() if line.startswith("step:") and " val_loss:" in line]
    expect("text log validations", len(lines), len(run.vals))
    for line, event in zip(lines, run.vals):
        where = f"{field(event, 'step', int)}/{run.planned()}"
        expect("text log step", line["step"], where)
        for name, value, unit in (("val_loss", number(event, "loss"), ""),
                                  ("train_time", number(event, "train_time_ms"), "ms")):
            found = line.get(name, "")
            if not found.endswith(unit) or not printed_as(found.removesuffix(unit), value):
                raise Refused(f"text log {name}", f"{value}{unit}, rounded, at step {where}",
                              shown(found))


RUN_RULES = (check_identity, check_program, check_overrides, check_settings, check_val_data,
             check_val_tokens, check_device, check_finite, check_warmup,
             check_recompiles, check_steps, check_validations, check_times, check_summary,
             check_text_log)


# -------------------------------------------------------------------------------------------------
# The rules of a set, the statistics, the verdict

def machine(run: Run) -> str:
    """The device; for a CPU its model and threads too, since "cpu" names no machine."""
    name = field(run.start, "environment.device", str)
    if name != "cpu":
        return name
    return (f"cpu {field(run.start, 'environment.cpu', str)}, "
            f"{field(run.start, 'environment.threads', int)} threads")


def check_member(run: Run, earlier: list[Run]) -> None:
    """The run belongs with the earlier ones of its set, and repeats none of them."""
    first = earlier[0] if earlier else run
    expect("one device in a set", machine(run), machine(first))
    for name, what, kind in (("track", "track", str), ("program_sha256", "program", str),
                             ("environment.torch", "torch version", str),
                             ("environment.processes", "number of processes", int),
                             ("data.val.sha256", "validation sha256", str)):
        expect(f"one {what} in a set", field(run.start, name, kind), field(first.start, name, kind))
    for name, what, kind in (("id", "run id", str), ("settings.seed", "seed", int)):
        value = field(run.start, name, kind)
        for other in earlier:
            if field(other.start, name, kind) == value:
                raise Refused(f"each {what} once in a set", "a new one",
                              f"{shown(value)}, as in {other.path}")


def judge_run(path: Path, earlier: list[Run]) -> tuple[Run | None, list[str]]:
    """The run, if its frame is sound, and one line for each rule that it breaks."""
    try:
        run = Run(path)
    except Refused as refusal:
        return None, [f"{path}: {refusal}"]
    lines = {}  # as a set that keeps its order: two rules may stumble over one value
    for check in (*RUN_RULES, lambda run: check_member(run, earlier)):
        try:
            check(run)
        except Refused as refusal:
            lines[f"{path}: {refusal}"] = True
    return run, list(lines)


def p_value(values: list[float], target: float) -> float:
    """P of a mean this far below the target if the target were the true mean (one-sided t-test).

    nan without a spread: for one value, or when all are equal.
    """
    from scipy import stats  # here, so that importing this file and --help need only Python

    if len(set(values)) < 2:
        return math.nan
    return float(stats.ttest_1samp(values, target, alternative="less").pvalue)


def mean_and_sd(values: list[float], digits: int) -> str:
    """Mean, and standard deviation with n - 1, as text.

    >>> mean_and_sd([1.0, 2.0, 3.0], 2), mean_and_sd([1.0], 2)
    ('mean 2.00, sd 1.00', 'mean 1.00, sd nan')
    """
    sd = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"mean {statistics.fmean(values):.{digits}f}, sd {sd:.{digits}f}"


def say(line: str) -> None:
    """Print one line, whatever a name in it holds and whatever the terminal can show."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    encoding = sys.stdout.encoding or "ascii"
    print(line.encode(encoding, "backslashreplace").decode(encoding))


def report(runs: list[Run]) -> bool:
    """Print table, statistics and verdict for runs that kept every rule; is the set valid?"""
    first, target, n = runs[0], runs[0].pins["target_loss"], len(runs)
    say(f"track {first.track}, target {target}; {machine(first)}, "
        f"torch {first.start['environment']['torch']}; {first.start['program']}")
    if first.pins["val_sha256"] is None:
        say(f"note: the sha256 of {first.pins['val_file']} is recorded, not pinned: "
            f"{first.start['data']['val']['sha256']}")
    width = max(len(run.path.stem) for run in runs)
    say(f"  {'run':<{width}}  {'seed':>6}  {'val_loss':>9}  {'train_s':>10}  {'steps':>6}  step_ms")
    for run in runs:
        ms, steps = run.end["train_time_ms"], len(run.steps)
        say(f"  {run.path.stem:<{width}}  {run.start['settings']['seed']:>6}  "
            f"{run.end['val_loss']:>9.5f}  {ms / 1000:>10.3f}  {steps:>6}  {ms / steps:.2f}")
    losses = [run.end["val_loss"] for run in runs]
    seconds = [run.end["train_time_ms"] / 1000 for run in runs]
    p = p_value(losses, target)
    say(f"val_loss: n {n}, {mean_and_sd(losses, 5)}, p {p:.3g} (one-sided, mean < {target})")
    say(f"timed training in seconds: {mean_and_sd(seconds, 3)}")
    if n < 2:
        say("NOT VALID: no p from 1 run; at least 1 more is needed")
    elif math.isnan(p):
        say("NOT VALID: no p, since all losses are equal; runs of different seeds differ")
    else:
        say(f"{'VALID' if p < MAX_P else 'NOT VALID'}: p must be below {MAX_P}, is {p:.3g}")
    return p < MAX_P


def judge_set(name: str, paths: list[Path]) -> bool:
    """Judge one set and print what was found; is it valid?"""
    say(f"{name}: {len(paths)} log(s)")
    runs, refusals = [], []
    for path in paths:
        run, broken = judge_run(path, runs)
        refusals += broken
        if not broken:
            runs.append(run)
    for line in refusals:
        say(line)
    if refusals or not paths:
        say(f"NOT VALID: {len(refusals)} refusal(s)" if paths else
            "NOT VALID: no .jsonl log; at least 2 runs are needed")
        return False
    return report(runs)


def main(argv: list[str] | None = None) -> int:
    """Judge every set named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path,
                        help="a record folder, or the .jsonl logs of one set")
    paths = parser.parse_args(argv).paths
    for path in paths:
        if not path.is_dir() and not (path.suffix == ".jsonl" and path.is_file()):
            parser.error(f"{str(path)!a} is neither a record folder nor a .jsonl log")
    try:
        import scipy.stats  # noqa: F401
    except ImportError as error:
        print(f"verify.py needs scipy: pip install -r requirements.txt ({error})", file=sys.stderr)
        return 2
    sets = [(str(path), sorted(path.glob("*.jsonl"))) for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    if files:
        sets.append(("the logs named", files))
    verdicts = [judge_set(name, logs) for name, logs in sets]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
