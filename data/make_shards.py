"""Make shards of your own text, or of token arrays that you have.

    python data/make_shards.py mybooks/ posts.jsonl.zst --out=data/mine
    python data/make_shards.py dump/*.parquet --text_field=body --seed=0 --out=data/mine
    python data/make_shards.py edufineweb_*.npy --eos=present --out=data/mine

A document is a `.txt` file, a line of `.jsonl`, `.jsonl.gz` or `.jsonl.zst` (its text in the field
--text_field), a row of `.parquet` (the text in the column of that name), or what stands between two
EoS of a flat array of token ids, `.npy` in uint16 or uint32. Folders are searched for all of these.

Documents keep their order, or get the one that --seed gives. Which of them validate is decided by
a hash of their tokens: a document, and every copy of it, is always on the same side. EoS opens each
document, and none runs over the end of a shard. Any number of workers gives the same bytes.

All is written to `<out>.part`, which becomes `<out>` in one step when it is whole and on the disk,
so a folder under its own name is whole, whenever the program was killed. Its `manifest.json` holds
size, sha256, tokens and documents of each shard; `cached_fineweb10B.py --verify --dest=<out>`
checks them.

Exit code: 0 made, 2 an input is wrong (one line says which), 130 and 143 interrupted.
"""

import argparse
import base64
import gzip
import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cached_fineweb10B as fetcher  # noqa: E402
from cached_fineweb10B import Problem, trainer  # noqa: E402

SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's
BATCH = 1 << 19                              # characters or tokens that a worker gets at once
AHEAD = 3                                    # batches a worker that are under way
SCAN = 1 << 22                               # tokens of an array that are searched at once

# -- reading: documents in order, each with the name of its place ----------------------------------

class Inputs:
    """The documents of some files, as text or as tokens, and how far the reading has come."""

    def __init__(self, files: list[Path], field: str, eos: str, vocab_size: int):
        self.files, self.field, self.eos, self.vocab_size = files, field, eos, vocab_size
        self.total = sum(path.stat().st_size for path in files)
        self.before = self.at = 0            # bytes: of the files that are read, and in all

    def documents(self) -> Iterator[tuple[str, str | np.ndarray]]:
        """(place, text or token ids) of every document, empty ones included."""
        for path in self.files:
            try:
                yield from READERS[kind(path)](self, path)
            except (OSError, EOFError, zlib.error) as error:
                reason = getattr(error, "strerror", None) or error
                raise Problem(f"{path}: cannot be read: {reason}") from None
            self.before += path.stat().st_size
            self.at = self.before

    def txt(self, path: Path) -> Iterator[tuple[str, str]]:
        yield str(path), unicode(path.read_bytes(), str(path))

    def jsonl(self, path: Path) -> Iterator[tuple[str, str]]:
        with open(path, "rb") as file:
            for number, line in enumerate(unpacked(path, file), 1):
                self.at = self.before + file.tell()
                place = f"{path}:{number}"
                line = unicode(line, place)
                try:
                    found = json.loads(line) if line.strip() else {self.field: ""}
                except (ValueError, RecursionError) as error:
                    raise Problem(f"{place}: not a line of JSON: {error}") from None
                if not isinstance(found, dict) or not isinstance(found.get(self.field), str):
                    raise self.no_text(place, line.strip()[:60])
                yield place, well_formed(found[self.field], place)

    def no_text(self, place: str, found: str) -> Problem:
        return Problem(f"{place}: expected text in the field {self.field}, found {found}; "
                       "--text_field names another")

    def parquet(self, path: Path) -> Iterator[tuple[str, str]]:
        import pyarrow
        import pyarrow.parquet
        row = 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                types = {field.name: str(field.type) for field in file.schema_arrow}
                if types.get(self.field) not in ("string", "large_string"):
                    columns = ", ".join(f"{name} ({of})" for name, of in types.items())
                    raise self.no_text(str(path), columns)
                for batch in file.iter_batches(1000, columns=[self.field]):
                    for value in batch.column(0):
                        row += 1
                        if (text := value.as_py()) is None:
                            raise Problem(f"{path}: row {row}: expected text, found null")
                        yield f"{path}: row {row}", text
                    done = path.stat().st_size * row // file.metadata.num_rows
                    self.at = self.before + done
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise Problem(f"{path}: row {row}: cannot be read: {reason}") from None

    def npy(self, path: Path) -> Iterator[tuple[str, np.ndarray]]:
        """Cut at EoS. An EoS at either end opens or closes a document, and makes no empty one."""
        if not self.eos:
            raise Problem(f"{path}: say whether EoS stands between its documents (--eos=present) "
                          "or the file is one document (--eos=absent)")
        try:
            ids = np.lib.format.open_memmap(path, "r")
        except ValueError:
            raise Problem(f"{path}: not a whole .npy file") from None
        if ids.ndim != 1 or ids.dtype.str[1:] not in ("u2", "u4"):
            raise Problem(f"{path}: expected a flat array of uint16 or uint32, found {ids.dtype} "
                          f"in {ids.ndim} dimensions")
        start, eos, place = 0, self.vocab_size - 1, f"{path}: token {{:,}}".format
        for first in range(0, len(ids), SCAN):
            part = ids[first:first + SCAN]
            if part.max() > eos:
                at = int(np.argmax(part > eos))
                raise Problem(f"{place(first + at)} is {part[at]}: expected ids below {eos + 1:,}")
            ends = np.flatnonzero(part == eos) + first
            if self.eos == "absent" and len(ends):
                raise Problem(f"{place(ends[0])} is EoS: --eos=absent says that there is none")
            for end in ends.tolist():
                if end > 0:
                    yield place(start), ids[start:end].astype("<u2")
                start = end + 1
            self.at = self.before + (first + len(part)) * ids.itemsize
        if self.eos == "present" and start == 0:
            raise Problem(f"{path}: no EoS ({eos}) in {len(ids):,} tokens: --eos=present says that "
                          "it stands between documents")
        if start < len(ids):
            yield place(start), ids[start:].astype("<u2")

