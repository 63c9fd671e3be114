"""The comparison: statistics against scipy and hand-worked cases, verdicts, formats, leaderboard.

Runs are made by hand, so that each figure can be checked by eye; the published claims are
reproduced from the losses that were published with them.
"""
import csv
import io
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import compare  # noqa: E402
import logs  # noqa: E402
import speedup  # noqa: E402
from compare import Group  # noqa: E402
from logs import Run, Validation  # noqa: E402
from speedup import SpeedUp  # noqa: E402

RECORD = ROOT / "records" / "2026-12-01_TinyBaseline"
H100 = "NVIDIA H100 80GB HBM3"
# Final losses and ms of modded-nanogpt's ten one-GPU runs with prefix tokens, and of ten without;
# their pull request (337) prints p = 0.00029 and 0.85960
PREFIX = ([3.2767, 3.2765, 3.2771, 3.2795, 3.2798, 3.2781, 3.2767, 3.2766, 3.2777, 3.2795],
          [595779, 594464, 594315, 596324, 594645, 594938, 594746, 595793, 595568, 595563])
WITHOUT = ([3.2840, 3.2792, 3.2803, 3.2777, 3.2815, 3.2859, 3.2810, 3.2816, 3.2788, 3.2791],
           [594345, 594970, 594973, 594294, 594391, 592519, 595285, 595357, 595642, 595666])
COLUMNS = ("path,run_index,steps,last_step,final_val_loss,train_time_ms,step_avg_ms,n_val_lines,"
           "n_step_lines,torch,gpu,n_gpus_listed,peak_alloc_mib,peak_reserved_mib,complete,seed")


def make(loss: float = 3.27, seconds: float | None = 100.0, record: str = "A", index: int = 0,
         **more) -> Run:
    """One run of 100 steps, validated three times: 5.0, 4.0 half-way, then its final loss."""
    at = [None if seconds is None else seconds * 500 * part for part in range(3)]
    vals = tuple(Validation(50 * part, value, at[part])
                 for part, value in enumerate((5.0, 4.0, loss)))
    return Run(**{"path": Path(f"logs/{record}/{index}.txt"), "index": 0, "record": record,
                  "format": "text", "validations": vals, "steps": (), "planned": 100,
                  "last_step": 100, "complete": True, "time_ms": at[-1], "step_avg_ms": None,
                  "tokens_per_step": 1e6, "gpu": H100, "gpus": 1, "torch": "2.11"} | more)


def group(losses, seconds, record: str = "A", **more) -> Group:
    return Group(record, tuple(make(loss, time, record, index, **more) for index, (loss, time)
                               in enumerate(zip(losses, seconds, strict=True))))


def valid_group(mean_s: float, record: str = "A", n: int = 6, **more) -> Group:
    """n runs whose mean loss is surely below 3.28; their times differ by 0.1 %."""
    return group([3.27 + 0.0004 * (i % 3) for i in range(n)],
                 [mean_s * (1 + 0.0005 * (-1) ** i) for i in range(n)], record, **more)


def verdict(new: Group, base: Group, target: float | None = None, across: bool = False):
    return compare.against(base, new, target, across)


# ---- statistics ----------------------------------------------------------------------------------

def p_of(losses: list[float], target: float) -> float:
    """p as compare.py reports it for a group with these final losses."""
    one = group(losses, [100.0] * len(losses))
    return compare.group_row(one, compare.alone(one, target), target)["p"]


def test_published_p_values_from_their_losses():
    assert f"{p_of(PREFIX[0], 3.28):.5f}" == "0.00029"
    assert f"{p_of(WITHOUT[0], 3.28):.5f}" == "0.85960"
    backout = [3.2781, 3.2796, 3.2772, 3.2769, 3.2783]      # of 2025-10-04, which prints p=0.0070
    assert f"{p_of(backout, 3.28):.4f}" == "0.0070"


