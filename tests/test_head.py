"""The head's loss and gradients equal a plain fp64 reference, whatever the chunk."""
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt
from train_gpt import FINEWEB

S = replace(FINEWEB, vocab_size=300)         # cap 30, slope 7.5
PADDED, D, T = 384, 48, 100


def head(chunk: int, kind: str = "reference") -> train_gpt.Head:
    return train_gpt.Head(S.vocab_size, S.logit_cap, S.logit_slope, chunk, False, kind)


def inputs(tokens: int = T, seed: int = 0, spread: float = 5.0) -> tuple[Tensor, Tensor, Tensor]:
    """Activations of rms 1, weights that make logits of a deviation `spread`, targets with gaps."""
    generator = torch.Generator().manual_seed(seed)
    x = F.rms_norm(torch.randn(tokens, D, generator=generator), (D,))
    weight = torch.randn(PADDED, D, generator=generator) * spread / D ** 0.5
    targets = torch.randint(0, S.vocab_size, (tokens,), generator=generator)
    targets[1::5] = -1
    return x, weight, targets


def truth(x: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.0) -> list[Tensor]:
    """Loss and the gradients of factor * loss for x and weight, by autograd in fp64."""
    x, weight = (t.double().requires_grad_() for t in (x.detach(), weight.detach()))
    logits = 30 * torch.sigmoid(x @ weight[:S.vocab_size].T / 7.5)
    loss = F.nll_loss(logits.log_softmax(1), targets, ignore_index=-1, reduction="sum")
    return [loss.detach(), *torch.autograd.grad(factor * loss, (x, weight))]


def ours(x: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.0,
         chunk: int = 32) -> list[Tensor]:
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    loss = train_gpt.head_loss(x, weight, targets, head(chunk))
    return [loss.detach(), *torch.autograd.grad(factor * loss, (x, weight))]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(("loss", "dx", "dW"), found, expected):
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.double() / scale, b.double() / scale, rtol=0, atol=2e-6,
                                   msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("chunk", [1, 7, 32, 50, 99, 100, 101, 1000])
def test_any_chunk_gives_the_loss_and_gradients_of_the_reference(chunk):
    close(ours(*inputs(), chunk=chunk), truth(*inputs()))


@pytest.mark.parametrize("factor", [3.5, -1.0, 1 / 393216, 0.0])
def test_the_incoming_gradient_is_honoured(factor):
    found, expected = ours(*inputs(), factor), truth(*inputs(), factor)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-6 * abs(factor) * 100)
    unit = ours(*inputs())
    for a, b in zip(found[1:], unit[1:]):
        torch.testing.assert_close(a, b * factor)


def test_targets_of_minus_one_count_nothing():
    x, weight, targets = inputs()
    loss, dx, dweight = ours(x, weight, targets)
    counted = targets >= 0
    assert 0 < counted.sum() < T
    assert (dx[~counted] == 0).all() and (dx[counted] != 0).any(1).all()
    close([loss, dx[counted], dweight], ours(x[counted], weight, targets[counted]))
    nothing = ours(x, weight, torch.full_like(targets, -1))
    assert all((t == 0).all() for t in nothing)


@pytest.mark.parametrize("padding", [0.0, 1e4, -1e4])
def test_padding_rows_get_no_probability_and_no_gradient(padding):
    """Rows 300 to 383 belong to no token: whatever they hold, nothing changes."""
    x, weight, targets = inputs()
    plain = ours(x, weight, targets)
    weight[S.vocab_size:] = padding
    changed = ours(x, weight, targets)
    assert all(torch.equal(a, b) for a, b in zip(plain, changed))
    assert (changed[2][S.vocab_size:] == 0).all() and (changed[2][:S.vocab_size] != 0).any()
    assert torch.equal(*(train_gpt.token_losses(x, w, targets, head(32))
                         for w in (inputs()[1], weight)))


@pytest.mark.parametrize("seed", range(3))
def test_bf16_errs_no_more_than_twice_a_naive_bf16_head(seed):
    """|ours - truth| <= 2 |naive - truth| + atol, the truth being of the same bf16 inputs."""
    x, weight, targets = inputs(seed=seed)
    x, weight = x.bfloat16(), weight.bfloat16()
    exact = truth(x, weight, targets)
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = 30 * torch.sigmoid(a @ b[:S.vocab_size].T / 7.5)
    loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    naive = [loss.detach(), *torch.autograd.grad(loss, (a, b))]
    found = ours(x, weight.float(), targets)
    assert [t.dtype for t in found] == [torch.float32, torch.bfloat16, torch.float32]
    for name, mine, theirs, right in zip(("loss", "dx", "dW"), found, naive, exact):
        errors = [(t.double() - right).norm().item() for t in (mine, theirs)]
        assert errors[0] <= 2 * errors[1] + 1e-4 * right.norm().item(), (name, errors)


def test_logits_at_the_cap():
    """Far beyond the cap every logit is 0 or 30, the gradient vanishes, all is finite."""
    x, weight, targets = inputs(spread=1e6)
    found = ours(x, weight, targets)
    close(found, truth(x, weight, targets))
    assert all(t.isfinite().all() for t in found) and found[1].abs().max() < 1e-6
    assert found[0] / (targets >= 0).sum() > 10


@pytest.mark.parametrize("tokens", [1, 2, 100])
def test_one_token_and_equal_targets(tokens):
    x, weight, targets = inputs(tokens)
    targets[:] = S.vocab_size - 1            # the last real row, beside the padding
    close(ours(x, weight, targets), truth(x, weight, targets))


@pytest.mark.parametrize("chunk", [1, 32, 1000])
def test_token_losses_sum_to_the_head_loss(chunk):
    x, weight, targets = inputs()
    losses = train_gpt.token_losses(x, weight, targets, head(chunk))
    assert losses.dtype == torch.float32 and losses.shape == (T,)
    assert (losses[targets < 0] == 0).all()
    assert losses.sum().item() == pytest.approx(ours(x, weight, targets)[0].item(), rel=1e-6)
    logits = 30 * torch.sigmoid(x.double() @ weight[:S.vocab_size].double().T / 7.5)
    expected = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=2e-5)


class Largest(TorchDispatchMode):
    """Remembers the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_the_logits_of_all_tokens_never_exist_at_once():
    tokens, chunk = 4096, 64
    x, weight, targets = inputs(tokens)
    most = max(tokens * D, PADDED * D, chunk * PADDED)
    assert most < tokens * PADDED / 4
    with Largest() as largest:               # a mode does not look into an operator: its body then
        total, dx, dweight = train_gpt.head_loss_op._init_fn(x, weight, targets, *head(chunk))
    assert chunk * PADDED <= largest.elements <= most
    close([total, dx, dweight], truth(x, weight, targets))
    with Largest() as largest:
        train_gpt.token_losses(x, weight, targets, head(chunk))
    assert chunk * PADDED <= largest.elements <= most
    x.requires_grad_(), weight.requires_grad_()
    with Largest() as largest:               # what autograd does around the operator
        train_gpt.head_loss(x, weight, targets, head(chunk)).backward()
    assert largest.elements <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    """torch's own checks of a custom operator: schema, fake tensors, autograd, AOTAutograd."""
    x, weight, targets = inputs()
    torch.library.opcheck(train_gpt.head_loss_op, (
        x.to(dtype).requires_grad_(), weight.requires_grad_(), targets, *head(32)))
