"""Draws groups of runs: for compare.py's --plot (one PNG) and --html (one page that needs no net).

    figures(groups)                    a list of (title, matplotlib Figure)
    draw(groups, path)                 all panels below each other, 800 pixels wide
    page(groups, rows, verdicts, path) table, verdicts and panels in one static file

A group is anything with a name and runs. Panels, for each track and target of the runs:

    validation loss against tokens, steps and timed training
    time of a step
    records over time: the groups that are named YYYY-MM-DD_Name, one panel for each hardware

A curve is the mean over the group's complete runs, with a band from the least to the greatest of
them. Both end where the first run ends; each run's own end is a point. Groups differ in line style,
marker and hatch, so a picture without colour shows the same.
"""

import base64
import html
import io
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np
import verify
from logs import Run, hardware_of, target_of, track_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

WIDTH, DPI = 8.0, 100    # inches, pixels per inch
SMALL = 9                # points: the least that is readable
EARLY = 0.1              # part of a curve that may leave the picture: its fall hides all else
LOOKS = [                # colour, line style, marker, hatch of the first, second ... group
    ("#000000", "-", "o", "//"), ("#d55e00", "--", "s", ".."), ("#0072b2", "-.", "^", "\\\\"),
    ("#009e73", ":", "D", "xx"), ("#cc79a7", (0, (5, 1, 1, 1, 1, 1)), "v", "++"),
    ("#56b4e9", (0, (8, 2)), "P", "||"), ("#e69f00", (0, (2, 1)), "X", "--"),
    ("#666666", (0, (8, 2, 1, 2)), "<", "oo"), ("#7a4a00", (0, (1, 3)), ">", "**"),
    ("#5e3c99", (0, (4, 4)), "*", "OO")]
UNITS = [("s", 1.0, 1000.0), ("min", 60.0, 18_000.0), ("h", 3600.0, math.inf)]  # up to so many s
History = Sequence[tuple[str, str, float]]   # date, name, seconds of timed training


class Group(Protocol):
    name: str
    runs: Sequence[Run]


@dataclass(frozen=True)
class Series:
    """The runs of a group that are drawn as one."""
    label: str
    runs: list[Run]
    look: tuple


@dataclass(frozen=True)
class Panel:
    title: str
    alt: str                       # what it shows, in words
    height: float                  # inches
    paint: Callable[["Axes"], None]


def fail(problem: str) -> NoReturn:
    print(f"plots.py: {problem}", file=sys.stderr)
    raise SystemExit(2)


def new_figure(height: float) -> "Figure":
    """Without pyplot, so no window and no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("matplotlib is not installed; pip install -r requirements.txt")
    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


def short(text: str, most: int) -> str:
    """Begin and end of a text that is too long for its place."""
    return text if len(text) <= most else f"{text[:most // 2]} ... {text[5 - most // 2:]}"


def plain(text: str) -> str:
    """A text that matplotlib draws as it stands: in a font that it has, without formulas.

    A dollar sign would begin a formula; a legend leaves out what begins with an underscore.
    """
    text = "".join(c if c.isprintable() and c < "\u0250" else "?" for c in text)
    return (" " if text.startswith("_") else "") + text.replace("$", "\\$")


def sound(value: float | None) -> bool:
    """A loss or time that a run can have: there, not negative, and finite with room to add up."""
    return value is not None and 0 <= value < verify.TOO_LARGE


# -------------------------------------------------------------------------------------------------
# What is drawn

def task_of(run: Run) -> tuple[str, float]:
    """Track and target; the track's own where a log names one that none can have."""
    return track_of(run), target_of(run if sound(run.target) else replace(run, target=None))


def places_of(runs: Iterable[Run]) -> str:
    return ", ".join(dict.fromkeys(
        hardware_of(run) or f"{run.gpus or '?'} x {run.gpu or 'unknown'}" for run in runs))


def series_of(groups: Sequence[Group], task: tuple[str, float]) -> list[Series]:
    """One for each group with runs of the task; the complete runs, or all where none is."""
    found = []
    of_task = [(group.name, [run for run in group.runs if task_of(run) == task])
               for group in groups]
    hardware = {places_of(runs) for _, runs in of_task if runs}
    for name, runs in of_task:
        if not runs:
            continue
        complete = [run for run in runs if run.complete]
        cut = len(runs) - len(complete)
        count = (f"n = {len(complete)}" + (f", {cut} cut short not drawn" if cut else "")
                 if complete else f"n = {cut}, cut short")
        place = f", {short(places_of(runs), 40)}" if len(hardware) > 1 else ""
        look = LOOKS[len(found) % len(LOOKS)]
        found.append(Series(f"{short(name, 44)} ({count}{place})", complete or runs, look))
    return found