READERS = {".txt": Inputs.txt, ".jsonl": Inputs.jsonl, ".jsonl.gz": Inputs.jsonl,
           ".jsonl.zst": Inputs.jsonl, ".parquet": Inputs.parquet, ".npy": Inputs.npy}

def kind(path: Path) -> str:
    """The ending that says how a file is read; "" for any other file."""
    return next((ending for ending in READERS if path.name.endswith(ending)), "")

def find_files(inputs: list[Path]) -> list[Path]:
    """The files named, and those in the folders named by order of their paths."""
    found = []
    for path in inputs:
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        files = [file for file in below if kind(file) and file.is_file()]
        if not files:
            what = "no such file" if not path.exists() else "no text or tokens"
            raise Problem(f"{path}: {what}: expected {' '.join(READERS)}, or a folder of them")
        if others := sum(file.is_file() for file in below) - len(files):
            fetcher.say(f"{path}: {others:,} files of other kinds left out")
        found += files
    return found

def unpacked(path: Path, file: BinaryIO) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(file)
    if path.suffix == ".zst":                # not zstandard's reader: a cut file is no error to it
        import pyarrow
        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 1 << 20)
    return file

def unicode(data: bytes, place: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = error.start
        raise Problem(f"{place}: not UTF-8: byte {data[at]:#x} at position {at:,}") from None

def well_formed(text: str, place: str) -> str:
    r"""JSON can spell half a character, as "\ud83d", that no text holds."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Problem(f"{place}: half of a surrogate pair at character {error.start:,}") from None
    return text

# -- tokens: many processes, one order -------------------------------------------------------------

@cache
def encoding(vocab_size: int) -> tiktoken.Encoding:
    """The first ranks of GPT-2's, below EoS. It has no special tokens, so all text is ordinary."""
    lines = (Path(__file__).parent / "gpt2.tiktoken").read_bytes().split(b"\n")
    pairs = [line.split() for line in lines[:vocab_size - 1]]
    return tiktoken.Encoding(f"gpt2-{vocab_size}", pat_str=SPLIT, special_tokens={},
                             mergeable_ranks={base64.b64decode(word): int(n) for word, n in pairs})

def start_worker() -> None:
    """A worker leaves interrupts to the parent, and ends with it, however it ends."""
    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow, daemon=True).start()

