"""A record in one command: runs of consecutive seeds, judged, compared, and written up.

    ./run.sh --runs=10 --name=MyIdea [--seed=0] [--parent=FOLDER] [settings of train_gpt.py]

Each run is a process of its own. The same command goes on with a set that was left half done: what
was cut short is put into incomplete/ and run again, what is complete stays. Then the judge
(verify.py, with its leak test) and the comparison with the parent record (compare.py) speak, and
the record's README.md holds what they said; what is outside its marked part is yours to write.

--parent is a record folder beside the new one, or none; without it, the newest one of the track
that the judge accepts. Timings compare on one machine only: re-time the parent's program here if
it was run elsewhere.

Exit code: 0 the set is a valid record, 1 it is not (a changed recipe makes it an experiment), 2 a
wrong setting, else that of the run that ended the set.
"""
import contextlib
import datetime
import difflib
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRAINER = HERE.parent / "train_gpt.py"
sys.path[:0] = [str(HERE), str(HERE.parent)]
import verify  # noqa: E402

import train_gpt  # noqa: E402
from train_gpt import Settings, UserError  # noqa: E402

BEGIN, END = "<!-- written by run_set.py: begin -->", "<!-- written by run_set.py: end -->"
TEMPLATE = f"""# {{name}}

What it changes, and why that should help: to be written.

{BEGIN}
{END}

## What did not work

To be written.
"""


def parse(arguments: list[str]) -> tuple[int, str, Settings, list[str], list[str]]:
    """Runs, parent ("" where none is named), settings of the first run, its arguments without the
    seed, and the recipe settings that were changed."""
    own = {"runs": "1", "parent": ""}
    for word in [word for word in arguments if re.match("--(runs|parent)=", word)]:
        name, own[word[2:].partition("=")[0]] = word.split("=", 1)
    rest = [word for word in arguments if not re.match("--(runs|parent)=", word)]
    settings, given = train_gpt.parse_settings(rest)
    if not re.fullmatch("[1-9][0-9]{0,3}", own["runs"], re.A):
        raise UserError(f"--runs={own['runs']}: expected a whole number, 1 to 9999")
    if not re.fullmatch(r"(|\w[\w.-]*)", own["parent"], re.A):
        raise UserError(f"--parent={own['parent']}: expected the name of a record folder, or none")
    if not re.fullmatch(r".{0,59}[^.]", settings.name):  # its characters are checked already
        raise UserError(f"--name={settings.name}: expected 1 to 60 characters, the last one no '.',"
                        " as it becomes a folder")
    command = [word for word in rest if not word.startswith("--seed=")]
    return (int(own["runs"]), own["parent"], settings, command,
            [name for name in given if name in train_gpt.RECIPE_FIELDS])


# -------------------------------------------------------------------------------------------------
# The folder of the set: what is in it, and what goes on in it

def finished(folder: Path) -> dict[int, dict]:
    """Seed -> start event of the runs that came to their end, be it that a loss was not finite."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            start, *_, end = verify.read_events(path)
            if end.get("status") in ("complete", "non-finite"):
                found[start["settings"]["seed"]] = start
        except (verify.Refused, ValueError, KeyError):
            pass                             # cut short
    return found


def folders(records: Path, name: str) -> list[Path]:
    """Record folders of this name, oldest first."""
    return sorted(path for path in records.glob(f"????-??-??_{name}") if path.is_dir())


def choose_folder(records: Path, settings: Settings) -> Path:
    """The newest folder of this name that has runs, which must be of this very program and these
    settings; else a new one of today."""
    program = hashlib.sha256(TRAINER.read_bytes()).hexdigest()
    wanted = json.loads(json.dumps(asdict(settings)))
    for folder in reversed(folders(records, settings.name)):
        for seed, start in finished(folder).items():
            other = [name for name, value in wanted.items()
                     if name != "seed" and start["settings"].get(name) != value]
            if start["program_sha256"] != program:
                other.append("program")
            if other:
                raise UserError(f"{folder}: seed {seed} was run with another {', '.join(other)}; "
                                "choose another --name, or move the folder away")
            return folder
    return records / f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}_{settings.name}"


def sort_out(folder: Path, name: str) -> None:
    """Bring in what a run wrote beside the folder, after midnight; put apart what was cut short."""
    for later in folders(folder.parent, name):
        if later.name > folder.name:
            for path in later.iterdir():
                os.replace(path, folder / path.name)
            later.rmdir()
    kept = {start["id"] for start in finished(folder).values()}
    for log in folder.glob("*.jsonl"):
        if log.stem not in kept:
            print(f"{log.name}: cut short, so it goes to {folder.name}/incomplete/")
            (folder / "incomplete").mkdir(exist_ok=True)
            for path in folder.glob(f"{log.stem}.*"):
                os.replace(path, folder / "incomplete" / path.name)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """One set at a time in a folder: the lock's file descriptor, which the runs share."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    except BlockingIOError:
        raise UserError(f"{folder}: a run of this set is still going on; wait for it") from None
    finally:
        os.close(lock)


