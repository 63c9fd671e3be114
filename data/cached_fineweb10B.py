"""Fetch FineWeb shards in GPT-2 tokens, and prove each one before it gets its name.

    python data/cached_fineweb10B.py              the validation shard and all that the recipe reads
    python data/cached_fineweb10B.py 9            the validation shard and 9 training shards
    python data/cached_fineweb10B.py --verify     check all that is there, without the network

A shard is written to `<name>.<first digits of its sha256>.part`. It becomes `<name>` only when its
size, sha256, header, token count and every token id are right and its bytes are on the disk, so a
file under its own name is whole, whenever the program was killed. What is there and intact is not
fetched again; a partial file is continued, and one of another version is removed.

`manifest.json` beside the shards holds repository, revision, and each shard's size, sha256, tokens
and documents. Later runs check against it and ask the network only for what is missing.

Environment: HF_TOKEN (raises the hub's limits), HF_ENDPOINT (a mirror), HF_HUB_OFFLINE.
Exit code: 0 all there and intact, 1 something is not (one line each), 2 wrong usage, 130 and 143
interrupted.
"""

import argparse
import email.utils
import fcntl
import hashlib
import json
import math
import os
import queue
import random
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Callable, NamedTuple

import httpx2  # what huggingface_hub makes its requests with
from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, parse_ratelimit_headers
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent

class Dataset(NamedTuple):
    """A set of shards on the hub."""

    repository: str
    prefix: str                              # of the file names
    revision: str                            # commit; "": that of `main` on first use, then pinned
    known: dict                              # name -> sha256 at `revision`, as others state it

# Sources of revision and hash: data/README.md. All three names are those that modded-nanogpt's own
# download scripts use. The validation shard is what a record is measured on, hence the second pin.
DATASETS = {
    "fineweb10B": Dataset(
        "kjj0/fineweb10B-gpt2", "fineweb", "889765ea1f903759787add96995d81171b632d0c",
        {"fineweb_val_000000.bin":
         "5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640"}),
    "fineweb100B": Dataset("kjj0/fineweb100B-gpt2", "fineweb", "", {}),
    "finewebedu10B": Dataset("kjj0/finewebedu10B-gpt2", "finewebedu", "", {}),
}

GPT2_VOCAB = 50257                           # ids, EoS the last
SHARD_TOKENS = 100_000_000                   # of a full shard, 200 MB
# Share of a shard's tokens that training reads: documents end at the cap, and the last document of
# a unit ends with the unit. train_gpt.pack_units makes it 0.79 on 300 documents of FineWeb, 0.81
# with a standard deviation of 0.04 over resamplings of them. One such deviation below is taken, as
# a shard too many costs seconds: 656.7M / 0.75 tokens are in 9 shards. 8 might just not do.
USABLE = 0.75
TRIES = 7                                    # without a new byte, before a file is given up
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0         # seconds between tries, doubling
LONGEST_ORDER = 900.0                        # seconds that the hub may order; its windows last 300
TIMEOUT = 30.0                               # seconds without a byte
REPORT_EVERY = 10.0                          # seconds between lines where there is no terminal
RETRY = {408, 416, 425, 429, 500, 502, 503, 504}  # answers that may be others next time

class Problem(Exception):
    """One clear line for the user."""

class WrongBytes(Problem):
    """Not the bytes that the hub publishes."""

class WrongUsage(Problem):
    """The command cannot be meant so."""

class Stopped(Exception):
    """The program was interrupted: leave things as they are."""

def trainer() -> ModuleType:
    """train_gpt, whose checks of a shard are used. Late, as torch takes seconds to import."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    import train_gpt
    return train_gpt

def shards_needed() -> int:
    """Training shards that one run of the recipe reads: 9, which is what the field fetches too."""
    t = trainer()
    return math.ceil(t.total_steps(t.FINEWEB) * t.FINEWEB.tokens_per_step / (USABLE * SHARD_TOKENS))

def say(line: str) -> None:
    tqdm.write(line, file=sys.stdout)        # keeps clear of the bar, if there is one
    sys.stdout.flush()

def complain(line: str) -> None:
    tqdm.write(f"cached_fineweb10B.py: {line}", file=sys.stderr)

# -- shards and the manifest -----------------------------------------------------------------------

def sha256_of(path: Path, stop: threading.Event) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            if stop.is_set():
                raise Stopped
            digest.update(block)
    return digest.hexdigest()

def entry_of(path: Path, name: str, sha256: str, vocab_size: int) -> dict:
    """The manifest's entry for the shard at `path`, whose hash is known; Problem if it is none."""
    t = trainer()
    try:
        shard = t.check_shard(path, vocab_size)
    except t.UserError as error:
        raise Problem(error.line.replace(str(path), name)) from None
    return {"size": path.stat().st_size, "sha256": sha256, "tokens": shard.tokens,
            "documents": shard.documents}

