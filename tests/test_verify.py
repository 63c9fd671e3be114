"""The judge accepts a sound set and refuses each broken rule by name, whatever the files hold.

A valid set of runs is written here from the log's description alone, without the trainer; each
mutant then breaks one rule of it.
"""

import hashlib
import importlib.util
import json
import math
import random
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
JUDGE = ROOT / "records" / "verify.py"
SPEC = importlib.util.spec_from_file_location("verify", JUDGE)
verify = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(verify)

STEPS, TOKENS_PER_STEP, VAL_EVERY = 10, 1024, 5
PROGRAM = b"raise SystemExit('the judge ran the program')\n"
REFUSAL = re.compile(r"^(?P<file>\S+?): (?P<rule>[^:]+): expected (?P<expected>.+), found (.+)$")


# -------------------------------------------------------------------------------------------------
# A valid set, written from the description of the log

def start_event(name: str, seed: int, digest: str, track: str) -> dict:
    """The first line of a log that uses exactly the pins of its track."""
    pins = verify.TRACKS[track]
    val = {"file": pins["val_file"], "tokens_in_file": pins["val_tokens"] + 1,
           "sha256": pins["val_sha256"] or "ab" * 32, "tokens": pins["val_tokens"],
           "sequence": pins["val_sequence"]}
    return {
        "event": "start", "format": 1, "track": track, "name": "Test", "id": name,
        "utc": "2026-12-01T03:00:00Z", "program": f"train_gpt_{digest[:8]}.py",
        "program_sha256": digest,
        "settings": {"seed": seed, "steps": STEPS - 2, "extra_steps": 2,
                     "tokens_per_step": TOKENS_PER_STEP, "target_loss": pins["target_loss"],
                     "val_tokens": pins["val_tokens"], "val_sequence": pins["val_sequence"],
                     "val_sha256": pins["val_sha256"] or ""},
        "recipe_overrides": {}, "machine_overrides": {"seed": seed},
        "environment": {"python": "3.11", "torch": "2.13.0+cpu", "triton": None, "cuda": None,
                        "driver": None, "device": "cpu", "capability": None, "cpu": "A processor",
                        "threads": 2, "processes": 1, "os": "Linux"},
        "run": {"precision": "fp32", "compiled": True, "micro_batch_units": 1,
                "attention": "reference", "steps": STEPS, "tokens_per_step": TOKENS_PER_STEP},
        "data": {"train": [{"file": "tiny_train_000000.bin", "tokens": 1_545_256}], "val": val},
        "parameters": 1_000_000}


def write_run(folder: Path, seed: int, track: str = "tiny", loss: float | None = None) -> Path:
    """One complete run: program, events and text log. The loss falls to near `loss`."""
    rng, name = random.Random(seed), f"run-{seed}"
    digest = hashlib.sha256(PROGRAM).hexdigest()
    (folder / f"train_gpt_{digest[:8]}.py").write_bytes(PROGRAM)
    final = (verify.TRACKS[track]["target_loss"] - 0.02 if loss is None else loss)
    final += rng.gauss(0, 0.0002)
    events = [start_event(name, seed, digest, track),
              {"event": "warmup", "seconds": 3.5, "graphs": 2, "restored": True}]
    clock, waited, text = 0.0, 0.0, ["a line of no interest"]
    for step in range(STEPS + 1):
        train_loss = final + (8.3 - final) * 0.5 ** step
        if step:
            clock, wait = clock + 100 + rng.random(), rng.random()
            waited += wait
            events.append({"event": "step", "step": step, "loss": train_loss, "lr_scale": 1.0,
                           "train_time_ms": clock, "wait_ms": wait})
            text.append(line(events[-1]))
        if step % VAL_EVERY == 0:
            loss = final if step == STEPS else train_loss
            events.append({"event": "val", "step": step, "loss": loss, "train_time_ms": clock,
                           "tokens": verify.TRACKS[track]["val_tokens"]})
            text.append(line(events[-1]))
    events.append({"event": "end", "status": "complete", "reason": None, "step": STEPS,
                   "val_loss": events[-1]["loss"], "train_time_ms": clock,
                   "wall_s": clock / 1000 + 9, "wait_ms": waited,
                   "tokens": STEPS * TOKENS_PER_STEP, "recompiles": 0, "peak_memory_mib": 100})
    text.append(summary(events[-1], track))
    write_events(folder / f"{name}.jsonl", events)
    (folder / f"{name}.txt").write_text("\n".join(text) + "\n")
    return folder / f"{name}.jsonl"


def line(event: dict) -> str:
    """A step or a validation in the text log."""
    kind, step = "train" if event["event"] == "step" else "val", event["step"]
    ms = event["train_time_ms"]
    return (f"step:{step}/{STEPS} {kind}_loss:{event['loss']:.4f} train_time:{ms:.0f}ms "
            f"step_avg:{ms / max(step, 1):.2f}ms")


def summary(end: dict, track: str) -> str:
    """The last line of the text log."""
    seconds = end["train_time_ms"] / 1000
    return (f"summary: val_loss {end['val_loss']:.4f}, target "
            f"{verify.TRACKS[track]['target_loss']}, trained {seconds:.1f} s, "
            f"{end['tokens'] / seconds:,.0f} tokens/s, MFU n/a, loader wait 0.10 %, recompiles 0, "
            f"peak memory 100 MiB, wall {end['wall_s']:.1f} s")


def write_set(folder: Path, runs: int = 4, **options) -> list[Path]:
    """Runs of the seeds 1, 2, ..."""
    folder.mkdir(exist_ok=True)
    return [write_run(folder, seed, **options) for seed in range(1, runs + 1)]