def run_one(command: list[str], lock: int) -> int:
    """Exit code of one run. An interrupt lets it write its end."""
    child = subprocess.Popen(command, pass_fds=[lock])
    try:
        return child.wait()
    except KeyboardInterrupt as error:
        if str(error) == "SIGTERM":          # that of a terminal reached the run as well
            child.terminate()
        child.wait()
        raise


# -------------------------------------------------------------------------------------------------
# What is said of the set

def tool(name: str, *arguments: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of a tool beside this one, run where `folder` has a short name."""
    done = subprocess.run([sys.executable, str(HERE / name), *arguments], text=True,
                          cwd=folder.parent.parent, stdout=subprocess.PIPE)
    return done.returncode, done.stdout


def short(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def choose_parent(folder: Path, track: str) -> str:
    """The newest other record of the track that the judge accepts, or none."""
    for other in sorted(folder.parent.glob("????-??-??_*"), reverse=True):
        tracks = {start["track"] for start in finished(other).values()}
        if other != folder and tracks == {track} and tool(
                "verify.py", short(other), folder=folder)[0] == 0:
            return other.name
    return "none"


def program_of(folder: Path) -> list[str]:
    start = next(iter(finished(folder).values()))
    return (folder / start["program"]).read_text(encoding="utf-8").splitlines()


def cost(folder: Path, parent: str) -> str:
    """Lines of the program against those of its parent's."""
    if parent == "none":
        return f"{len(program_of(folder)):,} lines; there is no parent."
    old, new = program_of(folder.parent / parent), program_of(folder)
    changes = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
    added, removed = (sum(line.startswith(sign) for line in changes) for sign in "+-")
    return (f"{len(new):,} lines, the parent's program has {len(old):,}: {added:,} added, "
            f"{removed:,} removed.")


def write_up(folder: Path, name: str, parent: str, evidence: str) -> None:
    """The marked part of README.md: what the judge reads there, evidence, cost, machine."""
    runs, path = finished(folder), folder / "README.md"
    facts = ", ".join(f"{key} {value}" for key, value in
                      runs[min(runs)]["environment"].items() if value is not None)
    part = (f"{BEGIN}\nparent: {parent}\nseeds: {min(runs)} to {max(runs)}\n\n## Evidence\n\n"
            f"{evidence}\n## Cost\n\n{cost(folder, parent)}\n\n## Machine\n\n{facts}\n{END}")
    text = path.read_text(encoding="utf-8") if path.exists() else TEMPLATE.format(name=name)
    before, marked, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if marked else ""
    train_gpt.write_whole(path, lambda file: file.write((before + part + after).encode()))


def conclude(folder: Path, settings: Settings, parent: str, changed: list[str]) -> int:
    """Judge, compare, write up, and the verdict; the exit code."""
    parent = parent or choose_parent(folder, settings.track)
    if parent != "none" and not finished(folder.parent / parent):
        raise UserError(f"--parent={parent}: no runs in {folder.parent / parent}")
    write_up(folder, settings.name, parent, "To be judged.\n")
    code, evidence = 1, ""
    questions = [("verify.py", "--program", short(folder))]
    if parent != "none":
        questions.append(("compare.py", f"{folder.parent.name}/{parent}", short(folder)))
    for name, *words in questions:
        found, answer = tool(name, *words, folder=folder)
        code = found if name == "verify.py" else code
        print(answer, end="")
        evidence += f"`{' '.join(['python', f'records/{name}', *words])}`:\n\n```\n{answer}```\n\n"
    write_up(folder, settings.name, parent, evidence)
    print(f"{folder / 'README.md'}: written; what it changes and what did not work is yours to say")
    if changed:
        print(f"experiment, not a record: {', '.join(changed)} changed, and a record has no recipe "
              "override")
    else:
        print("not a record: the judge says above why" if code else "a record, by the judge")
    return code


def main(arguments: list[str]) -> int:
    try:
        if "--help" in arguments:
            print(__doc__)
            return 0
        runs, parent, settings, command, changed = parse(arguments)
        signal.signal(signal.SIGTERM, train_gpt.interrupt)
        records = Path(settings.records_dir or HERE).resolve()
        folder = choose_folder(records, settings)
        with locked(folder) as lock:
            sort_out(folder, settings.name)
            for seed in range(settings.seed, settings.seed + runs):
                if seed in finished(folder):
                    print(f"seed {seed}: is there")
                    continue
                print(f"seed {seed}: run {seed - settings.seed + 1} of {runs}", flush=True)
                try:
                    code = run_one([sys.executable, str(TRAINER), *command, f"--seed={seed}"], lock)
                finally:
                    sort_out(folder, settings.name)
                if code:
                    print(f"run_set.py: seed {seed} ended with exit code {code}: " + (
                        "no set with this seed can be valid" if code == 3 else
                        "the same command goes on where it was"), file=sys.stderr)
                    return code
            return conclude(folder, settings, parent, changed)
    except UserError as error:
        print(f"run_set.py: {error.line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print("run_set.py: interrupted; the same command goes on where it was", file=sys.stderr)
        return 143 if str(error) == "SIGTERM" else 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
