"""Write the weights of a checkpoint as a safetensors file.

    ./run.sh export CHECKPOINT OUT.safetensors [--dtype=bf16]

The file holds the parameters under their names in train_gpt.GPT, and as metadata the settings, as
JSON, and the step. Matrices of equal shape lie in banks:

    embed, head           [V, D]         V: the vocabulary rounded up to 128, D: width
    value_embeds          [tables, V, D]
    attention_bank        [4 n, D, D]    q, k, v, o of each of n attentions, [out, in]
    mlp_bank              [2 L, D, F]    up [in, out] and down [out, in] of each of L blocks
    attention_gates, smear_gate, smear_scale, residual_mix, value_mix, skip_gates

To load it again:

    import json
    from safetensors import safe_open
    import train_gpt
    with safe_open("OUT.safetensors", "pt") as file:
        saved = json.loads(file.metadata()["settings"])
        tuples = lambda v: tuple(map(tuples, v)) if isinstance(v, list) else v
        settings = train_gpt.Settings(**{n: tuples(v) for n, v in saved.items()})
        model = train_gpt.GPT(settings)
        model.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})
"""
import argparse
import json
import os
import sys
from pathlib import Path

import torch
from _model import read_checkpoint, t


def export(checkpoint: Path, out: Path, dtype: torch.dtype) -> int:
    """Bytes written: the file is there whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    content = read_checkpoint(checkpoint)
    tensors = {name.removeprefix("model."): tensor.to(dtype).contiguous()
               for name, tensor in content["state"].items() if name.startswith("model.")}
    metadata = {"settings": json.dumps(content["settings"]), "step": str(content["step"]),
                "format": "pt"}
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except SafetensorError as error:         # no folder, no room
        raise t.UserError(f"{out}: cannot be written ({error})") from None
    finally:
        temporary.unlink(missing_ok=True)
    return out.stat().st_size


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="export", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    given = parser.parse_args(arguments)
    try:
        size = export(given.checkpoint, given.out,
                      dict(fp32=torch.float32, bf16=torch.bfloat16)[given.dtype])
    except t.UserError as error:
        print(f"export: {error.line}", file=sys.stderr)
        return 2
    print(f"{given.out}: {size / 2 ** 20:,.1f} MiB, {given.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