def write_events(path: Path, events: list[dict]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def read_events(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().removesuffix(b"\n").split(b"\n")]


def pick(events: list[dict], kind: str, number: int | None = None) -> dict:
    """The event of this kind (and step)."""
    return next(event for event in events
                if event["event"] == kind and number in (None, event.get("step")))


def judge(capsys, *paths: Path) -> tuple[int, list[str]]:
    """Exit code and the printed lines."""
    code = verify.main([str(path) for path in paths])
    return code, capsys.readouterr().out.splitlines()


# -------------------------------------------------------------------------------------------------
# Sound sets

@pytest.mark.parametrize("track", verify.TRACKS)
def test_a_sound_set_is_valid_and_p_is_scipys(tmp_path, capsys, track):
    logs = write_set(tmp_path / "set", track=track)
    code, lines = judge(capsys, tmp_path / "set")
    assert code == 0, lines
    losses = [read_events(path)[-1]["val_loss"] for path in logs]
    target = verify.TRACKS[track]["target_loss"]
    expected = stats.ttest_1samp(losses, target, alternative="less").pvalue
    assert verify.p_value(losses, target) == pytest.approx(expected, rel=1e-9)
    statistics = next(line for line in lines if line.startswith("val_loss: n 4"))
    assert f"mean {sum(losses) / 4:.5f}" in statistics and f"p {expected:.3g} " in statistics
    assert lines[-1].startswith("VALID")
    assert sum(line.lstrip().startswith("run-") for line in lines) == 4
    pinned = verify.TRACKS[track]["val_sha256"] is not None
    assert pinned != any("recorded, not pinned" in line for line in lines)


def test_p_of_a_set_worked_by_hand():
    """Mean 3.27, sd 0.01, n = 4: t = -2, and Student's distribution with 3 degrees of freedom is
    F(t) = 1/2 + (x / (1 + x^2) + atan x) / pi with x = t / sqrt(3)."""
    losses = [3.27 + 0.01 * z * math.sqrt(3 / 5) for z in (-1.5, -0.5, 0.5, 1.5)]
    x = -2 / math.sqrt(3)
    by_hand = 0.5 + (x / (1 + x * x) + math.atan(x)) / math.pi
    assert verify.p_value(losses, 3.28) == pytest.approx(by_hand, rel=1e-9)
    assert verify.mean_and_sd(losses, 6) == "mean 3.270000, sd 0.010000"


def test_logs_named_one_by_one_are_one_set(tmp_path, capsys):
    logs = write_set(tmp_path / "set")
    assert judge(capsys, *logs)[0] == 0
    for name in ("a", "b"):  # two runs a folder, as when midnight falls between them
        (tmp_path / name).mkdir()
    logs = [write_run(tmp_path / ("a" if seed < 3 else "b"), seed) for seed in (1, 2, 3, 4)]
    assert judge(capsys, *logs)[0] == 0


def test_each_folder_is_its_own_set_and_one_bad_set_decides(tmp_path, capsys):
    write_set(tmp_path / "good")
    write_set(tmp_path / "alone", runs=1)
    write_set(tmp_path / "fineweb", track="fineweb")
    assert judge(capsys, tmp_path / "good", tmp_path / "fineweb")[0] == 0
    code, lines = judge(capsys, tmp_path / "alone", tmp_path / "good")
    assert code == 1
    assert any(line.startswith("VALID") for line in lines)


def test_a_device_that_only_mentions_pretended_passes(tmp_path, capsys):
    for path in write_set(tmp_path / "set"):
        events = read_events(path)
        events[0]["environment"] |= {"device": "NVIDIA Not Pretended", "cuda": "13.0"}
        write_events(path, events)
    assert judge(capsys, tmp_path / "set")[0] == 0


# -------------------------------------------------------------------------------------------------
# Sets without enough evidence

def test_one_run_is_not_a_set(tmp_path, capsys):
    write_set(tmp_path / "set", runs=1)
    code, lines = judge(capsys, tmp_path / "set")
    assert code == 1 and lines[-1] == "NOT VALID: no p from 1 run; at least 1 more is needed"


def test_an_empty_folder_is_not_a_set(tmp_path, capsys):
    code, lines = judge(capsys, tmp_path)
    assert code == 1 and "at least 2 runs are needed" in lines[-1]


def test_a_mean_too_near_the_target_is_not_valid(tmp_path, capsys):
    write_set(tmp_path / "set", loss=verify.TINY_TARGET_LOSS - 0.0001)
    code, lines = judge(capsys, tmp_path / "set")
    assert code == 1 and lines[-1].startswith("NOT VALID: p must be below 0.01, is 0.")


def test_a_mean_above_the_target_is_not_valid(tmp_path, capsys):
    write_set(tmp_path / "set", loss=verify.TINY_TARGET_LOSS + 0.2)
    code, lines = judge(capsys, tmp_path / "set")
    assert code == 1 and lines[-1].startswith("NOT VALID: p must be below 0.01, is ")


def test_equal_losses_give_no_p(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(random.Random, "gauss", lambda *_: 0.0)
    write_set(tmp_path / "set")
    code, lines = judge(capsys, tmp_path / "set")
    assert code == 1 and "all losses are equal" in lines[-1]


# -------------------------------------------------------------------------------------------------
# Mutants of the events: (the rule that must be named, a change to the second run's events)

def put(kind: str, number: int | None, **values):
    """A mutant that overwrites top-level values of one event."""
    return lambda events: pick(events, kind, number).update(values)


def start(name: str, value: object):
    """A mutant that overwrites a dotted name in the start event."""
    def mutate(events):
        *path, last = name.split(".")
        found = events[0]
        for part in path:
            found = found[part]
        found[last] = value
    return mutate


def drop(kind: str, number: int | None = None):
    return lambda events: events.remove(pick(events, kind, number))


def twice(kind: str, number: int | None = None):
    def mutate(events):
        event = pick(events, kind, number)
        events.insert(events.index(event), dict(event))
    return mutate


def move(kind: str, number: int | None, to: int):
    def mutate(events):
        event = pick(events, kind, number)
        events.remove(event)
        events.insert(to, event)
    return mutate


def both(*mutants):
    return lambda events: [mutate(events) for mutate in mutants]


def cut_to(steps: int):
    """A run that stopped early and says so nowhere but in its plan."""
    def mutate(events):
        events[:] = [event for event in events if event.get("step", 0) <= steps
                     or event["event"] == "end"]
        events[-1].update(step=steps, tokens=steps * TOKENS_PER_STEP,
                          val_loss=events[-2]["loss"], train_time_ms=events[-2]["train_time_ms"])
    return mutate


def resumed(after: int, step: int | None = None, warm: bool = True, restored: bool = True, **facts):
    """The run went on from its checkpoint of step `after`, warmed up again."""
    def mutate(events):
        at = 1 + events.index(pick(events, "step", after))
        resume = {k: v for k, v in events[0].items() if k != "event"} | facts
        events[at:at] = [
            {"event": "checkpoint", "step": after, "stall_ms": 900.0},
            {"event": "resume", **resume,
             "resumed": {"file": "x.pt", "step": after if step is None else step}},
            *[{"event": "warmup", "seconds": 1.5, "graphs": 2, "restored": restored}] * warm]
    return mutate


NAN, INFINITY = float("nan"), float("inf")
EVENT_MUTANTS = [
    ("start event", drop("start")),
    ("start event", twice("start")),
    ("start event", move("start", None, 1)),
    ("end event", drop("end")),
    ("end event", twice("end")),
    ("end event", lambda events: events.insert(-1, events.pop())),
    ("end event", lambda events: events.append({"event": "val"})),
    ("end event", lambda events: events.clear() or events.append({"event": "start"})),
    ("format", start("format", 2)),
    ("event kind", lambda events: events.insert(2, {"event": "pause"})),
    ("resumed", start("resumed", {"file": "x_step3.pt", "step": 3})),
    ("warm-up", resumed(3, warm=False)),
    ("warm-up restored", resumed(3, restored=False)),
    ("resume step", resumed(3, step=2)),
    ("resume id", resumed(3, id="another")),
    ("resume program_sha256", resumed(3, program_sha256="0" * 64)),
    ("resume settings.seed", resumed(3, settings=dict(seed=77, tokens_per_step=TOKENS_PER_STEP))),
    ("resume recipe_overrides", resumed(3, recipe_overrides={"muon_lr": 0.1})),
    ("resume environment.device", resumed(3, environment={"device": "NVIDIA H200"})),
    ("field", lambda events: events.insert(5, {"event": "resume"})),
    ("field", lambda events: events.insert(2, {"loss": 3.0})),
    ("field", start("settings", [])),
    ("field", start("settings.steps", "8")),
    ("field", start("settings.steps", 10 ** 30)),
    ("track", start("track", "short")),
    ("run id", start("id", "another")),
    ("field", lambda events: events[0]["settings"].pop("seed")),
    ("program file", both(start("program_sha256", "0" * 64),
                          start("program", "train_gpt_00000000.py"))),
    ("program name", start("program", "../train_gpt.py")),
    ("program sha256", both(start("program_sha256", "xyz"), start("program", "train_gpt_xyz.py"))),
    ("recipe_overrides", start("recipe_overrides", {"steps": 9})),
    ("machine_overrides", start("machine_overrides", {"seed": 7})),
    ("machine_overrides", start("machine_overrides", {"unheard_of": 7})),
    ("field", lambda events: events[0].pop("machine_overrides")),
    ("field", start("environment.python", None)),
    ("environment", start("environment.os", "")),
    ("environment", start("environment.processes", 0)),
    ("field", start("environment.device", 0)),
    ("field", start("environment.device", "NVIDIA H100")),  # and no version of CUDA
    ("setting target_loss", start("settings.target_loss", 9.0)),
    ("setting val_tokens", start("settings.val_tokens", 1024)),
    ("setting val_sequence", start("settings.val_sequence", 1024)),
    ("setting val_sha256", start("settings.val_sha256", "")),
    ("validation file", start("data.val.file", "tiny_train_000000.bin")),
    ("validation sha256", start("data.val.sha256", "0" * 64)),
    ("validation tokens", start("data.val.tokens", 1024)),
    ("validation sequence", start("data.val.sequence", 1024)),
    ("tokens of the validation", put("val", 0, tokens=1024)),
    ("tokens of the validation", put("val", STEPS, tokens=177_070)),
    ("pretended device", both(start("environment.device", "Pretended NVIDIA H100 80GB HBM3"),
                              start("environment.cuda", "13.0"))),
    ("pretended device", both(start("environment.device", " pretended GPU"),
                              start("environment.cuda", "13.0"))),
    ("finite", put("step", 3, loss=NAN)),
    ("finite", put("step", 3, loss=INFINITY)),
    ("finite", put("step", 3, loss="NaN")),
    ("finite", put("step", 3, loss="Infinity")),
    ("finite", put("step", 3, loss=None)),
    ("finite", put("step", 3, loss=0.0)),
    ("finite", put("step", 3, loss=10 ** 400)),
    ("finite", put("step", 3, train_time_ms=NAN)),
    ("finite", put("step", 3, wait_ms=-INFINITY)),
    ("finite", put("val", 5, loss=True)),
    ("finite", put("val", 5, conditions={"power_w": NAN})),
    ("field", put("val", 5, conditions=[1])),
    ("finite", put("val", 5, train_time_ms=-1.0)),
    ("finite", put("warmup", None, seconds="NaN")),
    ("finite", put("end", None, val_loss=NAN)),
    ("finite", put("end", None, val_loss=None)),
    ("finite", put("end", None, wall_s=INFINITY)),
    ("warm-up", drop("warmup")),
    ("warm-up", twice("warmup")),
    ("warm-up", move("warmup", None, 4)),
    ("warm-up restored", put("warmup", None, restored=False)),
    ("warm-up restored", put("warmup", None, restored=1)),
    ("recompiles", put("end", None, recompiles=1)),
    ("recompiles", put("end", None, recompiles=False)),
    ("step in line", drop("step", 4)),
    ("step in line", twice("step", 4)),
    ("step in line", move("step", 4, 4)),
    ("step in line", put("step", 4, step=3)),
    ("steps", drop("step", STEPS)),
    ("steps", cut_to(5)),
    ("steps", lambda events: [events[0]["settings"].update(steps=0, extra_steps=0),
                              events.__delitem__(slice(3, -1))]),
    ("final validation", drop("val", STEPS)),
    ("final validation", cut_to(5)),
    ("step of the validation", put("val", 5, step=6)),
    ("step of the validation", move("val", 5, 6)),
    ("validation step", twice("val", 5)),
    ("time of the validation", put("val", 5, train_time_ms=500.0)),
    ("time of the validation", put("val", 0, train_time_ms=0.5)),
    ("train_time_ms", put("step", 4, train_time_ms=1.0)),
    ("train_time_ms", put("step", 1, train_time_ms=0.0)),
    ("train_time_ms", lambda events: pick(events, "step", 4).update(
        train_time_ms=pick(events, "step", 3)["train_time_ms"])),
    ("train_time_ms", put("end", None, train_time_ms=1.0)),
    ("summary step", put("end", None, step=9)),
    ("summary tokens", put("end", None, tokens=STEPS * TOKENS_PER_STEP + 1)),
    ("summary val_loss", put("end", None, val_loss=3.0)),
    ("summary wait_ms", put("end", None, wait_ms=99.0)),
    ("summary wall_s", put("end", None, wall_s=4.4)),
    ("summary train_time_ms", put("end", None, train_time_ms=10_000.0)),
    ("run.steps", start("run.steps", 9)),
    ("run.tokens_per_step", start("run.tokens_per_step", 512)),
    ("status", put("end", None, status="interrupted")),
    ("status", put("end", None, status="non-finite")),
    ("text log line", lambda events: [pick(events, kind, STEPS).update(val_loss=3.0, loss=3.0)
                                      for kind in ("val", "end")]),
    ("text log line", put("step", 4, loss=3.0)),
    ("text log lines", drop("val", 5)),
    ("text log summary", put("end", None, wall_s=99.0)),
    ("one device in a set", start("environment.device", "NVIDIA H200")),
    ("one device in a set", start("environment.cpu", "Another processor")),
    ("one device in a set", start("environment.threads", 64)),
    ("one torch version in a set", start("environment.torch", "2.11.0")),
    ("one number of processes in a set", start("environment.processes", 2)),
    ("each seed once in a set", start("settings.seed", 1)),
]


@pytest.mark.parametrize("mutate", [resumed(3), both(resumed(5), resumed(2)), resumed(
    3, settings=dict(seed=2, tokens_per_step=TOKENS_PER_STEP, micro_batch=2))])
def test_a_run_that_went_on_from_its_own_checkpoints_is_valid(tmp_path, capsys, mutate):
    path = write_set(tmp_path / "set")[1]
    events = read_events(path)
    mutate(events)
    write_events(path, events)
    code, lines = judge(capsys, tmp_path / "set")
    assert code == 0, lines


@pytest.mark.parametrize(("rule", "mutate"), EVENT_MUTANTS,
                         ids=[f"{at}-{rule}" for at, (rule, _) in enumerate(EVENT_MUTANTS)])
def test_a_mutant_of_the_events_is_refused_by_its_rule(tmp_path, capsys, rule, mutate):
    path = write_set(tmp_path / "set")[1]
    events = read_events(path)
    mutate(events)
    write_events(path, events)
    assert_refused(judge(capsys, tmp_path / "set"), path, rule)


def assert_refused(judged: tuple[int, list[str]], path: Path, rule: str) -> None:
    """Exit code 1, and a line about this file that names the rule; no line about another file."""
    code, lines = judged
    assert code == 1
    found = [match for match in map(REFUSAL.match, lines) if match]
    assert {match["file"] for match in found} == {str(path)}, lines
    assert any(match["rule"].startswith(rule) for match in found), lines
    assert lines[-1] == f"NOT VALID: {len(found)} refusal(s)"


# -------------------------------------------------------------------------------------------------
# Mutants of the files

def rewrite(suffix: str, change):
    """A mutant that changes the text of the second run's .jsonl or .txt."""
    def mutate(path):
        file = path.with_suffix(suffix)
        file.write_text(change(file.read_text()))
    return mutate


def program_of(path: Path) -> Path:
    return next(path.parent.glob("train_gpt_*.py"))


FILE_MUTANTS = [
    ("readable", "line 3", rewrite(".jsonl", lambda s: s.replace('"event": "val"', '"event', 1))),
    ("readable", "line 2", rewrite(".jsonl", lambda s: s.replace("\n", "\n\n", 1))),
    ("readable", "line 1", rewrite(".jsonl", lambda _: "")),
    ("readable", "line 16", rewrite(".jsonl", lambda s: s[:-9])),
    ("readable", "line 1", rewrite(".jsonl", lambda s: '{"event": "start", ' + s[1:])),
    ("readable", "line 2", rewrite(".jsonl", lambda s: s.replace("\n", "\n[1]\n", 1))),
    ("readable", "line 2", rewrite(".jsonl", lambda s: s.replace("\n", "\n" + "[" * 99999, 1))),
    ("readable", "line 1", lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes())),
    ("log", "run-2.jsonl", lambda path: (path.unlink(), path.mkdir())),
    ("text log", "run-2.txt", lambda path: path.with_suffix(".txt").unlink()),
    ("text log lines", "12", rewrite(".txt", lambda s: s.replace(" val_loss:", " loss:", 1))),
    ("text log lines", "12", rewrite(".txt", lambda s: re.sub("step:4/.*\n", "", s))),
    ("text log line", "0/10", rewrite(".txt", lambda s: s.replace("step:0/10", "step:0/11"))),
    ("text log line", "8.3", rewrite(".txt", lambda s: s.replace("loss:8.3", "loss:8.2"))),
    ("text log line", "8.3", rewrite(".txt", lambda s: s.replace("loss:8.3", "loss:nan8.3"))),
    ("text log line", "5/10", rewrite(".txt", lambda s: s.replace("time:50", "time:40"))),
    ("text log line", "3/10", rewrite(".txt", lambda s: re.sub("(step:3.*avg:)1", r"\g<1>9", s))),
    ("text log line", "0/10", rewrite(".txt", lambda s: s.replace("ms step", "s step"))),
    ("text log summaries", "0", rewrite(".txt", lambda s: s.replace("summary", "sum"))),
    ("text log summary", "trained 1", rewrite(".txt", lambda s: s.replace("ained 1", "ained 0"))),
    ("text log summary", "wall 1", rewrite(".txt", lambda s: s.replace("wall 1", "wall 2"))),
]


@pytest.mark.parametrize(("rule", "words", "mutate"), FILE_MUTANTS,
                         ids=[f"{at}-{rule}" for at, (rule, *_) in enumerate(FILE_MUTANTS)])
def test_a_mutant_of_the_files_is_refused_by_its_rule(tmp_path, capsys, rule, words, mutate):
    path = write_set(tmp_path / "set")[1]
    mutate(path)
    judged = judge(capsys, tmp_path / "set")
    assert_refused(judged, path, rule)
    assert any(words in line for line in judged[1] if f": {rule}" in line), judged[1]


@pytest.mark.parametrize(("rule", "mutate"), [
    ("program file", Path.unlink),
    ("program file", lambda program: (program.unlink(), program.mkdir())),
    ("program sha256", lambda program: program.write_bytes(PROGRAM + b"#")),
], ids=["missing", "folder", "changed"])
def test_a_changed_program_refuses_every_run(tmp_path, capsys, rule, mutate):
    logs = write_set(tmp_path / "set")
    mutate(program_of(logs[0]))
    code, lines = judge(capsys, tmp_path / "set")
    assert code == 1
    assert sum(f": {rule}: expected " in line for line in lines) == len(logs)


def test_another_program_in_a_set_is_refused(tmp_path, capsys, monkeypatch):
    write_set(tmp_path / "set")
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", b"pass\n")
    path = write_run(tmp_path / "set", 9)
    assert_refused(judge(capsys, tmp_path / "set"), path, "one program in a set")


def test_another_track_in_a_set_is_refused(tmp_path, capsys):
    write_set(tmp_path / "set")
    path = write_run(tmp_path / "set", 9, track="fineweb")
    assert_refused(judge(capsys, tmp_path / "set"), path, "one track in a set")


def test_another_unpinned_validation_file_in_a_set_is_refused(tmp_path, capsys):
    path = write_set(tmp_path / "set", track="fineweb")[1]
    events = read_events(path)
    events[0]["data"]["val"]["sha256"] = "cd" * 32
    write_events(path, events)
    assert_refused(judge(capsys, tmp_path / "set"), path, "one validation sha256 in a set")


def test_the_same_log_twice_is_refused(tmp_path, capsys):
    logs = write_set(tmp_path / "set")
    (tmp_path / "copy").mkdir()
    shutil.copy(program_of(logs[0]), tmp_path / "copy")
    for suffix in (".jsonl", ".txt"):
        shutil.copy(logs[0].with_suffix(suffix), tmp_path / "copy")
    copy = tmp_path / "copy" / logs[0].name
    assert_refused(judge(capsys, *logs, copy), copy, "each run id once in a set")


def test_every_rule_of_a_run_has_a_mutant_that_only_it_refuses(tmp_path, capsys, monkeypatch):
    """No rule is decoration: without it, one of the mutants above would pass as valid. Mutants of
    the events are tried with a text log that tells the same."""
    saved = []
    for at, (_, mutate) in enumerate(EVENT_MUTANTS):
        saved.append(write_set(tmp_path / str(at), runs=1)[0])
        events = read_events(saved[-1])
        mutate(events)
        write_events(saved[-1], events)
        if any(rule in EVENT_MUTANTS[at][0] for rule in ("step in line", "train_time_ms")):
            retell(saved[-1])
    for at, (_, _, mutate) in enumerate(FILE_MUTANTS, len(EVENT_MUTANTS)):
        saved.append(write_set(tmp_path / str(at), runs=2)[1])
        mutate(saved[-1])
    refusing = []
    for path in saved:
        try:
            run = verify.Run(path)
        except verify.Refused:
            continue
        refusing.append([rule for rule in verify.RUN_RULES if refuses(rule, run)])
    alone = {rules[0] for rules in refusing if len(rules) == 1}
    assert alone == set(verify.RUN_RULES)


def retell(path: Path) -> None:
    """Write the text log anew from the events."""
    events = read_events(path)
    path.with_suffix(".txt").write_text("\n".join([
        *(line(event) for event in events if event["event"] in ("step", "val")),
        summary(events[-1], events[0]["track"])]))


def refuses(rule, run) -> bool:
    try:
        rule(run)
    except verify.Refused:
        return True
    return False


# -------------------------------------------------------------------------------------------------
# A real record, tampered with: each forgery is refused by its name

RECORD = ROOT / "records" / "2026-12-01_TinyBaseline"


@pytest.fixture()
def record(tmp_path) -> Path:
    """A copy of the record whose README says what was run."""
    copy = Path(shutil.copytree(RECORD, tmp_path / RECORD.name))
    text = re.sub("^seeds:.*\n", "", (copy / "README.md").read_text(), flags=re.M)
    (copy / "README.md").write_text(f"{text}\nseeds: 0 to 9\n")
    return copy


def log_of(folder: Path, seed: int) -> Path:
    return next(folder.glob(f"*_seed{seed}_*.jsonl"))


def edit_loss(record):
    """The last validation of seed 7, in all places of its events."""
    path = log_of(record, 7)
    path.write_text(path.read_text().replace(str(read_events(path)[-1]["val_loss"]), "3.51"))


def edit_training_loss(record):
    path = log_of(record, 7)
    events = read_events(path)
    pick(events, "step", 300)["loss"] -= 0.1
    write_events(path, events)


def remove_step(record):
    """Both from the events and from the text."""
    path = log_of(record, 7)
    path.write_text("".join(line for line in path.read_text().splitlines(True)
                            if '"step": 300,' not in line))
    text = path.with_suffix(".txt")
    text.write_text(re.sub("^step:300/.*\n", "", text.read_text(), flags=re.M))


def change_hash(record):
    path = log_of(record, 7)
    digest = read_events(path)[0]["program_sha256"]
    path.write_text(path.read_text().replace(digest, digest[:-1] + "0"))


def other_val_set(record):
    path = log_of(record, 7)
    path.write_text(path.read_text().replace(verify.TRACKS["tiny"]["val_sha256"], "ab" * 32))


def shorten_times(record):
    """The events alone: every time is 9/10 of what it was."""
    path = log_of(record, 7)
    events = read_events(path)
    for event in events:
        if "train_time_ms" in event:
            event["train_time_ms"] *= 0.9
    write_events(path, events)


def shorten_times_of_both(record):
    """The text as well, by someone who forgets the averages."""
    shorten_times(record)
    text = log_of(record, 7).with_suffix(".txt")
    text.write_text(re.sub(r"train_time:(\d+)ms", lambda m: f"train_time:{0.9 * int(m[1]):.0f}ms",
                           text.read_text()))


def shorten_one_step(record):
    path = log_of(record, 7)
    events = read_events(path)
    pick(events, "step", 300)["train_time_ms"] -= 50
    write_events(path, events)


def drop_seed(record, seed, *kept):
    """Files of a run are deleted, but for the suffixes that are kept."""
    for path in list(record.glob(f"*_seed{seed}_*")):
        if path.suffix not in kept:
            path.unlink()


def move_apart(record, seed):
    """A whole run, as if it had been cut short."""
    (record / "incomplete").mkdir()
    for path in list(record.glob(f"*_seed{seed}_*")):
        path.rename(record / "incomplete" / path.name)


def claim_eight(record):
    readme = record / "README.md"
    readme.write_text(readme.read_text().replace("seeds: 0 to 9", "seeds: 0 to 8"))


def cut_short(record):
    path = log_of(record / "incomplete", 9)
    path.write_text("".join(path.read_text().splitlines(True)[:-1]))


FORGERIES = [
    ("setting val_sha256", other_val_set), ("validation sha256", other_val_set),
    ("program sha256", change_hash), ("step in line", remove_step),
    ("text log line", edit_loss), ("text log line", edit_training_loss),
    ("text log line", shorten_times), ("text log line", shorten_times_of_both),
    ("text log line", shorten_one_step),
    *(("seeds of the set", partial(drop_seed, seed=seed)) for seed in (4, 9, 0)),
    ("seeds of the set", partial(move_apart, seed=7)),
    ("log of each text log", lambda r: (drop_seed(r, 9, ".txt"), claim_eight(r))),
    ("run kept apart", lambda r: (move_apart(r, 9), claim_eight(r))),
    ("run kept apart", lambda r: (move_apart(r, 9), cut_short(r), claim_eight(r))),
]


def test_the_record_itself_is_valid(record, capsys):
    code, lines = judge(capsys, record)
    assert code == 0 and not any(line.startswith("note:") for line in lines), lines


@pytest.mark.parametrize(("rule", "forge"), FORGERIES,
                         ids=[f"{at}-{rule}" for at, (rule, _) in enumerate(FORGERIES)])
def test_a_forged_record_is_refused_by_name(record, capsys, rule, forge):
    forge(record)
    code, lines = judge(capsys, record)
    assert code == 1 and any(f": {rule}" in line and ": expected " in line for line in lines), lines


# -------------------------------------------------------------------------------------------------
# A set: its README, its seeds, what lies apart

def claim(folder: Path, *lines: str) -> Path:
    (folder / "README.md").write_text("# Test\n\n" + "\n".join(lines) + "\n\nText.\n")
    return folder


@pytest.mark.parametrize(("lines", "code"), [
    (["seeds: 1 to 4"], 0), (["seeds: 1 to 5"], 1), (["seeds: 0 to 4"], 1), (["seeds: 2 to 4"], 1),
    (["seeds: 1 to 3"], 1), (["seeds: 4 to 1"], 1), (["seeds: 1-4"], 1), (["seeds:"], 1),
    (["seeds: 1 to 4", "seeds: 1 to 4"], 1), (["parent: none"], 0), (["parent: ../set"], 1),
    (["parent: missing"], 1), (["systems-only: perhaps"], 1), (["systems-only: no"], 0),
    (["systems-only: yes"], 1), (["seeds: 1 to 999999999"], 1)])
def test_lines_of_the_readme(tmp_path, capsys, lines, code):
    write_set(tmp_path / "set")
    found, out = judge(capsys, claim(tmp_path / "set", *lines))
    assert found == code, out
    assert code == 0 or out[-1] == "NOT VALID: 1 refusal(s)"


def test_a_gap_in_the_seeds_is_refused_without_any_readme(tmp_path, capsys):
    logs = write_set(tmp_path / "set")
    code, lines = judge(capsys, logs[0], logs[2], logs[3])
    assert code == 1 and any("seeds of the set: expected all from 1 to 4" in s for s in lines)


@pytest.mark.parametrize(("seeds", "claimed"), [((1, 3, 4), "2 to 4"), ((1, 2, 4), "1 to 3")])
def test_no_claim_covers_a_gap(tmp_path, capsys, seeds, claimed):
    (tmp_path / "set").mkdir()
    for seed in seeds:
        write_run(tmp_path / "set", seed)
    code, lines = judge(capsys, claim(tmp_path / "set", f"seeds: {claimed}"))
    assert code == 1 and any("seeds of the set: expected all" in line for line in lines), lines


def test_a_run_that_was_cut_short_may_lie_apart_and_is_named(tmp_path, capsys):
    path = write_set(tmp_path / "set")[1]
    apart = tmp_path / "set" / "incomplete"
    apart.mkdir()
    (apart / "a.jsonl").write_text(path.read_text()[:-400])  # in the middle of the last line
    (apart / "b.jsonl").write_text("")
    code, lines = judge(capsys, tmp_path / "set")
    assert code == 0 and "note: 2 run(s) that were cut short lie apart in incomplete/" in lines
    (apart / "c.jsonl").write_text(path.read_text().replace('"complete"', '"non-finite"'))
    assert judge(capsys, tmp_path / "set")[0] == 1


# -------------------------------------------------------------------------------------------------
# The parent: its band, and sets that only do the same otherwise

def shift(path: Path, amount: float, steps=range(1, STEPS + 1), **settings) -> None:
    """Losses of a run, moved, in both of its files."""
    events = read_events(path)
    events[0]["settings"] |= settings
    for event in events:
        if event["event"] in ("step", "val") and event["step"] in steps:
            event["loss"] += amount
    events[-1]["val_loss"] = pick(events, "val", STEPS)["loss"]
    write_events(path, events)
    retell(path)


def with_parent(tmp_path, *lines: str, runs: int = 4) -> list[Path]:
    """A record `child` whose runs repeat those of its parent, seed by seed."""
    write_set(tmp_path / "mother", runs=5)
    logs = write_set(tmp_path / "child", runs=runs)
    claim(tmp_path / "child", "parent: mother", *lines)
    return logs


@pytest.mark.parametrize(("amount", "word"), [
    (0.0, "in its band"), (0.0002, "in its band"), (-0.015, "better"), (0.015, "worse")])
def test_a_curve_outside_the_parents_band_is_reported(tmp_path, capsys, amount, word):
    for path in with_parent(tmp_path):
        shift(path, amount)
    code, lines = judge(capsys, tmp_path / "child")
    found = [line for line in lines if line.startswith("against mother: ")]
    assert code == 0 and all(word in line for line in found), lines
    assert len(found) == (1 if word == "in its band" else 2)  # at steps 5 and 10
    if len(found) > 1:
        assert f"at {5 * TOKENS_PER_STEP:,} tokens" in found[0]


def test_the_band_by_hand():
    """Parents 3.1, 3.2, 3.3: sd 0.1, and for three runs half of it is t * 0.1 * sqrt(2 / 3)."""
    def run(loss):
        made = object.__new__(verify.Run)
        made.start, made.vals = {"settings": {"tokens_per_step": 8}}, [{"step": 5, "loss": loss}]
        return made

    parents, half = [run(3.1), run(3.2), run(3.3)], stats.t.isf(0.0005, 2) * 0.1 * math.sqrt(2 / 3)
    assert verify.outside_band([run(3.2 + half - 1e-6)] * 3, parents) == []
    (text,) = verify.outside_band([run(3.2 + half + 1e-6)] * 3, parents)
    assert f"worse: {3.2 - half:.5f} to {3.2 + half:.5f}" in text and "at 40 tokens" in text
    assert "better" in verify.outside_band([run(3.2 - half - 1e-6)] * 3, parents)[0]
    assert "no two runs" in verify.outside_band(parents, parents[:1])[0]
    equal = [run(3.2)] * 3                   # as before training: rounding alone
    assert not [x for x in (3.2009, 3.1991) if verify.outside_band([run(x)], equal)]
    assert verify.outside_band([run(3.2011)], equal) and verify.outside_band([run(3.1989)], equal)


def test_a_systems_only_set_needs_no_p_but_equal_losses(tmp_path, capsys):
    (path,) = with_parent(tmp_path, "systems-only: yes", runs=1)
    shift(path, 0.0005)                      # n = 1: within EQUAL, and in the band
    code, lines = judge(capsys, tmp_path / "child")
    assert code == 0 and lines[-1].startswith("VALID: systems-only"), lines
    claim(tmp_path / "child", "parent: mother")
    assert judge(capsys, tmp_path / "child")[0] == 1  # one run has no p


@pytest.mark.parametrize(("rule", "change"), [
    ("systems-only loss of seed 2, step 5", lambda path: shift(path, 0.0051, [5])),
    ("systems-only loss of seed 2, step 10", lambda path: shift(path, -0.0051, [10])),
    ("systems-only setting steps", lambda path: shift(path, 0.0, steps=STEPS - 1, extra_steps=1)),
    ("systems-only setting width", lambda path: shift(path, 0.0, width=512)),
])
def test_a_systems_only_set_that_computes_something_else_is_refused(
        tmp_path, capsys, rule, change):
    path = with_parent(tmp_path, "systems-only: yes")[1]
    mother = tmp_path / "mother"
    for log in mother.glob("*.jsonl"):
        shift(log, 0.0, width=256)
    for log in (tmp_path / "child").glob("*.jsonl"):
        shift(log, 0.0, width=256)
    assert judge(capsys, tmp_path / "child")[0] == 0
    if rule.endswith("steps"):
        events = read_events(path)
        events[0]["settings"] |= {"steps": STEPS - 1, "extra_steps": 1}
        write_events(path, events)
    else:
        change(path)
    code, lines = judge(capsys, tmp_path / "child")
    assert code == 1 and any(f": {rule}: expected " in line for line in lines), lines


def test_a_systems_only_curve_outside_the_band_is_refused(tmp_path, capsys):
    for path in with_parent(tmp_path, "systems-only: yes"):
        shift(path, 0.003)                   # within EQUAL each, but all on one side
    code, lines = judge(capsys, tmp_path / "child")
    assert code == 1 and any(": systems-only curve: expected" in line for line in lines), lines


def test_a_systems_only_set_must_be_below_the_target(tmp_path, capsys):
    write_set(tmp_path / "mother", runs=5, loss=verify.TINY_TARGET_LOSS + 0.1)
    write_set(tmp_path / "child", loss=verify.TINY_TARGET_LOSS + 0.1)
    claim(tmp_path / "child", "parent: mother", "systems-only: yes")
    code, lines = judge(capsys, tmp_path / "child")
    assert code == 1 and lines[-1].startswith("NOT VALID: systems-only, mean must be below 3.56")


def test_a_parent_of_another_track_is_refused(tmp_path, capsys):
    with_parent(tmp_path)
    shutil.rmtree(tmp_path / "mother")
    write_set(tmp_path / "mother", track="fineweb")
    code, lines = judge(capsys, tmp_path / "child")
    assert code == 1 and any(": track of the parent: expected" in line for line in lines), lines


def test_a_systems_only_set_has_only_seeds_of_its_parent(tmp_path, capsys):
    with_parent(tmp_path, "systems-only: yes", runs=6)
    code, lines = judge(capsys, tmp_path / "child")
    assert code == 1 and any(": systems-only seed: expected" in line for line in lines), lines


def test_a_machine_setting_of_a_systems_only_set_is_free(tmp_path, capsys):
    for path in with_parent(tmp_path, "systems-only: yes"):
        events = read_events(path)
        events[0]["settings"]["micro_batch"] = 2
        events[0]["machine_overrides"]["micro_batch"] = 2
        write_events(path, events)
    for path in (tmp_path / "mother").glob("*.jsonl"):
        events = read_events(path)
        events[0]["settings"]["micro_batch"] = 0
        write_events(path, events)
    assert judge(capsys, tmp_path / "child")[0] == 0


def test_a_broken_parent_is_refused(tmp_path, capsys):
    with_parent(tmp_path)
    path = next((tmp_path / "mother").glob("*.jsonl"))
    write_events(path, read_events(path)[:-1])
    code, lines = judge(capsys, tmp_path / "child")
    assert code == 1 and any(": parent: expected a sound record mother" in s for s in lines), lines


# -------------------------------------------------------------------------------------------------
# Conditions, and the leak test of the program

def test_energy_is_told_and_a_run_that_throttled_is_flagged(tmp_path, capsys):
    for number, path in enumerate(write_set(tmp_path / "set")):
        events = read_events(path)
        for event in events:
            if event["event"] == "val":
                event["conditions"] = {
                    "energy_j": 5e6 + 1000 * event["step"], "power_limit_w": 700.0,
                    "power_w": None, "throttle_reasons": 0x04 | 0x40 * (number == 2) * (
                        event["step"] == 5)}
        write_events(path, events)
    code, lines = judge(capsys, tmp_path / "set")
    assert code == 0 and "run-1: 10,000 J, its validations included" in lines
    assert [s for s in lines if "THROTTLED" in s] == ["run-3: THROTTLED: heat, by the hardware"]


def test_the_leak_test_decides_a_set_that_is_valid_otherwise(tmp_path):
    """PROGRAM is none that could be tested; the record's own passes in test_leak.py."""
    write_set(tmp_path / "set")
    done = run_judge("--program", tmp_path / "set")
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith("NOT VALID")
    assert "the judge ran the program" in done.stdout  # its SystemExit, told by the leak test
    path = next((tmp_path / "set").glob("*.jsonl"))
    write_events(path, read_events(path)[:-1])
    assert "judge ran" not in run_judge("--program", tmp_path / "set").stdout  # refused: not run


# -------------------------------------------------------------------------------------------------
# Whatever the files hold: no traceback, and never "valid"

GARBAGE = st.one_of(st.binary(max_size=60), st.sampled_from([
    b"\n", b"NaN", b"-1", b"null", b"{}", b"[]", b'"', b"\\ud800", b"\x00", b"1e999", b"true", b",",
    b'"event"', b'"end"', b'{"event": "end"}\n', b"9" * 5000, b"[" * 3000, b'{"a":' * 3000]))


@settings(max_examples=300, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_cuts_and_garbage_in_a_log_never_pass_or_crash(tmp_path, capsys, data):
    """The second log is cut, or a span is garbage. Valid only where that changed no claim."""
    path = write_set(tmp_path / "set", runs=2)[1]
    sound, before = path.read_bytes(), read_events(path)
    at = data.draw(st.integers(0, len(sound)), "from")
    to = data.draw(st.one_of(st.integers(at, min(at + 40, len(sound))), st.just(len(sound))), "to")
    path.write_bytes(sound[:at] + data.draw(GARBAGE, "garbage") + sound[to:])
    code, lines = judge(capsys, tmp_path / "set")
    assert code == 1 or code == 0 and same_record(path, before), lines
    assert all(line.isprintable() for line in lines)


def same_record(path: Path, before: list[dict]) -> bool:
    """Is what the record claims unchanged? Free text and training losses are not compared."""
    kept = ("event", "step", "tokens", "restored", "status", "val_loss", "recompiles", "format",
            "track", "id", "program_sha256", "recipe_overrides")
    after = read_events(path)
    return ([[event.get(name) for name in kept] for event in after]
            == [[event.get(name) for name in kept] for event in before])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["NaN", "tiny", 10 ** 4299, "\ud800"]),
    lambda inner: (st.lists(inner, max_size=3)
                   | st.dictionaries(st.text(max_size=5), inner, max_size=3)), max_leaves=6)


