"""Is it faster, by how much, how sure is that? Compares logs of any runs, ours or published.

    python records/compare.py records/PARENT records/NEW       NEW is held against PARENT
    python records/compare.py LOGS --by=gpu --format=markdown  groups by another key than the record
    python records/compare.py LOGS --runs --format=csv         a row a run, no statistics
    python records/compare.py LOGS --plot=out.png --html=out.html
    python records/compare.py --leaderboard [--check]          writes, or checks, records/README.md

The first group is the baseline, unless --baseline=NAME chooses another. A verdict is one of

    faster, slower         both groups are valid, and the 95 % interval of the speed-up leaves out 1
    not distinguishable    both are valid, and the interval holds 1
    not valid              a run is incomplete, or the mean final loss is not below the target with
                           p < 0.01 (one-sided one-sample t-test, as the field does)
    not comparable         the hardware differs or is unknown (--across-hardware compares it all the
                           same, and says so), or a log has no times
    not compared           tracks or targets differ: the times are those of different tasks

The speed-up is the baseline's mean timed training over the group's; speedup.py says how sure it is.
A log that names no track is one of modded-nanogpt's, so it is of FineWeb and its target is 3.28.

Exit code: 0, or 1 where --check finds the leaderboard stale, 2 wrong usage.
"""

import argparse
import contextlib
import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import logs
import plots
import verify
from logs import Run, hardware_of, target_of, track_of
from speedup import MOST_RUNS, SpeedUp, mean, more_runs, sd, sound, speed_up, time_to_target

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- compare.py --leaderboard: begin -->", "<!-- compare.py --leaderboard: end -->"


# -------------------------------------------------------------------------------------------------
# Groups of runs

def torch_of(run: Run) -> str | None:
    return run.torch


def distinct(values: Iterable[object]) -> list:
    """The different values, in order of appearance."""
    return list(dict.fromkeys(values))


def listed(values: Iterable[object]) -> str:
    """The different values as text.

    >>> listed([1, 2, 1]), listed([None])
    ('1, 2', 'unknown')
    """
    return ", ".join("unknown" if value is None else str(value) for value in distinct(values))


@dataclass(frozen=True)
class Group:
    """Runs that are compared as one: those of a record, a file, a GPU."""
    name: str
    runs: tuple[Run, ...]

    @property
    def complete(self) -> tuple[Run, ...]:
        """The runs that came to their last planned step with a validation."""
        return tuple(run for run in self.runs if run.complete)

    @property
    def losses(self) -> list[float]:
        """Final losses of the complete runs, nats per token."""
        return [run.final_loss for run in self.complete if run.final_loss is not None]

    @property
    def seconds(self) -> list[float]:
        """Timed training of the complete runs."""
        return [run.time_ms / 1000 for run in self.complete if sound(run.time_ms)]

    @property
    def tokens(self) -> list[float]:
        """Tokens of the complete runs that say how many a step has."""
        return [run.last_step * run.tokens_per_step for run in self.complete if run.tokens_per_step]

    def all(self, of: Callable[[Run], object]) -> list:
        """The different values that its runs have."""
        return distinct(map(of, self.runs))

    def targets(self, given: float | None) -> list[float]:
        """The one that is given, else those of the runs; nats per token."""
        return [given] if given else self.all(target_of)


KEYS: dict[str, Callable[[Run], object]] = {
    "record": lambda run: run.record,
    "file": lambda run: run.path.as_posix(),
    "gpu": hardware_of,
    "torch": torch_of,
    "program": lambda run: run.program_sha256 and run.program_sha256[:8],
    "track": track_of,
}


