"""The judge: are these logs a valid set of runs of their track?

    python records/verify.py records/2026-12-01_TinyBaseline     one record folder
    python records/verify.py records/*_Mine/*.jsonl              logs of one set, from any folders
    python records/verify.py --program records/<folder>          and the leak test of its program

Every folder is judged as one set; all .jsonl files named one by one are one more set. A set is
valid when every run keeps every rule below and the mean of the final validation losses is below
the track's target with p < 0.01 (one-sided one-sample t-test). One broken run refuses the whole
set: statistics over the rest would be a selection. For the same reason seeds are consecutive.

A folder's README.md may hold three lines that the judge reads:

    parent: 2026-12-01_TinyBaseline     the record that this one builds on, or none
    seeds: 0 to 9                       all that were run
    systems-only: yes                   the same mathematics as the parent's, only done otherwise

The curve of a set is held against its parent's at equal tokens; what leaves the parent's band is
reported. A systems-only set must stay inside, have the parent's settings, and repeat the losses of
the parent's runs of the same seeds; then a mean below the target is enough, without p.

The judge only reads (but for --program), and holds its own copy of what a track is (TRACKS), so
that editing the trainer does not move the target. It cannot see a log that was forged as a whole:
the program lies beside it to be read, and to be run again.

Exit code: 0 every set is valid, 1 a set is refused, 2 wrong usage.
"""

import argparse
import hashlib
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

MAX_P = 0.01
EQUAL = 0.005            # nats: how far rounding may move a run of the same mathematics and seed
ROUNDING = 0.001         # nats: how far it moves a loss before training
BAND_P = 0.001           # of a false alarm for a curve of the parent's own kind
TOO_LARGE = 1e20         # above any loss, time, count or seed; keeps the arithmetic finite
TINY_TARGET_LOSS = 3.56  # nats per token; fixed by TinyBaseline, 2026-12-01

THROTTLED = {0x08: "hardware slowdown", 0x20: "heat, by the driver", 0x40: "heat, by the hardware",
             0x80: "power brake"}  # NVML's bits; its power cap, 0x04, is the normal full load

KINDS = ("start", "warmup", "val", "step", "checkpoint", "resume", "end")  # of events, in format 1

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
    """start first, end last, each once, a complete run, no event that format 1 does not know.

    A run that went on from a checkpoint of its own has `checkpoint` and `resume` events."""
    kinds = [field(event, "event", str) for event in events]
    for kind, at, place in (("start", 0, "first"), ("end", -1, "last")):
        if kinds[at] != kind or kinds.count(kind) != 1:
            raise Refused(f"{kind} event", f"one, in the {place} line",
                          f"{kinds.count(kind)}, and {shown(kinds[at])} in the {place} line")
    expect("format", events[0].get("format"), 1)
    expect("status", events[-1].get("status"), "complete")  # else most other rules break as well
    for kind, event in zip(kinds, events):
        if kind not in KINDS:
            raise Refused("event kind", f"one of {', '.join(KINDS)}",
                          f"{shown(kind)} in line {event['line']}")


# -------------------------------------------------------------------------------------------------
# The rules of one run, one function each

def check_program(run: Run) -> None:
    """The log is named by its id; the program lies beside it, named by the hash that it has."""
    expect("run id", field(run.start, "id", str), run.path.stem)
    digest = field(run.start, "program_sha256", str)
    name = f"train_gpt_{digest[:8]}.py"
    expect("program name", field(run.start, "program", str), name)
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise Refused("program sha256", "64 hexadecimal digits", shown(digest))
    program = read(run.path.parent / name, "program file")
    expect("program sha256", hashlib.sha256(program).hexdigest(), digest)


def check_overrides(run: Run) -> None:
    """Another recipe than the program's is an experiment; the machine is free, but stated."""
    field(run.start, "settings", dict)
    found = field(run.start, "recipe_overrides", dict)
    if found:
        raise Refused("recipe_overrides", "none", shown(found))
    for name, value in field(run.start, "machine_overrides", dict).items():
        if name not in run.start["settings"] or run.start["settings"][name] != value:
            raise Refused("machine_overrides", f"{name}, as in settings", shown(value))


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


