"""What generate, hellaswag and export share: a checkpoint, its model, its tokenizer."""
import pickle
import sys
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# in the place of this folder, whose profile.py would hide the one that torch.compile imports
sys.path[:1] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "data")]

import train_gpt as t  # noqa: E402


class Trained(NamedTuple):
    """A model as a checkpoint left it."""

    model: t.GPT
    settings: t.Settings
    step: int
    stage: t.Stage                           # windows and rotary frequencies that belong to `step`
    blocked: bool                            # attention by the reference, as on a CPU


def read_checkpoint(path: Path) -> dict:
    """What `Run.checkpoint` wrote, on the CPU, mapped from the file: tensors and plain values."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise t.UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError):
        content = None
    if not isinstance(content, dict) or not {"settings", "step", "state"} <= set(content):
        raise t.UserError(f"{path}: not a checkpoint of train_gpt.py, or a damaged one")
    return content


def load(path: Path, device: str = "auto") -> Trained:
    """The model of a checkpoint, ready to be asked; fp32 on a CPU, bf16 on a GPU."""
    content = read_checkpoint(path)
    known = {f.name for f in fields(t.Settings)}
    s = t.Settings(**{n: v for n, v in content["settings"].items() if n in known})
    device = t.choose_device(t.replace(s, device=device))
    cuda = device.type == "cuda"
    model = t.GPT(s, torch.bfloat16 if cuda else torch.float32)
    for name, p in model.named_parameters():
        saved = content["state"].get(f"model.{name}")
        if saved is None or saved.shape != p.shape:
            found = "nothing" if saved is None else str(list(saved.shape))
            raise t.UserError(f"{path}: parameter {name}: expected {list(p.shape)}, found {found}; "
                              "it was made by another train_gpt.py: use the one in its record")
        p.data.copy_(saved)
    stage = t.stage_at(content["step"], t.stages(s))
    return Trained(model.to(device), s, content["step"], stage, not cuda)


def pack(documents: list[list[int]], eos: int, device: torch.device) -> t.Batch:
    """Documents, each opened by EoS, end to end; padded to whole blocks with one more document."""
    lengths = [len(tokens) + 1 for tokens in documents]
    total = t.up_to(sum(lengths), t.BLOCK)
    inputs, positions = np.full(total, eos, np.int32), np.zeros(total, np.int32)
    borders = np.cumsum([0, *lengths, total - sum(lengths)]).astype(np.int32)
    for tokens, start in zip(documents, borders):
        inputs[start + 1:start + 1 + len(tokens)] = tokens
    for start, end in zip(borders, borders[1:]):
        positions[start:end] = np.arange(end - start)
    arrays = inputs, np.full(total, -1), positions, borders
    return t.Batch(*(torch.from_numpy(a).to(device) for a in arrays))


@torch.no_grad()
def activations(trained: Trained, documents: list[list[int]]) -> tuple[Tensor, Tensor]:
    """x_TD behind the last norm for packed documents, and where each begins, int32 [N + 1]."""
    device = trained.model.head.device
    batch = pack(documents, trained.settings.vocab_size - 1, device)
    longest = max(map(len, documents)) + t.BLOCK + 1
    stage = trained.stage
    if trained.blocked:                      # the reference lays out no more than the text is long
        spans = [min(span, t.up_to(longest, t.BLOCK) // t.BLOCK) for span in stage.spans]
        stage = stage._replace(spans=tuple(spans))
    view = t.make_view(batch, stage, longest, "blocked" if trained.blocked else "varlen_attn")
    return trained.model(batch, view), batch.cu_seqlens


@torch.no_grad()
def log_probabilities(trained: Trained, x_CD: Tensor) -> Tensor:
    """Of every token of the vocabulary, behind each of these activations: fp32 [C, vocab]."""
    s = trained.settings
    z_CV = (x_CD @ trained.model.head.to(x_CD.dtype).T).float()[:, :s.vocab_size]
    return (s.logit_cap * torch.sigmoid(z_CV / s.logit_slope)).log_softmax(1)


def tokenizer(trained: Trained):
    """GPT-2's byte-pair encoding as the model knows it; the id behind its last rank is EoS."""
    from make_shards import encoding
    return encoding(trained.settings.vocab_size)
