"""Overflow of Transformer Engine's tensors: what its delayed scales did not hold is counted as the native backend counts it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.numerics import Overflow, overflow
from fp8cfg.numerics.amax_update import collect_ranges_used
from tests.support.small import small, steps
from tests.support.te_cases import CASES, backend
from tests.support.te_small import converted, tokens
from tests.support.te_table import node


def step(model: torch.nn.Module, *factors: float) -> Overflow | None:
    """A step of a microbatch for each of `factors`, times which its loss is."""
    for factor in factors:
        with backend().autocast(model):
            (model(tokens(), tokens()) * factor).backward()
    backend().after_step(model, None, 1)
    return overflow(model)


def test_a_jump_of_gradients_is_clipped_and_counted_over_microbatches(te: Any) -> None:
    model = converted(node({"scaling": "delayed"}))
    assert overflow(model) is None
    for _ in range(4):  # scales are 1 in the first, and flush small gradients
        found = step(model, 1e-3)
    assert found == Overflow(0, 0, 0.0, "")
    found = step(model, 1.0, 1e-3)
    assert (
        found is not None
        and found.infinite == 0
        and found.clipped >= 8
        and found.tensor.endswith("grad_output")
    )
    assert found.largest == pytest.approx(1000, rel=0.5)
    with torch.no_grad():
        model.layers[1].mlp.linear_fc2.weight[3, 3] = torch.inf
    found = step(model, 1.0)
    assert (
        found is not None
        and found.infinite == 1
        and found[2:] == (torch.inf, "layers.1.mlp.linear_fc2 weight")
    )
    step(model, 1.0)
    backend().after_skip(model)
    assert overflow(model) is None


def test_an_evaluation_leaves_none_and_other_scalings_none_at_all(te: Any) -> None:
    model = converted(node({"scaling": "delayed"}))
    step(model, 1.0)
    with torch.no_grad(), backend().autocast(model):
        model.embedding.weight.mul_(1e6)
        model(tokens(), tokens())
        model.embedding.weight.mul_(1e-6)
    assert step(model, 1.0) == Overflow(0, 0, 0.0, "")
    assert step(converted(node({"scaling": "current"})), 1.0) is None


def test_a_copy_is_not_watched_and_brings_no_other_layer_along(te: Any) -> None:
    model = converted(node({"scaling": "delayed"}))
    step(model, 1.0)
    layer = model.layers[0].mlp.linear_fc2
    assert layer.engine.ranges is not None and copy.deepcopy(layer).engine.ranges is None
    assert overflow(model) is not None and step(copy.deepcopy(model), 1.0) is None


@pytest.mark.parametrize("case", ["delayed", "delayed params"])
def test_ranges_are_natives(case: str, te: Any) -> None:
    """Of the same weights and data, step by step: a weight's is what its scale held when it was quantized."""
    found = []
    for name in ("te", "native"):
        job = fp8cfg.build(small(*[w for w in CASES[case] if w != "backend=te"], f"backend={name}"))
        used = []
        for _ in steps(job, 3):
            ranges = collect_ranges_used(job.model)
            assert ranges is not None
            used.append(dict(zip(ranges.names, ranges.ratios.tolist(), strict=True)))
        found.append(used)
    for mine, theirs in zip(*found, strict=True):
        assert mine.keys() == theirs.keys() and len(mine) == 24
        assert list(mine.values()) == pytest.approx([theirs[name] for name in mine], rel=0.25)
