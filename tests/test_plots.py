"""The plots: what a panel holds by structure, hostile names, the files, the page in a browser."""
import base64
import builtins
import html
import math
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
pytest.importorskip("matplotlib", reason="no matplotlib here: pip install -r requirements.txt")
import plots  # noqa: E402
from logs import Run, Step, Validation  # noqa: E402

H100 = "NVIDIA H100 80GB HBM3"
HOSTILE = ["<script>document.title='owned'</script>", '"><img src=x onerror=alert(1)>', "$\\frac{$",
           "_hidden", "\udcff\u2028 \u4e2d", "x" * 500]


def make(seed: int = 0, loss: float = 3.27, step_ms: float = 100.0, **more) -> Run:
    """100 steps of 1,000 tokens, validated every 25; of seed s, losses are s thousandths higher."""
    vals = tuple(Validation(step, loss + 0.001 * seed + 8 * 0.5 ** (step / 10) * (step < 100),
                            step * (step_ms + seed)) for step in range(0, 101, 25))
    steps = tuple(Step(step, None, step * (step_ms + seed)) for step in range(1, 101))
    return Run(**{"path": Path(f"{seed}.txt"), "index": 0, "record": "A", "format": "text",
                  "validations": vals, "steps": steps, "planned": 100, "last_step": 100,
                  "complete": True, "time_ms": vals[-1].time_ms, "step_avg_ms": step_ms,
                  "seed": seed, "tokens_per_step": 1000.0, "gpu": H100, "gpus": 1} | more)


def group(name: str, n: int = 3, **more) -> SimpleNamespace:
    return SimpleNamespace(name=name, runs=tuple(make(seed, **more) for seed in range(n)))


def axes_of(groups, history=None) -> dict:
    """Title -> axes."""
    return {title: figure.axes[0] for title, figure in plots.figures(groups, history)}


def legend(ax) -> list[str]:
    return [text.get_text() for text in ax.figure.legends[0].get_texts()]


# -------------------------------------------------------------------------------------------------
# What a panel holds

def test_every_panel_is_there_with_units_and_target():
    found = axes_of([group("2026-01-01_A"), group("2026-01-02_B", step_ms=90)])
    assert list(found) == ["Loss against tokens", "Loss against steps",
                           "Loss against timed training", "Time of a step",
                           f"Records over time: 1 x {H100}"]
    labels = [ax.get_xlabel() for ax in found.values()]
    assert [re.search(r"millions of tokens|^steps$|, s$|, ms |, s;", label)[0]
            for label in labels] == ["millions of tokens", "steps", ", s", ", ms ", ", s;"]
    for ax in list(found.values())[:3]:
        assert ax.get_ylabel() == "validation loss, nats per token"
        assert legend(ax) == ["2026-01-01_A (n = 3)", "2026-01-02_B (n = 3)", "target 3.28"]
        assert "band: least to greatest" in ax.figure.legends[0].get_title().get_text()
        low, high = ax.get_ylim()
        assert low < 3.27 < 3.28 < high < 8, "the fall of the first steps would hide the rest"
        target = [line for line in ax.lines if line.get_label() == "target 3.28"]
        assert set(target[0].get_ydata()) == {3.28}


def test_band_and_mean_are_those_of_the_runs():
    ax = axes_of([group("A", 3)])["Loss against steps"]
    line = ax.lines[0]
    assert list(line.get_xdata()) == [0, 25, 50, 75, 100]
    assert line.get_ydata()[-1] == pytest.approx(3.271)    # of 3.270, 3.271, 3.272
    band = ax.collections[0].get_paths()[0].vertices
    assert sorted(set(band[band[:, 0] == 100][:, 1].round(6))) == [3.27, 3.272]
    assert list(ax.lines[1].get_ydata()) == pytest.approx([3.27, 3.271, 3.272])
    assert not axes_of([group("A", 1)])["Loss against steps"].collections, "one run has no band"


def test_a_mean_over_time_ends_where_the_first_run_ends():
    x, y = plots.band([(np.array([0.0, 10.0]), np.array([5.0, 3.0])),
                       (np.array([2.0, 12.0]), np.array([6.0, 4.0]))])
    assert list(x) == [2, 10]                       # both have data from 2 to 10
    assert y[:, 0] == pytest.approx([4.6, 6.0])     # 5 - 2 * 2/10, and the first point
    assert y[:, 1] == pytest.approx([3.0, 4.4])     # the last point, and 6 - 2 * 8/10


