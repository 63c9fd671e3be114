"""HellaSwag: how often a checkpoint finds the right ending of a story among four.

    ./run.sh hellaswag CHECKPOINT [--file=hellaswag_val.jsonl] [--out=results.jsonl] [--items=200]

The 10,042 items of the validation set come from the hub, pinned by revision and hash (FETCHED), or
from --file: the .jsonl of github.com/rowanz/hellaswag, or the hub's parquet. Each ending is scored
behind its context, a blank between them, as a document of its own: no few-shot examples. acc takes
the ending with the largest sum of log-probabilities; acc_norm the largest mean per token, as GPT-2
reproductions report it; acc_bytes the largest mean per byte, as the LM evaluation harness does.
Results go to --out, a line an item; called again, it goes on where it stopped.
"""
import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from _model import Trained, activations, load, log_probabilities, t, tokenizer
from tqdm import tqdm

FETCHED = dict(repo_id="Rowan/hellaswag", repo_type="dataset",
               filename="data/validation-00000-of-00001.parquet",
               revision="218ec52e09a7e7462a5400043bb9a69a41d06b76")
SHA256 = "899813071e1e95efafec90f856e1987d2150fa4d020fc005df6962c259f660cd"  # of that file


def fetch() -> Path:
    """The pinned file, from the hub's cache or the hub, HF_ENDPOINT if that is set."""
    from huggingface_hub import hf_hub_download
    try:
        path = Path(hf_hub_download(**FETCHED, endpoint=os.environ.get("HF_ENDPOINT")))
    except Exception as error:               # of networks, hubs and disks: they have no common base
        raise t.UserError(f"{FETCHED['repo_id']}: {t.first_line(error)}; fetch hellaswag_val.jsonl "
                          "by hand and name it with --file") from None
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
        raise t.UserError(f"{path}: expected sha256 {SHA256[:12]}.., found {found[:12]}..; remove "
                          "it and try again")
    return path


def stories(path: Path) -> list:
    """Lines of the .jsonl, or rows of the parquet file as JSON."""
    if path.suffix != ".parquet":
        return path.read_text(encoding="utf-8").splitlines()
    import pyarrow.parquet
    table = pyarrow.parquet.read_table(path, columns=["ctx", "endings", "label"])
    return [json.dumps(row) for row in table.to_pylist()]


class Item(NamedTuple):
    """A story, tokenised."""

    number: int                              # line of the file, from 0
    context: list                            # tokens
    endings: list                            # four lists of tokens
    sizes: list                              # bytes of each ending
    label: int


def read_items(path: Path, coder) -> list[Item]:
    """All items of the file; a line that is none is refused by its number."""
    items = []
    try:
        lines = stories(path)
    except (OSError, ValueError) as error:   # of the disk, of UTF-8, of parquet
        raise t.UserError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(lines):
        try:
            story = json.loads(line)
            endings = [" " + ending for ending in story["endings"]]
            item = Item(number, coder.encode_ordinary(story["ctx"]),
                        [coder.encode_ordinary(ending) for ending in endings],
                        [len(ending.encode()) for ending in endings], int(story["label"]))
            if not (len(endings) == 4 and 0 <= item.label < 4 and all(item.endings)):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise t.UserError(f"{path}: line {number + 1}: expected an item with ctx, four endings "
                              "and a label; fetch the file again") from None
        items.append(item)
    return items


def batches(items: list[Item], tokens: int) -> Iterator[list[Item]]:
    """Items of like length, as many as have at most `tokens` tokens together, at least one."""
    batch, size = [], 0
    for item in sorted(items, key=lambda i: len(i.context)):
        needed = sum(len(item.context) + len(e) + 1 for e in item.endings)
        if batch and size + needed > tokens:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += needed
    if batch:
        yield batch


def score(trained: Trained, batch: list[Item]) -> list[list[float]]:
    """Of each item, the sum of log-probabilities of each ending."""
    documents = [item.context + ending for item in batch for ending in item.endings]
    x_TD, borders = activations(trained, documents)
    sums, at = [], 0
    for item in batch:
        sums.append([])
        for ending in item.endings:          # position i of a document predicts its token i
            first = int(borders[at]) + len(item.context)
            logp = log_probabilities(trained, x_TD[first:first + len(ending)])
            token = torch.tensor(ending, device=logp.device)
            sums[-1].append(logp.gather(1, token[:, None]).sum().item())
            at += 1
    return sums


def judge(item: Item, sums: list[float]) -> dict:
    """The line of the results."""
    def best(values: list[float]) -> bool:
        return values.index(max(values)) == item.label

    return dict(item=item.number, label=item.label, log_probability=sums, acc=best(sums),
                acc_norm=best([v / len(e) for v, e in zip(sums, item.endings)]),
                acc_bytes=best([v / n for v, n in zip(sums, item.sizes)]))


def done_before(path: Path, items: int) -> dict[int, dict]:
    """Results of an earlier call; a last line that was cut off is dropped."""
    if not path.exists():
        return {}
    done, whole = {}, 0
    with open(path, "rb+") as file:
        for line in file:
            try:
                result = json.loads(line)
                if not line.endswith(b"\n"):
                    break
            except ValueError:
                break
            if not isinstance(result, dict) or not 0 <= result.get("item", -1) < items:
                raise t.UserError(f"{path}: not results of this file; name another with --out")
            done[result["item"]] = result
            whole += len(line)
        file.truncate(whole)
    return done


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="hellaswag", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--file", type=Path, help="hellaswag_val.jsonl; default: from the hub")
    parser.add_argument("--out", type=Path, help="results; default: beside the checkpoint")
    parser.add_argument("--items", type=int, help="only the first of them")
    parser.add_argument("--batch_tokens", type=int, default=16384)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    given = parser.parse_args(arguments)
    out = given.out or given.checkpoint.with_suffix(".hellaswag.jsonl")
    try:
        trained = load(given.checkpoint, given.device)
        items = read_items(given.file or fetch(), tokenizer(trained))[:given.items]
        done = done_before(out, len(items))
    except t.UserError as error:
        print(f"hellaswag: {error.line}", file=sys.stderr)
        return 2
    left = [item for item in items if item.number not in done]
    with open(out, "a", encoding="utf-8") as file, tqdm(total=len(items), initial=len(done)) as bar:
        for batch in batches(left, given.batch_tokens):
            for item, sums in zip(batch, score(trained, batch)):
                done[item.number] = judge(item, sums)
                file.write(json.dumps(done[item.number]) + "\n")
            file.flush()
            bar.update(len(batch))
    for name, what in (("acc", "sum"), ("acc_norm", "per token"), ("acc_bytes", "per byte")):
        right = sum(result[name] for result in done.values())
        print(f"{name:10s} {100 * right / len(done):6.2f} %  ({right:,} of {len(done):,}, {what})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