def check_environment(run: Run) -> None:
    """All is there that a stranger needs to judge a timing, and the device is a real one."""
    device = field(run.start, "environment.device", str)
    kinds = dict.fromkeys(("python", "torch", "device", "cpu", "os"), str)
    kinds |= dict(threads=int, processes=int) | ({} if device == "cpu" else {"cuda": str})
    for name, kind in kinds.items():
        if (found := field(run.start, f"environment.{name}", kind)) in ("", 0):
            raise Refused("environment", name, shown(found))
    if device.strip().lower().startswith("pretended"):  # it computes nothing and times nothing
        raise Refused("pretended device", "a real device", shown(device))


def conditions(event: dict) -> dict:
    """What the device said of itself at a validation; {} where it said nothing."""
    found = field(event, "conditions", dict) if "conditions" in event else {}
    found = {name: value for name, value in found.items() if value is not None}
    return {name: number(found | {"line": event["line"]}, name) for name in found}


def check_finite(run: Run) -> None:
    """Losses and times are finite numbers, and no loss is exactly 0 (as an idle device gives)."""
    for event in run.steps + run.vals:
        number(event, "train_time_ms")
        if number(event, "loss") == 0:
            raise Refused("finite", f"a loss above 0 in line {event['line']}", "0")
    for event in run.steps + [run.end]:
        number(event, "wait_ms")
    for name in ("val_loss", "train_time_ms", "wall_s"):
        number(run.end, name)
    for event in run.vals:
        conditions(event)


def check_warmup(run: Run) -> None:
    """Warm-up came once, before all else, was undone, and had met every graph; and so again
    wherever the run went on."""
    warmups = [at for at, event in enumerate(run.events) if event["event"] == "warmup"]
    begun = [at for at, event in enumerate(run.events) if event["event"] in ("start", "resume")]
    if warmups != [at + 1 for at in begun]:
        raise Refused("warm-up", "one, right behind the start and each resume",
                      f"{len(warmups)}, in lines {[at + 1 for at in warmups][:5]}")
    for at in warmups:
        number(run.events[at], "seconds")
        expect("warm-up restored", run.events[at].get("restored"), True)
    expect("recompiles", run.end.get("recompiles"), 0)


def check_resumes(run: Run) -> None:
    """What goes on is the same run: same program, seed and machine, from the last step logged."""
    if run.start.get("resumed"):
        raise Refused("resumed", "a run from its own start", shown(run.start["resumed"]))
    done = 0
    for event in run.events:
        done = field(event, "step", int) if event["event"] == "step" else done
        if event["event"] == "resume":
            for name, kind in (("id", str), ("program_sha256", str), ("settings.seed", int),
                               ("settings.tokens_per_step", int), ("environment.device", str),
                               ("environment.cpu", str), ("environment.torch", str),
                               ("environment.processes", int), ("data.val.sha256", str)):
                expect(f"resume {name}", field(event, name, kind), field(run.start, name, kind))
            expect("resume recipe_overrides", field(event, "recipe_overrides", dict), {})
            expect("resume step", field(event, "resumed.step", int), done)


def check_steps(run: Run) -> None:
    """Steps 1 .. planned, each once, in order."""
    for wanted, event in enumerate(run.steps, 1):
        expect(f"step in line {event['line']}", field(event, "step", int), wanted)
    if not len(run.steps) == run.planned() > 0:
        raise Refused("steps", f"all {run.planned()} planned, at least 1", str(len(run.steps)))


def check_validations(run: Run) -> None:
    """A validation of the whole set follows its step, the clock stopped; one is at the end."""
    done, clock, validated = 0, 0, -1
    for event in run.events:
        if event["event"] == "step":
            done, clock = field(event, "step", int), number(event, "train_time_ms")
        elif event["event"] == "val":
            expect(f"step of the validation in line {event['line']}", event.get("step"), done)
            expect(f"tokens of the validation in line {event['line']}", event.get("tokens"),
                   run.pins["val_tokens"])
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
    waited = sum(number(event, "wait_ms") for event in run.steps)
    for name, source in (("val_loss", val.get("loss")), ("wait_ms", waited),
                         ("train_time_ms", step.get("train_time_ms"))):
        found = number(run.end, name)
        if found != source and (name != "wait_ms" or abs(found - source) > 1e-6 * found + 1e-3):
            raise Refused(f"summary {name}", shown(source), shown(found))
    least = run.end["train_time_ms"] / 1000 + sum(
        number(event, "seconds") for event in run.events if event["event"] == "warmup")
    if number(run.end, "wall_s") < least:
        raise Refused("summary wall_s", f"training and warm-up, {least}, or more",
                      shown(run.end["wall_s"]))


