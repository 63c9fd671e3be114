"""On a real CUDA device: the kernels at full size, attention against its reference, a short run.

They skip without a device; tests/test_kernels.py shows what can be shown then.
"""
from dataclasses import replace

import pytest
import torch

import train_gpt as t
from train_gpt import FINEWEB, TINY

pytestmark = pytest.mark.gpu

V, D = t.padded_vocab(FINEWEB), FINEWEB.width


@pytest.fixture(scope="module")
def machine() -> t.Machine:
    return t.choose_machine(FINEWEB)


def inputs(tokens: int, spread: float = 0.1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = t.norm(torch.randn(tokens, D, device="cuda", generator=generator)).bfloat16()
    weight = spread * torch.randn(V, D, device="cuda", generator=generator)
    targets = torch.randint(FINEWEB.vocab_size, (tokens,), device="cuda", generator=generator)
    targets[1::7] = -1
    return x, weight, targets


def kinds() -> list[str]:
    fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return ["bf16", *(t.FP8_HEADS if fp8 else ())]


def errors(found: tuple, truth: tuple) -> list[float]:
    return [((a.double() - b.double()).norm() / b.double().norm()).item()
            for a, b in zip(found, truth)]


@pytest.mark.parametrize("spread", [0.001, 0.1, 3.0])  # 3: logits far beyond the cap
@pytest.mark.parametrize("kind", kinds())
def test_head_at_full_size(machine, kind, spread):
    x, weight, targets = inputs(16384, spread)
    h = machine.head._replace(kind=kind)
    exact = t.head_loss_op(x.float(), weight, targets, *h._replace(kind="reference", chunk=1024))
    rounded = t.head_loss_op(x, weight, targets, *h._replace(kind="reference", chunk=1024))
    found = t.head_loss_op(x, weight, targets, *h)
    for mine, plain in zip(errors(found, exact), errors(rounded, exact)):
        assert mine < (0.1 if kind in t.FP8_HEADS else 2 * plain + 1e-4)
    assert errors(found[:1], exact[:1])[0] < 5e-3
    compiled = t.compiled(t.head_loss, True)(x, weight, targets, h)
    assert abs(compiled.item() / found[0].item() - 1) < 1e-6


@pytest.mark.parametrize("kind", kinds())
def test_chunks_of_more_than_two_to_the_31_logits(machine, kind):
    x, weight, targets = inputs(49152)
    if torch.cuda.mem_get_info()[0] < t.head_bytes(49152, V, D, machine.head._replace(
            chunk=49152, kind=kind)) * 1.2:
        pytest.skip("not enough memory for 49,152 rows of logits at once")
    small, large = (t.head_loss_op(x, weight, targets, *machine.head._replace(kind=kind, chunk=c))
                    for c in (8192, 49152))
    assert max(errors(large, small)) < 0.01


@pytest.mark.parametrize("shape", [(3, 768, 768), (24, 768, 3072), (2, 200, 520)])
def test_symmetric_product(shape):
    x = torch.randn(shape, device="cuda").bfloat16()
    symmetric = t.compiled(t.symmetric, True)  # eager, it is torch's product
    A = symmetric(x)
    truth = x.double() @ x.double().mT
    assert torch.equal(A, A.mT) and errors((A,), (truth,))[0] < 3e-3
    B, square = symmetric(A, A, -2.0, 0.5), A.double()
    assert errors((B,), (0.5 * square @ square - 2 * square,))[0] < 3e-3
    polar = t.compiled(t.polar_express, True)(x).float()
    values = torch.linalg.svdvals(polar)
    assert 0.7 < values.min() and values.max() < 1.3


@pytest.mark.parametrize("window", [128, 384, 2560])
def test_attention_against_its_reference(window):
    T, H, K = 8192, 6, 128
    q, k, v = (torch.randn(T, H, K, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    borders = torch.tensor([0, 5, 1000, 1001, 4000, T, T], dtype=torch.int32, device="cuda")
    positions = torch.arange(T, device="cuda")
    positions = (positions - borders[torch.searchsorted(borders, positions, right=True) - 1]).int()
    mask = t.block_mask(positions, window, -(-window // t.BLOCK))
    weights, results = torch.randn(T, H, K, device="cuda"), []
    for visible in (window, mask):
        y = t.attend(q * 0.1, k, v, visible, borders, T)
        results.append([y, *torch.autograd.grad((y.float() * weights).sum(), (q, k, v))])
    assert max(errors(*results)) < 0.02


def test_a_short_run_learns_and_the_head_was_tried(tmp_path):
    s = replace(TINY, steps=40, extra_steps=0, val_every=40, device="cuda",
                data_dir=str(t.Path(t.__file__).parent / "data" / "tiny"))
    run = t.Run(s, t.choose_machine(s))
    run.warm_up()
    assert run.machine.head.kind in ("reference", *kinds()) and len(run.tried) == 1 + len(kinds())
    first, batch = run.validate(0), list(range(4))
    for number in range(40):
        data = run.train_data.micro_batch([4 * number + n for n in batch])
        run.step(number, [lambda: data])
    assert abs(first - 8.318) < 0.01 and run.validate(40) < 5.5