def test_runs_without_common_data_give_no_mean():
    early = make(validations=(Validation(0, 5.0, 0.0), Validation(10, 4.0, 1e3)))
    late = make(validations=(Validation(90, 3.5, 9e3), Validation(100, 3.2, 1e4)))
    ax = axes_of([SimpleNamespace(name="A", runs=(early, late))])["Loss against steps"]
    assert len(ax.lines[0].get_xdata()) == 0
    assert list(ax.lines[1].get_xdata()) == [10, 100]


def test_values_that_are_no_losses_or_go_back_in_time_are_left_out():
    vals = [(0, 9.0, 0.0), (1, math.nan, 1.0), (2, 1e300, 2.0), (3, 4.0, 500.0), (4, 3.9, 400.0),
            (5, 3.5, None), (6, 3.4, 600.0)]
    run = make(validations=tuple(Validation(*val) for val in vals))
    x, y = plots.curve(run, "time")
    assert list(x) == [0, 0.5, 0.6] and list(y) == [9, 4, 3.4]
    x, y = plots.curve(run, "tokens")
    assert list(x) == [0, 3000, 4000, 5000, 6000]
    assert not len(plots.curve(make(tokens_per_step=None), "tokens")[0])


def test_what_is_missing_is_said():
    silent = group("B", tokens_per_step=None, steps=())
    found = axes_of([group("A"), silent])
    assert "B (n = 3): not in its logs" in legend(found["Loss against tokens"])
    assert any("B (n = 3): no step lines" in text.get_text()
               for text in found["Time of a step"].texts)
    assert list(axes_of([silent])) == ["Loss against steps", "Loss against timed training"]
    cut = SimpleNamespace(name="C", runs=(make(), make(1, complete=False)))
    ax = axes_of([cut])["Loss against steps"]
    assert legend(ax)[0] == "C (n = 1, 1 cut short not drawn)" and not ax.collections
    only = SimpleNamespace(name="C", runs=(make(complete=False),))
    assert legend(axes_of([only])["Loss against steps"])[0] == "C (n = 1, cut short)"


def test_other_hardware_is_named_and_other_tasks_have_their_own_panels():
    ax = axes_of([group("A"), group("B", gpus=8)])["Loss against timed training"]
    assert [label.rsplit("(")[1] for label in legend(ax)[:2]] == [
        f"n = 3, 1 x {H100})", f"n = 3, 8 x {H100})"]
    found = axes_of([group("A"), group("B", track="tiny", target=3.56)])
    assert [legend(found[f"Loss against steps, track {task}"])[1] for task in
            ("fineweb, target 3.28", "tiny, target 3.56")] == ["target 3.28", "target 3.56"]
    assert len(found) == 8


def test_groups_differ_without_colour():
    groups = [group(f"g{i}", 1) for i in range(len(plots.LOOKS))]
    found = axes_of(groups)
    lines = found["Loss against steps"].lines[:-1:2]    # the other ones are the runs' ends
    assert len({(str(line._unscaled_dash_pattern), line.get_marker()) for line in lines}) == 10
    assert len({str(line._unscaled_dash_pattern) for line in lines}) == 10
    assert len({line.get_marker() for line in lines}) == 10
    assert len({part.get_hatch() for part in found["Time of a step"].collections}) == 10
    many = axes_of([*groups, group("one more", 1)])
    assert "Loss against steps, the first 10 of 11 groups" in many


def test_step_times():
    at = [(1, 100.0), (2, 210.0), (4, 430.0), (4, 440.0), (5, math.nan), (6, 660.0), (7, 10.0),
          (8, 130.0)]
    run = make(steps=tuple(Step(step, None, time) for step, time in at))
    assert plots.step_times(run) == [110, 110, 110, 120]    # 4 to 6 is two steps; 6 to 7 restarts
    ax = axes_of([group("A", 1), group("B", 1, step_ms=1000)])["Time of a step"]
    assert [text.get_text() for text in ax.texts] == [
        "B (n = 1): median 1,000.0, 99 % below 1,000.0 ms",
        "A (n = 1): median 100.0, 99 % below 100.0 ms"]
    assert ax.get_xscale() == "log" and ax.texts[0].get_position()[1] < 1
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["100", "200", "500", "1,000"]


@pytest.mark.parametrize("seconds, unit, value", [(595.2, "s", 595.2), (7380, "min", 123.0),
                                                  (36_000, "h", 10.0)])
def test_times_have_the_unit_that_fits(seconds, unit, value):
    ax = axes_of([group("A", 1, step_ms=seconds * 10)])["Loss against timed training"]
    assert ax.get_xlabel() == f"timed training, {unit}"
    assert ax.lines[0].get_xdata()[-1] == pytest.approx(value)


