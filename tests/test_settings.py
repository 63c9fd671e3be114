"""Section 1 of train_gpt.py: the settings, the command line, and the numbers of the record."""
import ast
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import get_args, get_origin

import pytest

import train_gpt
from train_gpt import FINEWEB, PRESETS, RECIPE_FIELDS, TINY, Recipe, Settings, UserError

ROOT = Path(__file__).resolve().parent.parent
KINDS = {f.name: f.type for f in fields(Settings)}
CHOICES = {name for name, kind in KINDS.items() if get_origin(kind)}


def parse(*words) -> Settings:
    return train_gpt.parse_settings(["--track=fineweb", *words])[0]


def refusal(*words) -> str:
    """The line that refuses these words."""
    with pytest.raises(UserError) as error:
        parse(*words)
    assert error.value.code == 2
    line = error.value.line
    assert line and "\n" not in line
    return line


def trailing_comments() -> dict[str, str]:
    """Field -> the comment on its line, read by Python's own parser."""
    source = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
    lines, notes = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in ("Recipe", "Settings"):
            for item in node.body:
                if isinstance(item, ast.AnnAssign):
                    rest = lines[item.end_lineno - 1].encode()[item.end_col_offset:].decode()
                    notes[item.target.id] = rest.partition("# ")[2].strip()
    return notes


# ---- --help --------------------------------------------------------------------------------------