def examine(path: Path, name: str, size: int, sha256: str, stop: threading.Event,
            vocab_size: int = GPT2_VOCAB) -> dict:
    """The manifest's entry for the shard at `path`; Problem if it is not the one described."""
    if (found := path.stat().st_size) != size:
        raise WrongBytes(f"{name}: expected {size:,} bytes, found {found:,}")
    if (found := sha256_of(path, stop)) != sha256:
        raise WrongBytes(f"{name}: wrong bytes: expected sha256 {sha256[:12]}.., found "
                         f"{found[:12]}..")
    return entry_of(path, name, sha256, vocab_size)

class Manifest:
    """What is known of the shards in a folder. Every change is on the disk before the next."""

    def __init__(self, folder: Path):
        self.path, self.lock = folder / "manifest.json", threading.Lock()
        self.repository = self.revision = ""
        self.vocab_size, self.files = GPT2_VOCAB, {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            self.repository, self.revision = str(found["repository"]), str(found["revision"])
            self.vocab_size = int(found.get("vocab_size", GPT2_VOCAB))
            for name, entry in found["files"].items():
                self.files[name] = {"size": int(entry["size"]), "sha256": str(entry["sha256"]),
                                    "tokens": int(entry["tokens"]),
                                    "documents": int(entry["documents"])}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Problem(f"{self.path}: damaged, or of another program; remove it, and "
                          "the next run checks every shard against the hub") from None

    def add(self, name: str, entry: dict) -> None:
        with self.lock:
            self.files[name] = entry
            self.save()

    def save(self) -> None:
        text = json.dumps({"format": 1, "repository": self.repository, "revision": self.revision,
                           "vocab_size": self.vocab_size,
                           "files": dict(sorted(self.files.items()))}, indent=1)
        part = self.path.with_name("manifest.json.part")
        part.write_text(text + "\n", encoding="utf-8")
        settle(part, self.path)

def settle(part: Path, final: Path) -> None:
    """Give a finished file its name, such that a crash leaves the old file or the whole new one."""
    with open(part, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, final)
    sync_folder(final.parent)                # the name itself

def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

# -- the hub ---------------------------------------------------------------------------------------
# huggingface_hub brings addresses, token, mirror, session, listing and the meaning of errors. What
# its hf_hub_download (2.4.0) lacks is here: it deletes a partial file when it fails or is stopped,
# so that nothing can be continued, and its http_get keeps 10 MB in memory and does not retry 5xx.
# Plain HTTP on the `resolve` address is used throughout, never Xet, whatever HF_HUB_DISABLE_XET
# says: only there can a file be continued from any byte, and its sha256 is that of the LFS object.

class Want(NamedTuple):
    """A file as the hub describes it."""

    name: str
    size: int                                # bytes
    sha256: str

    @property
    def part(self) -> str:
        return f"{self.name}.{self.sha256[:16]}.part"

def ordered_wait(headers: httpx2.Headers) -> float | None:
    """Seconds that an answer orders to wait: Retry-After as number or date, or the hub's RateLimit.

    >>> ordered_wait({"retry-after": "120"})
    120.0
    """
    text = headers.get("retry-after", "").strip()
    if text.isdigit():
        return float(text)
    if text:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except ValueError:
            pass
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit and limit.remaining == 0 else None

class Hub:
    """One repository of the hub, or of its mirror."""

    def __init__(self, repository: str, stop: threading.Event):
        self.repository, self.stop = repository, stop
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self.not_before = 0.0                # an ordered wait holds for all threads

    def pause(self, seconds: float) -> None:
        if self.stop.wait(max(0.0, seconds)):
            raise Stopped

    def after(self, error: Exception, what: str, failures: int) -> None:
        """Wait for the next try, as the hub orders or ever longer; or give up with a Problem."""
        told, reason = None, str(error) or type(error).__name__
        if isinstance(error, HfHubHTTPError):
            response = error.response
            reason = f"HTTP {response.status_code} from {response.url.host}"
            told = ordered_wait(response.headers)
            hint = {401: "; is HF_TOKEN right?", 403: "; is HF_TOKEN right?",
                    404: f"; is there such a file or revision in {self.repository}?"}
            if response.status_code not in RETRY:
                raise Problem(f"{what}: {reason}{hint.get(response.status_code, '')}")
        if isinstance(error, httpx2.UnsupportedProtocol):
            raise Problem(f"{what}: HF_ENDPOINT={self.endpoint}: {reason}")
        if failures >= TRIES:
            raise Problem(f"{what}: gave up after {failures} tries without a new byte: {reason}")
        if told is not None and told > LONGEST_ORDER:
            raise Problem(f"{what}: {reason}, which orders a wait of {told:,.0f} s; run this again "
                          "then (a token in HF_TOKEN raises the limits)")
        seconds = told
        if told is None:                     # at random, so that the threads do not come in step
            seconds = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1)) * random.uniform(0.5, 1)
        else:
            self.not_before = max(self.not_before, time.monotonic() + told)
        say(f"{what}: {reason}; again in {seconds:.1f} s")
        self.pause(seconds)

    def listing(self, revision: str) -> tuple[str, dict[str, Want]]:
        """The commit behind `revision`, and its files in one request. No hash, no file."""
        failures, what = 0, f"{self.repository} at {revision[:12]}"
        while True:
            try:
                info = HfApi(endpoint=self.endpoint).dataset_info(
                    self.repository, revision=revision, files_metadata=True, timeout=TIMEOUT)
                break
            except (HfHubHTTPError, httpx2.TransportError) as error:
                failures += 1
                self.after(error, what, failures)
            except (ValueError, KeyError, TypeError, AttributeError, httpx2.InvalidURL):
                raise Problem(f"{what}: {self.endpoint} did not answer as the hub does") from None
        files = {f.rfilename: Want(f.rfilename, f.lfs.size, f.lfs.sha256)
                 for f in info.siblings or [] if f.lfs}
        commit = info.sha or ""
        if not re.fullmatch("[0-9a-f]{40}", commit):
            raise Problem(f"{what}: {self.endpoint} did not answer as the hub does")
        if re.fullmatch("[0-9a-f]{40}", revision) and commit != revision:
            raise Problem(f"{what}: {self.endpoint} answered with revision {commit[:12]}")
        return commit, files

    def download(self, want: Want, commit: str, part: Path, moved: Callable[[int], None]) -> None:
        """Bring `part` to its full size, from the byte where it ends; `moved` is told of each."""
        url = hf_hub_url(self.repository, want.name, repo_type="dataset", revision=commit,
                         endpoint=self.endpoint)
        furthest = have = part.stat().st_size if part.exists() else 0
        failures = 0
        while have < want.size:
            try:
                self.pause(self.not_before - time.monotonic())
                self.stream(url, want.size, have, part, moved)
                error = httpx2.RemoteProtocolError("the connection ended early")
            except (HfHubHTTPError, httpx2.RequestError, httpx2.InvalidURL) as caught:
                error = caught
                if isinstance(error, HfHubHTTPError) and error.response.status_code == 416:
                    part.unlink(missing_ok=True)  # longer than the file there: begin anew
                    moved(-have)
            have = part.stat().st_size if part.exists() else 0
            if have > furthest:              # only beyond the furthest is progress, or a server
                furthest, failures = have, 0 # that always stops short would keep us for ever
            if have < want.size:
                failures += 1
                self.after(error, want.name, failures)

    def stream(self, url: str, size: int, have: int, part: Path,
               moved: Callable[[int], None]) -> None:
        """One request for the bytes of a file from `have` on, appended to `part`."""
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
            hf_raise_for_status(response)
            if response.status_code != 206 or not response.headers.get(
                    "content-range", "").startswith(f"bytes {have}-"):
                moved(-have)                 # the server does not continue: take it from the start
                have = 0
                if response.status_code == 206:
                    part.unlink()
                    raise httpx2.RemoteProtocolError("the server sent another range")
            with open(part, "ab" if have else "wb") as file:
                for chunk in response.iter_raw():
                    if self.stop.is_set():
                        raise Stopped
                    file.write(chunk[:size - have])
                    file.flush()             # nothing that came is lost when we are killed
                    count = min(len(chunk), size - have)
                    moved(count)
                    have += count
                    if have == size:
                        return