def check_text_log(run: Run) -> None:
    """The text log says the same of every step and validation, and in its summary."""
    text = read(run.path.with_suffix(".txt"), "text log").decode("utf-8", "replace").splitlines()
    found = [" ".join(line.split()[:4]) for line in text
             if re.match(r"step:\S+ (train|val)_loss:", line)]
    events = [event for event in run.events if event["event"] in ("step", "val")]
    expect("text log lines", len(found), len(events))
    for line, event in zip(found, events):
        step, ms = field(event, "step", int), number(event, "train_time_ms")
        kind = "val" if event["event"] == "val" else "train"
        expect("text log line", line, f"step:{step}/{run.planned()} {kind}_loss:"
               f"{number(event, 'loss'):.4f} train_time:{ms:.0f}ms "
               f"step_avg:{ms / max(1, step):.2f}ms")
    summary = [line for line in text if line.startswith("summary: ")]
    expect("text log summaries", len(summary), 1)
    ms, tokens = number(run.end, "train_time_ms"), field(run.end, "tokens", int)
    first = (f"summary: val_loss {number(run.end, 'val_loss'):.4f}, target "
             f"{run.pins['target_loss']}, trained {ms / 1000:.1f} s, "
             f"{1000 * tokens / (ms or 1):,.0f} tokens/s, ")
    last = f", wall {number(run.end, 'wall_s'):.1f} s"
    expect("text log summary", summary[0][:len(first)], first)
    expect("text log summary", summary[0][-len(last):], last)


RUN_RULES = (check_program, check_overrides, check_settings, check_val_data, check_environment,
             check_finite, check_warmup, check_resumes, check_steps, check_validations, check_times,
             check_summary, check_text_log)


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


def judge_runs(paths: list[Path]) -> tuple[list[Run], list[str]]:
    """The sound runs among the logs of one set, and one line for each broken rule."""
    runs: list[Run] = []
    refusals: list[str] = []
    for path in paths:
        run, broken = judge_run(path, runs)
        refusals += broken
        runs += [] if broken else [run]
    return runs, refusals


def claims_of(folder: Path) -> dict[str, str]:
    """The lines of a record's README.md that the judge reads."""
    path = folder / "README.md"
    text = read(path, "README").decode("utf-8", "replace") if path.exists() else ""
    found = re.findall(r"^(parent|seeds|systems-only): *(.*?) *$", text, re.M)
    forms = {"parent": r"\w[\w.-]*", "seeds": r"\d{1,9} to \d{1,9}", "systems-only": "yes|no"}
    for name, value in found:
        if not re.fullmatch(forms[name], value, re.A) or len(dict(found)) < len(found):
            raise Refused(f"README {name}", f"one line {name}: {forms[name]}", shown(value))
    return dict(found)


def check_seeds(runs: list[Run], claims: dict[str, str]) -> None:
    """Consecutive seeds, and those that the README claims: none was dropped."""
    seeds = sorted(run.start["settings"]["seed"] for run in runs)
    first, last = map(int, claims.get("seeds", f"{seeds[0]} to {seeds[-1]}").split(" to "))
    if not seeds[0] == first <= last == seeds[-1] == first + len(seeds) - 1:
        raise Refused("seeds of the set", f"all from {first} to {last}", str(seeds)[:90])