def help_lines(capsys, *words) -> dict[str, dict[str, str]]:
    """Group ("recipe", "machine") -> field -> its line."""
    assert train_gpt.main(["--help", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    groups, group = {}, None
    for line in out.splitlines():
        if heading := re.match(r"(recipe|machine): ", line):
            group = groups.setdefault(heading[1], {})
        elif setting := re.match(r"  --(\w+)=", line):
            assert setting[1] not in group, f"{setting[1]} is listed twice"
            group[setting[1]] = line.strip()
    return groups


@pytest.mark.parametrize("track", PRESETS)
def test_help_lists_every_setting_once_with_default_note_and_group(track, capsys):
    groups, notes = help_lines(capsys, f"--track={track}"), trailing_comments()
    assert set(groups) == {"recipe", "machine"}
    assert set(groups["recipe"]) == RECIPE_FIELDS == {f.name for f in fields(Recipe)}
    assert set(groups["machine"]) == set(KINDS) - RECIPE_FIELDS
    for name, line in {**groups["recipe"], **groups["machine"]}.items():
        value = getattr(PRESETS[track], name)
        text = line.removeprefix(f"--{name}=")
        plain = json.dumps(value).replace(" ", "")
        assert text.startswith((plain, str(value).replace(" ", ""))), line
        assert len(notes[name]) > 0 and line.endswith("  " + notes[name])
        if name in CHOICES:
            assert "|".join(get_args(KINDS[name])) in line


def test_help_without_a_track_is_the_record(capsys):
    assert help_lines(capsys) == help_lines(capsys, "--track=fineweb")
    assert help_lines(capsys) != help_lines(capsys, "--track=tiny")


@pytest.mark.parametrize("track", PRESETS)
def test_what_help_shows_can_be_typed(track, capsys):
    """Each default, taken by a shell from the line of --help, is no override."""
    groups = help_lines(capsys, f"--track={track}")
    words = [shlex.split(line.replace("'", ""))[0] for group in groups.values()
             for line in group.values()]
    s, given = train_gpt.parse_settings([f"--track={track}", *words])
    assert s == PRESETS[track] and given == {}


def test_help_from_a_shell():
    done = subprocess.run([sys.executable, ROOT / "train_gpt.py", "--help"], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert "--tokens_per_step=393216  tokens\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 160


# ---- overrides -----------------------------------------------------------------------------------

@pytest.mark.parametrize("word, name, value", [
    ("--steps=12", "steps", 12), ("--seed=0", "seed", 0), ("--extra_steps=0", "extra_steps", 0),
    ("--val-every=7", "val_every", 7),       # dashes, as shells and people write them
    ("--muon_lr=0.1", "muon_lr", 0.1), ("--muon_lr=3e-4", "muon_lr", 3e-4),
    ("--embed_lr=50", "embed_lr", 50.0), ("--skip_init=-2", "skip_init", -2.0),
    ("--checkpoint=false", "checkpoint", False), ("--checkpoint=True", "checkpoint", True),
    ("--windows=(1,2)", "windows", (1, 2)), ("--windows=(4,)", "windows", (4,)),
    ("--no_attention=()", "no_attention", ()), ("--skips=((6,1),)", "skips", ((6, 1),)),
    ("--adam_betas=(0.9,0.95)", "adam_betas", (0.9, 0.95)),
    ("--name=My_Run-2.1", "name", "My_Run-2.1"), ("--data_dir=a b/c=d", "data_dir", "a b/c=d"),
    ("--val_sha256=", "val_sha256", ""), ("--optimizer=adamw", "optimizer", "adamw"),
    ("--precision=bf16", "precision", "bf16"), ("--compile=off", "compile", "off"),
    ("--device=cpu", "device", "cpu")])
def test_overrides(word, name, value):
    s, given = train_gpt.parse_settings(["--track=fineweb", word])
    assert getattr(s, name) == value and type(getattr(s, name)) is type(value)
    assert s == replace(FINEWEB, **{name: value})
    assert given == ({} if getattr(FINEWEB, name) == value else {name: value})


@pytest.mark.parametrize("track", PRESETS)
def test_the_presets_own_values_are_no_overrides(track):
    """Of all settings at once, as Python writes them."""
    words = [f"--{name}={getattr(PRESETS[track], name)}" for name in KINDS]
    assert train_gpt.parse_settings(words) == (PRESETS[track], {})


def test_the_last_of_two_overrides_counts():
    s, given = train_gpt.parse_settings(["--track=tiny", "--steps=5", "--steps=6"])
    assert s.steps == 6 and given == {"steps": 6}
    assert train_gpt.parse_settings(
        ["--track=tiny", "--steps=5", f"--steps={TINY.steps}"]) == (TINY, {})


def test_the_track_chooses_the_preset(monkeypatch):
    assert train_gpt.parse_settings(["--track=fineweb"]) == (FINEWEB, {})
    for cuda, preset in ((True, FINEWEB), (False, TINY)):
        monkeypatch.setattr(train_gpt.torch.cuda, "is_available", lambda: cuda)
        assert train_gpt.parse_settings([]) == (preset, {})


# ---- refusals ------------------------------------------------------------------------------------

@pytest.mark.parametrize("word, nearest", [
    ("--stesp=3", "steps"), ("--muonlr=0.1", "muon_lr"), ("--tokens-per-stp=1", "tokens_per_step"),
    ("--precison=bf16", "precision"), ("--Width=3", "width"), ("steps=3", "steps"),
    ("-steps=3", "steps"), ("--val_sha=0", "val_sha256")])
def test_an_unknown_name_is_answered_with_the_nearest(word, nearest):
    line = refusal(word)
    assert line.startswith(word) and f"--{nearest};" in line and "--help" in line


@pytest.mark.parametrize("word", ["", "--", "=", "--=", "tiny", "--\u00e4=1", "-1"])
def test_odd_words_are_refused_too(word):
    assert "the nearest is --" in refusal(word)


def test_a_name_without_a_value():
    assert refusal("--steps") == "--steps: expected --steps=value"
    assert "--checkpoint=value" in refusal("--checkpoint")


@pytest.mark.parametrize("text", ["{[]: 1}", "-" * 100_000 + "1", "9" * 5000, "(" * 300])
def test_text_that_python_cannot_evaluate(text):
    assert ": expected int, as in --steps=8" in refusal(f"--steps={text}")


WRONG = {int: ("abc", "1.5", "1e3", "", "True", "(1,)", "1 2"),
         float: ("abc", "nan", "inf", "-inf", "1e999", "", "False", "(0.5,)", "'1'"),
         bool: ("maybe", "1", "0", ""), tuple: ("3", "abc", "", "{1,2}", "None")}


@pytest.mark.parametrize("name", [n for n, kind in KINDS.items() if kind in WRONG])
def test_wrong_types_are_refused_by_name(name):
    for text in WRONG[KINDS[name]]:
        line = refusal(f"--{name}={text}")
        assert line.startswith(f"--{name}={text}: expected {KINDS[name].__name__}"), line
        assert f"as in --{name}=" in line


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_named(name):
    line = refusal(f"--{name}={get_args(KINDS[name])[-1][:-1]}x")
    assert f"--{name}=" in line and f"did you mean {get_args(KINDS[name])[-1]}?" in line
    assert all(choice in line for choice in get_args(KINDS[name]))
    assert f"--{name}=" in refusal(f"--{name}=")


@pytest.mark.parametrize("word, expected", [
    ("--steps=0", "at least 1"), ("--layers=-1", "at least 1"), ("--val_every=0", "at least 1"),
    ("--prefetch=0", "at least 1"), ("--epochs=0", "at least 1"), ("--seed=-1", "at least 0"),
    ("--threads=-1", "at least 0"), ("--extra_steps=-1", "at least 0"),
    ("--width=0", "at least 1"), ("--head_dim=0", "at least 1"), ("--unit_tokens=0", "at least 1"),
    ("--width=200", "a multiple of head_dim 128"), ("--head_dim=2", "a multiple of 4"),
    ("--gate_width=800", "at most width 768"), ("--vocab_size=65537", "65,536"),
    ("--vocab_size=1", "2 to"), ("--unit_tokens=100", "a multiple of"),
    ("--doc_cap=16385", "at most unit_tokens"), ("--tokens_per_step=16385", "a whole number of"),
    ("--cooldown=1.5", "0 to 1"), ("--cooldown=-0.1", "0 to 1"), ("--lr_floor=2", "0 to 1"),
    ("--windows=()", "at least one"), ("--windows=(0,)", "at least one"),
    ("--windows=(1.5,)", "whole numbers"), ("--final_windows=(1,2)", "three"),
    ("--final_windows=(1,0,2)", "three"), ("--final_windows=('a',1,2)", "three"),
    ("--skips=((1,3),)", "earlier block"), ("--skips=((12,1),)", "blocks 1 to 11"),
    ("--skips=(3,1)", "pairs"), ("--skips=((3,1,1),)", "pairs"), ("--skips=(('a',1),)", "pairs"),
    ("--skips=((3,1),(3,2))", "pairs"), ("--value_layers=((1,0),(1,1))", "pairs"),
    ("--value_layers=((0,0),)", "blocks 1 to 11"), ("--value_layers=((1,-1),)", "pairs"),
    ("--no_attention=(12,)", "blocks 1 to 11"), ("--no_attention=('a',)", "blocks 1 to 11"),
    ("--long_window=(0,)", "blocks 1 to 11"), ("--adam_betas=(0.9,)", "two"),
    ("--momentum=(0.9,)", "two"), ("--momentum=('a',0.9)", "two"),
    ("--name=a/b", "letters"), ("--name=..", "letters"), ("--name=a b", "letters")])
def test_values_that_cannot_work_are_refused_by_name(word, expected):
    line = refusal(word)
    assert line.startswith(word.partition("=")[0] + "=") and expected in line, line


def test_bad_settings_from_a_shell(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "train_gpt.py", "--track=tiny", "--stesp=3"],
                          capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("train_gpt.py: --stesp=3: no such setting; the nearest is --steps; "
                           "--help lists all\n")
    assert list(tmp_path.iterdir()) == []


def test_main_answers_bad_settings_with_code_2(capsys):
    for word in ("--steps=x", "--steps=0", "--optimizer=sgd", "nonsense"):
        assert train_gpt.main(["--track=tiny", word]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and word in err


# ---- the presets ---------------------------------------------------------------------------------

def test_settings_are_frozen():
    with pytest.raises(FrozenInstanceError):
        FINEWEB.steps = 1
    for s in PRESETS.values():
        assert hash(s) == hash(replace(s))   # so no field is a list


def test_presets_pass_their_own_rules_and_have_their_types():
    for track, s in PRESETS.items():
        assert s.track == track
        train_gpt.check_settings(s)
        for name, kind in KINDS.items():
            value = getattr(s, name)
            assert value in get_args(kind) if name in CHOICES else type(value) is kind, name


def test_recipe_and_machine_fields_partition_the_settings():
    machine = set(KINDS) - RECIPE_FIELDS
    assert isinstance(RECIPE_FIELDS, frozenset) and RECIPE_FIELDS < set(KINDS)
    assert machine == {
        "seed", "name", "data_dir", "records_dir", "device", "precision", "compile", "micro_batch",
        "head", "attention",
        "recompute", "head_chunk", "val_piece", "prefetch", "threads", "checkpoint", "log_every"}
    for name in machine:                     # what the machine is, no preset says
        assert getattr(TINY, name) == getattr(FINEWEB, name)
    for name in ("target_loss", "val_tokens", "val_sequence", "val_sha256", "steps", "extra_steps",
                 "tokens_per_step"):
        assert name in RECIPE_FIELDS         # what the judge reads


def test_fineweb_is_the_published_recipe():
    """Card recipe, record 38 of [1], number by number."""
    s = FINEWEB
    assert (s.steps, s.extra_steps, s.tokens_per_step) == (1630, 40, 393216)
    assert (s.steps + s.extra_steps) * s.tokens_per_step == 656_670_720
    assert (s.width, s.head_dim, s.mlp_width, s.layers) == (768, 128, 3072, 11)
    assert (s.vocab_size, train_gpt.padded_vocab(s)) == (50257, 50304)
    assert s.no_attention == (7,) and s.long_window == (4, 11)
    assert s.value_layers == ((1, 1), (2, 2), (9, 0), (10, 1), (11, 2))
    assert s.skips == ((6, 5), (7, 4), (8, 3), (9, 2), (10, 1)) and s.skip_init == -1.5
    assert (s.gate_width, s.value_mix_init, s.attention_scale) == (12, 0.5, 0.1)
    assert (s.logit_cap, s.logit_slope, s.rotary_base) == (30.0, 7.5, 1024.0)
    assert (s.window_unit, s.windows, s.final_windows) == (128, (3, 7, 11), (6, 13, 20))
    assert (s.optimizer, s.muon_lr, s.momentum, s.momentum_warmup) == (
        "muon", 0.06, (0.85, 0.95), 300)
    assert (s.adam_lr, s.adam_betas) == (0.008, (0.8, 0.95))
    assert math.isclose(s.adam_eps, 1e-8 / 49152, rel_tol=0.02)  # of a mean, not of a sum
    assert (s.embed_lr, s.head_lr, s.scalar_lr) == (75.0, 1.0, 5.0)
    assert (s.cooldown, s.lr_floor) == (0.5, 0.1)
    assert (s.adamw_lr, s.unit_tokens, s.doc_cap, s.epochs) == (6e-4, 16384, 2048, 1)
    assert (s.target_loss, s.val_every) == (3.28, 250)
    assert (s.val_tokens, s.val_sequence) == (10_485_760, 262_144)
    assert s.val_tokens == 40 * s.val_sequence
    assert s.tokens_per_step % s.unit_tokens == 0


def test_tiny_has_the_same_parts_at_other_sizes():
    blocks = train_gpt.block_table(TINY)
    assert any(b.long for b in blocks) and not all(b.long for b in blocks)
    assert any(b.skip is not None for b in blocks) and any(b.table is not None for b in blocks)
    assert TINY.vocab_size == 4097 and TINY.optimizer == "muon" and len(TINY.val_sha256) == 64
    for name in ("gate_width", "skip_init", "value_mix_init", "logit_cap", "logit_slope"):
        assert getattr(TINY, name) == getattr(FINEWEB, name)