# -- many at once ----------------------------------------------------------------------------------

class Progress:
    """Bytes, rate and time left: a bar on a terminal, else a line every few seconds."""

    def __init__(self, total: int, done: int, what: str = "fetching"):
        self.total, self.done, self.first = total, done, done
        self.began = self.said = time.monotonic()
        self.lock = threading.Lock()
        self.bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=what,
                        disable=not sys.stderr.isatty())

    def moved(self, count: int) -> None:
        with self.lock:
            self.done += count
            self.bar.update(count)
            now = time.monotonic()
            if not self.bar.disable or now - self.said < REPORT_EVERY:
                return
            self.said = now
            rate = max(1.0, (self.done - self.first) / (now - self.began))
        say(f"{self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, "
            f"{(self.total - self.done) / rate:,.0f} s left")

def in_parallel(work: Callable[[str], object], names: list[str], threads: int,
                stop: threading.Event) -> tuple[dict, list[str]]:
    """work(name) for all names: results by name, and the names that had a problem, each told.

    The threads are daemons: one that waits for a dead connection does not hold up an interrupt.
    """
    todo, results, failed, crashes = queue.SimpleQueue(), {}, [], []

    def run() -> None:
        while not stop.is_set():
            try:
                name = todo.get_nowait()
            except queue.Empty:
                return
            try:
                results[name] = work(name)
            except Stopped:
                return
            except Problem as problem:
                failed.append(name)
                complain(str(problem))
            except OSError as error:         # a full disk, a folder without permission
                failed.append(name)
                complain(f"{name}: {error.strerror or error}")
            except BaseException as error:   # a mistake of this program
                crashes.append(error)
                stop.set()

    for name in names:
        todo.put(name)
    workers = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, len(names)))]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            while worker.is_alive():
                worker.join(0.2)
    except KeyboardInterrupt:
        stop.set()
        for worker in workers:
            worker.join(1.0)
        raise
    if crashes:
        raise crashes[0]
    return results, failed

