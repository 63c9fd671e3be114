"""The model computes what the recipe says, and a token sees what it may see and nothing else.

Zero initial values would hide most faults, so `filled` gives every parameter random values. The
whole forward pass is checked against a second implementation, `plain_model`: one document at a
time, dense attention, fp64, written from the recipe and not from the program.
"""
import math
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import train_gpt
from train_gpt import FINEWEB, GPT, TINY, Batch, Block, Settings

# Everything that the card recipe has, on a small scale: a block without attention, a long window,
# attention with and without a value table, two skips; 300 tokens are padded to 384.
SMALL = replace(
    FINEWEB, vocab_size=300, width=64, head_dim=32, mlp_width=96, layers=4, no_attention=(3,),
    long_window=(2,), value_layers=((1, 1), (4, 0)), skips=((3, 2), (4, 1)),
    unit_tokens=512, doc_cap=512, window_unit=16, windows=(2, 5), final_windows=(3, 6, 7))
DOCUMENTS = (1, 70, 127, 3, 180, 2, 129)     # tokens; together 512


def head(chunk: int) -> train_gpt.Head:
    s = SMALL
    return train_gpt.Head(s.vocab_size, s.logit_cap, s.logit_slope, chunk, False, "reference")


def filled(s: Settings, seed: int = 0, dtype: torch.dtype = torch.float32) -> GPT:
    """A model whose every parameter is random and far from zero."""
    model, generator = GPT(s, dtype), torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        size = p.size(-1) ** -0.5 if name in ("attention_bank", "mlp_bank") else 0.7
        p.data.normal_(generator=generator).mul_(size)
        if name == "residual_mix":
            p.data.add_(1)
    return model


def packed(s: Settings, documents: tuple, seed: int = 0) -> Batch:
    """Random documents end to end; each opens with EoS, and every seventh target is left out."""
    rng, T = np.random.default_rng(seed), sum(documents)
    tokens = rng.integers(0, s.vocab_size - 1, T + 1)
    borders = np.cumsum((0, *documents))
    tokens[borders] = s.vocab_size - 1
    targets = tokens[1:].copy()
    targets[::7] = -1
    positions = np.concatenate([np.arange(n) for n in documents])
    return Batch(torch.from_numpy(tokens[:-1]).int(), torch.from_numpy(targets),
                 torch.from_numpy(positions).int(), torch.from_numpy(borders).int())


@torch.no_grad()
def outputs(model: GPT, batch: Batch, stage: train_gpt.Stage) -> Tensor:
    return model(batch, train_gpt.make_view(batch, stage, len(batch.inputs_T)))


def moved(model: GPT, batch: Batch, stage: train_gpt.Stage, token: int) -> list[int]:
    """The positions whose output is not the same, to the last bit, with another token there."""
    other = batch.inputs_T.clone()
    other[token] = (other[token] + 1) % model.s.vocab_size
    before, after = (outputs(model, batch._replace(inputs_T=t), stage)
                     for t in (batch.inputs_T, other))
    return (before != after).any(1).nonzero()[:, 0].tolist()


# -- What a token may see --------------------------------------------------------------------------

