"""data/make_shards.py: what it reads, the bytes that it writes, and that no half-made set stays."""
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import train_gpt

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "data/make_shards.py"
sys.path.insert(0, str(PROGRAM.parent))

import cached_fineweb10B as fetcher  # noqa: E402
import make_shards  # noqa: E402

EOS = 50256
TRAIN = "mine_train_{:06}.bin"


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a busy disk may take minutes


def run(out: Path, *words) -> int:
    return make_shards.main([*map(str, words), f"--out={out}", "--workers=1"])


def tokens_in(path: Path) -> np.ndarray:
    shard = train_gpt.check_shard(path, EOS + 1)
    tokens = np.fromfile(path, "<u2", offset=1024)
    assert len(tokens) == shard.tokens and tokens[0] == EOS
    return tokens


def documents_in(folder: Path, part="train") -> list[list[int]]:
    """The documents of all shards of a part, each without its EoS."""
    paths = train_gpt.find_shards(folder, part)
    tokens = np.concatenate([tokens_in(path) for path in paths])
    return [d[1:].tolist() for d in np.split(tokens, np.flatnonzero(tokens == EOS))[1:]]


def encoded(text: str) -> list[int]:
    return make_shards.encoding(EOS + 1).encode_ordinary(text)


def jsonl(path: Path, texts, field="text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))
    return path


def sample(count: int, seed=0) -> list[str]:
    rng = random.Random(seed)
    words = "the of and shard token 1,234 it's naïve 東京 \n\n <|endoftext|> don't".split(" ")
    return [f"{n} " + " ".join(rng.choices(words, k=rng.randint(1, 80))) for n in range(count)]


def sha256s(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


# ---- tokens --------------------------------------------------------------------------------------

# Ids as GPT-2's own encoder gives them: the first two are in many public texts, the fourth is how
# it spells the text of its special token.
KNOWN = {
    "Hello, I'm a language model,": [15496, 11, 314, 1101, 257, 3303, 2746, 11],
    "Hello world": [15496, 995],
    "hello   world": [31373, 220, 220, 995],
    "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29],
    " \n": [220, 198],
    "": [],
}


@pytest.mark.parametrize("text", KNOWN)
def test_known_tokens(text):
    (tokens,) = make_shards.encode([text], EOS + 1)
    assert tokens.tolist() == KNOWN[text] and tokens.dtype == np.dtype("<u2")


def test_the_split_is_that_of_the_library():
    """Its name there is r50k; the same cuts, on text that is hostile to each branch."""
    tiktoken = pytest.importorskip("tiktoken")
    public = pytest.importorskip("tiktoken_ext.openai_public")
    ours = make_shards.encoding(EOS + 1)
    theirs = tiktoken.Encoding("r50k", pat_str=public.r50k_pat_str, special_tokens={},
                               mergeable_ranks=ours._mergeable_ranks)
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("aZé東1²Ⅷ'stdmrevl \t\n\r\u00a0\u3000.!<|>😀\u0301", k=30))
        assert ours.encode_ordinary(text) == theirs.encode_ordinary(text), repr(text)


def test_fineweb_as_it_was_tokenised_by_others(shared):
    """Real shards: text from their tokens, and the same tokens from that text."""
    ranks = make_shards.encoding(EOS + 1)
    for path in sorted((shared / "corpus/fineweb_real").glob("*.bin")):
        tokens = np.fromfile(path, "<u2", offset=1024)
        documents = [d[1:].tolist() for d in np.split(tokens, np.flatnonzero(tokens == EOS))[1:]]
        assert len(documents) > 100
        for document in documents:
            assert ranks.encode_ordinary(ranks.decode_bytes(document).decode()) == document


def test_the_shards_that_ship_are_made_again_byte_for_byte(tmp_path):
    """From their text: the format, the order and the tokenizer of track tiny."""
    ranks, path = make_shards.encoding(4097), ROOT / "data/tiny/tiny_val_000000.bin"
    tokens = np.fromfile(path, "<u2", offset=1024)
    texts = [ranks.decode(d[1:].tolist()) for d in np.split(tokens, np.flatnonzero(tokens == 4096))
             if len(d)]
    source = jsonl(tmp_path / "a.jsonl", texts)
    assert run(tmp_path / "out", source, "--val=1", "--vocab_size=4097", "--prefix=tiny") == 0
    assert (tmp_path / "out/tiny_val_000000.bin").read_bytes() == path.read_bytes()
    assert fetcher.main(["--verify", f"--dest={tmp_path / 'out'}"]) == 0


# ---- inputs --------------------------------------------------------------------------------------

def write_input(folder: Path, ending: str, texts: list[str]) -> list:
    """The texts as one kind of input: the words to give."""
    if ending == ".txt":
        (folder / "below").mkdir()
        for n, text in enumerate(texts):
            (folder / "below" / f"{n:03}.txt").write_bytes(text.encode())
        (folder / "notes.md").write_text("left out")
        return [folder]
    path = folder / f"a{ending}"
    if ending == ".parquet":
        table = pyarrow.table({"id": list(range(len(texts))), "body": texts})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
        return [path, "--text_field=body"]
    if ending == ".npy":
        flat = [token for text in texts for token in (EOS, *encoded(text))]
        np.save(path, np.array(flat, np.uint16))
        return [path, "--eos=present"]
    data = jsonl(folder / "plain", texts, "body").read_bytes()
    if ending == ".jsonl.gz":                # two members, as `cat a.gz b.gz` makes them
        data = gzip.compress(data[:999]) + gzip.compress(data[999:])
    if ending == ".jsonl.zst":
        data = b"".join(pyarrow.compress(part, "zstd", asbytes=True)
                        for part in (data[:999], data[999:]))
    path.write_bytes(data)
    return [path, "--text_field=body"]


@pytest.mark.parametrize("ending", make_shards.READERS)
def test_every_input_gives_the_same_shards(ending, tmp_path, capsys):
    texts = sample(50)
    (tmp_path / "in").mkdir()
    assert run(tmp_path / "out", *write_input(tmp_path / "in", ending, texts), "--val=0.2") == 0
    train, val = documents_in(tmp_path / "out"), documents_in(tmp_path / "out", "val")
    assert sorted(train + val) == sorted(map(encoded, texts)) and min(len(train), len(val)) > 2
    order = [encoded(text) for text in texts]
    assert [order.index(d) for d in train] == sorted(order.index(d) for d in train)
    assert val == [encoded(text) for text in texts if make_shards.belongs_to_val(
        np.array(encoded(text), "<u2"), 0.2)]
    told = capsys.readouterr().out
    assert ("1 files of other kinds left out" in told) == (ending == ".txt")
    assert f"{len(val)} documents, the longest {max(map(len, val)) + 1}" in told


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<u4"])
@pytest.mark.parametrize("opens, closes", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("scan", [1 << 22, 2])
def test_eos_in_arrays(tmp_path, monkeypatch, dtype, opens, closes, scan):
    """Between documents, and before the first or behind the last or both or neither."""
    monkeypatch.setattr(make_shards, "SCAN", scan)
    flat = [EOS] * opens + [1, 2, EOS, 3, EOS, EOS, 4, 5, 6] + [EOS] * closes
    np.save(tmp_path / "a.npy", np.array(flat, dtype))
    files = make_shards.find_files([tmp_path])
    found = list(make_shards.Inputs(files, "", "present", EOS + 1).documents())
    assert [tokens.tolist() for _, tokens in found] == [[1, 2], [3], [], [4, 5, 6]]
    assert found[1][0] == f"{tmp_path / 'a.npy'}: token {3 + opens}"


def test_arrays_without_eos_are_a_document_each(tmp_path):
    for n, part in enumerate(([1, 2, 3], [7], [EOS - 1] * 9)):
        np.save(tmp_path / f"{n}.npy", np.array(part, np.uint32))
    assert run(tmp_path / "out", tmp_path, "--eos=absent", "--val=0") == 0
    assert documents_in(tmp_path / "out") == [[1, 2, 3], [7], [EOS - 1] * 9]


def test_inputs_keep_their_order_and_empty_documents_are_counted(tmp_path, capsys):
    b = jsonl(tmp_path / "b.jsonl", ["b1", "", "b2"])
    b.write_text(b.read_text() + "\n")
    a = jsonl(tmp_path / "a.jsonl", ["a1"])
    assert run(tmp_path / "out", b, a, "--val=0") == 0
    assert documents_in(tmp_path / "out") == [encoded(text) for text in ("b1", "b2", "a1")]
    assert f"2 empty documents left out, the first: {b}:2\n" in capsys.readouterr().out


def test_the_text_of_a_special_token_is_text(tmp_path):
    jsonl(tmp_path / "a.jsonl", ["one<|endoftext|>two"])
    assert run(tmp_path / "out", tmp_path, "--val=0") == 0
    (document,) = documents_in(tmp_path / "out")
    assert document == [505, *KNOWN["<|endoftext|>"], 11545]


# ---- split, order, size --------------------------------------------------------------------------

def test_same_bytes_for_any_workers_and_batches(tmp_path, monkeypatch):
    jsonl(tmp_path / "a.jsonl", sample(400))
    words = [str(tmp_path / "a.jsonl"), "--val=0.1", "--seed=5", "--shard_tokens=3000"]
    made = []
    for workers, batch in ((1, 1 << 19), (3, 500)):
        monkeypatch.setattr(make_shards, "BATCH", batch)
        out = tmp_path / f"out{workers}"
        assert make_shards.main([*words, f"--out={out}", f"--workers={workers}"]) == 0
        made.append(sha256s(out))
    assert made[0] == made[1] and len(made[0]) > 5


def test_reading_waits_for_the_workers(tmp_path, monkeypatch):
    """Back-pressure: however slow the reader of the results, few batches are under way."""
    monkeypatch.setattr(make_shards, "BATCH", 1)
    inputs = make_shards.Inputs([jsonl(tmp_path / "a.jsonl", sample(200))], "text", "", EOS + 1)
    read, plain = [], inputs.documents

    def counted():
        for item in plain():
            read.append(item)
            yield item

    inputs.documents = counted
    got = make_shards.tokenised(inputs, 1, lambda count: None)
    for n in range(1, 20):
        next(got)
        assert len(read) == n - 1 + make_shards.AHEAD
    got.close()


def test_validation_does_not_depend_on_order_or_company(tmp_path):
    """Each document falls on the same side in any set, its copies too; the share is right."""
    texts = sample(1000)
    rng = random.Random(1)
    sides = []
    for name, part in (("a", texts), ("b", rng.sample(texts, 500) + texts[:50] * 2)):
        source = jsonl(tmp_path / f"{name}.jsonl", part)
        assert run(tmp_path / name, source, "--val=0.25", f"--seed={len(part)}") == 0
        sides.append([{tuple(d) for d in documents_in(tmp_path / name, side)}
                      for side in ("train", "val")])
    (train, val), (train_b, val_b) = sides
    assert not train & val and train_b < train and val_b < val
    late = sum(make_shards.belongs_to_val(np.array([7, 7, n], "<u2"), 0.25) for n in range(1000))
    for count in (len(val), late):           # every token counts: the last one too
        assert abs(count - 250) < 4 * (1000 * 0.25 * 0.75) ** 0.5


def test_the_shuffle(tmp_path, monkeypatch):
    """A seed's order is one order; another seed's is another; both are far from the old one."""
    texts = sample(600)
    source = jsonl(tmp_path / "a.jsonl", texts)
    orders = {}
    for name in ("0", "0 again", "1"):
        assert run(tmp_path / name, source, f"--seed={name[0]}", "--val=0") == 0
        documents = documents_in(tmp_path / name)
        orders[name] = [int(re.match(r"\d+", make_shards.encoding(EOS + 1).decode(d))[0])
                        for d in documents]
        assert sorted(orders[name]) == list(range(600))
    assert orders["0"] == orders["0 again"] != orders["1"]
    for a in (orders["0"], orders["1"], [orders["0"].index(n) for n in orders["1"]]):
        assert abs(np.corrcoef(a, range(600))[0, 1]) < 4 / 600 ** 0.5
    keys = [hashlib.blake2b(f"0 {n}".encode(), digest_size=8).digest() for n in range(600)]
    assert orders["0"] == sorted(range(600), key=keys.__getitem__)


def test_shards_hold_whole_documents_up_to_their_size(tmp_path):
    lengths = [3, 5, 1, 9, 2, 2, 2, 9, 1]    # with EoS one more: the first two fill a shard
    np.save(tmp_path / "a.npy", np.concatenate([[EOS] + [7] * n for n in lengths]).astype("<u2"))
    words = [tmp_path / "a.npy", "--eos=present", "--val=0"]
    assert run(tmp_path / "out", *words, "--shard_tokens=10") == 0
    sizes = [np.flatnonzero(tokens_in(p) != EOS).size for p in train_gpt.find_shards(
        tmp_path / "out", "train")]
    assert sizes == [3 + 5, 1, 9, 2 + 2 + 2, 9, 1]
    assert [len(d) for d in documents_in(tmp_path / "out")] == lengths
    assert run(tmp_path / "two", *words, "--shard_tokens=9") == 2


def test_the_manifest_is_right_and_the_fetcher_checks_it(tmp_path, capsys):
    source = jsonl(tmp_path / "a.jsonl", sample(100))
    out = tmp_path / "out"
    assert run(out, source, "--val=0.1", "--shard_tokens=2000") == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest["files"]) == {p.name for p in out.glob("*.bin")} and len(manifest) == 5
    for name, entry in manifest["files"].items():
        tokens = tokens_in(out / name)
        assert entry == {"size": 1024 + 2 * len(tokens), "tokens": len(tokens), "documents":
                         int((tokens == EOS).sum()), "sha256": sha256s(out)[name]}
    assert fetcher.main(["--verify", f"--dest={out}"]) == 0
    data = bytearray((out / TRAIN.format(1)).read_bytes())
    data[-1] ^= 1
    (out / TRAIN.format(1)).write_bytes(data)
    assert fetcher.main(["--verify", f"--dest={out}"]) == 1
    assert f"{TRAIN.format(1)}: wrong bytes" in capsys.readouterr().err
    assert fetcher.main(["1", f"--dest={out}"]) == 2  # and never mixes in its own
    assert "holds shards of make_shards.py" in capsys.readouterr().err


def test_the_trainer_takes_them(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", sample(300))
    assert run(tmp_path / "out", source, "--val=0.1") == 0
    s = train_gpt.replace(train_gpt.TINY, vocab_size=EOS + 1, steps=1, extra_steps=0,
                          val_sha256="", val_tokens=800)
    data = train_gpt.TrainData(s, tmp_path / "out")
    assert data.units >= 4 and data.micro_batch([0]).inputs_T[0] == EOS
    assert train_gpt.ValData(s, tmp_path / "out", 16384, 512).groups


# ---- faults: one line, exit code 2, nothing left -------------------------------------------------

def content(name: str, data: bytes):
    return lambda folder: (folder / name).write_bytes(data)


def array(values, dtype="<u2"):
    return lambda folder: np.save(folder / "a.npy", np.array(values, dtype))


def table(**columns):
    return lambda folder: pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")


GOOD = b'{"text": "good"}\n'
FAULTS = {  # what is wrong: (what makes it so, words, what the line must say)
    "broken JSON": (content("a.jsonl", GOOD + b'{"text": "x\n'), [], ["a.jsonl:2", "not a line"]),
    "not an object": (content("a.jsonl", b"[1]\n"), [], ["a.jsonl:1", "field text", "[1]"]),
    "no such field": (content("a.jsonl", GOOD), ["--text_field=body"],
                      ["a.jsonl:1", "field body", "good", "--text_field"]),
    "null for text": (content("a.jsonl", b'{"text": null}'), [], ["a.jsonl:1", "null"]),
    "deep JSON": (content("a.jsonl", b"[" * 100_000), [], ["a.jsonl:1", "not a line of JSON"]),
    "jsonl not UTF-8": (content("a.jsonl", GOOD + b'{"text": "\xff"}'), [],
                        ["a.jsonl:2", "not UTF-8", "0xff at position 10"]),
    "half a surrogate": (content("a.jsonl", b'{"text": "ab\\ud83d"}'), [],
                         ["a.jsonl:1", "surrogate", "character 2"]),
    "txt not UTF-8": (content("a.txt", b"abc\xe9"), [], ["a.txt", "0xe9 at position 3"]),
    "cut gz": (content("a.jsonl.gz", gzip.compress(GOOD * 999)[:-9]), [],
               ["a.jsonl.gz", "cannot be read"]),
    "not gz": (content("a.jsonl.gz", GOOD), [], ["a.jsonl.gz", "cannot be read"]),
    "damaged gz": (content("a.jsonl.gz", gzip.compress(GOOD)[:12] + b"xxxx" * 9), [],
                   ["a.jsonl.gz", "cannot be read"]),
    "cut zst": (content("a.jsonl.zst", pyarrow.compress(GOOD * 999, "zstd", asbytes=True)[:-1]),
                [], ["a.jsonl.zst", "cannot be read"]),
    "not zst": (content("a.jsonl.zst", GOOD), [], ["a.jsonl.zst", "cannot be read"]),
    "not parquet": (content("a.parquet", GOOD), [], ["a.parquet", "cannot be read"]),
    "no such column": (table(id=[1], body=["x"]), [],
                       ["a.parquet", "field text", "id (int64), body (string)"]),
    "column of numbers": (table(text=[1]), [], ["a.parquet", "text (int64)"]),
    "column not UTF-8": (table(text=pyarrow.array([b"a", b"b\xff"]).view("string")), [],
                         ["a.parquet: row 2", "cannot be read", "0xff"]),
    "null in a column": (table(text=["a", None]), [], ["a.parquet: row 2", "null"]),
    "eos not said": (array([1, EOS, 2]), [], ["a.npy", "--eos=present", "--eos=absent"]),
    "eos where absent": (array([1, EOS, 2]), ["--eos=absent"], ["a.npy: token 1 is EoS"]),
    "no eos where present": (array([1, 2]), ["--eos=present"], ["a.npy", "no EoS (50256)"]),
    "id beyond": (array([1, 50257], "<u4"), ["--eos=absent"], ["token 1 is 50257", "50,257"]),
    "float array": (array([1.0], "<f4"), ["--eos=absent"], ["a.npy", "float32"]),
    "two dimensions": (array([[1], [2]]), ["--eos=absent"], ["a.npy", "2 dimensions"]),
    "not npy": (content("a.npy", GOOD), ["--eos=absent"], ["a.npy", "not a whole .npy file"]),
    "cut npy": (lambda f: (array([1] * 99)(f), os.truncate(f / "a.npy", 200)), ["--eos=absent"],
                ["a.npy", "not a whole .npy file"]),
    "nothing to read": (content("a.bin", GOOD), [], ["no text or tokens", ".jsonl.zst"]),
    "longer than a shard": (content("a.txt", b"one two three"), ["--shard_tokens=3"],
                            ["a.txt", "3 tokens and EoS", "--shard_tokens"]),
    "no validation": (content("a.txt", b"one"), ["--val=0.0000001"], ["no document for val"]),
    "nothing to train on": (content("a.txt", b"one"), ["--val=0.999999"],
                            ["no document for train"]),
    "all empty": (content("a.txt", b""), ["--val=0"], ["no document for train"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_one_line(fault, tmp_path, capsys):
    make, words, said = FAULTS[fault]
    (tmp_path / "in").mkdir()
    make(tmp_path / "in")
    words = [f"--val={0}", *words] if not any("--val" in w for w in words) else words
    assert run(tmp_path / "out", tmp_path / "in", *words) == 2
    line = capsys.readouterr().err
    assert line.startswith("make_shards.py: ") and line.count("\n") == 1, line
    assert all(word in line for word in said), line
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_missing_input_and_a_folder_that_is_there(tmp_path, capsys):
    assert run(tmp_path / "out", tmp_path / "gone.txt") == 2
    assert "gone.txt: no such file" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/theirs").write_text("")
    assert run(tmp_path / "out", tmp_path / "a.txt", "--val=0") == 2
    assert "out: is there already" in capsys.readouterr().err
    (tmp_path / "out/theirs").unlink()
    assert run(tmp_path / "out", tmp_path / "a.txt", "--val=0") == 0


@pytest.mark.parametrize("word", ["--val=1.5", "--val=x", "--val=nan", "--seed=-1", "--workers=0",
                                  "--shard_tokens=3000000000", "--prefix=a/b", "--prefix=my_val",
                                  "--eos=perhaps", "--vocab_size=50258"])
def test_wrong_usage(word, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "out", tmp_path, word)
    assert stopped.value.code == 2 and word.split("=")[0] in capsys.readouterr().err


def test_a_worker_that_is_killed_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(make_shards, "encode", die)
    (tmp_path / "a.txt").write_text("text")
    assert run(tmp_path / "out", tmp_path / "a.txt") == 2
    assert "a worker was killed" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def die(contents, vocab_size):
    os.kill(os.getpid(), signal.SIGKILL)


# ---- killed and interrupted ----------------------------------------------------------------------

def start(out: Path, source: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, PROGRAM, source, f"--out={out}", "--val=0.1", "--seed=1", "--workers=2",
         "--shard_tokens=50000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(n) for n in found.read_text().split()] if found.exists() else []


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, dict, float]:
    """A source, what one undisturbed run makes of it, and how many seconds it takes."""
    folder = tmp_path_factory.mktemp("whole")
    source = jsonl(folder / "a.jsonl", [t * 20 for t in sample(400)])
    began = time.monotonic()
    done = start(folder / "out", source)
    assert done.communicate(timeout=120)[1] == "" and done.returncode == 0
    return source, sha256s(folder / "out"), time.monotonic() - began


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_at_random_moments(whole, tmp_path):
    """Never a folder that is half made; the next run gives the same bytes; no worker stays."""
    source, expected, seconds = whole
    rng, out, workers = random.Random(time.time()), tmp_path / "out", set()
    for _ in range(2):
        process = start(out, source)
        end = time.monotonic() + rng.uniform(0.2, 1.1) * seconds
        while time.monotonic() < end and process.poll() is None:
            workers.update(children(process.pid))
            time.sleep(0.02)
        process.kill()
        process.communicate(timeout=60)      # until no worker holds the other end
        if out.exists():
            assert sha256s(out) == expected
            shutil.rmtree(out)
    process = start(out, source)
    assert process.communicate(timeout=120)[1] == "" and process.returncode == 0
    assert sha256s(out) == expected
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    end = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert workers and not any(map(alive, workers)), "workers outlive the program"


def test_nothing_of_a_killed_run_gets_into_the_next(tmp_path):
    part = tmp_path / "out.part"
    part.mkdir()
    for name in (TRAIN.format(9), "000.shuffle", "manifest.json", "manifest.json.part"):
        (part / name).write_text("half a")
    (tmp_path / "a.txt").write_text("text")
    assert run(tmp_path / "out", tmp_path / "a.txt", "--val=0") == 0
    assert set(sha256s(tmp_path / "out")) == {TRAIN.format(0), "manifest.json"}
    assert not part.exists()


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(number, code, whole, tmp_path):
    process = start(tmp_path / "out", whole[0])
    end = time.monotonic() + 60
    while not list(tmp_path.glob("out.part/*.shuffle")) and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == code and err == (
        "make_shards.py: interrupted; nothing is left of it\n")
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_do_not_meet(whole, tmp_path):
    (tmp_path / "out.part").mkdir()
    lock = fetcher.locked(tmp_path / "out.part")
    try:
        process = start(tmp_path / "out", whole[0])
        err = process.communicate(timeout=60)[1]
    finally:
        os.close(lock)
    assert process.returncode == 2 and err.count("\n") == 1 and "another run" in err
    assert (tmp_path / "out.part").is_dir()