@settings(max_examples=300, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_value_anywhere_never_crashes(tmp_path, capsys, data):
    """A value of a log, at any depth, becomes any JSON value."""
    path = write_set(tmp_path / "set", runs=2)[1]
    events = read_events(path)
    holder: dict | list = events
    while True:
        key = data.draw(st.sampled_from(list(holder) if isinstance(holder, dict)
                                        else range(len(holder))), "key")
        if not isinstance(holder[key], dict | list) or not holder[key] or data.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = data.draw(json_values, "value")
    write_events(path, events)
    code, lines = judge(capsys, tmp_path / "set")
    assert code in (0, 1) and lines[-1].startswith("VALID" if code == 0 else "NOT VALID")


@settings(max_examples=100, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.one_of(st.binary(max_size=300), GARBAGE))
def test_a_log_of_garbage_alone_never_passes_or_crashes(tmp_path, capsys, garbage):
    path = write_set(tmp_path / "set", runs=2)[1]
    path.write_bytes(garbage)
    assert judge(capsys, tmp_path / "set")[0] == 1
    assert judge(capsys, path)[0] == 1


@settings(max_examples=100, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.one_of(st.binary(max_size=300), st.just(b"step:5 val_loss:\nstep:x val_loss::")))
def test_a_text_log_of_garbage_never_passes_or_crashes(tmp_path, capsys, garbage):
    path = write_set(tmp_path / "set", runs=2)[1]
    path.with_suffix(".txt").write_bytes(garbage)
    assert_refused(judge(capsys, tmp_path / "set"), path, "text log")


# -------------------------------------------------------------------------------------------------
# The command

def run_judge(*arguments: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(JUDGE), *map(str, arguments)], text=True,
                          capture_output=True, check=False, timeout=120, **options)


