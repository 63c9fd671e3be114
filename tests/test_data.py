"""Section 2 of train_gpt.py: what is a shard, a unit, a micro-batch, a validation piece.

Most rules are held against loops so plain that they need no proof, on documents that hypothesis
chooses. In a coded ribbon every token but EoS is its own position, so a batch shows where each of
its tokens came from.
"""
import base64
import json
import math
import os
import queue
import random
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from train_gpt import FINEWEB, TINY, Head, Machine, Reader, TrainData, UserError, ValData

ROOT = Path(__file__).resolve().parent.parent
EOS = 60000
MANY, SOME = settings(deadline=None, max_examples=300), settings(deadline=None, max_examples=50)
SMALL = replace(TINY, vocab_size=EOS + 1, unit_tokens=128, doc_cap=48, tokens_per_step=512, steps=1,
                extra_steps=0, epochs=1, val_tokens=900, val_sequence=256, val_sha256="")


def write_shard(path: Path, tokens, magic=20240520, version=1, count=None) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(tokens).astype("<u2").tobytes())
    return path


def coded(lengths, head=0) -> np.ndarray:
    """Documents of these lengths behind `head` stray tokens; a token is its position, or EoS."""
    tokens = np.arange(head + sum(lengths))
    tokens[head + np.cumsum([0, *lengths[:-1]])] = EOS
    return tokens


def some_lengths(count: int, seed: int, least=1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(least, 90) for _ in range(count)]


def split(folder: Path, tokens, cuts=()) -> Path:
    """`tokens` as training shards cut at `cuts`; each shard needs an EoS of its own."""
    for n, part in enumerate(np.split(tokens, cuts)):
        write_shard(folder / f"x_train_{n:06}.bin", part)
    return folder


def naive_units(lengths, unit_tokens, doc_cap) -> list[list[tuple[int, int]]]:
    """Units as lists of (document, tokens read of it)."""
    units, unit, room = [], [], unit_tokens
    for n, length in enumerate(lengths):
        take = min(length, doc_cap, room)
        unit.append((n, take))
        room -= take
        if room == 0:
            units.append(unit)
            unit, room = [], unit_tokens
    return units


def settings_for(lengths, **changes):
    """SMALL with as many steps as these documents' units allow, one unit a step."""
    s = replace(SMALL, **changes)
    units = len(naive_units([*lengths[:-1], lengths[-1] - 1], s.unit_tokens, s.doc_cap))
    return replace(s, tokens_per_step=s.unit_tokens, steps=max(1, units)), units


def machine(k=1, rank=0, world=1) -> Machine:
    head = Head(300, 30.0, 7.5, 128, False, "reference")
    return Machine(torch.device("cpu"), torch.float32, False, "blocked", head, (k, rank, world),
                   "off", 256, ())