def group_runs(runs: list[Run], by: str) -> list[Group]:
    """Groups in order of appearance. Records of one name in two folders are two groups."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        name = listed([KEYS[by](run)])
        above = f"/{run.path.as_posix()}".rpartition(f"/{name}/")[0] if by == "record" else ""
        found.setdefault((name, above.removeprefix("/")), []).append(run)
    names = [name for name, _ in found]
    return [Group(f"{above}/{name}" if names.count(name) > 1 and above else name, tuple(members))
            for (name, above), members in found.items()]


# -------------------------------------------------------------------------------------------------
# Verdicts

def why_not_valid(group: Group, target: float) -> str:
    """What keeps the set from being valid, "" where nothing does."""
    cut, losses = len(group.runs) - len(group.complete), group.losses
    if cut:
        return f"{cut} of {len(group.runs)} runs incomplete"
    if not all(map(sound, losses)):
        return "a final loss is not finite"
    if not losses:
        return "no run has a final loss"
    if len(losses) < 2:
        return f"no p from 1 run, whose loss is {losses[0]:.5f} against {target:g}"
    p, lacking = verify.p_value(losses, target), more_runs(losses, target)
    if p < verify.MAX_P:
        return ""
    if lacking is None:
        return "no p, since all losses are equal; runs of different seeds differ"
    need = (f"at this mean and sd {lacking:,} more runs would do" if lacking < math.inf else
            f"at this mean and sd {MOST_RUNS:,} runs would not do" if mean(losses) < target else
            "the mean is not below it")
    return f"p = {p:.3g} for a mean loss below {target:g} (< {verify.MAX_P} is needed; {need})"


@dataclass(frozen=True)
class Verdict:
    word: str
    reason: str
    speed: SpeedUp = SpeedUp()


def alone(group: Group, given: float | None) -> Verdict:
    """Of a group that is held against nothing, as the baseline."""
    targets = group.targets(given)
    if len(targets) > 1 or len(group.all(track_of)) > 1:
        return Verdict("not compared", f"tracks {listed(group.all(track_of))}, "
                       f"targets {listed(targets)} in one group")
    if reason := why_not_valid(group, targets[0]):
        return Verdict("not valid", reason)
    return Verdict("valid", f"p = {verify.p_value(group.losses, targets[0]):.3g} for a mean loss "
                   f"below {targets[0]:g}")


def against(base: Group, group: Group, given: float | None, across: bool) -> Verdict:
    """Of a group that is held against the baseline."""
    for name, ours, theirs in (("tracks", group.all(track_of), base.all(track_of)),
                               ("targets", group.targets(given), base.targets(given))):
        if ours != theirs or len(ours) > 1:
            return Verdict("not compared", f"{name} {listed(ours)} against {listed(theirs)}")
    ours, theirs = group.all(hardware_of), base.all(hardware_of)
    hardware = f"hardware {listed(ours)} against {listed(theirs)}"
    same = ours == theirs and len(ours) == 1 and ours[0] is not None
    if not same and not across:
        return Verdict("not comparable", f"{hardware} (--across-hardware compares all the same)")
    speed = speed_up(base.seconds, group.seconds)
    words = f"{speed}" if same else f"{speed}; ACROSS {hardware}"
    if group.all(torch_of) != base.all(torch_of):
        words += f"; torch {listed(group.all(torch_of))} against {listed(base.all(torch_of))}"
    reasons = [f"{one.name}: {reason}" for one in (group, base)
               if (reason := why_not_valid(one, base.targets(given)[0]))]
    if reasons:
        return Verdict("not valid", "; ".join([*reasons, words]), speed)
    if speed.low is None:
        return Verdict("not comparable", words, speed)
    return Verdict("faster" if speed.low > 1 else "slower" if speed.high < 1 else
                   "not distinguishable", words, speed)


# -------------------------------------------------------------------------------------------------
# Rows and their formats

def group_row(group: Group, verdict: Verdict, given: float | None) -> dict:
    """All that is known of a group: name -> value, None where it is not known."""
    targets, losses, seconds = group.targets(given), group.losses, group.seconds
    target = targets[0] if len(targets) == 1 else math.nan
    reached = [time for run in group.complete
               if (time := time_to_target(run, target)) is not None]
    rates = [run.last_step * run.tokens_per_step / run.time_ms * 1000 for run in group.complete
             if run.tokens_per_step and sound(run.time_ms) and run.time_ms > 0]
    versions = distinct(name for run in group.runs for name in run.versions)
    speed = verdict.speed
    return {
        "group": group.name, "n": len(group.complete),
        "incomplete": len(group.runs) - len(group.complete),
        "track": listed(group.all(track_of)), "target": target,
        "loss_mean": mean(losses), "loss_sd": sd(losses),
        "p": verify.p_value(losses, target) if sd(losses) else None,
        "more_runs": more_runs(losses, target),
        "seconds_mean": mean(seconds), "seconds_sd": sd(seconds),
        "to_target_s": mean(reached), "reached_target": len(reached),
        "steps": listed(run.last_step for run in group.complete), "tokens": mean(group.tokens),
        "tokens_per_s": mean(rates), "energy_j_mean": mean(
            [run.energy_j for run in group.complete if run.energy_j is not None]),
        "hardware": listed(group.all(hardware_of)),
        "torch": listed(group.all(torch_of)),
        "versions": {name: listed(run.versions.get(name) for run in group.runs)
                     for name in versions},
        "unplaced": sum(run.unplaced for run in group.runs), "speed_up": speed.ratio,
        "speed_up_low": speed.low, "speed_up_high": speed.high, "welch_p": speed.p,
        "verdict": verdict.word, "reason": verdict.reason}


def run_row(run: Run, path: str) -> dict:
    """What one run's log says, times in ms, memory in MiB."""
    steps = run.last_step if run.planned is None else run.planned
    return {"path": path, "run_index": run.index, "steps": steps, "last_step": run.last_step,
            "final_val_loss": run.final_loss, "train_time_ms": run.time_ms,
            "step_avg_ms": run.step_avg_ms, "n_val_lines": len(run.validations),
            "n_step_lines": len(run.steps), "torch": run.torch, "gpu": run.gpu,
            "n_gpus_listed": run.gpus, "peak_alloc_mib": run.peak_alloc_mib,
            "peak_reserved_mib": run.peak_reserved_mib, "complete": run.complete,
            "seed": run.seed}


