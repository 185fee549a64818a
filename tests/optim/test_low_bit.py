"""The low-bit optimizers: float32 throughout is torch's AdamW and Adam; gradients, parameter groups, random numbers, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fp8cfg.numerics.codecs import CODECS, Codec, get_codec
from fp8cfg.numerics.formats import E4M3
from fp8cfg.optim.low_bit import gradients
from fp8cfg.optim.low_bit.adam import LowBitAdam, LowBitAdamW, LowBitOptimizer
from fp8cfg.optim.low_bit.columns import Columns, named_columns
from tests.support.low_bit import (
    BETAS,
    ROWS,
    bits,
    build,
    equal,
    everything,
    normal,
    parameters,
    train,
)


# float32 throughout is torch's optimizer. The order of operations is MS-AMP's: torch's is lerp for the first moment, and MKL's
# square root where it is not fused. So the bits of one step differ in the last place, and after 200 steps this much.
@pytest.mark.parametrize(
    ("mine", "theirs"), [(LowBitAdamW, torch.optim.AdamW), (LowBitAdam, torch.optim.Adam)]
)
@pytest.mark.parametrize(
    "kernel",
    [{"fused": True}, {"foreach": True}, {"foreach": False, "fused": False}],
    ids=["fused", "foreach", "single"],
)
def test_float32_is_torchs(mine: type[LowBitOptimizer], theirs: Any, kernel: dict) -> None:
    a, b = parameters(ROWS["fp32"], (100, 130), (77,)), parameters(ROWS["fp32"], (100, 130), (77,))
    ours, reference = (
        build(ROWS["fp32"], a, mine),
        theirs([*b.values()], lr=1e-3, betas=BETAS, weight_decay=0.1, **kernel),
    )
    for step in range(200):
        for x, y in zip(a.values(), b.values(), strict=True):
            x.grad = y.grad = normal(*x.shape, seed=step, scale=1e-3)
        ours.step()
        reference.step()
    for x, y in zip(a.values(), b.values(), strict=True):
        for u, v in (
            (x, y),
            *((ours.state[x][k][0], reference.state[y][k]) for k in ("exp_avg", "exp_avg_sq")),
        ):
            assert (u - v).abs().max() <= 5e-7 * v.abs().max()


def test_first_moments_of_float32_are_torchs_to_the_bit() -> None:
    a, b = parameters(ROWS["fp32"], (100, 130)), parameters(ROWS["fp32"], (100, 130))
    ours, reference = (
        build(ROWS["fp32"], a),
        torch.optim.AdamW([*b.values()], lr=1e-3, betas=BETAS, weight_decay=0.1, fused=True),
    )
    a["p0"].grad = b["p0"].grad = normal(100, 130)
    ours.step()
    reference.step()
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(ours.state[a["p0"]][moment][0], reference.state[b["p0"]][moment])


# Gradients and groups.


def test_gradients_are_stored_once_and_freed() -> None:
    p = parameters(ROWS["O2"], (4, 128))
    optimizer = build(ROWS["O2"], p)
    p["p0"].grad = normal(4, 128)
    optimizer.store_grads()
    data, scale_inv = optimizer.stored_grads[p["p0"]]
    assert (
        p["p0"].grad is None
        and data.dtype == E4M3.dtype
        and scale_inv.item() == CODECS["fp8_pow2"].encode(normal(4, 128))[1].item()
    )
    before = p["p0"].detach().clone()
    optimizer.step()
    assert not torch.equal(before, p["p0"]) and optimizer.state[p["p0"]]["step"] == 1
    p["p0"].grad = normal(4, 128)
    optimizer.store_grads()  # a step has read what was stored, so this takes its place
    p["p0"].grad = normal(4, 128)
    with pytest.raises(RuntimeError, match="the gradient of p0 was stored before a backward pass"):
        optimizer.step()
    optimizer.zero_grad()
    assert not optimizer.stored_grads and p["p0"].grad is None


def test_gradients_scale_by_their_scale() -> None:
    """Unscaling and clipping touch four bytes."""
    found = []
    for divide in (False, True):
        p = parameters(ROWS["O2"], (4, 128))
        optimizer = build(ROWS["O2"], p)
        p["p0"].grad = normal(4, 128) * (2.0**16 if divide else 1.0)
        optimizer.store_grads()
        if divide:
            optimizer.stored_grads[p["p0"]][1].div_(2.0**16)
        optimizer.step()
        found.append(everything(optimizer, p))
    assert equal(*found)


def test_groups_have_their_own_columns_and_hyperparameters() -> None:
    w, b = nn.Parameter(normal(4, 128)), nn.Parameter(normal(4))
    groups = [
        {"params": [("w", w)], "weight_decay": 0.1, "columns": ROWS["O2"]},
        {"params": [("b", b)], "lr": 0.0},
    ]
    optimizer = LowBitAdamW(groups, lr=1e-2)
    start = b.detach().clone()
    train(optimizer, {"w": w, "b": b}, range(2))
    assert {k for k in optimizer.state_tensors() if k[0] == "b"} == {
        "b.exp_avg",
        "b.exp_avg_sq",
    } and torch.equal(b, start)
    assert optimizer.state[w]["exp_avg"][0].dtype == E4M3.dtype
    optimizer.add_param_group({"params": [("c", nn.Parameter(torch.ones(3)))]})
    assert "c.exp_avg" in optimizer.state_tensors()


def test_parameters_without_gradient_wait() -> None:
    p = parameters(ROWS["O2"], (4, 128), (4, 128))
    optimizer = build(ROWS["O2"], p)
    for step in range(3):
        p["p0"].grad = normal(4, 128, seed=step)
        p["p1"].grad = normal(4, 128, seed=step) if step == 2 else None
        optimizer.step()
        optimizer.zero_grad()
    assert [optimizer.state[v]["step"] for v in p.values()] == [3, 1]
    assert optimizer.step(lambda: 3.5) == 3.5


def test_seeds_and_names_choose_the_random_numbers() -> None:
    c, found = ROWS["bf16 stochastic"], []
    for name, seed in (("a", 0), ("a", 0), ("b", 0), ("a", 1)):
        p = {name: nn.Parameter(normal(4, 128).bfloat16())}
        train(build(c, p, seed=seed), p, range(2))
        found.append(bits(p[name]))
    assert (
        torch.equal(found[0], found[1])
        and not torch.equal(found[0], found[2])
        and not torch.equal(found[0], found[3])
    )


def test_stochastic_rounding_carries_small_updates() -> None:
    """100 steps of Adam at lr 1e-6 move a weight of 1 by 1e-4, a fortieth of half a unit of bf16."""
    moved = {}
    for row in ("bf16 stochastic", "bf16 nearest"):
        c = replace_weight(ROWS["bf16 stochastic"], row.split()[1])
        p = {"w": nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))}
        optimizer = LowBitAdamW(p.items(), columns=c, lr=1e-6)
        for _ in range(100):
            p["w"].grad = torch.full((4096,), -1.0, dtype=torch.bfloat16)
            optimizer.step()
        moved[row] = (p["w"].float() - 1).mean().item()
    assert moved["bf16 nearest"] == 0.0 and moved["bf16 stochastic"] == pytest.approx(1e-4, rel=0.2)


def replace_weight(c: Columns, rounding: Any) -> Columns:
    return c._replace(weight=replace(c.weight, rounding=rounding))


@pytest.mark.parametrize(
    ("params", "options", "words"),
    [
        ([("w", nn.Parameter(torch.zeros(2)))], {"lr": -1.0}, "lr=-1.0 must not be negative"),
        ([("w", nn.Parameter(torch.zeros(2)))], {"eps": math.nan}, "eps=nan must not be negative"),
        (
            [("w", nn.Parameter(torch.zeros(2)))],
            {"betas": (0.9, 1.0)},
            r"betas=\(0.9, 1.0\) must lie in \[0, 1\)",
        ),
        ([nn.Parameter(torch.zeros(2))], {}, "state is kept by name"),
        (
            [("w", nn.Parameter(torch.zeros(2))), ("w", nn.Parameter(torch.zeros(2)))],
            {},
            "two parameters are named w",
        ),
        ([("w", nn.Parameter(torch.zeros(2, 3).t()))], {}, "w is not contiguous"),
        (
            [("w", nn.Parameter(torch.zeros(2).to(E4M3.dtype)))],
            {},
            "w is torch.float8_e4m3fn; parameters are float32",
        ),
    ],
)
def test_what_is_refused(params: Any, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LowBitAdamW(params, **options)


@pytest.mark.slow
def test_torchaos_adamw_fp8() -> None:
    """AdamWFp8 stores both moments as E4M3 in blocks of 256. Its first moment is a lerp, so some codes differ, by one."""
    optim = pytest.importorskip("torchao.optim")
    blocks, w = Codec(E4M3, "exact", block=256), normal(64, 128, scale=0.02)
    ours, theirs = {"w": nn.Parameter(w.clone())}, nn.Parameter(w.clone())
    a, b = (
        build(Columns(exp_avg=blocks, exp_avg_sq=blocks), ours),
        optim.AdamWFp8([theirs], lr=1e-3, betas=BETAS, weight_decay=0.1),
    )
    for step in range(10):
        ours["w"].grad = theirs.grad = normal(64, 128, seed=step, scale=1e-3)
        a.step()
        b.step()
    for moment in ("exp_avg", "exp_avg_sq"):
        (data, scale), other = a.state[ours["w"]][moment], b.state[theirs][moment]
        assert (bits(data) != bits(other.codes)).float().mean() < 1e-3 and torch.allclose(
            scale, other.scale, rtol=1e-5
        )
    assert (ours["w"] - theirs).abs().max() < 5e-5


def test_gradients_add_up_in_their_codec_where_storage_accumulate_is_stored() -> None:
    """storage.accumulate=stored: each sum is rounded again, as MS-AMP does; wide rounds once."""
    p, fp8 = nn.Parameter(torch.zeros(64)), get_codec("fp8")
    parts = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    optimizer = LowBitAdamW([("p", p)], columns=named_columns(weight_grad="fp8"))
    want = torch.zeros(64)
    for part in parts:
        with optimizer.storing(add=True):
            (p * part).sum().backward()
        assert p.grad is None
        want = fp8.decode(fp8.encode(want + part))
    assert torch.equal(fp8.decode(optimizer.stored_grads[p]), want)
    assert not torch.equal(want, fp8.decode(fp8.encode(parts.sum(0))))
    with pytest.raises(RuntimeError, match="stored before a backward pass"), optimizer.storing():
        (p * 1.0).sum().backward()


def test_gradients_wait_for_those_that_are_stored_in_the_same_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, here of 2: the bits of those that are stored alone. A large one does not wait, and none after the pass."""
    monkeypatch.setattr(gradients, "tensors_per_launch", lambda device: 2)
    monkeypatch.setattr(gradients, "MAX_PENDING_ELEMENTS", 100)
    params = {
        name: nn.Parameter(normal(n, seed=n))
        for name, n in (("a", 64), ("b", 32), ("c", 8), ("d", 128))
    }
    optimizer = LowBitAdamW([*params.items()], columns=named_columns(weight_grad="fp8"))
    there: dict[str, str] = {}
    for name, p in params.items():
        p.register_post_accumulate_grad_hook(
            lambda _, name=name: there.update(
                {name: "".join(optimizer.names[q] for q in optimizer.stored_grads)}
            )
        )

    def backward() -> None:
        total = torch.zeros(())
        for p in params.values():
            total = (total + p.square().sum()).sin()  # gradients come in the reverse order
        total.backward()

    with optimizer.storing():
        backward()
        assert params["a"].grad is not None
        optimizer.zero_grad()  # drops what waits
    assert not optimizer.stored_grads and all(p.grad is None for p in params.values())
    there.clear()
    with optimizer.storing():
        backward()
        assert params["a"].grad is not None
    assert [*there.items()] == [("d", ""), ("c", "d"), ("b", "d"), ("a", "dcb")] and all(
        p.grad is None for p in params.values()
    )
    stored = dict(optimizer.stored_grads)
    backward()
    for p in params.values():
        assert all(
            torch.equal(bits(x), bits(y))
            for x, y in zip(stored[p], get_codec("fp8").encode(p.grad), strict=True)
        )