def read_all(data: TrainData, s, m: Machine) -> list:
    """All that one process reads, micro-batch by micro-batch."""
    per_step = s.tokens_per_step // s.unit_tokens // m.share[2]
    reader = Reader(data, s, m)
    try:
        return [reader.next() for _ in range(s.steps * -(-per_step // m.share[0]))]
    finally:
        reader.close()


def within(seconds: float, function):
    """What `function` returns or raises; a failure, not a hang, where it does neither in time."""
    results = queue.Queue()

    def call():
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        pytest.fail(f"no answer within {seconds} s")
    if error:
        raise error
    return result


def by_units(batches: list, unit_tokens: int) -> list[tuple]:
    """Inputs, targets and positions of each unit of a list of micro-batches."""
    return [tuple(t[at:at + unit_tokens].tolist()
                  for t in (b.inputs_T, b.targets_T, b.positions_T))
            for b in batches for at in range(0, len(b.inputs_T), unit_tokens)]


# ---- units --------------------------------------------------------------------------------------

@MANY
@given(st.lists(st.integers(0, 60), min_size=1, max_size=80), st.integers(1, 100),
       st.integers(1, 100))
def test_pack_units_is_the_naive_loop(lengths, unit_tokens, doc_cap):
    firsts = train_gpt.pack_units(np.array(lengths), unit_tokens, doc_cap)
    expected = naive_units(lengths, unit_tokens, doc_cap)
    assert firsts[0] == 0 and len(firsts) == len(expected) + 1
    assert firsts[1:].tolist() == [unit[-1][0] + 1 for unit in expected]


def test_every_unit_opens_with_eos_and_is_full(tmp_path):
    lengths = some_lengths(200, seed=0)
    s, units = settings_for(lengths)
    data = TrainData(s, split(tmp_path, coded(lengths)))
    assert data.units == units > 20
    for inputs, targets, positions in by_units(read_all(data, s, machine()), s.unit_tokens):
        assert len(inputs) == s.unit_tokens and inputs[0] == EOS and positions[0] == 0
        assert min(targets) >= 0
        assert [p == 0 for p in positions] == [token == EOS for token in inputs]


def test_every_token_is_read_once_or_accounted_for(tmp_path):
    """Each token of the ribbon is in exactly one class, and each class is where it belongs."""
    head, lengths = 17, some_lengths(120, seed=1, least=2)
    tokens = coded(lengths, head)
    s, units = settings_for(lengths)
    data = TrainData(s, split(tmp_path, tokens, [1000, 1001 + lengths[0], 3333]))
    read = np.zeros(len(tokens), int)
    for inputs, targets, _ in by_units(read_all(data, s, machine()), s.unit_tokens):
        for token, target in zip(inputs, targets):
            at = token if token != EOS else target - 1  # EoS is followed by its document
            assert tokens[at] == token
            read[at] += 1
    starts = head + np.cumsum([0, *lengths])
    expected = np.full(len(tokens), -1)
    expected[:head] = 0                      # before the first document
    for n, take in sum(naive_units([*lengths[:-1], lengths[-1] - 1], s.unit_tokens, s.doc_cap), []):
        expected[starts[n]:starts[n] + take] = 1
        expected[starts[n] + take:starts[n + 1]] = 0
        cap_cut, unit_cut = take == s.doc_cap, take < min(lengths[n], s.doc_cap)
        assert take == lengths[n] or cap_cut or unit_cut
    unread_documents = expected == -1        # too few for one more unit: the stated end
    expected[unread_documents] = 0
    assert read.tolist() == expected.tolist()
    left = int(unread_documents.sum())
    assert 0 < left == len(tokens) - min(starts[starts > np.flatnonzero(read)[-1]])
    late = starts[:-1] >= len(tokens) - left
    assert np.minimum(lengths, s.doc_cap)[late].sum() <= s.unit_tokens


def test_targets_inside_at_document_ends_and_at_cuts(tmp_path):
    """Lengths 20 | 100 (cut at the cap of 48) | 30 | 70 (cut at the unit's end) | 128 ..."""
    lengths = [20, 100, 30, 70, 128, 128, 128]
    tokens, (s, _) = coded(lengths), settings_for(lengths)
    data = TrainData(s, split(tmp_path, tokens))
    batch = data.micro_batch([0])
    inputs, targets = batch.inputs_T.tolist(), batch.targets_T.tolist()
    assert inputs == [EOS, *range(1, 20), EOS, *range(21, 68), EOS, *range(121, 150),
                      EOS, *range(151, 180)]
    assert targets[:19] == list(range(1, 20))
    assert targets[19] == EOS                # the document really ended there
    assert targets[67] == 68                 # cut at the cap: the true next token
    assert targets[97] == EOS
    assert targets[127] == 180               # cut at the unit's end: the true next token
    assert batch.cu_seqlens.tolist()[:6] == [0, 20, 68, 98, 128, 128]
    assert data.micro_batch([1]).inputs_T[:3].tolist() == [EOS, 221, 222]  # the next document


def test_target_of_the_last_document_of_a_shard_is_in_the_next(tmp_path):
    lengths = [128, 128, 128]
    s, _ = settings_for(lengths, doc_cap=128)
    batch = TrainData(s, split(tmp_path, coded(lengths), [128])).micro_batch([0])
    assert batch.targets_T[-1] == EOS        # of the next shard
    s = replace(s, steps=3)
    with pytest.raises(UserError):           # the ribbon's very last token has no target
        TrainData(s, tmp_path)


@SOME
@given(st.lists(st.integers(1, 120), min_size=12, max_size=60), st.integers(0, 30), st.data())
def test_shard_borders_do_not_matter(lengths, head, data):
    """Shards of odd sizes give the units of one shard, targets at their borders included."""
    tokens = coded(lengths, head)
    s, units = settings_for(lengths)
    if units == 0:
        return
    eos = np.flatnonzero(tokens == EOS)
    # any borders, as long as each shard keeps an EoS: at most one between two neighbours
    picks = data.draw(st.lists(st.integers(0, len(eos) - 2), unique=True, max_size=5).map(sorted))
    cuts = [data.draw(st.integers(int(eos[n]) + 1, int(eos[n + 1]))) for n in picks]
    with TemporaryDirectory() as one, TemporaryDirectory() as many:
        whole = TrainData(s, split(Path(one), tokens))
        parts = TrainData(s, split(Path(many), tokens, cuts))
        assert whole.units == units
        for unit in range(units):
            a, b = whole.micro_batch([unit]), parts.micro_batch([unit])
            for x, y in zip(a[:3], b[:3]):
                assert torch.equal(x, y), f"unit {unit}, shards cut at {cuts}"
            n = whole.documents
            assert a.cu_seqlens[:n].tolist() == b.cu_seqlens[:n].tolist()


@SOME
@given(st.lists(st.integers(1, 120), min_size=1, max_size=40))
def test_no_target_crosses(lengths):
    """Every input's target is the token after it in the ribbon, never one of another document."""
    tokens, (s, units) = coded(lengths), settings_for(lengths)
    if units == 0:
        return
    with TemporaryDirectory() as folder:
        data = TrainData(s, split(Path(folder), tokens))
        batch, at = data.micro_batch(list(range(units))), 0
        for unit in range(units):
            for start, size, scored in data.pieces(unit):
                assert start == scored
                assert batch.inputs_T[at:at + size].tolist() == tokens[start:start + size].tolist()
                assert batch.targets_T[at:at + size].tolist() == \
                    tokens[start + 1:start + size + 1].tolist()
                assert batch.positions_T[at:at + size].tolist() == list(range(size))
                at += size
        assert at == len(batch.inputs_T)


# ---- micro-batches, processes, the reader thread -------------------------------------------------

@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Six steps of eight units, and what one process reads one unit at a time."""
    lengths = some_lengths(400, seed=2)
    s = replace(SMALL, tokens_per_step=8 * 128, steps=6)
    data = TrainData(s, split(tmp_path_factory.mktemp("stream"), coded(lengths), [2000, 5555]))
    units = by_units(read_all(data, s, machine()), s.unit_tokens)
    assert len(units) == 48 == len({tuple(unit[0]) for unit in units})
    assert units == [by_units([data.micro_batch([n])], s.unit_tokens)[0] for n in range(48)]
    return s, data, units


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_the_stream_is_the_same_for_any_micro_batch(stream, k):
    s, data, units = stream
    assert by_units(read_all(data, s, machine(k)), s.unit_tokens) == units


@pytest.mark.parametrize("k, world", [(1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (1, 8)])
def test_the_stream_is_the_same_for_any_number_of_processes(stream, k, world):
    s, data, units = stream
    ranks = [by_units(read_all(data, s, machine(k, rank, world)), s.unit_tokens)
             for rank in range(world)]
    assert all(len(rank) == 48 // world for rank in ranks)
    assert [unit for row in zip(*ranks) for unit in row] == units
    step = {tuple(unit[0]) for unit in units[8:16]}  # the second step is the same 8 units
    assert {tuple(unit[0]) for rank in ranks for unit in rank[8 // world:16 // world]} == step


def test_the_stream_is_the_same_from_a_slow_reader(stream, monkeypatch):
    s, data, units = stream
    rng, prompt = random.Random(3), TrainData.micro_batch

    def slow(self, numbers):
        time.sleep(rng.choice([0, 0, 0.01, 0.05]))
        return prompt(self, numbers)

    monkeypatch.setattr(TrainData, "micro_batch", slow)
    for prefetch in (1, 3):
        small = replace(s, prefetch=prefetch)
        assert by_units(read_all(data, small, machine(2)), s.unit_tokens) == units
    reader = Reader(data, s, machine())
    reader.next()
    assert reader.waited > 0
    within(20, reader.close)


def test_a_slow_trainer_gets_the_same_stream(stream):
    s, data, units = stream
    reader, got = Reader(data, replace(s, prefetch=2), machine(4)), []
    for _ in range(12):
        got.append(reader.next())
        time.sleep(0.01)
    reader.close()
    assert by_units(got, s.unit_tokens) == units


def test_the_reader_stays_within_prefetch(stream):
    s, data, _ = stream
    reader = Reader(data, replace(s, prefetch=3), machine())
    time.sleep(0.3)
    assert len(reader.ahead) == 3 and all(future.done() for future in reader.ahead)
    reader.next()
    assert len(reader.ahead) == 3
    within(20, reader.close)


def test_close_stops_the_thread_and_drops_what_it_has_not_begun(stream, monkeypatch):
    s, data, _ = stream
    monkeypatch.setattr(TrainData, "micro_batch", lambda self, numbers: time.sleep(0.2))
    reader = Reader(data, replace(s, prefetch=5), machine())
    assert any(t.name.startswith("reader") for t in threading.enumerate())
    within(1, reader.close)
    assert not any(t.name.startswith("reader") for t in threading.enumerate())
    assert sum(future.cancelled() for future in reader.ahead) >= 3


def test_an_error_of_the_thread_reaches_the_main_thread(stream, monkeypatch):
    s, data, units = stream
    prompt = TrainData.micro_batch

    def failing(self, numbers):
        if numbers == [3]:
            raise OSError("disk gone")
        return prompt(self, numbers)

    monkeypatch.setattr(TrainData, "micro_batch", failing)
    reader = Reader(data, s, machine())
    assert by_units([reader.next() for _ in range(3)], s.unit_tokens) == units[:3]
    with pytest.raises(OSError, match="disk gone"):
        within(20, reader.next)
    reader.close()


def test_a_shard_that_shrinks_during_the_run_is_an_error(tmp_path):
    lengths = [60] * 40
    s, units = settings_for(lengths)
    data = TrainData(s, split(tmp_path, coded(lengths)))
    path = tmp_path / "x_train_000000.bin"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(AssertionError, match="x_train_000000.bin changed"):
        data.micro_batch([units - 1])


def test_epochs_begin_the_stream_anew(tmp_path):
    lengths = [60] * 40                      # 13 units of 48 + 48 + 32
    s, units = settings_for(lengths)
    assert units == 13
    folder = split(tmp_path, coded(lengths))
    three = replace(s, epochs=3, steps=36)
    data = TrainData(three, folder)
    got = by_units(read_all(data, three, machine()), s.unit_tokens)
    assert got[:13] == got[13:26] and got[26:] == got[:10] and got[0] != got[1]
    mixed = replace(three, tokens_per_step=2 * s.unit_tokens, steps=18)
    assert by_units(read_all(data, mixed, machine(2)), s.unit_tokens) == got
    with pytest.raises(UserError):
        TrainData(replace(three, steps=40), folder)


def test_one_shard_is_enough_and_no_more_than_needed_are_read(tmp_path):
    lengths = [60] * 40
    s, units = settings_for(lengths)
    folder = split(tmp_path, coded(lengths))
    assert len(TrainData(s, folder).ribbon.paths) == 1
    write_shard(folder / "x_train_000001.bin", [1, 2, 3])  # no EoS: an error if it were read
    assert TrainData(s, folder).units == units
    with pytest.raises(UserError) as error:
        TrainData(replace(s, steps=units + 1), folder)
    assert "x_train_000001.bin: no EoS" in error.value.line


@pytest.mark.parametrize("size", [1, 7, 64])
def test_indexing_in_parts_finds_every_document(tmp_path, monkeypatch, size):
    monkeypatch.setattr(train_gpt, "SCAN_TOKENS", size)
    lengths = [5, 1, 1, 30, 64, 3]
    path = write_shard(tmp_path / "a.bin", coded(lengths, 3))
    shard = train_gpt.check_shard(path, EOS + 1)
    assert shard[:4] == (107, 6, 4, 64)      # lengths 5 1 1 30 64 3: the stray tokens are of none
    assert shard.starts_N.tolist() == [3, 8, 9, 10, 40, 104]


CHOICES = {  # of a run, by document cap: the windows that go with it
    128: ["--window_unit=32", "--windows=(1,2,3)", "--final_windows=(1,3,4)"],
    512: ["--window_unit=64", "--windows=(2,4,6)", "--final_windows=(3,6,8)"],
}


def test_document_cap_and_windows_are_choices_of_a_run(tmp_path, monkeypatch):
    """The same shards serve any: nothing of either is in them."""
    # prepare changes the whole process, but for this: torch loads its compiler's settings late
    monkeypatch.setattr(train_gpt, "prepare", lambda *_: torch._dynamo.config)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    before = train_gpt.signal.getsignal(train_gpt.signal.SIGTERM), torch.get_num_threads()
    rng = random.Random(4)
    for name, count in ((TRAIN, 40), (VAL, 10)):  # documents that count on from a random id
        tokens = []
        for first in rng.choices(range(96), k=count):
            tokens += [96, *((first + n) % 96 for n in range(rng.randint(50, 700)))]
        write_shard(tmp_path / "data" / name, tokens)
    small = ["--track=tiny", "--device=cpu", "--precision=fp32", "--compile=off", "--vocab_size=97",
             "--width=64", "--head_dim=32", "--mlp_width=128", "--layers=3", "--long_window=(3,)",
             "--value_layers=((1,0),(3,0))", "--skips=((3,1),)", "--tokens_per_step=1024",
             "--steps=6", "--extra_steps=0", "--val_tokens=2000", "--val_sequence=1000",
             "--val_sha256=", f"--data_dir={tmp_path / 'data'}"]
    per_unit, losses = {}, {}
    for cap, windows in CHOICES.items():
        words = [*small, f"--doc_cap={cap}", *windows, f"--records_dir={tmp_path / str(cap)}"]
        try:
            torch.set_num_threads(1)         # so small a model
            assert train_gpt.main(words) == 0
        finally:
            train_gpt.signal.signal(train_gpt.signal.SIGTERM, before[0])
            torch.set_num_threads(before[1])
        (log,) = (tmp_path / str(cap)).glob("*/*.jsonl")
        events = [json.loads(line) for line in log.read_text().splitlines()]
        assert events[-1]["status"] == "complete"
        losses[cap] = [e["loss"] for e in events if e["event"] == "val"]
        assert losses[cap][-1] < losses[cap][0] - 0.1
        data = TrainData(train_gpt.parse_settings(words)[0], tmp_path / "data")
        pieces = [piece for unit in range(data.units) for piece in data.pieces(unit)]
        assert max(piece.size for piece in pieces) == cap
        per_unit[cap] = len(pieces) / data.units
    assert abs(losses[128][0] - losses[512][0]) < 1e-4 < abs(losses[128][-1] - losses[512][-1])
    assert per_unit[128] > 1.5 * per_unit[512]


# ---- errors: one line that names the file and the remedy, before any work ------------------------

def good(folder: Path) -> Path:
    """Shards that SMALL can train on and validate with."""
    split(folder, coded([60] * 40))
    write_shard(folder / "x_val_000000.bin", coded([60] * 20))
    return folder


def spoil(name: str, **shard):
    return lambda folder: write_shard(folder / name, **shard)


def truncate(folder):
    path = folder / "x_train_000000.bin"
    path.write_bytes(path.read_bytes()[:-2])


def remove(name):
    return lambda folder: (folder / name).unlink()


TRAIN, VAL = "x_train_000000.bin", "x_val_000000.bin"
FAULTS = {  # what is wrong: (what makes it so, settings, what the line must say)
    "exhausted": (lambda f: None, ["--steps=100"], ["needs 51,200 tokens", "found 1,664", TRAIN,
                                                   "add shards", "--steps", "--epochs"]),
    "truncated": (truncate, [], [TRAIN, "truncated", "2,400 tokens", "5,824", "5,822", "again"]),
    "longer than it says": (lambda f: open(f / TRAIN, "ab").write(b"xx"), [], [TRAIN, "5,826"]),
    "foreign": (lambda f: (f / TRAIN).write_bytes(bytes(range(256)) * 20), [],
                [TRAIN, "not a token shard", "20240520", "make it again"]),
    "empty": (lambda f: (f / TRAIN).write_bytes(b""), [], [TRAIN, "not a token shard", "0 bytes"]),
    "half a header": (lambda f: (f / TRAIN).write_bytes(b"\0" * 1000), [], [TRAIN, "1000 bytes"]),
    "wrong version": (spoil(TRAIN, tokens=coded([60] * 40), version=2), [],
                      [TRAIN, "20240520, 2", "make it again"]),
    "header only": (spoil(TRAIN, tokens=[]), [], [TRAIN, "0 tokens", "again"]),
    "negative count": (spoil(TRAIN, tokens=[1], count=-1), [], [TRAIN, "-1 tokens"]),
    "EoS-free": (spoil(TRAIN, tokens=np.arange(3000)), [], [TRAIN, "no EoS (60000)", "tokenizer"]),
    "id beyond the vocabulary": (spoil(TRAIN, tokens=[EOS, 1, EOS + 1, 2]), [],
                                 [TRAIN, "token 60001 at position 2", "60,001", "tokenizer"]),
    "a folder for a shard": (lambda f: ((f / TRAIN).unlink(), (f / TRAIN).mkdir()), [],
                             [TRAIN, "cannot be read", "--data_dir"]),
    "a dangling link": (lambda f: ((f / TRAIN).unlink(), (f / TRAIN).symlink_to("gone")), [],
                        [TRAIN, "cannot be read", "--data_dir"]),
    "no train shard": (remove(TRAIN), [], ["*_train_*.bin", "data/README.md", "--data_dir"]),
    "no val shard": (remove(VAL), [], ["*_val_*.bin", "data/README.md", "--data_dir"]),
    "another val shard": (lambda f: None, ["--val_sha256=" + "0" * 64],
                          [VAL, "sha256 000000000000", "again", "--val_sha256="]),
    "val too short": (lambda f: None, ["--val_tokens=1200"],
                      [VAL, "1,201 tokens", "found 1,200", "--val_tokens"]),
    "val EoS-free": (spoil(VAL, tokens=np.arange(3000)), [], [VAL, "no EoS"]),
    "val truncated": (spoil(VAL, tokens=np.arange(300), count=301), [], [VAL, "truncated"]),
    "val piece too small": (lambda f: None, ["--val_piece=128"], ["--val_piece=128", "look back"]),
}
SETTINGS = [f"--{name}={getattr(SMALL, name)}" for name in (
    "vocab_size", "unit_tokens", "doc_cap", "tokens_per_step", "steps", "extra_steps", "epochs",
    "val_tokens", "val_sequence", "val_sha256")] + [
    "--track=tiny", "--device=cpu", "--compile=off"]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_data_are_one_line(fault, tmp_path, capsys, monkeypatch):
    """Nothing is built before: no model, no record folder."""
    monkeypatch.setattr(train_gpt, "prepare", lambda *_: None)  # it changes the whole process
    monkeypatch.setattr(train_gpt.GPT, "__init__", lambda *_: pytest.fail("a model was built"))
    before = train_gpt.signal.getsignal(train_gpt.signal.SIGTERM)
    make, changes, said = FAULTS[fault]
    make(good(tmp_path / "data"))
    try:
        code = train_gpt.main([*SETTINGS, f"--data_dir={tmp_path / 'data'}",
                               f"--records_dir={tmp_path / 'records'}", *changes])
    finally:
        train_gpt.signal.signal(train_gpt.signal.SIGTERM, before)
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and not (tmp_path / "records").exists()
    assert err.count("\n") == 1 and err.startswith("train_gpt.py: ")
    assert changes[:1] == ["--val_piece=128"] or str(tmp_path / "data") in err
    for words in said:
        assert words in err


def test_good_data_has_no_fault(tmp_path):
    folder = good(tmp_path)
    assert TrainData(SMALL, folder).units == 13
    assert ValData(SMALL, folder, room=256, context=100).groups


@pytest.mark.parametrize("fault", ["missing folder", "exhausted", "EoS-free"])
def test_faults_of_data_from_a_shell(fault, tmp_path):
    make, changes, said = FAULTS.get(fault, (None, [], ["no *_train_*.bin", "--data_dir"]))
    if make:
        make(good(tmp_path / "data"))
    done = subprocess.run([sys.executable, ROOT / "train_gpt.py", *SETTINGS, *changes,
                           f"--data_dir={tmp_path / 'data'}", f"--records_dir={tmp_path / 'r'}"],
                          capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "r").exists()
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert str(tmp_path / "data") in done.stderr and all(words in done.stderr for words in said)


# ---- validation ---------------------------------------------------------------------------------

@MANY
@given(st.sets(st.integers(0, 200), max_size=25), st.integers(0, 60), st.integers(1, 140),
       st.integers(1, 80), st.integers(0, 40))
def test_cut_sequence(starts, first, size, more, context):
    """Counted ranges partition the sequence, groups fit, no window loses sight, borders hold."""
    room, end = context + more, first + size
    starts = np.array(sorted(starts), dtype=np.int64)
    borders = [first, *(b for b in starts.tolist() if first < b < end), end]
    groups = train_gpt.cut_sequence(starts, first, end, room, context)
    pieces = [piece for group in groups for piece in group]
    counted = [n for p in pieces for n in range(p.scored, p.start + p.size)]
    assert counted == list(range(first, end))
    assert all(sum(p.size for p in group) <= room for group in groups)
    for p in pieces:
        opens = max(b for b in borders if b <= p.start)
        ends = min(b for b in borders if b > p.start)
        assert p.size > 0 and opens <= p.start <= p.scored < p.start + p.size <= ends
        assert p.scored - p.start >= min(context, p.scored - opens)
    for group in groups:
        at = group[-1].start + group[-1].size
        opens = max(b for b in borders if b < at)
        ends = min(b for b in borders if b >= at)
        assert at in borders or ends - opens > room, "a document that fits was cut"
        assert all(a.start + a.size == b.start for a, b in zip(group, group[1:]))
    for a, b in zip(groups, groups[1:]):     # no group closes early
        if b[0].start in borders and a[-1].start + a[-1].size in borders:
            assert sum(p.size for p in a) + b[0].size > room or b[0].size == room


@SOME
@given(st.lists(st.integers(1, 150), min_size=15, max_size=40), st.integers(0, 30),
       st.integers(10, 300), st.integers(20, 200))
def test_val_data_covers_the_pinned_tokens_in_order(lengths, head, val_sequence, room):
    """Inputs, targets, positions and borders of every group, against the file itself."""
    tokens = coded(lengths, head)
    s = replace(SMALL, val_tokens=min(len(tokens) - 1, 900), val_sequence=val_sequence)
    context = min(19, room - 1)
    with TemporaryDirectory() as folder:
        write_shard(Path(folder) / VAL, tokens)
        val = ValData(s, Path(folder), room, context)
        targets = []
        for group, pieces in enumerate(val.groups):
            batch = val.batch(group)
            assert [len(t) for t in batch[:3]] == [room] * 3
            assert [t.dtype for t in batch] == [torch.int32, torch.int64, torch.int32, torch.int32]
            borders, at = batch.cu_seqlens.tolist(), 0
            assert len(borders) == val.documents + 1 and borders == sorted(borders)
            for n, (start, size, scored) in enumerate(pieces):
                assert borders[n] == at and borders[n + 1] == at + size
                assert batch.inputs_T[at:at + size].tolist() == tokens[start:start + size].tolist()
                assert batch.positions_T[at:at + size].tolist() == list(range(size))
                mine = batch.targets_T[at:at + size].tolist()
                skip = scored - start
                assert mine == [-1] * skip + tokens[scored + 1:start + size + 1].tolist()
                sequence = start // val_sequence
                assert (start + size - 1) // val_sequence == sequence, "a piece of two sequences"
                at += size
            assert set(borders[len(pieces) + 1:]) <= {room}
            assert batch.targets_T[at:].tolist() == [-1] * (room - at)
            assert batch.positions_T[at:].tolist() == list(range(room - at))
            targets += [t for t in batch.targets_T.tolist() if t >= 0]
        assert targets == tokens[1:s.val_tokens + 1].tolist()


def decode(tokens, eos) -> bytes:
    pairs = [line.split() for line in (ROOT / "data/gpt2.tiktoken").read_bytes().splitlines()]
    ranks = {int(rank): base64.b64decode(text) for text, rank in pairs}
    return b"".join(ranks[t] for t in tokens.tolist() if t != eos)


def test_bytes_of_the_tiny_validation_text():
    """The factor from nats per token to bits per byte that the README states."""
    tokens = np.fromfile(ROOT / "data/tiny/tiny_val_000000.bin", "<u2", offset=1024)
    text = decode(tokens[1:TINY.val_tokens + 1], TINY.vocab_size - 1)
    stated = re.search(r"bytes of UTF-8 text \| [\d,]+ \| ([\d,]+)",
                       (ROOT / "data/tiny/README.md").read_text())[1]
    assert len(text) == int(stated.replace(",", ""))  # all but the last token's: an end of line
    factor = TINY.val_tokens / math.log(2) / len(text)
    assert f"{factor:.4f}" in (ROOT / "README.md").read_text()


# ---- the shards that ship, larger ones, and memory -----------------------------------------------

def compare_with_naive(s, folder: Path) -> TrainData:
    """All units of `folder` against the naive loop over its tokens."""
    data = TrainData(s, folder)
    tokens = np.concatenate([np.fromfile(p, "<u2", offset=1024) for p in data.ribbon.paths])
    starts = np.flatnonzero(tokens == s.vocab_size - 1)
    lengths = np.diff([*starts, len(tokens) - 1])
    units = naive_units(lengths.tolist(), s.unit_tokens, s.doc_cap)
    assert data.units == len(units)
    for n in range(0, len(units), max(1, len(units) // 50)):
        batch = data.micro_batch([n])
        at = np.concatenate([np.arange(starts[d], starts[d] + take) for d, take in units[n]])
        assert batch.inputs_T.tolist() == tokens[at].tolist()
        assert batch.targets_T.tolist() == tokens[at + 1].tolist()
    return data


def test_the_tiny_shards():
    s = replace(TINY, steps=1, extra_steps=0)
    compare_with_naive(s, ROOT / "data/tiny")
    TrainData(TINY, ROOT / "data/tiny")      # and they last for the schedule
    val = ValData(TINY, ROOT / "data/tiny", 16384, 2000)
    assert sum((val.batch(n).targets_T >= 0).sum().item() for n in range(len(val.groups))) \
        == TINY.val_tokens


def test_fineweb_sizes_on_one_real_shard(shared, tmp_path):
    (tmp_path / "pdmix_train_000000.bin").symlink_to(
        shared / "corpus/pdmix/pdmix_train_000000.bin")
    data = compare_with_naive(replace(FINEWEB, steps=10, extra_steps=0), tmp_path)
    assert data.units >= 240
    with pytest.raises(UserError) as error:
        TrainData(FINEWEB, tmp_path)
    assert "needs 656,670,720 tokens" in error.value.line


MEASURE = """
import sys
import time
from dataclasses import replace
from pathlib import Path
import train_gpt

def peak():  # not ru_maxrss: it begins with that of the process that started this one
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10

before = peak()
s = replace(train_gpt.FINEWEB, steps=240, extra_steps=0)
data = train_gpt.TrainData(s, Path(sys.argv[1]))
began = time.process_time()
shard = train_gpt.check_shard(data.ribbon.paths[0], s.vocab_size)
seconds = time.process_time() - began
for unit in range(0, data.units, 100):
    data.micro_batch([unit])
print(data.ribbon.borders[-1], peak() - before, *shard[1:4], seconds)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_time_of_a_200_mb_shard(tmp_path):
    """Checked in parts and read unit by unit: far from half a gigabyte, and from its own size; a
    check takes less than a second of one core."""
    path, tokens = tmp_path / "x_train_000000.bin", 100_000_000
    write_shard(path, [], count=tokens)
    with open(path, "r+b") as file:
        file.truncate(1024 + 2 * tokens)
    np.memmap(path, "<u2", "r+", 1024)[::600] = 50256
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True,
                          cwd=ROOT, timeout=120)
    path.unlink()
    assert done.returncode == 0, done.stderr
    read, added_mib, *facts, seconds = map(float, done.stdout.split())
    assert read == tokens and added_mib < 150, f"{added_mib} MiB more"
    assert facts == [166_667, 600, 600] and seconds < 1, f"{seconds} s"