# -------------------------------------------------------------------------------------------------
# Records over time

def test_waterfall_falls_from_the_best_before():
    history = [("2026-01-03", "slower", 95.0), ("2026-01-01", "first", 100.0),
               ("2026-01-02", "second", 90.0), ("2026-01-04", "third", 80.0)]
    ax = axes_of([group("A")], history)["Records over time"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [
        "2026-01-01 first", "2026-01-02 second", "2026-01-03 slower", "2026-01-04 third"]
    bars = [(sorted((bar.get_x(), bar.get_x() + bar.get_width())), bar.get_hatch())
            for bar in ax.patches]
    assert bars == [([90, 100], "//"), ([90, 95], "xx"), ([80, 90], "//")]
    assert [text.get_text() for text in ax.texts] == [
        "100 s", "90 s (-10.0%)", "95 s (+5.6%)", "80 s (-11.1%)"]
    assert ax.yaxis_inverted() and ax.get_xlim()[0] < 80 < 100 < ax.get_xlim()[1]


def test_history_of_groups():
    """Dated groups that reach the target, of one task and hardware, in order of time."""
    groups = [group("x/2026-02-01_New", step_ms=80), group("2026-01-01_Old"), group("undated"),
              group("2026-01-15_Misses", loss=3.29), group("2026-01-20_Cut", complete=False),
              group("2026-01-21_Timeless", time_ms=None), group("2026-03-01_Eight", gpus=8),
              group("2026-03-01_Tiny", track="tiny", target=3.56)]
    assert plots.history_of(groups, ("fineweb", 3.28)) == {
        f"1 x {H100}": [("2026-01-01", "Old", 10.1), ("2026-02-01", "New", 8.1)],
        f"8 x {H100}": [("2026-03-01", "Eight", 10.1)]}
    titles = [title for title in axes_of(groups) if "Records" in title]
    assert titles == [f"Records over time: track fineweb, target 3.28, 1 x {H100}"]


# -------------------------------------------------------------------------------------------------
# Files

def test_png_is_800_pixels_wide_and_its_text_is_readable(tmp_path):
    from matplotlib.image import imread
    from matplotlib.text import Text

    groups = [group("2026-01-01_A"), group("2026-01-02_B")]
    plots.draw(groups, tmp_path / "out.png")
    height, width = imread(tmp_path / "out.png").shape[:2]
    assert width == 800 and height > 1500, "a stack, not a row"
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]
    for _, figure in plots.figures(groups):
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
        assert len(texts) > 5 and min(text.get_fontsize() for text in texts) >= 9
        box = figure.get_tightbbox()
        assert -0.1 < box.x0 and box.x1 < 8.1, "something is cut off"


def test_hostile_names_are_drawn_as_text(tmp_path, recwarn):
    plots.draw([group(f"2026-01-0{i + 1}_{name}") for i, name in enumerate(HOSTILE)],
               tmp_path / "out.png")
    assert not [str(warning.message) for warning in recwarn]
    labels = legend(axes_of([group(name) for name in HOSTILE])["Loss against steps"])
    assert len(labels) == len(HOSTILE) + 1 and max(map(len, labels)) < 70