def test_moments_in_blocks_and_in_float32_go_on_in_the_other() -> None:
    """Where the shards of one layout cut the blocks, its moments are float32; here of every tensor."""
    blocks = Columns(exp_avg=CODECS["fp8_block"], exp_avg_sq=CODECS["fp8_block"])
    both = {
        columns: build(columns, parameters(columns, (4, 128))) for columns in (Columns(), blocks)
    }
    for optimizer in both.values():
        optimizer.full_columns = {blocks}
        (p,) = optimizer.names
        p.grad = normal(4, 128)
        optimizer.step()
    for of, to in ((Columns(), blocks), (blocks, Columns())):
        (p,), (theirs,) = both[to].names, both[of].names
        want = of.exp_avg.decode(both[of].state[theirs]["exp_avg"])
        both[to].load_state(both[of].state_tensors(), both[of].state_json())
        got = to.exp_avg.decode(both[to].state[p]["exp_avg"])
        assert torch.equal(got, blocks.exp_avg.decode(blocks.exp_avg.encode(want))) and got.any()


@pytest.mark.parametrize("saved_in_blocks", [False, True])
def test_zero_converts_only_its_own_moments(saved_in_blocks: bool) -> None:
    """Under ZeRO a rank has the JSON of all parameters, and the tensors of its own."""
    blocks = Columns(exp_avg=CODECS["fp8_block"], exp_avg_sq=CODECS["fp8_block"])
    saved, target = (blocks, Columns()) if saved_in_blocks else (Columns(), blocks)

    def optimizer_of(columns: Columns, owned: set[str] | None) -> LowBitAdamW:
        params = {name: nn.Parameter(normal(4, 128)) for name in ("a", "b")}
        optimizer = LowBitAdamW(params.items(), columns=columns, owned=owned)
        optimizer.full_columns = {blocks}
        return optimizer

    before = optimizer_of(saved, None)
    for p in before.names:
        p.grad = normal(4, 128)
    before.step()
    after = optimizer_of(target, {"a"})
    after.load_state(before.state_tensors(), before.state_json())
    assert after.state_json()["state"]["b"]["step"] == 1
    assert after.state_tensors().keys() == optimizer_of(target, {"a"}).state_tensors().keys()


def test_an_empty_shard_has_the_scales_of_the_whole() -> None:
    columns = Columns(exp_avg=CODECS["fp8"], exp_avg_sq=CODECS["fp16_scaled"])
    optimizer = build(columns, parameters(columns, (0, 128)))
    (p,) = optimizer.names
    p.grad = torch.zeros_like(p)
    optimizer.max_over_ranks = lambda known: torch.full_like(known, 2.0)  # of another rank's rows
    optimizer.step()
    for moment, codec_of in (("exp_avg", columns.exp_avg), ("exp_avg_sq", columns.exp_avg_sq)):
        assert optimizer.state[p][moment][1] == codec_of.scale_inv(torch.tensor(2.0)) != 1