def show(value: object, form: str = "") -> str:
    """A value in its form, "" for what is not known."""
    return "" if value is None else format(value, form)


def pair(row: dict, name: str, form: str) -> str:
    """`mean +- sd`, the second only where there is one."""
    text, spread = show(row[f"{name}_mean"], form), row[f"{name}_sd"]
    return text if spread is None else f"{text} +- {spread:{form}}"


def group_cells(row: dict) -> dict[str, str]:
    """Heading -> text, for people."""
    tokens, cut = row["tokens"] and row["tokens"] / 1e6, row["incomplete"]
    speed = show(row["speed_up"], ".4f")
    if row["speed_up_low"] is not None:
        speed += f" ({row['speed_up_low']:.4f} to {row['speed_up_high']:.4f})"
    return {"group": row["group"], "n": f"{row['n']} + {cut} cut" if cut else f"{row['n']}",
            "loss": pair(row, "loss", ".5f"), "p": show(row["p"], ".3g"),
            "timed s": pair(row, "seconds", ",.3f"), "speed-up": speed,
            "to target s": show(row["to_target_s"], ",.1f"), "steps": row["steps"],
            "M tokens": show(tokens, ",.1f"), "tokens/s": show(row["tokens_per_s"], ",.0f"),
            "hardware": row["hardware"], "torch": row["torch"]}


def verdict_line(row: dict, base: Group) -> str:
    held = "" if row["group"] == base.name else f" against {base.name}"
    unplaced = f" [{row['unplaced']} line(s) could not be placed]" if row["unplaced"] else ""
    return f"{row['group']}{held}: {row['verdict']}: {row['reason']}{unplaced}"


def as_table(cells: list[dict[str, str]]) -> list[str]:
    """Aligned columns."""
    rows = [list(cells[0]), *[list(row.values()) for row in cells]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip()
            for row in rows]