# -- the commands ----------------------------------------------------------------------------------

class Job(NamedTuple):
    """What was asked for."""

    dataset: Dataset
    names: list                              # of files, the validation shard first
    folder: Path
    revision: str                            # "" = the manifest's, else the dataset's, else main
    threads: int
    dry_run: bool
    stop: threading.Event

def still_intact(job: Job, manifest: Manifest) -> set[str]:
    """Names of the wanted files that are what the manifest says: all that it takes offline."""
    def check(name: str) -> bool:
        entry, path = manifest.files[name], job.folder / name
        good = (path.stat().st_size == entry["size"]
                and sha256_of(path, job.stop) == entry["sha256"])
        if not good:
            say(f"{name}: damaged: not what the manifest says")
        return good

    there = [n for n in job.names if n in manifest.files and (job.folder / n).is_file()]
    results, _ = in_parallel(check, there, job.threads, job.stop)
    return {name for name, good in results.items() if good}

def objection(job: Job, manifest: Manifest, name: str, want: Want | None, commit: str,
              endpoint: str) -> str:
    """Why the file that the hub describes must not be taken, "" where it may."""
    if want is None:
        return f"no such file in {job.dataset.repository} at revision {commit[:12]}"
    offer = f"{endpoint} publishes sha256 {want.sha256[:12]}.. for it"
    known = job.dataset.known.get(name, want.sha256)
    if commit == job.dataset.revision != job.revision and known != want.sha256:
        return f"{offer}, expected {known[:12]}..; --revision={commit} takes it all the same"
    old = manifest.files.get(name)
    if old and commit == manifest.revision and old["sha256"] != want.sha256:
        return f"{offer}, the manifest has {old['sha256'][:12]}.. at the same revision"
    return ""

def describe(job: Job, manifest: Manifest, hub: Hub, missing: list[str]) -> tuple[list[Want], int]:
    """Ask the hub for the missing files: those to take, and how many it has no right one of.

    The manifest takes on the hub's commit, and forgets what that commit has differently.
    """
    commit, files = hub.listing(job.revision or manifest.revision or job.dataset.revision or "main")
    wants, problems = [], 0
    for name in missing:
        line = objection(job, manifest, name, files.get(name), commit, hub.endpoint)
        if line:
            problems += 1
            complain(f"{name}: {line}")
        else:
            wants.append(files[name])
    if commit != manifest.revision:
        for name, old in list(manifest.files.items()):
            if name not in files or files[name].sha256 != old["sha256"]:
                say(f"{name}: revision {commit[:12]} has another one")
                del manifest.files[name]
    manifest.repository, manifest.revision = job.dataset.repository, commit
    sizes = {want.part: want.size for want in files.values()}
    for path in sorted(job.folder.glob(f"{job.dataset.prefix}_*.part")):
        if path.stat().st_size > sizes.get(path.name, -1):
            say(f"{path.name}: part of another file, {'to be ' if job.dry_run else ''}removed")
            if not job.dry_run:
                path.unlink()
    return wants, problems