def curve(run: Run, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, steps or seconds, and validation losses: finite ones, in rising order of the axis."""
    points: list[tuple[float, float]] = []
    for val in run.validations:
        x = {"tokens": run.tokens_per_step and val.step * run.tokens_per_step, "steps": val.step,
             "time": None if val.time_ms is None else val.time_ms / 1000}[axis]
        if sound(x) and sound(val.loss) and (not points or x > points[-1][0]):
            points.append((x, val.loss))
    return tuple(np.array(points, dtype=float).reshape(-1, 2).T)


def band(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Where all curves have data: x, and a row of losses a curve, on lines between its points."""
    start, stop = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(start <= grid) & (grid <= stop)]
    return grid, np.array([np.interp(grid, x, y) for x, y in curves])


def step_times(run: Run) -> list[float]:
    """ms; where lines are more than a step apart, the mean of the steps between.

    Early logs of modded-nanogpt start their clock again at step 11: that pair is left out.
    """
    lines = [(line.step, line.time_ms) for line in run.steps if sound(line.time_ms)]
    return [(after - before) / (step - last) for (last, before), (step, after) in pairwise(lines)
            if step > last and after >= before]


def history_of(groups: Sequence[Group], task: tuple[str, float]) -> dict[str, History]:
    """Hardware -> the dated groups that reach the target, by date, with their mean seconds."""
    found: dict[str, list] = {}
    for group in groups:
        dated = re.search(r"(?:^|/)(\d{4}-\d\d-\d\d)_([^/]+)$", group.name)
        runs = [run for run in group.runs if run.complete and task_of(run) == task]
        times = [run.time_ms / 1000 for run in runs if sound(run.time_ms) and run.time_ms > 0]
        losses = [run.final_loss for run in runs if run.final_loss is not None]
        if dated and times and losses and np.mean(losses) <= task[1]:
            found.setdefault(places_of(runs), []).append((*dated.groups(), float(np.mean(times))))
    return {place: sorted(records, key=lambda record: record[0])
            for place, records in found.items()}


# -------------------------------------------------------------------------------------------------
# Panels

def spread(ax: "Axes", low: float, high: float, left: float, right: float) -> np.ndarray:
    """Set the x axis to low ... high and a part of that more on both sides: 120 bins of it.

    A logarithmic axis gets ticks at 1, 2, 5, 10 ..., written as people write them.
    """
    log = ax.get_xscale() == "log"
    first, last = np.log10((low, high)) if log else (low, high)
    width = (last - first) or abs(0.1 * last) or 1.0
    bins = np.linspace(first - left * width, last + right * width, 121)
    if log:
        bins = 10 ** bins
        ticks = np.outer(10.0 ** np.arange(-9, 13), (1, 2, 5)).ravel()
        ticks = ticks[(bins[0] <= ticks) & (ticks <= bins[-1])]
        ax.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        ax.set_xticks([], minor=True)
    ax.set_xlim(bins[0], bins[-1])
    return bins


def unit_of(seconds: float) -> tuple[str, float]:
    """The unit in which a time reads well, and its seconds."""
    return next((name, size) for name, size, most in UNITS if seconds <= most)


