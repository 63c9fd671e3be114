"""Let a checkpoint go on with a text.

    ./run.sh generate records/<record>/<id>.pt --prompt="The sea"
    ./run.sh generate CHECKPOINT --prompt="The sea" --samples=3 --tokens=100 --temperature=0.8
                      --top_k=50 --top_p=0.95 --seed=1 --device=cpu

The prompt is the beginning of a document, as in training. It works on the checkpoint of a run that
goes on, as files are replaced whole. Nothing is cached: each token costs one pass over the text so
far, which keeps the model's mathematics in one place and the result exact.
"""
import argparse
import codecs
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from _model import Trained, activations, load, log_probabilities, t, tokenizer
from torch import Tensor


def choose(logp_V: Tensor, temperature: float, top_k: int, top_p: float,
           generator: torch.Generator) -> int:
    """A token: the likeliest at temperature 0, else drawn from the `top_k` likeliest, and of those
    from the fewest that hold `top_p` of the probability."""
    if temperature == 0:
        return int(logp_V.argmax())
    value, token = (logp_V / temperature).sort(descending=True, stable=True)
    p = value.softmax(0)
    if top_k:
        p[top_k:] = 0
    p[1:][p.cumsum(0)[:-1] >= top_p * p.sum()] = 0
    return int(token[torch.multinomial(p, 1, generator=generator)])


def continuation(trained: Trained, prompt: list[int], tokens: int, temperature: float, top_k: int,
                 top_p: float, seed: int) -> Iterator[int]:
    """Up to `tokens` tokens behind the prompt; EoS ends the document."""
    text, generator = list(prompt), torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        x_TD, _ = activations(trained, [text])
        logp_V = log_probabilities(trained, x_TD[len(text):len(text) + 1])[0].cpu()
        token = choose(logp_V, temperature, top_k, top_p, generator)
        if token == trained.settings.vocab_size - 1:
            return
        text.append(token)
        yield token


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="generate", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompt", default="", help="beginning of the document")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of a sample")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    parser.add_argument("--top_k", type=int, default=0, help="0: all")
    parser.add_argument("--top_p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0, help="of the first sample")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    given = parser.parse_args(arguments)
    for name, right in (("temperature", given.temperature >= 0), ("top_k", given.top_k >= 0),
                        ("top_p", 0 < given.top_p <= 1), ("tokens", given.tokens > 0)):
        if not right:
            parser.error(f"--{name}={getattr(given, name)} is out of range")
    try:
        trained = load(given.checkpoint, given.device)
    except t.UserError as error:
        print(f"generate: {error.line}", file=sys.stderr)
        return 2
    coder = tokenizer(trained)
    prompt = coder.encode_ordinary(given.prompt)
    for number in range(given.samples):
        letters = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may be two tokens
        print(("" if number == 0 else "\n---\n") + given.prompt, end="", flush=True)
        for token in continuation(trained, prompt, given.tokens, given.temperature, given.top_k,
                                  given.top_p, given.seed + number):
            print(letters.decode(coder.decode_single_token_bytes(token)), end="", flush=True)
        print(letters.decode(b"", final=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