def test_every_published_p_value_to_its_printed_precision(shared):
    """One claim, "~1", has no printed precision; it stands for 1.000."""
    csv.field_size_limit(10**7)
    with (shared / "upstream_logs/published_pvalues.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["p_claimed"]]
    inexact = []
    for row in rows:
        p, claim = p_of(json.loads(row["losses"]), float(row["target"])), row["p_claimed"]
        try:
            unit = Decimal(claim).as_tuple().exponent     # of the last printed digit
        except ArithmeticError:
            inexact.append((claim, round(p, 3)))
            continue
        assert abs(Decimal(p) - Decimal(claim)) <= Decimal(f"0.5000001e{unit}"), row["record_dir"]
    assert len(rows) - len(inexact) > 55 and inexact == [("~1", 1.0)]


def test_a_group_by_hand():
    row = compare.group_row(one := group([3.26, 3.27, 3.28], [90.0, 100.0, 110.0]),
                            compare.alone(one, None), None)
    assert row["n"] == 3 and row["steps"] == "100" and row["tokens"] == 1e8
    assert row["loss_mean"] == pytest.approx(3.27) and row["loss_sd"] == pytest.approx(0.01)
    assert row["seconds_mean"] == 100 and row["seconds_sd"] == 10
    assert row["tokens_per_s"] == pytest.approx(1e6 * (100 / 90 + 1 + 100 / 110) / 3)
    # t = -0.01 / (0.01 / sqrt 3) = -sqrt 3 with 2 degrees: p = (1 - sqrt(3 / 5)) / 2
    assert row["p"] == pytest.approx((1 - math.sqrt(3 / 5)) / 2) and row["target"] == 3.28


def test_interval_by_hand_where_one_side_has_no_spread():
    """Then Fieller's interval is that of the other mean: +- t s / sqrt n, n - 1 degrees."""
    times = [98.0, 100.0, 102.0]
    half = stats.t.ppf(0.975, 2) * 2 / math.sqrt(3)
    found = speedup.speed_up([200.0] * 4, times)
    assert (found.ratio, found.low, found.high) == pytest.approx((2, 200 / (100 + half),
                                                                  200 / (100 - half)))
    found = speedup.speed_up(times, [200.0] * 4)
    assert (found.low, found.high) == pytest.approx(((100 - half) / 200, (100 + half) / 200))


TIMES = st.lists(st.integers(900, 1100).map(lambda value: value / 10), min_size=2, max_size=12)


@pytest.mark.filterwarnings("ignore:Precision loss")    # of scipy, where one side is constant
@settings(deadline=None)
@given(TIMES, TIMES)
def test_interval_is_where_scipys_welch_test_stands_at_five_per_cent(base, new):
    found = speedup.speed_up(base, new)
    if len(set(base)) == len(set(new)) == 1:
        assert found == SpeedUp(statistics.fmean(base) / statistics.fmean(new))
        return
    test = stats.ttest_ind(base, new, equal_var=False).pvalue
    assert found.p == pytest.approx(test, rel=1e-6)
    assert found.low < found.ratio < found.high
    assert (found.low <= 1 <= found.high) == (test >= 0.05)
    for end in (found.low, found.high):
        if 0 < end < math.inf:
            scaled = [end * value for value in new]
            assert stats.ttest_ind(base, scaled, equal_var=False).pvalue == pytest.approx(0.05)


def test_interval_holds_the_true_ratio_in_about_95_of_100_cases():
    rng, held, cases = random.Random(0), 0, 1500
    for _ in range(cases):
        found = speedup.speed_up([rng.gauss(120, 3) for _ in range(8)],
                                 [rng.gauss(100, 1) for _ in range(5)])
        held += found.low <= 1.2 <= found.high
    assert abs(held / cases - 0.95) < 4 * math.sqrt(0.95 * 0.05 / cases)


def test_open_interval_and_too_few_times():
    assert (wide := speedup.speed_up([1.0, 100.0], [1.0, 100.0])).low == 0 and wide.high == math.inf
    for base, new in (([2.0], [1.0, 1.0]), ([2.0, 2.0], [1.0]), ([2.0, 2.0], [1.0, 1.0])):
        assert speedup.speed_up(base, new) == SpeedUp(2.0)
    assert speedup.speed_up([], [1.0]) == speedup.speed_up([0.0, 1.0], [1.0, 2.0]) == SpeedUp()


def test_more_runs_by_hand():
    """Mean 0.001 below the target with sd 0.001: t = sqrt n. t(0.99, 8 and 7) = 2.896 and 2.998."""
    losses = [3.279 - 0.001, 3.279, 3.279 + 0.001]
    assert 2.896 < math.sqrt(9) and math.sqrt(8) < 2.998
    assert speedup.more_runs(losses, 3.28) == 9 - 3
    assert speedup.more_runs(losses, 3.30) == 0
    assert speedup.more_runs(losses, 3.279 - 1e-9) == math.inf     # the mean is above
    assert speedup.more_runs(losses, 3.279 + 1e-6) == math.inf     # millions would do
    assert speedup.more_runs([3.27], 3.28) is speedup.more_runs([3.27, 3.27], 3.28) is None
    assert speedup.more_runs([3.27, math.nan], 3.28) is None


def curve(*points: tuple[float, float | None]) -> Run:
    return make(validations=tuple(Validation(i, *point) for i, point in enumerate(points)))


@pytest.mark.parametrize("points, seconds", [
    (((4.0, 10_000), (3.0, 20_000)), 17.5),
    (((6.0, 0), (4.0, 10_000), (3.0, 20_000)), 17.5),
    (((4.0, 10_000), (3.25, 20_000)), 20),
    (((4.0, 0), (3.25, 8_000), (3.0, 9_000)), 8),
    (((3.0, 5_000),), 5),                               # the first is already there
    (((4.0, 10_000), (math.nan, 15_000), (3.0, 20_000)), 17.5),
    (((4.0, 10_000), (3.5, None), (3.0, 20_000)), 17.5),
    (((4.0, 1_000), (3.0, 2_000), (3.5, 3_000), (3.1, 4_000)), 1.75),    # the first time
    (((math.inf, 0), (4.0, 10_000), (3.0, 20_000), (3.0, math.inf)), 17.5),
    (((4.0, 10_000), (3.26, 20_000)), None), ((), None), (((3.0, None),), None)])
def test_time_to_target(points, seconds):
    assert speedup.time_to_target(curve(*points), 3.25) == seconds


# ---- verdicts ------------------------------------------------------------------------------------

def test_faster_slower_and_not_distinguishable():
    a, quick = valid_group(100, "A"), valid_group(99, "B")
    near = [valid_group(seconds, "C") for seconds in (100.01, 99.99)]
    assert verdict(quick, a).word == "faster" and verdict(a, quick).word == "slower"
    assert {verdict(one, a).word for one in near} == {"not distinguishable"}
    assert verdict(quick, a).speed.ratio == pytest.approx(100 / 99)
    assert "1.0101 times as fast (95% interval 1.00" in verdict(quick, a).reason


def test_not_valid_says_which_and_why_and_what_is_lacking():
    a, slow = valid_group(100), group([3.277, 3.279, 3.2815], [90, 91, 92], "B")
    for found in (verdict(slow, a), verdict(a, slow)):
        assert found.word == "not valid" and "times as fast" in found.reason
        lacking = speedup.more_runs(slow.losses, 3.28)
        assert ("B: p = 0.294 for a mean loss below 3.28 (< 0.01 is needed; at this mean and sd "
                f"{lacking} more runs would do)") in found.reason and lacking > 9
    reasons = {
        "no p from 1 run, whose loss is 3.27000 against 3.28": group([3.27], [90]),
        "the mean is not below it": group([3.29, 3.28], [90, 91]),
        "all losses are equal": group([3.27, 3.27], [90, 91]),
        "a final loss is not finite": group([3.27, math.nan], [90, 91]),
        "a final loss is not": group([3.27, 1e308, 1e308], [90, 91, 1e308]),
        "10,000 runs would not do": group([3.2699, 3.28999], [90, 91]),
        "1 of 7 runs incomplete": Group("B", (*valid_group(90).runs, make(complete=False))),
        "2 of 2 runs incomplete": group([3.27, 3.26], [9, 9], complete=False),
        "no run has a final loss": group([3.27, 3.26], [9, 9], validations=())}
    for reason, new in reasons.items():
        found = verdict(new, a)
        assert found.word == "not valid" and reason in found.reason, reason
        assert compare.group_row(new, found, None)["n"] == len(new.complete)


def test_incomplete_runs_stay_out_of_the_figures():
    one = Group("B", (*valid_group(90).runs, make(9.9, 1.0, complete=False)))
    row = compare.group_row(one, compare.alone(one, None), None)
    assert (row["n"], row["incomplete"]) == (6, 1) and row["seconds_mean"] == pytest.approx(90)
    assert compare.group_cells(row)["n"] == "6 + 1 cut"


def test_other_hardware_is_never_compared_silently():
    a = valid_group(100)
    others = {f"8 x {H100} against 1 x {H100}": valid_group(20, "B", gpus=8),
              f"1 x A100 against 1 x {H100}": valid_group(20, "B", gpu="A100"),
              f"unknown against 1 x {H100}": valid_group(20, "B", gpu=None),
              f"1 x {H100}, 2 x {H100} against 1 x {H100}": Group(
                  "B", (*valid_group(20).runs, *valid_group(20, gpus=2).runs))}
    for words, new in others.items():
        found = verdict(new, a)
        assert found.word == "not comparable" and words in found.reason
        assert "times as fast" not in found.reason and found.speed == SpeedUp()
        found = verdict(new, a, across=True)
        assert found.word in ("faster", "not distinguishable")
        assert f"ACROSS hardware {words}" in found.reason
    unknown = valid_group(100, gpu=None)
    assert verdict(unknown, unknown).word == "not comparable"


def test_other_targets_and_tracks_are_not_compared():
    a, tiny = valid_group(100, target=3.28), valid_group(50, "B", track="tiny", target=3.56)
    assert verdict(tiny, a, across=True).word == "not compared"
    assert "tracks tiny against fineweb" in verdict(tiny, a).reason
    easy = valid_group(50, "B", target=3.5)
    assert "targets 3.5 against 3.28" in verdict(easy, a).reason
    assert verdict(easy, a, target=3.4).word == "faster"       # one target for all, as was asked
    assert verdict(valid_group(50, "B", track="fineweb"), a).word == "faster"
    mixed = Group("M", a.runs + tiny.runs)
    assert verdict(a, mixed).word == verdict(mixed, a).word == "not compared"
    assert verdict(mixed, mixed).word == compare.alone(mixed, None).word == "not compared"
    row = compare.group_row(mixed, compare.alone(mixed, None), None)
    assert row["p"] is None or math.isnan(row["p"])


def test_a_log_without_times_and_other_versions():
    a, silent = valid_group(100), group([3.27, 3.271, 3.272], [None] * 3, "B")
    assert verdict(silent, a).word == "not comparable" and "no times" in verdict(silent, a).reason
    assert "; torch 2.12 against 2.11" in verdict(valid_group(90, "B", torch="2.12"), a).reason


def test_published_runs_side_by_side():
    """What the ten runs each of pull request 337 show: the same time, and only one set is valid."""
    prefix, without = (group(losses, [ms / 1000 for ms in times], name) for name, (losses, times)
                       in (("prefix", PREFIX), ("without", WITHOUT)))
    found = verdict(prefix, without)
    assert found.word == "not valid" and found.reason.startswith("without: p = 0.86 for a mean")
    assert found.speed.low < 1 < found.speed.high
    assert found.speed.ratio == pytest.approx(594.7442 / 595.2135)
    assert compare.alone(prefix, None).word == "valid"


# ---- groups --------------------------------------------------------------------------------------

def test_groups_by_every_key():
    runs = [make(record="A"), make(record="B", index=1, gpus=8, torch="2.10"),
            make(record="A", index=2, program_sha256="ab" * 32, track="tiny")]
    names = {by: [one.name for one in compare.group_runs(runs, by)] for by in compare.KEYS}
    assert names == {"record": ["A", "B"], "gpu": [f"1 x {H100}", f"8 x {H100}"],
                     "file": ["logs/A/0.txt", "logs/B/1.txt", "logs/A/2.txt"],
                     "torch": ["2.11", "2.10"], "program": ["unknown", "abababab"],
                     "track": ["fineweb", "tiny"]}
    assert compare.group_runs(runs, "record")[0].runs == (runs[0], runs[2])


def test_records_of_one_name_in_two_folders_are_two_groups():
    runs = [make(path=Path(folder) / name) for folder in ("old/A", "new/A")
            for name in ("1.txt", "sub/2.txt")]
    groups = compare.group_runs(runs, "record")
    assert [(one.name, len(one.runs)) for one in groups] == [("old/A", 2), ("new/A", 2)]


# ---- command line --------------------------------------------------------------------------------

@pytest.fixture
def told(monkeypatch, tmp_path, capsys):
    """compare.py with folders whose runs are given: arguments -> exit code, output lines."""
    known: dict[Path, list[Run]] = {}

    def told(groups: list[Group], *words: str) -> tuple[int, list[str]]:
        for one in groups:
            (folder := tmp_path / one.name).mkdir(exist_ok=True)
            known[folder] = list(one.runs)
        monkeypatch.setattr(logs, "read_runs", lambda path: known[path], raising=False)
        try:
            code = compare.main([*[str(tmp_path / one.name) for one in groups], *words])
        except SystemExit as error:
            code = error.code
        said = capsys.readouterr()
        return code, (said.err if code else said.out).splitlines()

    return told


PAIR = [valid_group(100, "A"), valid_group(99, "B")]


def test_table_and_verdicts(told):
    code, lines = told(PAIR)
    assert code == 0 and lines[0].split()[:3] == ["group", "n", "loss"] and lines[3] == ""
    assert lines[1].startswith("A      6  3.27040 +- 0.00036  ") and "  99.000 +- 0.054" in lines[2]
    assert lines[4].startswith("A: valid: p = ") and lines[5].startswith("B against A: faster: 1.0")
    columns = [lines[0].index(name) for name in ("timed s", "speed-up", "hardware")]
    assert all(line[at - 1] == " " != line[at] for line in lines[2:3] for at in columns)
    assert told(PAIR, "--baseline=B")[1][4].startswith("A against B: slower: ")


def test_markdown(told):
    _, lines = told(PAIR, "--format=markdown")
    assert [line.count("|") for line in lines[:4]] == [13] * 4 and set(lines[1]) == set("| -")
    assert lines[4] == "" and [line[:4] for line in lines[5:]] == ["* A:", "* B "]


def test_json_and_csv_hold_the_same(told):
    found = json.loads("\n".join(told(PAIR, "--format=json")[1]))
    rows = list(csv.DictReader(io.StringIO("\n".join(told(PAIR, "--format=csv")[1]))))
    assert [row["verdict"] for row in found] == ["valid", "faster"] and len(rows) == 2
    assert found[1]["speed_up"] == pytest.approx(100 / 99) and found[0]["speed_up"] is None
    for one, other in zip(found, rows):
        assert list(one) == list(other)
        for name in ("p", "seconds_mean", "loss_sd", "to_target_s", "tokens_per_s"):
            assert float(other[name]) == one[name]


def test_json_has_no_nan(told):
    lines = told([group([3.27, math.nan], [1, 2])], "--format=json")[1]
    (row,) = json.loads("\n".join(lines), parse_constant=lambda name: pytest.fail(name))
    assert row["loss_mean"] is None and row["verdict"] == "not valid"


def test_rows_of_runs(told):
    _, lines = told(PAIR, "--runs", "--format=csv")
    assert lines[0] == COLUMNS and len(lines) == 13
    row = dict(zip(COLUMNS.split(","), lines[1].split(",")))
    assert row["final_val_loss"] == "3.27" and row["complete"] == "True" and row["seed"] == ""
    assert told(PAIR, "--runs")[1][0].split() == COLUMNS.split(",")


def test_rows_of_the_published_runs_are_as_expected(shared, capsys):
    folder = shared / "upstream_logs"
    assert compare.main([str(folder), "--runs", "--format=csv"]) == 0
    found = {(row["path"], row["run_index"]): row
             for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    with (folder / "expected.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert ",".join(rows[0]) == COLUMNS and len(found) == len(rows) > 50
    for row in rows:
        other = found[row["path"], row["run_index"]]
        if row["complete"] == "0":           # as the two logs of llm.c have it
            row["complete"] = "False"
        for name, value in row.items():
            try:
                assert float(other[name]) == float(value), (row["path"], name)
            except ValueError:
                assert other[name] == value, (row["path"], name)


def test_a_run_counts_once_however_often_it_is_named(told):
    runs = list(PAIR[0].runs)
    groups = [Group("A", tuple(runs)), Group("A2", tuple(runs[:3]))]
    assert told(groups)[1][1].split()[:2] == ["A", "6"] and len(told(groups)[1]) == 4


def test_what_was_cut_short_and_put_apart_is_no_part_of_the_set(told):
    apart = make(complete=False, path=Path("logs/A/incomplete/9.txt"))
    _, lines = told([Group("A", (*PAIR[0].runs, apart))])
    assert lines[1].split()[:2] == ["A", "6"] and "valid: p = " in lines[3]


def test_lines_without_a_place_are_reported(told):
    _, lines = told([valid_group(100, unplaced=2)])
    assert lines[-1].endswith(" [12 line(s) could not be placed]")


def test_picture_and_page(told, tmp_path):
    pytest.importorskip("matplotlib")
    picture, page = tmp_path / "out.png", tmp_path / "out.html"
    _, lines = told(PAIR, f"--plot={picture}", f"--html={page}")
    assert picture.read_bytes().startswith(b"\x89PNG") and lines[5] in page.read_text()
    assert all(f'">{name}</th>' in page.read_text() for name in ("timed s", "torch"))


@pytest.mark.parametrize("words, line", [
    (["--baseline=C"], "--baseline=C: expected one of A, B"),
    (["--target=nan"], "--target=nan: expected nats per token, above 0 and below 100"),
    (["--target=-1"], "--target=-1.0: expected nats per token, above 0 and below 100"),
    (["--by=colour"], "argument --by: invalid choice"),
    (["--check"], "--check goes with --leaderboard"),
    (["nowhere"], "'nowhere': no such file or folder")])
def test_wrong_usage_is_one_line_and_exit_code_2(told, words, line):
    code, lines = told(PAIR, *words)
    assert code == 2 and lines[-1].startswith(f"compare.py: error: {line}")
    assert not any("Traceback" in said for said in lines)


def test_no_run_and_no_argument(told):
    assert told([Group("empty", ())])[1][-1].endswith(
        "empty': no run in it; a run's log has lines of validation")
    assert told([])[1][-1] == "compare.py: error: no log or folder named"


# ---- leaderboard ---------------------------------------------------------------------------------

def test_leaderboard_is_up_to_date():
    done = subprocess.run([sys.executable, str(ROOT / "records/compare.py"), "--leaderboard",
                           "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def board(tmp_path) -> Path:
    """README.md of a records folder with the committed record and a set that is none."""
    shutil.copytree(RECORD, tmp_path / RECORD.name)
    shutil.copytree(RECORD, forged := tmp_path / "2026-12-02_Forged")
    next(forged.glob("train_gpt_*.py")).write_text("raise SystemExit('another program')\n")
    readme = tmp_path / "README.md"
    readme.write_text(f"Before.\n{compare.BEGIN}\n{compare.END}\nEnd.\n")
    return readme


def test_leaderboard_is_written_and_found_stale(board, capsys):
    assert compare.write_board(board, check=True) == 1
    assert "stale; python records/compare.py --leaderboard renews it" in capsys.readouterr().out
    assert compare.write_board(board, check=False) == 0
    text = board.read_text()
    assert text.startswith("Before.\n") and text.endswith("\nEnd.\n")
    assert "| 2026-12-01_TinyBaseline | 137.9 +- 11.5 | 3.5408 +- 0.0046 | 10 | 1.6e-07 |" in text
    said = capsys.readouterr().err
    assert "Forged" not in text and "left out: 2026-12-02_Forged: NOT VALID: 10 refusal(s)" in said
    assert compare.write_board(board, check=True) == 0
    assert compare.write_board(board, check=False) == 0 and board.read_text() == text
    board.write_text(text.replace("137.9", "99.9"))
    assert compare.write_board(board, check=True) == 1


def test_one_table_for_each_track_target_and_hardware(board):
    parts = compare.leaderboard(board.parent).split("\n### ")[1:]
    heads = [part.splitlines()[0] for part in parts]
    assert len(set(heads)) == len(heads) == 3
    assert [head.split(": ")[0] for head in heads] == ["fineweb, target 3.28"] * 2 + [
        "tiny, target 3.56"]
    assert heads[0].endswith(": 1 x NVIDIA GeForce RTX 4090") and heads[1].endswith(f": 1 x {H100}")
    slow = [line.split(" | ") for line in parts[0].splitlines()[4:6]]
    assert [row[4] for row in slow] == ["misses the target"] * 2
    rows = [line.split(" | ") for line in parts[1].splitlines()[4:7]]
    assert [row[1] for row in rows] == ["595.2 +- 0.7", "728.0", "812.8"]
    assert [row[4] for row in rows] == ["0.00029", "one run: none", "one run: none"]


def test_what_misses_the_target_comes_last_however_fast(board, monkeypatch):
    head, first, *_ = (ROOT / "records/published.csv").read_text().splitlines()
    quick = first.replace("3.27782", "3.29").replace("595.2135", "99.5")
    (board.parent / "published.csv").write_text("\n".join((head, quick, first)))
    monkeypatch.setattr(compare, "HERE", board.parent)
    text = compare.leaderboard(board.parent)
    assert 0 < text.index("595.2") < text.index("99.5 +- 0.7 | 3.2900") < text.index("misses the")


def test_leaderboard_without_its_place(board, capsys):
    board.write_text(f"{compare.BEGIN}\n")
    assert compare.write_board(board, check=False) == 2
    assert capsys.readouterr().err.startswith(f"compare.py: {board}: expected the lines ")


def test_published_runs_are_whole_and_sourced():
    with (ROOT / "records/published.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["source"].startswith("https://") and row["track"] in compare.verify.TRACKS
        assert float(row["target"]) == compare.verify.TRACKS[row["track"]]["target_loss"]
        assert (row["n"] == "1") == (row["loss_sd"] == "") == (row["seconds_sd"] == "")
    losses, times = PREFIX
    for name, figure in (("loss_mean", statistics.fmean(losses)),
                         ("loss_sd", statistics.stdev(losses)),
                         ("seconds_mean", statistics.fmean(times) / 1000),
                         ("seconds_sd", statistics.stdev(times) / 1000)):
        unit = Decimal(rows[0][name]).as_tuple().exponent
        assert float(rows[0][name]) == round(figure, -unit), name