def test_as_a_command(tmp_path):
    folder = tmp_path / "a folder \u00e9"
    path = write_set(folder)[1]
    done = run_judge(folder, cwd=tmp_path, env={"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-1].startswith("VALID") and done.stderr == ""
    path.write_text("")
    done = run_judge("a folder \u00e9", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == ""


@pytest.mark.parametrize("arguments", [
    [], ["missing"], ["missing.jsonl"], [JUDGE], ["--what", "."]],
    ids=["none", "folder", "log", "not a log", "option"])
def test_wrong_usage_is_exit_code_2(tmp_path, arguments):
    done = run_judge(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.strip()


def test_help():
    done = run_judge("--help")
    assert done.returncode == 0 and "PATH" in done.stdout and "Exit code" in done.stdout


def test_without_scipy_one_line_names_the_remedy(tmp_path):
    (tmp_path / "scipy").mkdir()
    (tmp_path / "scipy" / "__init__.py").write_text("raise ImportError('hidden by the test')")
    write_set(tmp_path / "set")
    done = run_judge(tmp_path / "set", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "pip install -r requirements.txt" in done.stderr


def test_the_judge_imports_no_torch_and_never_runs_the_program(tmp_path):
    write_set(tmp_path / "set")
    code = ("import runpy, sys\n"
            f"sys.argv = ['verify.py', {str(tmp_path / 'set')!r}]\n"
            "try:\n"
            f"    runpy.run_path({str(JUDGE)!r}, run_name='__main__')\n"
            "finally:\n"
            "    print([n for n in sys.modules if n.split('.')[0] in ('torch', 'train_gpt')])\n")
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True,
                          check=False, timeout=120)
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-1] == "[]"
    assert "the judge ran the program" not in done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------
# The judge and the rest of the repository agree

@pytest.mark.parametrize("track", verify.TRACKS)
def test_the_pins_are_the_trainers_presets(track, monkeypatch):
    if not (ROOT / "train_gpt.py").is_file():
        pytest.skip("train_gpt.py is not there")
    monkeypatch.syspath_prepend(ROOT)
    import train_gpt

    preset, pins = getattr(train_gpt, track.upper()), verify.TRACKS[track]
    for name in ("target_loss", "val_tokens", "val_sequence"):
        assert getattr(preset, name) == pins[name], name
    assert preset.val_sha256 == (pins["val_sha256"] or "")


def test_the_tiny_pin_is_the_shard_that_ships():
    pins = verify.TRACKS["tiny"]
    shard = ROOT / "data" / "tiny" / pins["val_file"]
    if not shard.is_file():
        pytest.skip(f"{shard.name} is not in data/tiny")
    content = shard.read_bytes()
    assert hashlib.sha256(content).hexdigest() == pins["val_sha256"]
    assert int.from_bytes(content[8:12], "little") == pins["val_tokens"] + 1


def committed_records() -> dict[Path, list[Path]]:
    """Folder -> logs under version control. What a user's own runs add is not for this test."""
    listed = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "records/*/*.jsonl"],
                            cwd=ROOT, text=True, capture_output=True, check=False)
    records: dict[Path, list[Path]] = {}
    for name in listed.stdout.splitlines():
        records.setdefault(ROOT / Path(name).parent, []).append(ROOT / name)
    return records


def test_committed_records_are_valid(capsys):
    records = committed_records() if shutil.which("git") else {}
    if not records:
        pytest.skip("no record is under version control here")
    for logs in records.values():
        code, lines = judge(capsys, *logs)
        assert code == 0, lines