def encode(contents: list[str | np.ndarray], vocab_size: int) -> list[np.ndarray]:
    """The tokens of each, uint16."""
    words = encoding(vocab_size).encode_ordinary
    return [np.array(words(c), "<u2") if isinstance(c, str) else c for c in contents]

def batches(documents: Iterable[tuple[str, str | np.ndarray]]) -> Iterator[tuple[list, list]]:
    """Places and contents of about BATCH characters or tokens of documents."""
    places, contents, size = [], [], 0
    for place, content in documents:
        places.append(place)
        contents.append(content)
        size += 64 + len(content)            # a count for each, so that a batch of empty ones ends
        if size >= BATCH:
            yield places, contents
            places, contents, size = [], [], 0
    yield places, contents

def tokenised(inputs: Inputs, workers: int, moved: Callable[[int], None]
              ) -> Iterator[tuple[str, np.ndarray]]:
    """(place, tokens uint16) of each document in order.

    Reading waits for the workers, and they for whoever asks: that bounds the memory.
    """
    spawn, waiting, told = multiprocessing.get_context("spawn"), deque(), 0
    with ProcessPoolExecutor(workers, spawn, start_worker) as pool:
        try:
            for places, contents in batches(inputs.documents()):
                waiting.append((places, pool.submit(encode, contents, inputs.vocab_size)))
                moved(inputs.at - told)
                told = inputs.at
                if len(waiting) >= AHEAD * workers:
                    places, future = waiting.popleft()
                    yield from zip(places, future.result())
            for places, future in waiting:
                yield from zip(places, future.result())
        except BrokenProcessPool:
            raise Problem("a worker was killed, perhaps for want of memory: lower --workers, or "
                          "split the longest documents") from None
        finally:
            pool.shutdown(cancel_futures=True)

# -- writing ---------------------------------------------------------------------------------------

class Shuffle:
    """Documents by the order of a hash of seed and number: any seed gives one order, everywhere.

    They go by way of 256 files, one for each first byte of the hash: memory holds one file's.
    """

    def __init__(self, folder: Path, seed: int):
        self.seed, self.count = seed, 0
        self.paths = [folder / f"{n:03}.shuffle" for n in range(256)]
        self.files = [open(path, "wb") for path in self.paths]

    def add(self, tokens: np.ndarray) -> None:
        digest = hashlib.blake2b(f"{self.seed} {self.count}".encode(), digest_size=8).digest()
        self.count += 1
        self.files[digest[0]].write(
            digest + len(tokens).to_bytes(8, "little") + tokens.tobytes())

    def documents(self) -> Iterator[np.ndarray]:
        for path, file in zip(self.paths, self.files):
            file.close()
            data, at, found = path.read_bytes(), 0, []
            while at < len(data):
                size = int.from_bytes(data[at + 8:at + 16], "little")
                found.append((data[at:at + 8], at + 16, size))
                at += 16 + 2 * size
            path.unlink()
            for _, at, size in sorted(found):
                yield np.frombuffer(data, "<u2", size, at)

