"""The Triton kernels against plain torch, in Triton's interpreter; tests/test_kernels.py runs this.

The rule for whatever is rounded: its error against fp64 is at most twice that of the same rounding
written plainly in torch, and a little.
"""
import importlib.util
import sys
from pathlib import Path

import interpreted  # must come before triton
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime import interpreter

import train_gpt

SOURCE = Path(train_gpt.__file__).read_text(encoding="utf-8")
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
assert interpreted.DTYPES["bf16"] is BF16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(found: Tensor, truth: Tensor) -> float:
    """Relative distance: |found - truth| / |truth|."""
    return ((found.double() - truth).norm() / truth.norm().clamp(min=1e-30)).item()


# ---- one kernel at a time: each check takes the module that holds the kernels --------------------

def check_product(t) -> None:
    for M, N, K, add in ((70, 50, 96, False), (300, 130, 1056, True), (128, 256, 128, False),
                         (1, 1000, 32, True), (1000, 1, 1152, False)):
        a, b = random(M, K).to(E5M2), random(N, K, seed=1).to(E4M3)
        scale, before = torch.tensor(0.37), random(M, N, seed=2)
        truth = 0.37 * a.double() @ b.double().T + before.double() * add
        out = t.triton_product(a, b, scale, torch.float32, before.clone() if add else None)
        assert distance(out, truth) < 1e-5
        assert distance(t.triton_product(a, b, scale, BF16), truth - before.double() * add) < 3e-3
        rows = t.triton_product(a, b, scale, torch.float32, before[:M // 2 + 1].clone())
        assert distance(rows, (truth + before.double() * (not add))[:M // 2 + 1]) < 1e-5


def check_quantise(t) -> None:
    for M, N, rows in ((5, 48, 128), (130, 80, 256), (64, 64, 64)):
        x = random(M, N) * random(M, 1, seed=1).exp()
        x[0, :4] = torch.tensor([0.0, 1e4, -1e4, 1e-9])
        for value in (x, x.to(BF16)):
            q, q_t = t.quantise(value, torch.tensor(0.02), rows)
            expected = (value.float() / 0.02).to(E4M3)
            assert torch.equal(q[:M].view(torch.uint8), expected.view(torch.uint8))
            assert torch.equal(q_t.view(torch.uint8), q.view(torch.uint8).T)
            assert q.shape == (rows, N) and (q[M:].view(torch.uint8) == 0).all()


def logits(C: int, V: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """bf16 logits far beyond the cap and near 0, targets with gaps, and the truth in fp64: the
    losses and their gradient for the logits."""
    z = (random(C, V) * 10 ** torch.linspace(-2, 2, C)[:, None]).to(BF16)
    targets = torch.randint(0, vocab, (C,), generator=torch.Generator().manual_seed(3))
    targets[1::4] = -1
    exact = z.double().requires_grad_()
    capped = 30 * torch.sigmoid(exact[:, :vocab] / 7.5)
    losses = F.cross_entropy(capped, targets, ignore_index=-1, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    return z, targets, losses.detach(), gradient


def check_losses(t) -> None:
    for C, V, vocab in ((9, 384, 300), (1, 5000, 4999), (5, 4096, 4096)):
        z, targets, truth, _ = logits(C, V, vocab)
        losses = t.capped_loss(z, targets, head(vocab))
        assert (losses.double() - truth).abs().max() < 2e-5
        assert (losses[targets < 0] == 0).all()


def check_gradient(t) -> None:
    for C, V, vocab in ((9, 384, 300), (70, 200, 200), (1, 130, 129)):
        z, targets, _, truth = logits(C, V, vocab)
        g, g_t = torch.empty(C, V, dtype=E5M2), torch.empty(V, C, dtype=E5M2)
        t.capped_loss(z, targets, head(vocab), 2.0 ** 15, g, g_t)
        naive = (truth * 2 ** 15).to(torch.float32).to(E5M2).double() / 2 ** 15
        assert distance(g.double() / 2 ** 15, truth) <= 2 * distance(naive, truth)
        assert torch.equal(g_t.view(torch.uint8), g.view(torch.uint8).T)
        assert (g.float()[targets < 0] == 0).all() and (g.float()[:, vocab:] == 0).all()
        t.capped_loss(z, targets, head(vocab), g_CV=z)  # over the logits
        assert distance(z, truth) <= 2 * distance(truth.to(BF16), truth)


def check_symmetric(t) -> None:
    for B, M, K in ((2, 150, 208), (1, 128, 64), (3, 300, 80), (1, 1, 16)):
        x, add = random(B, M, K).to(BF16), random(B, M, M, seed=1)
        add = (add + add.mT).to(BF16)
        plain = t.symmetric_op(x, None, 1.0, 0.5)
        both = t.symmetric_op(x, add, -2.0, 0.5)
        truth = 0.5 * x.double() @ x.double().mT
        assert torch.equal(plain, plain.mT) and torch.equal(both, both.mT)
        for found, true in ((plain, truth), (both, truth - 2 * add.double())):
            assert distance(found, true) <= 2 * distance(true.to(BF16), true) + 1e-4


CHECKS = dict(product=check_product, quantise=check_quantise, losses=check_losses,
              gradient=check_gradient, symmetric=check_symmetric)


def head(vocab: int, chunk: int = 64, kind: str = "bf16") -> train_gpt.Head:
    return train_gpt.Head(vocab, 30.0, 7.5, chunk, False, kind)


@pytest.mark.parametrize("name", CHECKS)
def test_kernel(name):
    CHECKS[name](train_gpt)


# ---- mutants: the checks above find them ---------------------------------------------------------

MUTANTS = [
    ("product", "a += bank * M * K + (rows % M)", "a += bank * M * K + rows * 0 + (rows % N)"),
    ("product", "for k in range(0, K, BK)", "for k in range(BK, K, BK)"),
    ("product", "total += tl.dot(", "total = tl.dot("),
    ("symmetric", "beta * tl.load(add + at", "beta * tl.load(c + at"),
    ("quantise", "q.T.contiguous()", "q.contiguous()"), ("quantise", "x_MN.float() /", "x_MN *"),
    ("losses", "total += tl.where(cols < vocab, ", "total += tl.where(cols < V, "),
    ("losses", "tl.where(target >= 0, tl.log(total) - aim, 0.0)", "tl.log(total) - aim"),
    ("losses", "for first in range(0, vocab, B)", "for first in range(0, vocab - B, B)"),
    ("gradient", "gate * (1 - gate)", "gate"),
    ("gradient", "(cols[None, :] == target)", "(cols[None, :] == target + 1)"),
    ("gradient", "p = tl.where((cols < vocab)[None, :], ", "p = tl.where((cols < V)[None, :], "),
    ("gradient", "tl.store(g_t + at, tl.trans(d)", "tl.store(g_t + at, tl.trans(d) * 0"),
    ("symmetric", "if n > m:", "if n >= m:"),
    ("symmetric", "at = bank * M * N + cols.to(tl.int64)[:, None] * M", "at = bank * M + cols"
     ".to(tl.int64)[:, None] * M"),
    ("symmetric", "b += bank * N * K", "b += 0 * bank * N * K"),
]


@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_mutant_is_found(number, tmp_path):
    name, old, new = MUTANTS[number]
    assert SOURCE.count(old) >= 1, f"{old!r} is not in train_gpt.py"
    path = tmp_path / f"mutant_{number}.py"
    path.write_text(SOURCE.replace(old, new).replace('"speedrun::', f'"mutant{number}::'))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(Exception):           # mostly AssertionError; a mutant may also crash
        CHECKS[name](module)


# ---- the whole head ------------------------------------------------------------------------------

def case(T: int, D: int, V: int, vocab: int, spread: float = 5.0) -> list[Tensor]:
    x = F.rms_norm(random(T, D), (D,))
    weight = random(V, D, seed=1) * spread / D ** 0.5
    targets = torch.randint(0, vocab, (T,), generator=torch.Generator().manual_seed(2))
    if T > 3:
        targets[1::5] = -1
    return [x, weight, targets]


def naive(x: Tensor, weight: Tensor, targets: Tensor, vocab: int, dtype, gradient_dtype) -> list:
    """Loss, dx, dW: every factor of a product rounded, sums in fp64. fp64: no rounding at all."""
    def rounded(y: Tensor, dtype: torch.dtype, top: float) -> Tensor:
        if dtype in (torch.float64, BF16):
            return y.to(dtype).double()
        scale = y.abs().max().clamp(min=1e-20) / top
        return (y / scale).float().to(dtype).double() * scale

    x, w = rounded(x.double(), dtype, 448), rounded(weight.double(), dtype, 448)
    z = (x @ w.T).detach()
    z = (z if dtype == torch.float64 else z.to(BF16).double()).requires_grad_()
    capped = 30 * torch.sigmoid(z[:, :vocab] / 7.5)
    loss = F.cross_entropy(capped, targets, ignore_index=-1, reduction="sum")
    (g,) = torch.autograd.grad(loss, z)
    g = rounded(g, gradient_dtype, 32768)
    return [loss.detach(), g @ w, g.T @ x]


CASES = {
    "ragged": (case(100, 96, 384, 300), 300), "one token": (case(1, 64, 300, 300), 300),
    "wide": (case(33, 160, 1024, 1000), 1000), "at the cap": (case(40, 64, 256, 250, 300.0), 250),
    "gpt2 unpadded": (case(20, 32, 50257, 50257), 50257),
    "gpt2 padded": (case(20, 32, 50304, 50257), 50257),
    "equal targets": ([*case(50, 64, 256, 256)[:2], torch.full((50,), 7)], 256),
    "no target": ([*case(50, 64, 256, 256)[:2], torch.full((50,), -1)], 256),
    "zero weight": ([case(50, 64, 256, 200)[0], torch.zeros(256, 64), case(50, 64, 256, 200)[2]],
                    200),
}
CASES["large and small rows"] = ([random(40, 1, seed=5).mul(3).exp() * CASES["at the cap"][0][0],
                                  *CASES["at the cap"][0][1:]], 250)


# in FP8 the unpadded vocabulary is padded to the other's size, so that one would be the same again
@pytest.mark.parametrize("name, kind", [
    (name, kind) for name in CASES for kind in ("bf16", "fp8-triton")
    if (name, kind) != ("gpt2 padded", "fp8-triton")])
def test_head(name, kind):
    (x, weight, targets), vocab = CASES[name]
    x = x.to(BF16)
    xs, ws = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = train_gpt.head_loss(xs, ws, targets, head(vocab, 64, kind))
    found = [loss.detach(), *torch.autograd.grad(3 * loss, (xs, ws))]
    found[1:] = [g / 3 for g in found[1:]]   # the incoming gradient is honoured
    truth = naive(x, weight, targets, vocab, torch.float64, torch.float64)
    dtypes = (BF16, BF16) if kind == "bf16" else (E4M3, E5M2)
    plain = naive(x, weight, targets, vocab, *dtypes)
    for found, plain, true in zip(found, plain, truth):
        assert (found.double() - true).norm() <= 2 * (plain - true).norm() + 4e-3 * true.norm()
    losses = train_gpt.token_losses(x, weight, targets, head(vocab, 64, kind))
    close = train_gpt.token_losses(x, weight, targets, head(vocab, 64, "reference"))
    torch.testing.assert_close(losses, close, rtol=1e-4, atol=1e-4)  # never FP8


def test_polar_express_by_kernels(monkeypatch):
    bank = random(3, 144, 208)
    expected = train_gpt.polar_express(bank)
    monkeypatch.setattr(train_gpt, "symmetric", lambda x, add=None, b=1.0, c=1.0:
                        train_gpt.symmetric_op(x, add, b, c))
    found = train_gpt.polar_express(bank)
    values = torch.linalg.svdvals(found.float())
    assert distance(found, expected.double()) < 0.08 and 0.7 < values.min() < values.max() < 1.3


# ---- offsets beyond 2^31 -------------------------------------------------------------------------

def test_rows_beyond_two_to_the_31_elements(monkeypatch):
    """42,752 x 50,304 logits are 2.15e9 elements, and only the last rows of memory are touched."""
    C, V = 42752, 50304
    z, last = torch.empty(C, V, dtype=BF16), C - 1
    a, b = random(C, 32).to(E4M3), random(V, 32, seed=1).to(E4M3)
    targets, sums = torch.full((C,), 11), torch.ones(C)
    start = {}
    old = interpreter.InterpreterBuilder.create_get_program_id
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", lambda self, axis:
                        interpreter.TensorHandle(old(self, axis).data + start.get(axis, 0),
                                                 old(self, axis).dtype))
    start[0] = (C // 128) * (-(-V // 256)) - 1  # the last tile
    train_gpt.product_kernel[(1, 1)](a, b, None, z, torch.tensor(1.0), 1.0, 1.0, C, V, 32,
                                     MIRROR=False, PROMOTE=False, BM=128, BN=256, BK=32)
    corner = a[-128:].float() @ b[-128:].float().T  # V is 196.5 tiles of 256
    assert distance(z[-128:, -128:], corner.double()) < 3e-3
    z[last] = random(V).to(BF16)
    losses = torch.zeros(C)
    start[0] = last
    train_gpt.loss_kernel[(1,)](z, targets, losses, sums, V, V, 30.0, 7.5, B=4096)
    truth = F.cross_entropy(30 * torch.sigmoid(z[last].double() / 7.5)[None], targets[:1])
    assert abs(losses[last].item() - truth.item()) < 1e-4
    g, g_t = torch.empty(C, V, dtype=E5M2), torch.empty(V, C, dtype=E5M2)
    start = {0: C // 64 - 1, 1: V // 64 - 1}
    monkeypatch.undo()
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", lambda self, axis:
                        interpreter.TensorHandle(old(self, axis).data + start.get(axis, 0),
                                                 old(self, axis).dtype))
    train_gpt.gradient_kernel[(1, 1)](z, targets, sums, g, g_t, 2.0 ** 15, C, V, V, 30.0, 7.5, B=64)
    gate = torch.sigmoid(z[last, -64:].double() / 7.5)
    truth = (30 * gate).exp() / sums[last].double() * gate * (1 - gate) * 4
    found = g[last, -64:].double() / 2 ** 15
    assert distance(found, truth) < 0.1
    assert torch.equal(g_t[-64:, last].double(), g[last, -64:].double())