def as_markdown(cells: list[dict[str, str]]) -> list[str]:
    rows = [list(cells[0]), ["---"] * len(cells[0]), *[list(row.values()) for row in cells]]
    return ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]


def as_json(rows: list[dict]) -> list[str]:
    """JSON has no nan and no inf: null stands for both."""
    return json.dumps([{name: None if isinstance(value, float) and not math.isfinite(value)
                        else value for name, value in row.items()} for row in rows],
                      indent=1).splitlines()


def as_csv(rows: list[dict]) -> list[str]:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: json.dumps(value) if isinstance(value, dict) else value
                      for name, value in row.items()} for row in rows)
    return text.getvalue().splitlines()


def formatted(form: str, rows: list[dict], cells: list[dict[str, str]]) -> list[str]:
    """JSON and CSV hold the values, the tables what is for people."""
    return {"json": as_json, "csv": as_csv}[form](rows) if form in ("json", "csv") else (
        {"table": as_table, "markdown": as_markdown}[form](cells))


# -------------------------------------------------------------------------------------------------
# Leaderboard: the record folders that the judge accepts, beside published single-GPU runs

def accepted(folder: Path) -> bool:
    """Does the judge accept the set?"""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        valid = verify.judge_set(folder, sorted(folder.glob("*.jsonl")))
    if not valid:
        print(f"left out: {folder.name}: {said.getvalue().splitlines()[-1]}", file=sys.stderr)
    return valid


def board_rows(records: Path) -> list[dict]:
    """Our records and published.csv: the fields of that file, numbers as numbers or None."""
    rows: list[dict] = []
    with (HERE / "published.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            numbers = {name: float(row[name]) if row[name] else None
                       for name in ("target", "loss_mean", "loss_sd", "seconds_mean", "seconds_sd")}
            rows.append(row | numbers | {"n": int(row["n"])})
    for folder in sorted(records.glob("????-??-??_*")):
        if accepted(folder):
            group = Group(folder.name, tuple(read_set(folder)))
            row = group_row(group, alone(group, None), None)
            rows.append(row | {"record": folder.name, "source": folder.name, "note": "logs"})
    return rows


def board_p(row: dict) -> str:
    """p from mean, sd and n, or why there is none."""
    from scipy import stats

    if row["loss_mean"] >= row["target"]:
        return "misses the target"
    if row["loss_sd"] is None:
        return "one run: none"
    t = (row["loss_mean"] - row["target"]) / row["loss_sd"] * math.sqrt(row["n"])
    return f"{stats.t.cdf(t, row['n'] - 1):.2g}"


def leaderboard(records: Path) -> str:
    """One table a track, target and hardware, fastest first; those that miss the target last."""
    rows, lines = board_rows(records), []
    for place in sorted({(row["track"], row["target"], row["hardware"]) for row in rows}):
        lines += [f"### {place[0]}, target {place[1]:g}: {place[2]}", ""]
        here = [row for row in rows if (row["track"], row["target"], row["hardware"]) == place]
        here.sort(key=lambda row: (row["loss_mean"] >= row["target"], row["seconds_mean"]))
        lines += [*as_markdown([{
            "record": row["record"], "timed training, s": pair(row, "seconds", ",.1f"),
            "final loss, nats per token": pair(row, "loss", ".4f"), "n": str(row["n"]),
            "p": board_p(row), "source": f"[{row['note'] or 'source'}]({row['source']})"}
            for row in here]), ""]
    return "\n".join([BEGIN, "", *lines, END])


def write_board(readme: Path, check: bool) -> int:
    """Bring the marked part of README.md up to date, or say whether it is."""
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"compare.py: {readme}: expected the lines {BEGIN} and {END}, found not both; "
              "put them where the tables belong", file=sys.stderr)
        return 2
    new = before + leaderboard(readme.parent) + after
    if check:
        print(f"{readme.name}: " + ("up to date" if new == text else
                                    "stale; python records/compare.py --leaderboard renews it"))
        return int(new != text)
    plots.write(readme, new.encode())
    return 0