def paint_curves(ax: "Axes", found: list, label: str, scale: float, target: float) -> None:
    """found: (Series, curves) of each group."""
    tops, lows = [target], [target]
    for at, (series, curves) in enumerate(found):
        colour, style, marker, _ = series.look
        look = {"color": colour, "linestyle": style, "marker": marker, "markersize": 5}
        if not curves:
            ax.plot([], [], label=plain(f"{series.label}: not in its logs"), **look)
            continue
        grid, losses = band(curves)
        mean, every = losses.mean(axis=0), max(1, len(grid) // 8)
        ax.plot(grid / scale, mean, label=plain(series.label), markevery=(at % every, every),
                **look)
        if len(curves) > 1:
            ax.fill_between(grid / scale, losses.min(axis=0), losses.max(axis=0), color=colour,
                            alpha=0.25, linewidth=0)
        ax.plot([x[-1] / scale for x, _ in curves], [y[-1] for _, y in curves], marker,
                color=colour, markersize=4, fillstyle="none")
        tops += [max(y[x >= EARLY * x[-1]]) for x, y in curves]
        lows += [min(y) for _, y in curves]
    ax.axhline(target, color="#444444", linewidth=1, label=f"target {target:g}")
    margin = 0.05 * (max(tops) - min(lows)) or max(0.1, 0.1 * target)
    ax.set_ylim(min(lows) - margin, max(tops) + margin)
    ax.set(xlabel=label, ylabel="validation loss, nats per token")
    ax.grid(alpha=0.3)
    ax.figure.legend(fontsize=SMALL, loc="outside lower left", frameon=False, handlelength=4,
                     title="line: mean, until the first run ends; band: least to greatest; "
                           "hollow: each run's end", title_fontsize=SMALL, alignment="left")


def curve_panel(series: list[Series], axis: str, target: float) -> Panel | None:
    """None where no log has this axis."""
    found = [(one, [xy for run in one.runs if len((xy := curve(run, axis))[0])]) for one in series]
    ends = [x[-1] for _, curves in found for x, _ in curves]
    if not ends:
        return None
    unit, size = unit_of(max(ends))
    title, label, scale = {
        "tokens": ("Loss against tokens", "millions of tokens (steps x mean tokens a step)", 1e6),
        "steps": ("Loss against steps", "steps", 1.0),
        "time": ("Loss against timed training", f"timed training, {unit}", size)}[axis]
    said = [f"{one.label} ends at a mean of {np.mean([y[-1] for _, y in curves]):.4f} after "
            f"{np.mean([x[-1] for x, _ in curves]) / scale:,.1f}"
            for one, curves in found if curves]
    return Panel(title, f"{title} ({label}); target {target:g}. {'; '.join(said)}.",
                 3.8 + 0.2 * len(found),
                 partial(paint_curves, found=found, label=label, scale=scale, target=target))


def paint_steps(ax: "Axes", found: list) -> None:
    """A histogram a group, the first on top. found: (Series, ms of each step)."""
    low, high = (pick(np.percentile(times, part) for _, times in found if times)
                 for pick, part in ((min, 0.5), (max, 99.5)))
    ax.set_xscale("log" if high > 5 * low > 0 else "linear")
    bins = spread(ax, low, high, 0.02, 0.02)
    for row, (series, times) in enumerate(reversed(found)):
        colour, _, _, hatch = series.look
        said = f"{series.label}: no step lines with times in its logs"
        if times:
            median, tail = np.percentile(times, (50, 99))
            said = f"{series.label}: median {median:,.1f}, 99 % below {tail:,.1f} ms"
            ax.plot([median] * 2, [row, row + 0.66], color=colour, linewidth=2)
        counts = np.histogram(times, bins)[0]
        heights = row + 0.6 * counts / max(1, counts.max())
        ax.fill_between(bins, row, [*heights, row], step="post", facecolor=colour + "40",
                        edgecolor=colour, hatch=hatch, linewidth=0.8)
        ax.text(0.01, row + 0.7, plain(said), fontsize=SMALL, transform=ax.get_yaxis_transform())
    ax.set(xlabel="time of a step, ms (1 % of a group's steps at most are outside)",
           ylabel="steps (scaled)", yticks=[], ylim=(-0.05, len(found)))


def step_panel(series: list[Series]) -> Panel | None:
    found = [(one, [time for run in one.runs for time in step_times(run)]) for one in series]
    if not any(times for _, times in found):
        return None
    said = [f"{one.label} has a median of {np.median(times):,.1f} ms"
            for one, times in found if times]
    return Panel("Time of a step", f"Distribution of the time of a step. {'; '.join(said)}.",
                 1.1 + 0.8 * len(found), partial(paint_steps, found=found))


def paint_history(ax: "Axes", records: History) -> None:
    """A point a record, and a bar from the best time before it."""
    unit, size = unit_of(max(seconds for _, _, seconds in records))
    times = [seconds / size for _, _, seconds in records]
    for row, time in enumerate(times):
        best = min(times[:row], default=time)
        colour, hatch = ("#009e73", "//") if time <= best else ("#d55e00", "xx")
        if row:
            ax.barh(row, time - best, left=best, color=colour + "60", edgecolor=colour,
                    hatch=hatch, height=0.6)
        change = f" ({time / best - 1:+.1%})" if row else ""
        ax.plot(time, row, "o" if time <= best else "x", color="black", markersize=5)
        ax.annotate(f"{time:,.4g} {unit}{change}", (max(time, best), row), (8, 0), fontsize=SMALL,
                    textcoords="offset points", verticalalignment="center")
    ax.set(xscale="log" if max(times) > 5 * min(times) > 0 else "linear",
           xlabel=f"timed training, {unit}; bar: change from the best before it")
    spread(ax, min(times), max(times), 0.05, 0.4)
    ax.set_yticks(range(len(records)), [plain(f"{date} {short(name, 30)}")
                                        for date, name, _ in records], fontsize=SMALL)
    ax.set_ylim(len(records) - 0.4, -0.6)
    ax.grid(axis="x", alpha=0.3)


def history_panel(records: History, place: str) -> Panel:
    title = "Records over time" + (f": {short(place, 60)}" if place else "")
    said = [f"{date} {name} {seconds:,.1f} s" for date, name, seconds in records]
    return Panel(title, f"{title}. {'; '.join(said)}.", 1.0 + 0.28 * len(records),
                 partial(paint_history, records=records))


def panels(groups: Sequence[Group], history: History | None) -> list[Panel]:
    """All that the runs have data for. Runs of two tasks are never drawn in one panel."""
    tasks, found = dict.fromkeys(task_of(run) for group in groups for run in group.runs), []
    for task in tasks:
        series = series_of(groups, task)
        drawn = series[:len(LOOKS)]
        here = [*(curve_panel(drawn, axis, task[1]) for axis in ("tokens", "steps", "time")),
                step_panel(drawn)]
        track = f"track {task[0]}, target {task[1]:g}, " if len(tasks) > 1 else ""
        part = f"the first {len(LOOKS)} of {len(series)} groups" if series != drawn else ""
        found += [replace(panel, title=f"{panel.title}, {track}{part}".rstrip(", "))
                  for panel in here if panel]
        if history is None:
            found += [history_panel(records, track + place)
                      for place, records in history_of(groups, task).items() if len(records) > 1]
    if history:
        found.append(history_panel(sorted(history, key=lambda record: record[0]), ""))
    if not found:
        fail("nothing to draw: expected a run with a finite validation loss, found none")
    return found


def filled(figure: "FigureBase", panel: Panel) -> "FigureBase":
    """The figure, or part of one, with the panel in it."""
    ax = figure.add_subplot()
    panel.paint(ax)
    ax.set_title(plain(panel.title), fontsize=11, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def figures(groups: Sequence[Group], history: History | None = None) -> list[tuple[str, "Figure"]]:
    """Title and figure of each panel. history: records by date, in place of the groups' own."""
    return [(panel.title, filled(new_figure(panel.height), panel))
            for panel in panels(groups, history)]


# -------------------------------------------------------------------------------------------------
# Files

def write(path: Path, data: bytes) -> None:
    """All or nothing: under another name first, which is on disk before it takes the place."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        fail(f"{path}: cannot be written ({error.strerror}); name a file in a folder that is there")


def draw(groups: Sequence[Group], path: Path, history: History | None = None) -> None:
    """All panels below each other in one PNG."""
    found, image = panels(groups, history), io.BytesIO()
    heights = [panel.height for panel in found]
    figure = new_figure(sum(heights))
    parts = figure.subfigures(len(found), height_ratios=heights, squeeze=False).flat
    for part, panel in zip(parts, found):
        filled(part, panel)
    figure.savefig(image, format="png", dpi=DPI)
    write(path, image.getvalue())


STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
html { background: Canvas; color: CanvasText; }
.wide, figure { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.875rem; }
th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid GrayText; text-align: left; }
th, td { white-space: nowrap; }
td:first-child { white-space: normal; min-width: 12rem; }
td, li { overflow-wrap: anywhere; }
figure { margin: 2rem 0; }
img { width: 100%; min-width: 40rem; max-width: 50rem; height: auto; background: white; }
@media (prefers-color-scheme: dark) { img { filter: invert(0.9) hue-rotate(180deg); } }
"""
# Even if a name of a log got through as markup, this would let no script run and nothing be fetched
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def picture_tag(panel: Panel) -> str:
    """The panel as an SVG inside an img, where no browser runs scripts."""
    figure, image = filled(new_figure(panel.height), panel), io.BytesIO()
    import matplotlib  # new_figure has said so if it is missing
    with matplotlib.rc_context({"svg.hashsalt": "plots"}):  # the same runs give the same file
        figure.savefig(image, format="svg", metadata={"Date": None})
    data = base64.b64encode(image.getvalue()).decode()
    return (f'<figure><img alt="{html.escape(panel.alt)}" src="data:image/svg+xml;base64,{data}">'
            "</figure>")


def page(groups: Sequence[Group], rows: list[dict[str, str]], verdicts: list[str], path: Path,
         history: History | None = None) -> None:
    """One page with the table (a dict a row: heading -> text), the verdicts and the panels."""
    title = html.escape(short("Runs compared: " + ", ".join(group.name for group in groups), 100))
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in rows[0]) if rows else ""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row.values())
                   + "</tr>\n" for row in rows)
    lines = "".join(f"<li>{html.escape(line)}</li>\n" for line in verdicts)
    pictures = "\n".join(map(picture_tag, panels(groups, history)))
    text = f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
<h1>Runs compared</h1>
<div class="wide"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}</tbody>
</table></div>
<h2>Verdicts</h2>
<ul>
{lines}</ul>
<h2>Figures</h2>
{pictures}
</html>
"""
    write(path, text.encode("utf-8", "xmlcharrefreplace"))