def check_apart(folder: Path, runs: list[Run]) -> int:
    """Nothing lies apart but runs that were cut short and run again; how many do."""
    for path in folder.glob("*_seed*_*.txt"):
        read(path.with_suffix(".jsonl"), "log of each text log")
    seeds, logs = {run.start["settings"]["seed"] for run in runs}, folder.glob("incomplete/*.jsonl")
    for path in (logs := sorted(logs)):
        text = read(path, "log").decode("utf-8", "replace")
        status = re.search(r'"status": *"(complete|non-finite)"', text)
        if status:
            raise Refused("run kept apart", "one that was cut short", f"{path.name}: {status[1]}")
        seed = re.search(r'"seed": *(\d{1,9})\b', text)
        if seed and int(seed[1]) not in seeds:
            raise Refused("run kept apart", "its seed in the set", f"{path.name}: seed {seed[1]}")
    return len(logs)


def curves(runs: list[Run]) -> dict[int, list[float]]:
    """Tokens -> the validation losses of all runs there."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for event in run.vals:
            tokens = event["step"] * run.start["settings"]["tokens_per_step"]
            found.setdefault(tokens, []).append(event["loss"])
    return found


def outside_band(runs: list[Run], parents: list[Run]) -> list[str]:
    """Where the mean curve of m runs leaves the band that n runs of the parent predict for it.

    Half a band is t sd sqrt(1/n + 1/m), sd of the parents, and Student's t with n - 1 degrees of
    freedom, such that a set of the parent's own kind leaves it with probability BAND_P.
    """
    from scipy import stats

    ours, theirs, lines = curves(runs), curves(parents), []
    shared = [tokens for tokens in ours if len(theirs.get(tokens, ())) > 1]
    for tokens in shared:
        mean, n, m = statistics.fmean(theirs[tokens]), len(theirs[tokens]), len(ours[tokens])
        t = float(stats.t.isf(BAND_P / 2 / len(shared), n - 1))
        half = t * statistics.stdev(theirs[tokens]) * math.sqrt(1 / n + 1 / m)
        low, high = mean - max(half, ROUNDING), mean + max(half, ROUNDING)
        if not low <= (found := statistics.fmean(ours[tokens])) <= high:
            lines.append(f"at {tokens:,} tokens the mean loss {found:.5f} is outside the parent's "
                         f"band, {'better' if found < low else 'worse'}: {low:.5f} to {high:.5f}")
    return lines if shared else ["no two runs of the parent were validated at equal tokens"]


def check_systems_only(runs: list[Run], parents: list[Run]) -> None:
    """Settings and losses are those of the parent's runs of the same seeds."""
    by_seed = {run.start["settings"]["seed"]: run for run in parents}
    for run in runs:
        settings = run.start["settings"]
        if (parent := by_seed.get(settings["seed"])) is None:
            raise Refused("systems-only seed", "one of the parent's", shown(settings["seed"]))
        free = {*run.start["machine_overrides"], *parent.start["machine_overrides"]}
        for name, value in parent.start["settings"].items():
            if name not in free and settings.get(name, value) != value:
                raise Refused(f"systems-only setting {name}", shown(value), shown(settings[name]))
        found = {event["step"]: event["loss"] for event in run.vals}
        for event in parent.vals:
            if not abs(found.get(event["step"], math.inf) - event["loss"]) <= EQUAL:
                raise Refused(f"systems-only loss of seed {settings['seed']}, step {event['step']}",
                              f"{event['loss']:.5f} +- {EQUAL}", shown(found.get(event["step"])))


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


def check_set(folder: Path | None, runs: list[Run]) -> tuple[bool, list[str]]:
    """The rules of a whole set; is it systems-only, and what else is to be said?"""
    claims, notes = claims_of(folder) if folder else {}, []
    check_seeds(runs, claims)
    if "seeds" not in claims:
        notes.append("note: no line seeds: in a README.md, so a first or last one may be missing")
    if folder and (apart := check_apart(folder, runs)):
        notes.append(f"note: {apart} run(s) that were cut short lie apart in incomplete/")
    systems_only, name = claims.get("systems-only") == "yes", claims.get("parent", "none")
    if name == "none":
        expect("parent of a systems-only set", name if systems_only else "", "")
        return False, notes
    parents, refusals = judge_runs(sorted((folder.resolve().parent / name).glob("*.jsonl")))
    if refusals or not parents:
        raise Refused("parent", f"a sound record {name} beside this one",
                      refusals[0] if refusals else "no logs there")
    expect("track of the parent", parents[0].track, runs[0].track)
    outside = outside_band(runs, parents)
    notes += [f"against {name}: {line}" for line in outside or ["the curve is in its band"]]
    if systems_only:
        check_systems_only(runs, parents)
        expect("systems-only curve", outside[0] if outside else "in the parent's band",
               "in the parent's band")
        notes.append(f"systems-only: settings and losses are those of {name}, seed by seed")
    return systems_only, notes