def adopt(job: Job, manifest: Manifest, wants: list[Want]) -> list[Want]:
    """Take in files that have their name and are right, but are not in the manifest.

    So are those of another program, or of a run killed between the two. Returns the others.
    """
    by_name = {want.name: want for want in wants if (job.folder / want.name).is_file()}

    def check(name: str) -> bool:
        try:
            entry = examine(job.folder / name, *by_name[name], job.stop)
        except Problem as problem:
            say(f"{problem}; {'to be ' if job.dry_run else ''}removed, to be fetched")
            if not job.dry_run:              # no run may train on it, also if the hub fails us now
                (job.folder / name).unlink()
            return False
        if not job.dry_run:
            manifest.add(name, entry)
        say(f"{name}: already there, and right")
        return True

    found, _ = in_parallel(check, list(by_name), job.threads, job.stop)
    return [want for want in wants if not found.get(want.name)]

def fetch_one(job: Job, manifest: Manifest, hub: Hub, want: Want, moved: Callable) -> None:
    """Download, prove, name and list one file; nothing has its name before it is proven."""
    part = job.folder / want.part
    for last in (False, True):
        hub.download(want, manifest.revision, part, moved)
        try:
            entry = examine(part, *want, job.stop)
            break
        except WrongBytes as problem:        # perhaps of an older part: once more, all of it
            part.unlink()
            moved(-want.size)
            if last:
                raise
            say(f"{problem}; once more from the start")
        except Problem:                      # the very file that the hub has, but no shard
            part.unlink()
            raise
    settle(part, job.folder / want.name)
    manifest.add(want.name, entry)
    say(f"{want.name}: {entry['tokens']:,} tokens, {entry['documents']:,} documents, "
        f"sha256 {want.sha256[:12]}..")

def fetch_missing(job: Job, manifest: Manifest, missing: list[str]) -> int:
    """Bring the missing files; returns how many could not be had."""
    hub = Hub(job.dataset.repository, job.stop)
    wants, problems = describe(job, manifest, hub, missing)
    if not job.dry_run:
        manifest.save()
    wants = {want.name: want for want in adopt(job, manifest, wants)}
    total = sum(want.size for want in wants.values())
    parts = [job.folder / want.part for want in wants.values()]
    done = sum(part.stat().st_size for part in parts if part.exists())
    place = job.folder
    while not place.exists():                # only a dry run leaves the folder unmade
        place = place.parent
    free = shutil.disk_usage(place).free
    amount = f"{(total - done) / 1e6:,.0f} MB to fetch, {free / 1e6:,.0f} MB free in {place}"
    if total - done > free:
        raise Problem(f"{amount}: make room, or choose another folder with --dest=FOLDER")
    say(f"{hub.endpoint}, {job.dataset.repository} at {manifest.revision}: {len(wants)} files, "
        f"{amount}")
    if job.dry_run:
        for want in wants.values():
            say(f"{want.name}: {want.size:,} bytes, sha256 {want.sha256}")
        return problems
    progress = Progress(total, done)
    try:
        _, failed = in_parallel(
            lambda name: fetch_one(job, manifest, hub, wants[name], progress.moved),
            list(wants), job.threads, job.stop)
    finally:
        progress.bar.close()
    return problems + len(failed)

def fetch(job: Job) -> int:
    """Bring what is missing; returns how many files could not be had."""
    manifest = Manifest(job.folder)
    if manifest.repository not in ("", job.dataset.repository):
        raise WrongUsage(f"{job.folder} holds shards of {manifest.repository}; those of "
                         f"{job.dataset.repository} have the same names: --dest=FOLDER")
    asked = job.revision or manifest.revision or job.dataset.revision
    intact = still_intact(job, manifest) if asked == manifest.revision else set()
    missing, problems = [name for name in job.names if name not in intact], 0
    if missing and constants.is_offline_mode():
        for name in missing:
            complain(f"{name}: not here intact, and HF_HUB_OFFLINE forbids to fetch it")
        problems = len(missing)
    elif missing:
        problems = fetch_missing(job, manifest, missing)
    if problems:
        complain(f"{job.folder}: {problems} of {len(job.names)} files are not there; what is there "
                 "is right, and the same command tries the others again")
    elif not (job.dry_run and missing):
        tokens = sum(manifest.files[name]["tokens"] for name in job.names[1:])
        say(f"{job.folder}: all {len(job.names)} files are there and intact, {tokens:,} tokens to "
            f"train on, revision {manifest.revision[:12]}")
    return problems

