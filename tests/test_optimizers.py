"""Polar Express makes singular values alike; Muon and Adam are the published updates."""
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from train_gpt import FINEWEB, GPT, Group

SMALL = replace(
    FINEWEB, vocab_size=300, width=64, head_dim=32, mlp_width=96, layers=3, no_attention=(2,),
    long_window=(3,), value_layers=((1, 0),), skips=((3, 1),))

# -- Polar Express ---------------------------------------------------------------------------------
# Five odd polynomials act on each singular value by itself, so the matrix function is U f(S) V^T
# with the scalar f below. On [.001, 1], where f is equioscillating, it stays in the band.

COEFFICIENTS = (                             # arXiv 2505.16932, for 5 iterations
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))
BAND = (0.8588, 1.1412)


def scalar_map(value):
    """What five iterations make of a singular value of the normalised matrix."""
    for a, b, c in COEFFICIENTS:
        value = a * value + b * value ** 3 + c * value ** 5
    return value


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_values(values: Tensor, rows: int, cols: int) -> Tensor:
    """A matrix with these singular values, and zeros."""
    u, v = (torch.linalg.qr(normal(n, len(values), seed=n))[0] for n in (rows, cols))
    return u * values @ v.T


MATRICES = {
    "random": normal(1, 64, 64), "wide": normal(1, 32, 96), "tall": normal(1, 96, 32),
    "row": normal(1, 1, 50), "column": normal(1, 50, 1), "bank": normal(5, 24, 40),
    "huge": 1e6 * normal(1, 32, 48), "as small as gradients": 1e-7 * normal(1, 32, 48),
    "low rank": normal(1, 64, 5) @ normal(1, 5, 80, seed=1),
    "spread": with_values(torch.logspace(0, -2.5, 32).double(), 32, 64)[None],
    "one direction": with_values(torch.ones(1).double(), 48, 48)[None],
    "equal": torch.linalg.qr(normal(1, 40, 40))[0]}


def test_the_scalar_map_stays_in_the_band():
    mapped = scalar_map(np.geomspace(1e-3, 1, 1_000_001))
    assert BAND[0] < mapped.min() < BAND[0] + 1e-4 and BAND[1] - 1e-4 < mapped.max() < BAND[1]
    assert scalar_map(np.array([0.0]))[0] == 0
    assert train_gpt.POLAR_EXPRESS == COEFFICIENTS


