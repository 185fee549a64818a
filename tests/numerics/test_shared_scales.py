"""Delayed scales that ranks share: amaxes are reduced in a pass until each scale is known to be set, and no longer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8cfg.numerics import FP8Linear, Region, Scaling, amax, amax_update, update_scales
from fp8cfg.numerics.amax import AmaxGroup
from fp8cfg.numerics.amax_update import reset_state
from fp8cfg.numerics.async_copies import HostCopy
from fp8cfg.numerics.scaling import GRAD_OUTPUT, WEIGHT

SPLIT = AmaxGroup(((WEIGHT, 0), (GRAD_OUTPUT, 1)), "tensor-parallel ranks")


class Arriving:
    """An event of a copy that is there when somebody waits for it; as on a GPU, the host does not know before."""

    waits = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        Arriving.waits += 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often amaxes were reduced, and scales read."""
    found = {"reduced": 0, "read": 0}

    def largest(t: Tensor, group: str) -> Tensor:
        found["reduced"] += 1
        return t.clone()

    def of(values: Tensor) -> HostCopy:
        found["read"] += 1
        return HostCopy(values)

    monkeypatch.setattr(amax, "all_reduce_max", largest)
    monkeypatch.setattr(amax_update.HostCopy, "of", of)
    return found


def layer_of(**kwargs: Any) -> FP8Linear:
    linear = nn.Linear(32, 16, bias=False)
    linear.amax_group = SPLIT  # type: ignore[assignment]
    return FP8Linear.from_linear(linear, Scaling(amax_history_len=4), Region(active=True), **kwargs)


def step(layer: FP8Linear, asked: dict[str, int], gradient: float = 1.0) -> tuple[int, int]:
    """A pass and the update after it; the reductions and reads that they took."""
    asked.update(reduced=0, read=0)
    layer(torch.randn(8, 32, requires_grad=True)).backward(torch.full((8, 16), gradient))
    update_scales([layer], step=1)
    return asked["reduced"], asked["read"]


def test_nothing_is_reduced_once_scales_are_set(asked: dict[str, int]) -> None:
    layer = layer_of()
    assert step(layer, asked) == (2, 1) and layer.pass_amax_group is None
    assert step(layer, asked) == (0, 0)


def test_products_in_high_precision_are_not_waited_for(asked: dict[str, int]) -> None:
    layer = layer_of(high_precision=(False, True, True))
    assert step(layer, asked) == (1, 1)
    assert layer.fp8_scale is not None and layer.fp8_scale[GRAD_OUTPUT] == 0, (
        "no gradient is quantized"
    )
    assert step(layer, asked) == (0, 0)


def test_a_scale_that_saw_nothing_but_zeros_is_asked_for_again(asked: dict[str, int]) -> None:
    layer = layer_of()
    assert step(layer, asked, gradient=0.0) == (2, 1) and layer.pass_amax_group == AmaxGroup(
        ((GRAD_OUTPUT, 1),), SPLIT.group
    )
    assert step(layer, asked) == (1, 1) and step(layer, asked) == (0, 0)


def test_a_loaded_layer_asks_again(asked: dict[str, int]) -> None:
    layer = layer_of()
    step(layer, asked)
    layer.load_state_dict(layer.state_dict())
    assert (
        layer.pass_amax_group == SPLIT
        and step(layer, asked) == (2, 1)
        and layer.pass_amax_group is None
    )
    reset_state([layer])
    assert layer.pass_amax_group == SPLIT


def test_a_gpu_is_read_an_update_late(
    asked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amax_update.HostCopy, "of", lambda values: HostCopy(values, Arriving()))  # type: ignore[arg-type]
    Arriving.waits, layer = 0, layer_of()
    step(layer, asked)
    assert layer.pass_amax_group == SPLIT and Arriving.waits == 0, "the copy is on its way"
    other = copy.deepcopy(layer)
    assert other.scales_read is None and layer.scales_read is not None, "an event has no copy"
    assert step(layer, asked)[0] == 2 and layer.pass_amax_group is None and Arriving.waits == 1
    assert step(layer, asked)[0] == 0 and layer.scales_read is None and Arriving.waits == 1
    step(layer := layer_of(), asked)
    layer.load_state_dict(layer.state_dict())
    assert layer.scales_read is None, "it would tell of scales that are gone"