class Shards:
    """The shards of one part of a set, train or val: whole documents, `limit` tokens at most."""

    def __init__(self, stem: Path, limit: int, vocab_size: int, manifest: fetcher.Manifest):
        self.stem, self.limit, self.manifest = stem, limit, manifest
        self.eos = np.array(vocab_size - 1, "<u2").tobytes()
        self.names, self.file, self.tokens = [], None, 0
        self.longest = self.read = 0         # of a document; of all, as far as a run reads them

    def add(self, tokens: np.ndarray) -> None:
        if self.file and self.tokens + 1 + len(tokens) > self.limit:
            self.close()
        if not self.file:
            self.names.append(f"{self.stem.name}_{len(self.names):06}.bin")
            self.file = open(self.stem.with_name(self.names[-1]), "wb")
            self.file.write(bytes(trainer().HEADER_BYTES))
        self.file.write(self.eos + tokens.tobytes())
        self.tokens += 1 + len(tokens)
        self.longest = max(self.longest, 1 + len(tokens))
        self.read += min(1 + len(tokens), trainer().FINEWEB.doc_cap)

    def close(self) -> None:
        """Finish the shard that is open; read it again from the disk, and list it."""
        t = trainer()
        self.file.seek(0)
        self.file.write(np.array([t.MAGIC, t.VERSION, self.tokens], "<i4").tobytes())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        path, m = Path(self.file.name), self.manifest
        sha256 = fetcher.sha256_of(path, threading.Event())
        m.add(path.name, fetcher.entry_of(path, path.name, sha256, m.vocab_size))
        self.file, self.tokens = None, 0

def belongs_to_val(tokens: np.ndarray, fraction: float) -> bool:
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2 ** 64

# -- the command -----------------------------------------------------------------------------------

def documents_of(a: argparse.Namespace, inputs: Inputs, folder: Path) -> Iterator[np.ndarray]:
    """The tokens of all documents that are not empty, in the order of the shards."""
    shuffle = Shuffle(folder, a.seed) if a.seed is not None else None
    progress, empty, first = fetcher.Progress(inputs.total, 0, "reading"), 0, ""
    with closing(progress.bar), closing(tokenised(inputs, a.workers, progress.moved)) as found:
        for place, tokens in found:
            if len(tokens) >= a.shard_tokens:
                raise Problem(f"{place}: a document of {len(tokens):,} tokens and EoS does not fit "
                              f"into a shard of {a.shard_tokens:,}: split it, or --shard_tokens=N")
            if len(tokens) == 0:
                empty, first = empty + 1, first or place
            elif shuffle:
                shuffle.add(tokens)
            else:
                yield tokens
    if empty:
        fetcher.say(f"{empty:,} empty documents left out, the first: {first}")
    if shuffle:
        yield from shuffle.documents()

def fill(a: argparse.Namespace, inputs: Inputs, folder: Path) -> dict[str, Shards]:
    """Write all shards and the manifest into `folder`; the parts that have any."""
    manifest = fetcher.Manifest(folder)
    manifest.repository, manifest.vocab_size = "make_shards.py", a.vocab_size
    manifest.revision = f"val={a.val} seed={a.seed} shard_tokens={a.shard_tokens}"
    parts = {part: Shards(folder / f"{a.prefix}_{part}", a.shard_tokens, a.vocab_size, manifest)
             for part in ("train", "val")}
    for tokens in documents_of(a, inputs, folder):
        parts["val" if belongs_to_val(tokens, a.val) else "train"].add(tokens)
    for part, shards in parts.items():
        if shards.file:
            shards.close()
        elif a.val != (part == "train"):     # --val=0 asks for no val, --val=1 for no train
            raise Problem(f"no document for {part}: choose another --val than {a.val}, or give "
                          "more documents")
    return parts

