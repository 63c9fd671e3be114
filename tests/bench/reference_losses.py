"""Losses of simple models on the tiny track's validation tokens, for scale:

    python tests/bench/reference_losses.py

uniform: every token alike. unigram: counts of the training shard, one added to each. bigram: counts
of pairs, mixed with the unigram model by a pseudo-count that is chosen on the last tenth of the
training shard.
"""
import math
from pathlib import Path

import numpy as np

VOCAB = 4097
TINY = Path(__file__).resolve().parents[2] / "data" / "tiny"


def shard(name: str) -> np.ndarray:
    return np.fromfile(TINY / name, "<u2", offset=1024).astype(np.int64)


def losses(fit: np.ndarray, score: np.ndarray, pseudo: float) -> tuple[float, float]:
    """Mean loss in nats of the unigram and the bigram model, fitted on one stream, on another."""
    unigram = np.bincount(fit, minlength=VOCAB) + 1.0
    unigram /= unigram.sum()
    pairs = np.bincount(fit[:-1] * VOCAB + fit[1:], minlength=VOCAB ** 2)
    before = np.bincount(fit[:-1], minlength=VOCAB)
    a, b = score[:-1], score[1:]
    bigram = (pairs[a * VOCAB + b] + pseudo * unigram[b]) / (before[a] + pseudo)
    return -np.log(unigram[b]).mean(), -np.log(bigram).mean()


def main() -> None:
    train, val = shard("tiny_train_000000.bin"), shard("tiny_val_000000.bin")
    cut = len(train) * 9 // 10
    pseudo = min((2.0 ** n for n in range(14)),
                 key=lambda p: losses(train[:cut], train[cut:], p)[1])
    unigram, bigram = losses(train, val, pseudo)
    text_bytes = 606_868                     # of the validation shard, data/tiny/README.md
    for name, loss in (("uniform", math.log(VOCAB)), ("unigram", unigram), ("bigram", bigram)):
        bits = loss * (len(val) - 1) / math.log(2) / text_bytes
        print(f"{name:8s} {loss:.4f} nats a token, {bits:.4f} bits a byte")


if __name__ == "__main__":
    main()