# -------------------------------------------------------------------------------------------------
# Main

def read_set(path: Path) -> list[Run]:
    """The runs of a file or folder, without those that were cut short and put apart."""
    return [run for run in logs.read_runs(path) if run.path.parent.name != "incomplete"]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="compare.py", usage="compare.py PATH ... [options]",
                                     description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, help="a log, or a folder")
    parser.add_argument("--by", choices=KEYS, default="record", help="what makes a group")
    parser.add_argument("--baseline", metavar="NAME", help="group that the others are held against")
    parser.add_argument("--target", type=float, help="loss in nats per token, for all groups")
    parser.add_argument("--across-hardware", action="store_true", help="compare times all the same")
    parser.add_argument("--format", choices=("table", "markdown", "json", "csv"), default="table")
    parser.add_argument("--runs", action="store_true", help="a row a run, no statistics")
    parser.add_argument("--plot", metavar="FILE.png", type=Path)
    parser.add_argument("--html", metavar="FILE.html", type=Path)
    parser.add_argument("--leaderboard", action="store_true", help="renew records/README.md")
    parser.add_argument("--check", action="store_true", help="with --leaderboard: only look")
    return parser


def read_all(paths: list[Path]) -> list[Run]:
    """The runs of all paths, each once. Raises ValueError with what is wrong with a path."""
    runs: dict[tuple, Run] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{str(path)!a}: no such file or folder")
        if not (found := read_set(path)):
            raise ValueError(f"{str(path)!a}: no run in it; a run's log has lines of validation")
        for run in found:
            runs.setdefault((run.path.resolve(), run.index), run)
    return list(runs.values())


def report_runs(runs: list[Run], above: Path | None, form: str) -> list[str]:
    """A row a run, its path relative to the folder."""
    rows = [run_row(run, (run.path.relative_to(above) if above else run.path).as_posix())
            for run in runs]
    return formatted(form, rows, [{name: show(value) for name, value in row.items()}
                                  for row in rows])


def report(given: argparse.Namespace, groups: list[Group], base: Group) -> list[str]:
    """A row a group and the verdicts; plots are drawn where they are wanted."""
    verdicts = [alone(group, given.target) if group is base else
                against(base, group, given.target, given.across_hardware) for group in groups]
    rows = [group_row(group, verdict, given.target) for group, verdict in zip(groups, verdicts)]
    cells, said = [group_cells(row) for row in rows], [verdict_line(row, base) for row in rows]
    if given.plot:
        plots.draw(groups, given.plot)
    if given.html:
        plots.page(groups, cells, said, given.html)
    if given.format in ("json", "csv"):
        return formatted(given.format, rows, cells)
    bullet = "* " if given.format == "markdown" else ""
    return [*formatted(given.format, rows, cells), "", *[bullet + line for line in said]]


def main(argv: list[str] | None = None) -> int:
    parser = options()
    given = parser.parse_args(argv)
    if given.leaderboard:
        return write_board(HERE / "README.md", given.check)
    if given.check or not given.paths:
        parser.error("--check goes with --leaderboard" if given.check else "no log or folder named")
    if given.target is not None and not 0 < given.target < 100:
        parser.error(f"--target={given.target}: expected nats per token, above 0 and below 100")
    try:
        runs = read_all(given.paths)
    except ValueError as error:
        parser.error(str(error))
    if given.target:
        runs = [replace(run, target=given.target) for run in runs]  # for the plots
    if given.runs:
        above = given.paths[0] if len(given.paths) == 1 and given.paths[0].is_dir() else None
        lines = report_runs(runs, above, given.format)
    else:
        groups = group_runs(runs, given.by)
        by_name = {group.name: group for group in groups}
        if given.baseline not in (None, *by_name):
            parser.error(f"--baseline={given.baseline}: expected one of {', '.join(by_name)}")
        lines = report(given, groups, by_name.get(given.baseline, groups[0]))
    for line in lines:
        verify.say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
