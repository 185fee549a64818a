"""State of a low-bit optimizer: resumed bit for bit, its names, what loading refuses, and nothing left to pickle."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from fp8cfg.numerics.formats import E4M3
from fp8cfg.optim.low_bit.adam import LowBitAdam, LowBitAdamW, LowBitOptimizer
from tests.support.low_bit import ROWS, build, equal, everything, normal, parameters, train


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("cls", [LowBitAdamW, LowBitAdam])
def test_resumes_bit_for_bit(row: str, cls: type[LowBitOptimizer]) -> None:
    c, shapes = ROWS[row], ((9, 128), (50,))
    p = parameters(c, *shapes)
    optimizer = build(c, p, cls, seed=5)
    train(optimizer, p, range(3))
    tensors, rest, weights = (
        save(optimizer.state_tensors()),
        json.dumps(optimizer.state_json()),
        {k: v.detach().clone() for k, v in p.items()},
    )
    train(optimizer, p, range(3, 6))

    again = parameters(c, *shapes, seed=50)
    with torch.no_grad():
        for k, v in again.items():
            v.copy_(weights[k])
    resumed = build(c, again, cls)
    resumed.load_state(load(tensors), json.loads(rest))
    assert resumed.seed == 5 and all(torch.equal(again[k], weights[k]) for k in again)
    train(resumed, again, range(3, 6))
    assert equal(everything(optimizer, p), everything(resumed, again))
    assert resumed.state_json() == optimizer.state_json()


def test_state_names() -> None:
    p = parameters(ROWS["O3"], (4, 128))
    assert {
        k: (v.dtype, tuple(v.shape)) for k, v in build(ROWS["O3"], p).state_tensors().items()
    } == {
        "p0.master": (torch.float16, (4, 128)),
        "p0.master.scale_inv": (torch.float32, ()),
        "p0.weight": (E4M3.dtype, (4, 128)),
        "p0.weight.scale_inv": (torch.float32, ()),
        "p0.exp_avg": (E4M3.dtype, (4, 128)),
        "p0.exp_avg.scale_inv": (torch.float32, ()),
        "p0.exp_avg_sq": (torch.float16, (4, 128)),
        "p0.exp_avg_sq.scale_inv": (torch.float32, ()),
    }
    assert set(build(ROWS["fp32"], p).state_tensors()) == {"p0.exp_avg", "p0.exp_avg_sq"}
    assert build(ROWS["O2"], p).state_json() == {
        "optimizer": "LowBitAdamW",
        "seed": 0,
        "state": {
            "p0": {
                "step": 0,
                "codecs": {
                    "weight": "fp16 pow2",
                    "exp_avg": "e4m3 pow2",
                    "exp_avg_sq": "fp16 pow2",
                },
            }
        },
    }


def test_what_load_refuses_and_that_nothing_changes() -> None:
    p = parameters(ROWS["O2"], (4, 128))
    optimizer = build(ROWS["O2"], p)
    train(optimizer, p, range(2))
    tensors, rest = (
        {k: v.clone() for k, v in optimizer.state_tensors().items()},
        optimizer.state_json(),
    )
    before = everything(optimizer, p)
    cut = {k: v for k, v in tensors.items() if k != "p0.exp_avg.scale_inv"}
    wide = {**tensors, "p0.exp_avg": tensors["p0.exp_avg"].float()}
    entry = rest["state"]["p0"]
    for t, j, words in (
        (cut, rest, "1 tensors missing, among them p0.exp_avg.scale_inv"),
        (wide, rest, r"p0.exp_avg is torch.float32 \[4, 128\], expected torch.float8_e4m3fn"),
        (
            tensors,
            {**rest, "optimizer": "LowBitAdam"},
            "of LowBitAdam, this optimizer is LowBitAdamW",
        ),
        (tensors, {**rest, "state": {"q": entry}}, "1 parameters missing, among them p0"),
        (
            tensors,
            {
                **rest,
                "state": {"p0": {**entry, "codecs": {**entry["codecs"], "exp_avg": "e4m3 exact"}}},
            },
            "exp_avg e4m3 exact, .*expected",
        ),
        (tensors, {"state": {}}, "the JSON has"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.load_state(t, j)
    assert equal(before, everything(optimizer, p))


def test_weights_written_by_others_are_noticed() -> None:
    p = parameters(ROWS["Megatron"], (4, 128))
    optimizer = build(ROWS["Megatron"], p)
    with torch.no_grad():
        p["p0"].zero_()
    with pytest.raises(
        RuntimeError,
        match="1 parameters, p0 among them, were written after the optimizer had stored their values",
    ):
        optimizer.step()
    plain = parameters(ROWS["fp32"], (4, 128))
    optimizer = build(ROWS["fp32"], plain)
    with torch.no_grad():
        plain["p0"].zero_()
    optimizer.step()


def test_originals_are_what_masters_start_from() -> None:
    original = normal(4, 128)
    p = {"w": nn.Parameter(original.bfloat16())}
    optimizer = build(ROWS["Megatron"], p, originals={p["w"]: original})
    assert torch.equal(optimizer.state_tensors()["w.master"], original)


def test_nothing_is_left_to_pickle(tmp_path: Path) -> None:
    """`state_dict` goes through torch.save and back without code, weights_only."""
    p = parameters(ROWS["O2"], (4, 128))
    optimizer = build(ROWS["O2"], p)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    with pytest.raises(TypeError, match="an optimizer cannot be copied or pickled"):
        torch.save(optimizer, tmp_path / "whole.pt")
    with pytest.raises(TypeError, match="an optimizer cannot be copied or pickled"):
        copy.deepcopy(optimizer)


def test_a_state_with_other_groups_changes_nothing() -> None:
    p = parameters(ROWS["O2"], (4, 128))
    optimizer = build(ROWS["O2"], p)
    state, mine = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_tensors())
    state["tensors"]["p0.exp_avg.scale_inv"].fill_(7.0)
    with pytest.raises(ValueError, match="2 parameter groups, expected 1"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"] * 2})
    assert all(torch.equal(t, mine[name]) for name, t in optimizer.state_tensors().items())
    optimizer.load_state_dict(
        {
            **state,
            "param_groups": [{"lr": 0.5, "betas": (0.5, 0.5), "eps": 1.0, "weight_decay": 0.0}],
        }
    )
    assert (
        optimizer.param_groups[0]["lr"] == 0.5
        and optimizer.state_tensors()["p0.exp_avg.scale_inv"] == 7.0
    )