def report(a: argparse.Namespace, parts: dict[str, Shards]) -> None:
    for part, shards in parts.items():
        entries = [shards.manifest.files[name] for name in shards.names]
        tokens, documents = (sum(e[key] for e in entries) for key in ("tokens", "documents"))
        if tokens:
            cap, read = trainer().FINEWEB.doc_cap, shards.read / tokens
            fetcher.say(f"{part}: {len(entries)} shards, {tokens:,} tokens, {documents:,} "
                        f"documents, the longest {shards.longest:,}; a document cap of {cap:,} "
                        f"leaves {read:.0%} of the tokens")
    val = parts["val"]
    if val.names and parts["train"].names:
        pinned = min(trainer().FINEWEB.val_tokens, val.manifest.files[val.names[0]]["tokens"] - 1)
        fetcher.say(f"to train on it: --data_dir={a.out} --val_sha256= --val_tokens={pinned}")

def make(a: argparse.Namespace) -> None:
    """Make the whole set, or leave nothing."""
    out = Path(os.path.abspath(a.out))
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise Problem(f"{a.out}: is there already: remove it, or choose another --out")
    inputs = Inputs(find_files(a.inputs), a.text_field, a.eos, a.vocab_size)
    part = out.with_name(out.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    lock = fetcher.locked(part)
    try:
        remove_shards(part)                  # of a run that was killed
        parts = fill(a, inputs, part)
        os.rename(part, out)
        fetcher.sync_folder(out.parent)
        report(a, parts)
    finally:
        if part.exists():
            remove_shards(part)
            part.rmdir()
        os.close(lock)

def remove_shards(part: Path) -> None:
    for pattern in ("*.bin", "*.shuffle", "manifest.json*"):
        for path in part.glob(pattern):
            path.unlink()

def parse(arguments: list[str]) -> argparse.Namespace:
    def whole(low: int, high: int) -> Callable[[str], int]:
        def read(text: str) -> int:
            if not text.isdecimal() or not low <= int(text) <= high:
                raise argparse.ArgumentTypeError(f"expected a whole number, {low} to {high:,}")
            return int(text)
        return read

    def fraction(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1:
            raise argparse.ArgumentTypeError("expected a fraction, 0 to 1")
        return value

    def word(text: str) -> str:
        if not re.fullmatch(r"\w+", text) or re.search("_(train|val)(_|$)", f"_{text}"):
            raise argparse.ArgumentTypeError("expected a word without train or val in it")
        return text

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(prog="make_shards.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="files and folders")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--val", type=fraction, default=0.01, metavar="FRACTION",
                        help="share of the documents that validate (default: %(default)s)")
    parser.add_argument("--seed", type=whole(0, 2 ** 63), metavar="N",
                        help="shuffle the documents (default: keep their order)")
    parser.add_argument("--shard_tokens", type=whole(2, 2 ** 31 - 1), default=fetcher.SHARD_TOKENS,
                        metavar="N", help="most tokens in a shard (default: %(default)s)")
    parser.add_argument("--workers", type=whole(1, 999), default=cores, metavar="N",
                        help="processes that tokenise (default: one a core, %(default)s)")
    parser.add_argument("--text_field", default="text", metavar="NAME",
                        help="field or column that holds the text (default: %(default)s)")
    parser.add_argument("--eos", choices=("present", "absent"), default="",
                        help="in .npy: does EoS stand between documents, or is a file one?")
    parser.add_argument("--prefix", type=word, default="mine",
                        help="of the names of the shards (default: %(default)s)")
    vocab = fetcher.GPT2_VOCAB
    parser.add_argument("--vocab_size", type=whole(257, vocab), default=vocab, metavar="N",
                        help="the first N - 1 of GPT-2's ranks, and EoS; 4097 is that of track "
                        "tiny (default: %(default)s)")
    return parser.parse_args(arguments)

def main(arguments: list[str]) -> int:
    a = parse(arguments)
    try:
        make(a)
        return 0
    except Problem as problem:
        print(f"make_shards.py: {problem}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"make_shards.py: {error.filename or a.out}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as signalled:
        print("make_shards.py: interrupted; nothing is left of it", file=sys.stderr)
        return 143 if str(signalled) == "SIGTERM" else 130

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, fetcher.terminated)
    sys.exit(main(sys.argv[1:]))