def condition_lines(run: Run) -> list[str]:
    """Energy of a run, and whether it throttled, where its device says it."""
    found = [conditions(event) for event in run.vals]
    energy = [c["energy_j"] for c in found if "energy_j" in c]
    reasons = [why for bit, why in THROTTLED.items()
               if any(int(c.get("throttle_reasons", 0)) & bit for c in found)]
    lines = [f"THROTTLED: {', '.join(reasons)}"] if reasons else []
    if len(energy) > 1:
        lines.append(f"{energy[-1] - energy[0]:,.0f} J, its validations included")
    return [f"{run.path.stem}: {line}" for line in lines]


def say(line: str) -> None:
    """Print one line, whatever a name in it holds and whatever the terminal can show."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    encoding = sys.stdout.encoding or "ascii"
    print(line.encode(encoding, "backslashreplace").decode(encoding))


def report(runs: list[Run], systems_only: bool, notes: list[str]) -> bool:
    """Print table, statistics and verdict for a set that kept every rule; is it valid?"""
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
    for line in [line for run in runs for line in condition_lines(run)] + notes:
        say(line)
    if systems_only:
        below = statistics.fmean(losses) < target
        say(f"{'VALID' if below else 'NOT VALID'}: systems-only, mean must be below {target}")
        return below
    if n < 2:
        say("NOT VALID: no p from 1 run; at least 1 more is needed")
    elif math.isnan(p):
        say("NOT VALID: no p, since all losses are equal; runs of different seeds differ")
    else:
        say(f"{'VALID' if p < MAX_P else 'NOT VALID'}: p must be below {MAX_P}, is {p:.3g}")
    return p < MAX_P


def judge_set(folder: Path | None, paths: list[Path]) -> bool:
    """Judge one set and print what was found; is it valid?"""
    name, more = folder or "the logs named", (False, [])
    say(f"{name}: {len(paths)} log(s)")
    runs, refusals = judge_runs(paths)
    if runs and not refusals:
        try:
            more = check_set(folder, runs)
        except Refused as refusal:
            refusals.append(f"{name}: {refusal}")
    for line in refusals:
        say(line)
    if refusals or not paths:
        say(f"NOT VALID: {len(refusals)} refusal(s)" if paths else
            "NOT VALID: no .jsonl log; at least 2 runs are needed")
        return False
    return report(runs, *more)


def leaks_not(log: Path) -> bool:
    """Does the program of this log pass leak_test.py, in a process of its own?"""
    start = read_events(log)[0]
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("leak_test.py")),
                           str(log.with_name(start["program"])), f"--track={start['track']}"],
                          stdout=subprocess.PIPE, text=True)
    for line in [*done.stdout.splitlines(), *["NOT VALID: see above"] * (done.returncode > 0)]:
        say(line)
    return done.returncode == 0


def main(argv: list[str] | None = None) -> int:
    """Judge every set named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path,
                        help="a record folder, or the .jsonl logs of one set")
    parser.add_argument("--program", action="store_true", help="leak test of a valid set's program")
    given = parser.parse_args(argv)
    for path in (paths := given.paths):
        if not path.is_dir() and not (path.suffix == ".jsonl" and path.is_file()):
            parser.error(f"{str(path)!a} is neither a record folder nor a .jsonl log")
    try:
        import scipy.stats  # noqa: F401
    except ImportError as error:
        print(f"verify.py needs scipy: pip install -r requirements.txt ({error})", file=sys.stderr)
        return 2
    sets = [(path, sorted(path.glob("*.jsonl"))) for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    verdicts = [judge_set(folder, logs) and (not given.program or leaks_not(logs[0]))
                for folder, logs in sets + [(None, files)] * bool(files)]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
