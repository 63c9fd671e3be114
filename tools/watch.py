"""Show a run as CSV, in Weights & Biases or in TensorBoard, while it goes on or afterwards.

    ./run.sh watch records/<record>/<id>.jsonl --to=csv            writes <id>.csv beside the log
    ./run.sh watch records/<record>/<id>.jsonl --to=wandb          pip install wandb
    ./run.sh watch records/<record>/<id>.jsonl --to=tensorboard    pip install tensorboard

It follows the log from a process of its own, so that training neither waits for it nor fails with
it. It ends with the run, and goes on where a resumed run goes on. TensorBoard's files go to a
folder <id> beside the log.
"""
import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SHOWN = ("loss", "lr_scale", "train_time_ms", "wait_ms")


def sink(kind: str, log: Path) -> Callable[[dict, int], None]:
    """What takes numbers by name at a step."""
    if kind == "csv":
        file = open(log.with_suffix(".csv"), "w", encoding="utf-8", newline="")
        columns = [f"{event}/{name}" for event in ("step", "val") for name in SHOWN]
        writer = csv.DictWriter(file, ["step", *columns])
        writer.writeheader()
        return lambda numbers, step: (writer.writerow(numbers | {"step": step}), file.flush())
    if kind == "wandb":
        import wandb
        run = wandb.init(project="one-gpu", id=log.stem, resume="allow")
        return lambda numbers, step: run.log(numbers, step=step)
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(log.with_suffix(""))

    def show(numbers: dict, step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return show


def follow(log: Path, pause: float) -> Iterator[dict]:
    """The events of a log up to its end, those to come included; all again once it was cut."""
    at = 0
    while True:
        with open(log, "rb") as file:
            at = at if log.stat().st_size >= at else 0
            file.seek(at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                at += len(line)
                yield (event := json.loads(line))
                if event["event"] == "end":
                    return
        time.sleep(pause)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--to", choices=("csv", "wandb", "tensorboard"), required=True)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between looks (1)")
    given, done = parser.parse_args(argv), -1
    try:
        show = sink(given.to, given.log)
        for event in follow(given.log, given.pause):
            order = 2 * event.get("step", 0) + (event["event"] == "val")
            if event["event"] in ("step", "val") and order > done:
                show({f"{event['event']}/{n}": event[n] for n in SHOWN if n in event},
                     event["step"])
                done = order
    except ImportError as error:
        print(f"watch.py: {error}; pip install {given.to}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"watch.py: {given.log}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.path.pop(0)                          # tools/profile.py hides Python's own
    sys.exit(main())