@pytest.mark.parametrize("documents", [DOCUMENTS, (512,), (128, 128, 256), (1,) * 128])
def test_a_token_moves_nothing_before_it_and_nothing_outside_its_document(documents):
    model, batch = filled(SMALL), packed(SMALL, documents)
    borders = np.cumsum((0, *documents))
    for stage in (train_gpt.stages(SMALL)[0], train_gpt.stages(SMALL)[-1]):
        for n in range(0, len(documents), max(1, len(documents) // 8)):
            first, end = borders[n], borders[n + 1]
            for token in {first, (first + end) // 2, end - 1}:
                changed = moved(model, batch, stage, token)
                assert changed[0] == token, f"token {token} moved {changed[0]}"
                assert changed[-1] < end, f"token {token} of [{first}, {end}) moved {changed[-1]}"
                if token + 1 < end:
                    assert changed[1] == token + 1  # the neighbour sees it


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("unit", [1, 24, 63, 64, 65, 100, 128, 129])
def test_one_attention_sees_exactly_its_window(unit, long):
    """Output t depends on tokens t - window to t: no more, no fewer. The smear would add one."""
    s = replace(SMALL, layers=1, no_attention=(), long_window=(1,) if long else (), skips=(),
                value_layers=((1, 0),), window_unit=unit, windows=(2,), final_windows=(1, 2, 3))
    model, batch = filled(s), packed(s, (20, 470, 22))
    model.smear_scale.data.zero_()
    for stage, window in zip(train_gpt.stages(s), (2 * unit, 3 * unit) if long else (unit, unit)):
        for token in (20, 127, 128, 200):
            expected = list(range(token, min(token + window + 1, 490)))
            assert moved(model, batch, stage, token) == expected


def test_look_back_is_the_exact_reach_of_the_model():
    s = replace(SMALL, window_unit=8, windows=(2, 3), final_windows=(3, 6, 7))
    # attention in blocks 1 and 4 with 24 tokens, in block 2 with 56, and the smear
    assert train_gpt.look_back(s) == 24 + 56 + 24 + 1
    model, batch = filled(s, dtype=torch.float64), packed(s, (512,))  # the far end is faint
    reach = [moved(model, batch, stage, 100)[-1] - 100 for stage in train_gpt.stages(s)]
    assert reach == [8 + 16 + 8 + 1, 8 + 24 + 8 + 1, 24 + 56 + 24 + 1]


def test_look_back_of_fineweb():
    # 8 short windows of 768 and 2 long ones of 2,560 at the last validation, and the smear
    assert train_gpt.look_back(FINEWEB) == 8 * 768 + 2 * 2560 + 1


# -- Attention -------------------------------------------------------------------------------------

def dense_attention(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, documents: tuple,
                    window: int) -> Tensor:
    """All T x T scores, masked."""
    T = len(q_THK)
    document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    back = torch.arange(T)[:, None] - torch.arange(T)
    seen = (back >= 0) & (back <= window) & (document[:, None] == document)
    scores = torch.einsum("ihk,jhk->hij", q_THK, k_THK).masked_fill(~seen, -torch.inf)
    return torch.einsum("hij,jhk->ihk", scores.softmax(-1), v_THK)


@st.composite
def layouts(draw) -> tuple:
    """Document sizes that fill 384 tokens."""
    sizes, left = [], 384
    while left:
        sizes.append(min(left, draw(st.sampled_from([1, 2, 5, 63, 64, 65, 128, 129, 200, 384]))))
        left -= sizes[-1]
    return tuple(sizes)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layouts(), st.sampled_from([1, 16, 63, 64, 65, 100, 127, 128, 129, 256, 500]),
       st.integers(0, 1))
def test_blocked_attention_equals_dense_attention(documents, window, further):
    """Values and gradients, in fp64; a span wider than needed changes nothing."""
    q, k, v, g = torch.randn(4, 384, 2, 8, dtype=torch.float64,
                             generator=torch.Generator().manual_seed(window))
    positions = torch.cat([torch.arange(n) for n in documents]).int()
    mask = train_gpt.block_mask(positions, window, -(-window // train_gpt.BLOCK) + further)
    results = []
    for function, how in ((train_gpt.blocked_attention, (mask,)),
                          (dense_attention, (documents, window))):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        y = function(*leaves, *how)
        results.append([y, *torch.autograd.grad(y, leaves, g)])
    for ours, truth in zip(*results):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("documents, window", [
    ((5, 120, 3, 128), 16), ((256,), 100), ((1, 1, 126, 128), 64), ((40, 216), 500)])
def test_flex_attention_equals_the_blocked_one(documents, window):
    """Values only: FlexAttention has no backward on a CPU. `attend` chooses by what it is given."""
    T, generator = sum(documents), torch.Generator().manual_seed(window)
    q, k, v = torch.randn(3, T, 2, 16, dtype=torch.float64, generator=generator)
    positions = torch.cat([torch.arange(n) for n in documents]).int()
    masks = (train_gpt.block_mask(positions, window, -(-window // train_gpt.BLOCK)),
             train_gpt.flex_mask(positions, window))
    truth, ours = (train_gpt.attend(q, k, v, mask, torch.empty(0), T) for mask in masks)
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)


def test_attend_hands_varlen_attn_its_window_borders_and_scale():
    """The call that CUDA gets, on a CPU kernel for torch's private op; in a process of its own.

    The kernel is dense and believes only its arguments: borders, window and scale. So equality with
    the reference says that the call means the same.
    """
    script = """
        import torch, train_gpt
        import torch.nn.attention.varlen as V
        calls = []

        def probabilities(q, k, borders, window, scale):
            T = len(q)
            document = torch.bucketize(torch.arange(T), borders[1:].long(), right=True)
            back = torch.arange(T)[:, None] - torch.arange(T)
            seen = (back >= -window[1]) & (back <= window[0]) & (document[:, None] == document)
            scores = torch.einsum("ihk,jhk->hij", q, k) * scale
            return scores.masked_fill(~seen, -torch.inf)

        @V._varlen_attn.register_kernel("cpu")
        def forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None,
                    window_size=None, *rest):
            calls.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k, scale, list(window_size)))
            scores = probabilities(q, k, cu_q, window_size, scale)
            out = torch.einsum("hij,jhk->ihk", scores.softmax(-1), v)
            return out.contiguous(), scores.logsumexp(-1), torch.zeros(2, dtype=torch.uint64)

        @V._varlen_attn_backward.register_kernel("cpu")
        def backward(g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng, scale=None,
                     window_size=None):
            p = (probabilities(q, k, cu_q, window_size, scale) - lse[:, :, None]).exp()
            dp = torch.einsum("ihk,jhk->hij", g, v)
            ds = p * (dp - (g * out).sum(-1).T[:, :, None]) * scale
            return tuple(torch.einsum(e, a, b).contiguous() for e, a, b in (
                ("hij,jhk->ihk", ds, k), ("hij,ihk->jhk", ds, q), ("hij,ihk->jhk", p, g)))

        documents = (1, 70, 130, 55)
        positions = torch.cat([torch.arange(n) for n in documents]).int()
        cu = torch.tensor([0, 1, 71, 201, 256, 256, 256], dtype=torch.int32)  # padded with T
        q, k, v, g = torch.randn(4, 256, 2, 8, generator=torch.Generator().manual_seed(0))
        for window in (16, 128):
            results = []
            for visible in (window, train_gpt.block_mask(positions, window, 2)):
                leaves = [t.clone().requires_grad_() for t in (q, k, v)]
                y = train_gpt.attend(*leaves, visible, cu, 130)
                results.append([y, *torch.autograd.grad(y, leaves, g)])
            for ours, truth in zip(*results):
                torch.testing.assert_close(ours, truth, rtol=0, atol=2e-5)
            assert calls.pop() == (cu.tolist(), cu.tolist(), 130, 130, 1.0, [window, 0]), calls
        assert not calls
        """
    root = Path(train_gpt.__file__).parent
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=root, text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


# -- Rotary positions ------------------------------------------------------------------------------

def view_at(s: Settings, positions_T: Tensor, stage: train_gpt.Stage) -> train_gpt.View:
    """The view of documents of one token each, wherever they say that they are."""
    batch = Batch(positions_T, positions_T, positions_T, positions_T)
    return train_gpt.make_view(batch, stage, len(positions_T))


def test_rotary_is_relative():
    q, k = torch.randn(2, 128, 2, 32, generator=torch.Generator().manual_seed(0))
    scores = []
    for shift in (0, 1, 100, 1000):
        view = view_at(SMALL, torch.arange(shift, shift + 128).int(), train_gpt.stages(SMALL)[0])
        scores.append(torch.einsum("ihk,jhk->hij", *(train_gpt.rotate(x, view) for x in (q, k))))
    assert (scores[0] - torch.einsum("ihk,jhk->hij", q, k)).abs().max() > 1  # it does turn
    for shifted in scores[1:]:
        torch.testing.assert_close(shifted, scores[0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("s", [SMALL, TINY, FINEWEB])
def test_rotary_turns_the_first_half_of_the_pairs(s):
    """Pair (i, i + K/2) turns by position / 1024^(i / (K/4 - 1)) for i < K/4, the others never."""
    K, positions = s.head_dim, torch.tensor([0, 1, 2, 17, 383] * 128)[:128 * 5].int()
    x = torch.randn(len(positions), 2, K, generator=torch.Generator().manual_seed(0))
    y = train_gpt.rotate(x, view_at(s, positions, train_gpt.stages(s)[0]))
    still = [*range(K // 4, K // 2), *range(K // 2 + K // 4, K)]
    assert torch.equal(y[:, :, still], x[:, :, still])
    freqs = torch.tensor([1024.0 ** (-i / (K // 4 - 1)) for i in range(K // 4)], dtype=torch.double)
    assert freqs[0] == 1 and abs(freqs[-1] - 1 / 1024) < 1e-12
    turn = torch.polar(torch.ones(1).double(), -positions[:, None, None] * freqs)
    before, after = (torch.complex(t[..., :K // 4], t[..., K // 2:K // 2 + K // 4])
                     for t in (x.double(), y.double()))
    torch.testing.assert_close(after, before * turn, rtol=0, atol=1e-4)


def test_stages_of_fineweb_follow_yarn_by_hand():
    """Windows of 384, 896, 1408, and 1664 for the last validation, which then sees 2560."""
    found = train_gpt.stages(FINEWEB)
    assert [(g.first_step, g.short, g.long) for g in found] == [
        (0, 128, 384), (543, 384, 896), (1086, 640, 1408), (1670, 768, 2560)]
    # .1, then times 1 + .2 ln(7/3), 1 + .2 ln(11/7), 1 + .2 ln(13/11)
    assert [g.scale for g in found] == pytest.approx([.1, .116946, .127517, .131778], abs=1e-6)
    # Index 0 has frequency 1 and turns 61 times in the first window: kept for good.
    assert [g.freqs_R[0] for g in found] == [1.0] * 4
    # Index 31 has 1/1024 and never turns once: stretched by 3/7, then 7/11, 11/13, that is 3/13.
    assert [g.freqs_R[31] * 1024 for g in found] == pytest.approx([1, 3 / 7, 3 / 11, 3 / 13])
    # Index 10 has 1024^(-10/31) = .1068896, and turns 6.53262 times in 384 tokens: it keeps
    # (6.53262 - 1) / 31 = .178472 of its speed, so f *= 3/7 + .178472 * 4/7 = .530555.
    assert found[0].freqs_R[10] == pytest.approx(.1068896, abs=1e-7)
    assert found[1].freqs_R[10] == pytest.approx(.1068896 * .530555, abs=1e-7)
    # It then turns 896 * .0567108 / 2 pi = 8.08712 times, keeps (8.08712 - 1) / 31 = .228617, and
    # f *= 7/11 + .228617 * 4/11 = .719497; then 9.14361 times, .262697, and 11/13 + .. = .886569.
    assert found[2].freqs_R[10] == pytest.approx(.0567108 * .719497, abs=1e-7)
    assert found[3].freqs_R[10] == pytest.approx(.0408033 * .886569, abs=1e-7)


def test_a_view_has_the_scale_frequencies_and_windows_of_its_stage():
    batch = packed(SMALL, DOCUMENTS)
    for stage in train_gpt.stages(SMALL):
        view = train_gpt.make_view(batch, stage, 180)
        assert view.scale.item() == pytest.approx(stage.scale, rel=1e-6) and view.longest == 180
        angle = batch.positions_T[:, None].double() * torch.tensor(stage.freqs_R).double()
        for table, truth, still in ((view.cos_T1R, angle.cos(), 1), (view.sin_T1R, angle.sin(), 0)):
            torch.testing.assert_close(table[:, 0, :8].double(), truth, rtol=0, atol=1e-4)
            assert (table[:, 0, 8:] == still).all()
        seen = [mask.flatten(0, 2).sum(1) for mask in (view.short, view.long)]
        for keys, window in zip(seen, (stage.short, stage.long)):
            assert torch.equal(keys, batch.positions_T.clamp(max=window) + 1)


# -- Shape, table, initial values ------------------------------------------------------------------

def test_fineweb_has_268_665_612_parameters():
    with torch.device("meta"):
        model = GPT(FINEWEB)
    found = {name: p.numel() for name, p in model.named_parameters()}
    table = 50304 * 768                      # 50,257 rounded up to 393 * 128 = 50,304 rows
    assert table == 38_633_472
    assert found == {
        "embed": table, "head": table, "value_embeds": 3 * table,
        "attention_bank": 10 * 4 * 768 * 768,  # 10 attentions of q, k, v, o: 23,592,960
        "mlp_bank": 11 * 2 * 768 * 3072,     # 11 blocks of up, down: 51,904,512
        "attention_gates": 10 * 6 * 12, "smear_gate": 12, "smear_scale": 1,
        "residual_mix": 11 * 2, "value_mix": 10 * 2, "skip_gates": 5}
    # 5 * 38,633,472 + 23,592,960 + 51,904,512 + 720 + 12 + 1 + 22 + 20 + 5
    assert sum(found.values()) == 268_665_612
    sizes = [train_gpt.padded_vocab(replace(SMALL, vocab_size=n)) for n in (300, 384, 385)]
    assert sizes == [384, 384, 512]


def test_the_blocks_of_fineweb_are_those_of_the_recipe():
    """Block 7 has no attention; 4 and 11 are long; 1, 2, 9, 10, 11 have tables 1, 2, 0, 1, 2; and
    block 6 adds the output of 5, 7 of 4, to 10 of 1: last in, first out."""
    assert train_gpt.block_table(FINEWEB) == [
        #     attention  long   table  skip  source
        Block(0,         False, 1,     None, None),
        Block(1,         False, 2,     None, None),
        Block(2,         False, None,  None, None),
        Block(3,         True,  None,  None, None),
        Block(4,         False, None,  None, None),
        Block(5,         False, None,  0,    4),
        Block(None,      False, None,  1,    3),
        Block(6,         False, None,  2,    2),
        Block(7,         False, 0,     3,    1),
        Block(8,         False, 1,     4,    0),
        Block(9,         True,  2,     None, None)]
    assert FINEWEB.width == 768 and FINEWEB.head_dim == 128 and FINEWEB.mlp_width == 3072


def initial(s: Settings, seed: int, dtype: torch.dtype = torch.float32) -> GPT:
    model = GPT(s, dtype)
    for p in model.parameters():
        p.data.fill_(torch.nan)              # what is not initialised stays like this
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def test_initial_values():
    model = initial(SMALL, seed=1)
    named = dict(model.named_parameters())
    assert all(p.isfinite().all() for p in named.values())
    for name in ("head", "smear_gate", "smear_scale", "attention_gates"):
        assert (named[name] == 0).all(), name
    bound = 3 ** 0.5 * 0.5 / 64 ** 0.5       # uniform, so the deviation is .5 / sqrt(width)
    for bank, every in ((named["attention_bank"], 4), (named["mlp_bank"], 2)):
        assert (bank[every - 1::every] == 0).all()  # o, down
        for p in (p for n, p in enumerate(bank) if n % every < every - 1):
            assert 0.98 * bound < p.abs().max() <= bound and abs(p.mean()) < 0.1 * bound
            assert p.std().item() == pytest.approx(0.5 / 64 ** 0.5, rel=0.05)
    for p in (named["embed"], *named["value_embeds"]):
        assert p.std().item() == pytest.approx(1, rel=0.03) and abs(p.mean()) < 0.03
        assert p.abs().max() > 3             # normal, not uniform
    assert len({p.sum().item() for p in (named["embed"], *named["value_embeds"])}) == 3
    assert torch.equal(named["residual_mix"], torch.tensor([[1.0, 0.0]] * 4))
    assert (named["value_mix"] == 0.5).all() and (named["skip_gates"] == -1.5).all()


def test_initial_values_depend_on_the_seed_alone():
    torch.manual_seed(5)
    state, first = torch.get_rng_state(), initial(SMALL, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    same, other = initial(SMALL, seed=1), initial(SMALL, seed=2)
    for name, p in first.named_parameters():
        assert torch.equal(p, same.get_parameter(name)), name
    for name in ("embed", "value_embeds", "attention_bank", "mlp_bank"):
        assert not torch.equal(first.get_parameter(name), other.get_parameter(name)), name


def test_a_parameter_without_an_initial_value_is_an_error():
    model = GPT(SMALL)
    model.stranger = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(KeyError, match="stranger"):
        model.init_weights(torch.Generator())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_loss_is_ln_of_the_unpadded_vocabulary(dtype):
    model, batch = initial(SMALL, seed=0, dtype=dtype), packed(SMALL, DOCUMENTS)
    view = train_gpt.make_view(batch, train_gpt.stages(SMALL)[0], 180)
    loss = model.loss(batch, view, head(100)).item()
    assert loss / (batch.targets_T >= 0).sum().item() == pytest.approx(math.log(300), abs=1e-5)


# -- The formula -----------------------------------------------------------------------------------

def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def turn(x_TK: Tensor, freqs: tuple) -> Tensor:
    """Rotary positions of one head of one document, pair by pair."""
    (T, K), y = x_TK.shape, x_TK.clone()
    for i, freq in enumerate(freqs):
        angle = torch.arange(T).double() * freq
        a, b = x_TK[:, i], x_TK[:, i + K // 2]
        y[:, i] = a * angle.cos() + b * angle.sin()
        y[:, i + K // 2] = b * angle.cos() - a * angle.sin()
    return y


def plain_model(p: dict, s: Settings, stage: train_gpt.Stage, tokens: Tensor) -> Tensor:
    """One document through the model, from the recipe: activations for the head, [T, D]."""
    T, K, sigmoid = len(tokens), s.head_dim, torch.sigmoid
    e, attention, pushed = p["embed"][tokens], 0, {}
    smeared = [e[0]] + [
        e[t] + p["smear_scale"] * sigmoid(p["smear_gate"][0, 0] @ e[t, :s.gate_width]) * e[t - 1]
        for t in range(1, T)]
    x = x0 = rms(torch.stack(smeared))
    for block in range(1, s.layers + 1):
        for gate, (to, source) in zip(p["skip_gates"], s.skips):
            if to == block:
                x = x + sigmoid(gate) * pushed[source]
        x = p["residual_mix"][block - 1, 0] * x + p["residual_mix"][block - 1, 1] * x0
        if block not in s.no_attention:
            q_DD, k_DD, v_DD, o_DD = p["attention_bank"][4 * attention:4 * attention + 4]
            h, window = rms(x), stage.long if block in s.long_window else stage.short
            v = p["value_mix"][attention, 0] * (h @ v_DD.T)
            for to, table in s.value_layers:
                if to == block:
                    v = v + p["value_mix"][attention, 1] * p["value_embeds"][table][tokens]
            heads = []
            for head, at in enumerate(range(0, s.width, K)):
                q, k = (turn(rms((h @ w.T)[:, at:at + K]), stage.freqs_R) for w in (q_DD, k_DD))
                seen = torch.ones(T, T).tril() - torch.ones(T, T).tril(-window - 1)
                scores = (stage.scale * q @ k.T).masked_fill(seen == 0, -torch.inf)
                gate = sigmoid(h[:, :s.gate_width] @ p["attention_gates"][attention, head])
                heads.append(gate[:, None] * (scores.softmax(1) @ v[:, at:at + K]))
            x, attention = x + torch.cat(heads, 1) @ o_DD.T, attention + 1
        up_DF, down_DF = p["mlp_bank"][2 * block - 2:2 * block]
        x = x + torch.relu(rms(x) @ up_DF) ** 2 @ down_DF.T
        pushed[block] = x
    return rms(x)


def plain_losses(p: dict, s: Settings, x_TD: Tensor, targets_T: Tensor) -> Tensor:
    """Capped cross-entropy of each token, [T]; 0 where the target is -1."""
    logits = s.logit_cap * torch.sigmoid(x_TD @ p["head"][:s.vocab_size].T / s.logit_slope)
    return F.cross_entropy(logits, targets_T, reduction="none", ignore_index=-1)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_model_and_loss_equal_a_plain_implementation(stage):
    """Activations, token losses, loss and the gradient of every parameter, all features on."""
    model, batch = filled(SMALL, seed=stage), packed(SMALL, DOCUMENTS, seed=stage)
    at = train_gpt.stages(SMALL)[stage]
    view = train_gpt.make_view(batch, at, 180)
    p = {n: t.detach().double().requires_grad_() for n, t in model.named_parameters()}
    x_TD = torch.cat([plain_model(p, SMALL, at, t) for t in batch.inputs_T.split(DOCUMENTS)])
    losses_T = plain_losses(p, SMALL, x_TD, batch.targets_T)
    losses_T.sum().backward()

    with torch.no_grad():
        ours_TD = model(batch, view)
        ours_T = train_gpt.token_losses(ours_TD, model.head, batch.targets_T, head(100))
    torch.testing.assert_close(ours_TD.double(), x_TD, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours_T.double(), losses_T, rtol=0, atol=1e-4)
    loss = model.loss(batch, view, head(100))
    assert loss.item() == pytest.approx(losses_T.sum().item(), rel=1e-5)
    loss.backward()
    for name, ours in model.named_parameters():
        truth = p[name].grad
        assert truth.abs().max() > 1e-3, f"{name} is not used"
        error = (ours.grad - truth).abs().max() / truth.abs().max()
        assert error < 1e-4, f"gradient of {name}: relative error {error:.1e}"


def test_bf16_follows_fp32():
    batch, at = packed(SMALL, DOCUMENTS), train_gpt.stages(SMALL)[0]
    view = train_gpt.make_view(batch, at, 180)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        model = filled(SMALL, dtype=dtype)
        x_TD = model(batch, view)
        assert x_TD.dtype == dtype           # nothing in between promotes to fp32
        loss = model.loss(batch, view, head(128))
        assert loss.dtype == torch.float32
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


# -- Validation in pieces --------------------------------------------------------------------------

def test_validation_in_pieces_equals_validation_of_whole_sequences(tmp_path):
    """Token by token, with documents longer than a piece and sequences that cut documents."""
    sizes, rng = (90, 20, 700, 1, 129, 400, 60, 300), np.random.default_rng(0)
    tokens = rng.integers(0, 299, sum(sizes))
    tokens[np.cumsum((0, *sizes[:-1]))] = 299
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    (tmp_path / "x_val_000000.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    s = replace(SMALL, window_unit=8, windows=(2, 3), final_windows=(2, 3, 4), val_tokens=1500,
                val_sequence=640, val_sha256="")
    context = train_gpt.look_back(s)
    assert context == 16 + 32 + 16 + 1
    model, stage = filled(s), train_gpt.stages(s)[-1]

    def losses(room: int, context: int) -> Tensor:
        data, found = train_gpt.ValData(s, tmp_path, room, context), []
        for group in range(len(data.groups)):
            batch = data.batch(group)
            each = train_gpt.token_losses(outputs(model, batch, stage), model.head,
                                          batch.targets_T, head(256))
            assert (each[batch.targets_T < 0] == 0).all()
            found.append(each[batch.targets_T >= 0])
        return torch.cat(found).double()

    whole = losses(640, context)
    assert len(whole) == 1500                # every target once
    for room in (128, 256, 384):
        pieces = losses(room, context)
        assert pieces.sum().item() == pytest.approx(whole.sum().item(), rel=1e-6)
        torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-4)
    assert (losses(128, 8) - whole).abs().max() > 1e-3  # less context would show

    # the farthest token of the context is too faint for that, so it is counted
    opens = {0, 640, 1280, *np.cumsum(sizes).tolist()}
    groups = train_gpt.ValData(s, tmp_path, 128, context).groups
    inner = [p for group in groups for p in group if p.start not in opens]
    assert len(inner) > 5 and {p.scored - p.start for p in inner} == {context}

    # and the whole sequences are those of the definition: no attention across their borders
    p = {n: t.detach().double() for n, t in model.named_parameters()}
    truth, text = [], torch.from_numpy(tokens)
    cuts = sorted(t for t in opens | {1500} if t <= 1500)
    for first, end in zip(cuts, cuts[1:]):
        x_TD = plain_model(p, s, stage, text[first:end])
        truth.append(plain_losses(p, s, x_TD, text[first + 1:end + 1]))
    torch.testing.assert_close(whole, torch.cat(truth), rtol=0, atol=1e-4)