@pytest.mark.parametrize("seed", [1])
def test_numbers_that_make_no_sense_are_no_traceback(seed, tmp_path, recwarn):
    rng = random.Random(seed)
    odd = [0, 1, -1, 1e-300, 1e19, 1e300, -1e300, math.nan, math.inf, None, 3.28, 100, 5e5]

    def run(at: int) -> Run:
        vals = tuple(Validation(rng.randrange(100), rng.choice(odd[:9]), rng.choice(odd))
                     for _ in range(rng.randrange(6)))
        steps = tuple(Step(rng.randrange(100), None, rng.choice(odd)) for _ in range(8))
        more = {name: rng.choice(odd) for name in ("time_ms", "tokens_per_step", "target")}
        return make(at, validations=vals, steps=steps, complete=at > 0, **more)
    groups = [SimpleNamespace(name=f"2026-01-0{day}_A", runs=(make(), run(0), run(1), run(2)))
              for day in range(1, 4)]
    plots.draw(groups, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert not [str(warning.message) for warning in recwarn]


class Page(HTMLParser):
    """Tags with their attributes, and the text."""
    def __init__(self, text: str):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def hostile_page(folder: Path) -> Path:
    groups = [group(name) for name in HOSTILE]
    path = folder / "out.html"
    plots.page(groups, [{"group": name, name: name} for name in HOSTILE],
               [f"{name}: not valid" for name in HOSTILE], path)
    return path


def test_page_is_self_contained_and_escapes(tmp_path):
    text = hostile_page(tmp_path).read_text(encoding="utf-8")
    page = Page(text)
    assert {tag for tag, _ in page.tags} == {
        "html", "meta", "title", "style", "h1", "h2", "div", "table", "thead", "tbody", "tr", "th",
        "td", "ul", "li", "figure", "img"}
    assert not {name for _, attrs in page.tags for name in attrs if name.startswith("on")}
    assert "http://" not in text and "https://" not in text and "url(" not in text
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 4 and all(attrs["alt"] for attrs in images)
    assert HOSTILE[0] in images[1]["alt"] and "ends at a mean of 3.2710" in images[1]["alt"]
    for attrs in images:
        kind, data = attrs["src"].split(",")
        svg = base64.b64decode(data, validate=True).decode()
        assert kind == "data:image/svg+xml;base64" and "<svg" in svg and "<script" not in svg
        assert not re.search(r'href="(?!#)', svg), "a picture refers to something outside"
    for name in HOSTILE[:4]:
        assert f"{name}: not valid" in page.text and html.escape(name) in text
    assert "prefers-color-scheme: dark" in text and "color-scheme: light dark" in text


def test_page_holds_rows_and_verdicts_in_order(tmp_path):
    rows = [{"group": "A", "n": "3"}, {"group": "B", "n": "4"}]
    plots.page([group("A"), group("B")], rows, ["A: valid", "B against A: faster"],
               tmp_path / "out.html")
    page = Page((tmp_path / "out.html").read_text(encoding="utf-8"))
    assert re.sub(r"\s+", " ", page.text[page.text.index("Runs compared\n"):]).split(" Fig")[0] == (
        "Runs compared groupn A3 B4 Verdicts A: valid B against A: faster")


def test_page_in_a_browser(tmp_path):
    """No script runs; every picture is decoded. The page's title would show a script that ran."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser",
                                                   "google-chrome"))), None)
    if not browser:
        pytest.skip("no chromium here")
    path = hostile_page(tmp_path)
    probe = tmp_path / "probe.html"     # the page in a frame, looked at from outside
    probe.write_text("""<iframe id=page src=out.html width=1000 height=3000></iframe><p id=said>
<script>onload = () => { const page = document.getElementById("page").contentDocument;
 const wide = [...page.images].map(image => image.naturalWidth >= 576 && image.width > 500);
 said.textContent = JSON.stringify([page.title.slice(0, 13), wide, page.scripts.length,
  page.documentElement.scrollWidth <= 1000, page.querySelectorAll("tbody tr").length]); }</script>
""", encoding="utf-8")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--allow-file-access-from-files",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", str(probe)],
        capture_output=True, text=True, timeout=60)
    said = re.search(r'<p id="said">(.*?)\s*<', done.stdout)
    assert said, done.stdout[-500:] + done.stderr[-500:]
    assert said[1] == '["Runs compared",[true,true,true,true],0,true,6]', path.name


def test_same_runs_give_the_same_page(tmp_path):
    for name in ("a", "b"):
        plots.page([group("A")], [{"group": "A"}], ["A: valid"], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# -------------------------------------------------------------------------------------------------
# What goes wrong

def refused(capsys, call, *arguments) -> str:
    """The one line that the call ends with."""
    with pytest.raises(SystemExit) as end:
        call(*arguments)
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1 and lines[0].startswith("plots.py: ")
    return lines[0]


def test_one_clear_line(tmp_path, capsys, monkeypatch):
    assert "nothing to draw" in refused(capsys, plots.draw, [group("A", 0)], tmp_path / "out.png")
    line = refused(capsys, plots.draw, [group("A", 1)], tmp_path / "none" / "out.png")
    assert "none" in line and "No such file" in line
    (tmp_path / "out.png").mkdir()
    assert "out.png" in refused(capsys, plots.draw, [group("A", 1)], tmp_path / "out.png")
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"], "a part was left behind"
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)
    monkeypatch.setattr(builtins, "__import__", without)
    line = refused(capsys, plots.draw, [group("A", 1)], tmp_path / "b.png")
    assert line.endswith("matplotlib is not installed; pip install -r requirements.txt")


def test_a_failed_write_keeps_the_old_file(tmp_path, capsys, monkeypatch):
    path = tmp_path / "out.png"
    path.write_bytes(b"old")

    def full(_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(plots.os, "fsync", full)
    assert "No space left" in refused(capsys, plots.draw, [group("A", 1)], path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_importing_needs_no_matplotlib():
    code = "import sys; sys.path.insert(0, 'records'); import plots; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "plots" in loaded and not {"matplotlib", "compare"} & loaded