def verify(job: Job) -> int:
    """Check every shard in the folder and every one that should be; returns the number wrong."""
    manifest = Manifest(job.folder)
    names = sorted({*manifest.files, *job.names, *(p.name for p in job.folder.glob("*.bin"))})
    if not names:
        raise Problem(f"{job.folder}: no shards and no manifest.json")

    def check(name: str) -> dict:
        entry = manifest.files.get(name)
        if not (job.folder / name).is_file():
            raise Problem(f"{name}: missing")
        if entry is None:
            raise Problem(f"{name}: not in manifest.json, so its hash is not known; fetching it "
                          "with this program compares it with the hub's")
        found = examine(job.folder / name, name, entry["size"], entry["sha256"], job.stop,
                        manifest.vocab_size)
        if found != entry:
            raise Problem(f"{name}: the manifest says {entry['tokens']:,} tokens and "
                          f"{entry['documents']:,} documents, found {found['tokens']:,} and "
                          f"{found['documents']:,}")
        return found

    found, failed = in_parallel(check, names, job.threads, job.stop)
    say(f"{job.folder}: {len(found)} of {len(names)} files intact, "
        f"{sum(entry['tokens'] for entry in found.values()):,} tokens")
    return len(failed)

def locked(folder: Path) -> int:
    """A descriptor that keeps other runs of this program out of the folder until it is closed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Problem(f"{folder}: another run of this program is at work in it") from None
    except OSError:                          # some network file systems have no locks
        pass
    return descriptor

def parse(arguments: list[str]) -> argparse.Namespace:
    def count(low: int) -> Callable[[str], int]:
        def read(text: str) -> int:
            if not text.isdecimal() or not low <= int(text) <= 999_999:
                raise argparse.ArgumentTypeError(f"expected a whole number from {low} on")
            return int(text)
        return read

    parser = argparse.ArgumentParser(prog="cached_fineweb10B.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="?", type=count(0), metavar="N",
                        help="training shards to have (default: what the recipe needs)")
    parser.add_argument("--set", choices=DATASETS, default="fineweb10B",
                        help="which shards (default: %(default)s)")
    parser.add_argument("--dest", type=Path, help="folder (default: data/ and the name of the set)")
    parser.add_argument("--revision", default="",
                        help="commit, tag or branch (default: the manifest's, else the pinned one)")
    parser.add_argument("--jobs", type=count(1), default=4,
                        help="files at once (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true",
                        help="say what would be fetched, and write nothing")
    parser.add_argument("--verify", action="store_true",
                        help="check all shards in the folder, without the network")
    return parser.parse_args(arguments)

def main(arguments: list[str]) -> int:
    a, stop, lock = parse(arguments), threading.Event(), -1
    try:
        shards, dataset = a.shards, DATASETS[a.set]
        if shards is None and not a.verify:
            shards = shards_needed()
        names = [] if shards is None else [f"{dataset.prefix}_val_000000.bin"] + [
            f"{dataset.prefix}_train_{n:06d}.bin" for n in range(1, shards + 1)]
        folder = a.dest or ROOT / "data" / a.set
        job = Job(dataset, names, folder, a.revision, a.jobs, a.dry_run, stop)
        if a.verify:
            return 1 if verify(job) else 0
        if not a.dry_run:
            folder.mkdir(parents=True, exist_ok=True)
            lock = locked(folder)
        return 1 if fetch(job) else 0
    except Problem as problem:
        complain(str(problem))
        return 2 if isinstance(problem, WrongUsage) else 1
    except OSError as error:
        complain(f"{error.filename or a.dest}: {error.strerror or error}")
        return 1
    except KeyboardInterrupt as signalled:
        stop.set()
        complain("interrupted; partial files are kept, and the same command goes on from there")
        return 143 if str(signalled) == "SIGTERM" else 130
    finally:
        if lock >= 0:
            os.close(lock)

def terminated(number: int, frame) -> None:
    raise KeyboardInterrupt("SIGTERM")

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminated)
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (130, 143):
        os._exit(code)                       # threads may still wait for the network
    sys.exit(code)