@pytest.mark.parametrize("name", MATRICES)
def test_polar_express_applies_the_scalar_map_to_the_singular_values(name):
    g = MATRICES[name]
    u, values, vh = torch.linalg.svd(g, full_matrices=False)
    normalised = values / (1.02 * values.norm(dim=-1, keepdim=True) + 2e-11)
    expected = (u * scalar_map(normalised)[:, None]) @ vh
    exact = train_gpt.polar_express(g, torch.float64)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-9)
    single = train_gpt.polar_express(g.float(), torch.float32)
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-3)
    assert single.dtype == torch.float32
    kept = torch.linalg.svdvals(single)[normalised > 1e-3]
    assert len(kept) and BAND[0] - 1e-3 < kept.min() and kept.max() < BAND[1] + 1e-3
    lost = torch.linalg.svdvals(exact)[normalised < 1e-12]
    assert len(lost) == 0 or lost.max() < 1e-6  # a direction without gradient stays without step
    rough = train_gpt.polar_express(g.float())
    assert rough.dtype == torch.bfloat16
    if normalised.min() > 0.02:              # smaller ones drown in the rounding to 8 bits
        assert (rough.double() - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", ["random", "wide", "tall", "bank", "low rank"])
def test_polar_express_of_the_transpose_is_the_transpose(name):
    g = MATRICES[name]
    torch.testing.assert_close(train_gpt.polar_express(g.mT, torch.float64),
                               train_gpt.polar_express(g, torch.float64).mT, rtol=0, atol=1e-9)


def test_polar_express_works_on_the_wide_side():
    """A tall matrix costs no more than its transpose."""
    costs = []
    for shape in ((96, 16), (16, 96)):
        with FlopCounterMode(display=False) as counter:
            train_gpt.polar_express(normal(1, *shape), torch.float64)
        costs.append(counter.get_total_flops())
    assert costs[0] == costs[1] == 5 * 2 * (2 * 16 * 16 * 96 + 16 ** 3)


@pytest.mark.parametrize("factor", [1e-5, 1e-3, 2.0 ** 40])
def test_polar_express_ignores_a_positive_factor(factor):
    g = MATRICES["wide"].float()
    torch.testing.assert_close(*(train_gpt.polar_express(x, torch.float32)
                                 for x in (g, factor * g)), rtol=0, atol=1e-4)
    torch.testing.assert_close(train_gpt.polar_express(-g, torch.float32),
                               -train_gpt.polar_express(g, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_polar_express_of_zero_is_zero(dtype):
    assert (train_gpt.polar_express(torch.zeros(2, 8, 16), dtype) == 0).all()


@pytest.mark.parametrize("shape", [(6, 24, 40), (6, 40, 24)])
def test_a_bank_is_its_matrices_one_by_one(shape):
    g = normal(*shape) * torch.logspace(-6, 6, 6)[:, None, None]
    one_by_one = torch.stack([train_gpt.polar_express(x[None], torch.float64)[0] for x in g])
    torch.testing.assert_close(train_gpt.polar_express(g, torch.float64), one_by_one)


# -- Updates ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_equals_torch_over_20_steps(decay, dtype):
    lr, betas, eps = 0.03, (0.8, 0.95), 1e-8
    ours, m, v = normal(6, 5).to(dtype), *torch.zeros(2, 6, 5, dtype=dtype)
    theirs = torch.nn.Parameter(ours.clone())
    kind = torch.optim.AdamW if decay else torch.optim.Adam
    optimizer = kind([theirs], lr=lr, betas=betas, eps=eps, weight_decay=decay)
    for step in range(1, 21):
        theirs.grad = (normal(6, 5, seed=step) * 10.0 ** -(step % 5)).to(dtype)
        rate = lr / step                     # a schedule
        optimizer.param_groups[0]["lr"] = rate
        train_gpt.adam_update(ours, theirs.grad, m, v, torch.tensor(rate, dtype=dtype), betas, eps,
                              decay, torch.tensor(step, dtype=dtype))
        optimizer.step()
        atol = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(ours, theirs.data, rtol=0, atol=atol)


def test_eps_of_adam_is_that_of_a_summed_loss():
    """With loss and eps divided by the same number, Adam's step is the same: [1] sums the loss of
    49,152 tokens with an eps of 1e-8, ours is a mean."""
    assert FINEWEB.adam_eps == pytest.approx(1e-8 / 49152, rel=0.02)
    steps = []
    for size, eps in ((1.0, 1e-8), (1 / 49152, 1e-8 / 49152)):
        p, m, v = torch.zeros(3, 4, 4, dtype=torch.float64)
        for step in (1, 2, 3):
            train_gpt.adam_update(p, 1e-8 * size * normal(4, 4, seed=step), m, v, torch.tensor(0.1),
                                  (0.8, 0.95), eps, 0.0, torch.tensor(float(step)))
        steps.append(p)
    torch.testing.assert_close(*steps)


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (40, 40)])
@pytest.mark.parametrize("same", [True, False])
def test_muon_agrees_with_torch_over_20_steps(same, shape, monkeypatch):
    """To bf16 with torch's coefficients; in direction with our own, which make flatter values.

    torch does not divide by the safety factor 1.02: its first polynomial has to take that back.
    """
    a, b, c = 3.4445, -4.775, 2.0315
    if same:
        monkeypatch.setattr(train_gpt, "POLAR_EXPRESS", (
            (a * 1.02, b * 1.02 ** 3, c * 1.02 ** 5), *[(a, b, c)] * 4))
    lr, mu, ours, m = 0.02, 0.9, normal(1, *shape).float(), torch.zeros(1, *shape)
    theirs = torch.nn.Parameter(ours[0].clone())
    optimizer = torch.optim.Muon([theirs], lr=lr, weight_decay=0.0, momentum=mu)
    for step in range(20):
        before = ours.clone(), theirs.data.clone()
        theirs.grad = normal(*shape, seed=step).float()
        train_gpt.muon_update(ours, theirs.grad[None], m, torch.tensor(lr), torch.tensor(mu),
                              torch.bfloat16)
        optimizer.step()
        d, t = ours[0] - before[0][0], theirs.data - before[1]
        cosine = (d * t).sum() / d.norm() / t.norm()
        assert cosine > (0.998 if same else 0.97)
        assert 0.98 < d.norm() / t.norm() < 1.02 or not same


def test_muon_momentum_and_step_by_hand():
    """One direction, so that the polar factor is known: m = mu m + (1 - mu) g, and the step looks
    ahead, at mu m + (1 - mu) g again."""
    u = with_values(torch.ones(1).double(), 32, 8)  # tall: the shape factor is 2
    v = normal(1, 32, 8)
    p, m = v.clone(), -u[None].clone()
    mu = torch.tensor(0.75, dtype=torch.float64)
    train_gpt.muon_update(p, 2.0 * u[None], m, torch.tensor(0.1), mu, torch.float64)
    # m = .75 * -1 + .25 * 2 = -.25; looking ahead .75 * -.25 + .25 * 2 = .3125 > 0
    torch.testing.assert_close(m, -0.25 * u[None])
    step = 0.1 * 2.0 * scalar_map(1 / 1.02) * u[None]
    torch.testing.assert_close(p, v - step, rtol=0, atol=1e-7)


@pytest.mark.parametrize("shape, factor", [((48, 12), 2.0), ((12, 48), 1.0), ((24, 24), 1.0),
                                           ((50, 40), math.sqrt(1.25))])
def test_muon_steps_further_for_tall_matrices(shape, factor):
    g, p = normal(2, *shape), torch.zeros(2, *shape, dtype=torch.float64)
    train_gpt.muon_update(p, g, torch.zeros_like(g), torch.tensor(0.5), torch.tensor(0.9),
                          torch.float64)
    torch.testing.assert_close(p, -0.5 * factor * train_gpt.polar_express(g, torch.float64),
                               rtol=0, atol=1e-6)


# -- Groups and state ------------------------------------------------------------------------------

def test_groups_of_the_recipe():
    """lr .008, times 75 for tables, 1 for the head, 5 for scalars; Muon .06; no decay at all."""
    with torch.device("meta"):
        groups = train_gpt.parameter_groups(GPT(FINEWEB), FINEWEB)
    rates = {n: (g.kind, round(g.lr, 9), g.decay) for n, g in groups.items()}
    adam = {"embed": .6, "value_embeds": .6, "head": .008, "smear_scale": .04, "residual_mix": .04,
            "value_mix": .04, "skip_gates": .04}
    muon = ("smear_gate", "attention_bank", "attention_gates", "mlp_bank")
    assert rates == {**{n: ("adam", lr, 0.0) for n, lr in adam.items()},
                     **{n: ("muon", .06, 0.0) for n in muon}}
    assert {g.betas for g in groups.values() if g.kind == "adam"} == {(0.8, 0.95)}


def test_adamw_trains_every_parameter_and_decays_matrices():
    s = replace(SMALL, optimizer="adamw")
    groups = train_gpt.parameter_groups(GPT(s), s)
    assert set(groups) == {n for n, _ in GPT(s).named_parameters()}
    for name, group in groups.items():
        decay = 0.1 if name in ("attention_bank", "mlp_bank", "head") else 0.0
        assert group == Group("adam", 6e-4, (0.9, 0.95), 1e-8, decay), name


def test_groups_cover_the_parameters_exactly():
    for s in (SMALL, replace(SMALL, optimizer="adamw")):
        extra, missing = GPT(s), GPT(s)
        extra.stranger = torch.nn.Parameter(torch.zeros(3))
        del missing.skip_gates
        for model, name in ((extra, "stranger"), (missing, "skip_gates")):
            with pytest.raises(AssertionError, match=name):
                train_gpt.parameter_groups(model, s)


def trained(s: train_gpt.Settings, scale: float = 1.0, steps: int = 1, still: tuple = ()) -> tuple:
    """A small model after `steps` steps on random gradients, and its parameters before them.

    Rows `still` of the tables have no gradient, as tokens that no document holds.
    """
    model = GPT(s)
    model.init_weights(torch.Generator().manual_seed(0))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = train_gpt.Optimizer(model, s, compile=False)
    for step in range(steps):
        for n, p in model.named_parameters():
            p.grad = normal(*p.shape, seed=step).float()
        model.embed.grad[list(still)] = 0
        model.value_embeds.grad[:, list(still)] = 0
        optimizer.step(step, scale, 0.9)
        assert all(p.grad is None for p in model.parameters())  # dropped, not zeroed
    return model, before, optimizer


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_every_parameter_moves_in_proportion_to_the_schedule(optimizer):
    s = replace(SMALL, optimizer=optimizer)
    (full, before, _), (half, _, _), (still, _, _) = (trained(s, x) for x in (1.0, 0.5, 0.0))
    for name, old in before.items():
        whole = full.get_parameter(name) - old
        assert (whole != 0).any(), name
        # the difference to a value of size 4 is known to 4 * 2^-24
        torch.testing.assert_close(half.get_parameter(name) - old, whole / 2, rtol=1e-3, atol=1e-6)
        assert torch.equal(still.get_parameter(name), old), name


def test_optimizer_keeps_the_state_and_rates_of_each_group():
    """Three steps of the whole are three steps of its parts, with bias correction from step 1."""
    model, before, optimizer = trained(SMALL, 0.5, steps=3)
    for name, group in train_gpt.parameter_groups(model, SMALL).items():
        p, rate = before[name], torch.tensor(group.lr * 0.5)
        state = [torch.zeros_like(p) for _ in range(1 if group.kind == "muon" else 2)]
        for step in range(3):
            g = normal(*p.shape, seed=step).float()
            if group.kind == "muon":
                train_gpt.muon_update(p, g, *state, rate, torch.tensor(0.9), torch.float32)
            else:
                train_gpt.adam_update(p, g, *state, rate, group.betas, group.eps, group.decay,
                                      torch.tensor(step + 1.0))
        assert torch.equal(model.get_parameter(name), p), name
        assert all(torch.equal(a, b) for a, b in zip(optimizer.state[name], state)), name


@pytest.mark.parametrize("s", [SMALL, replace(SMALL, optimizer="adamw")])
def test_rows_that_no_document_holds_stay_as_they_are(s):
    rows = (7, 150, *range(300, 384))        # two tokens and the padding
    model, before, _ = trained(s, steps=4, still=rows)
    seen = [n for n in range(384) if n not in rows]
    for name, axis in (("embed", 0), ("value_embeds", 1)):
        old, new = (x.movedim(axis, 0) for x in (before[name], model.get_parameter(name)))
        assert torch.equal(new[list(rows)], old[list(rows)]), name
        assert (new[seen] != old[seen]).flatten(1).any(1).all(), name
