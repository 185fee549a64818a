from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.numerics import (
    E4M3,
    E5M2,
    FP8Linear,
    Region,
    Scaling,
    compute_amax,
    compute_scale,
    discard_amax,
    roll_amax_history,
    update_scales,
)
from fp8cfg.parallel.process_group import World
from tests.support.ranks import on_ranks

INF, NAN = math.inf, math.nan
FLT_MAX = torch.finfo(torch.float32).max


def layer(**scaling: object) -> FP8Linear:
    return FP8Linear.from_linear(nn.Linear(16, 16), Scaling(**scaling), Region())  # type: ignore[arg-type]


# --- amax


AMAXES: list[tuple[list[float], float]] = [
    ([1, -3, 2], 3),
    ([NAN, -2, 1], 2),
    ([NAN, -INF, 1], INF),
    ([NAN, NAN], 0),
    ([0.0, -0.0], 0),
]


@pytest.mark.parametrize("compiled", [False, True])
def test_amax_skips_nan_and_not_infinity(compiled: bool) -> None:
    def amaxes(tensors: list[Tensor]) -> list[Tensor]:
        return [compute_amax(t) for t in tensors]

    cases = [
        (dtype, values, want)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for values, want in AMAXES
    ]
    tensors = [torch.tensor(values, dtype=dtype) for dtype, values, _ in cases]
    found = (torch.compile(amaxes, fullgraph=True) if compiled else amaxes)(tensors)
    for case, got in zip(cases, found, strict=True):
        assert (got.item(), got.dtype, got.shape) == (case[-1], torch.float32, ()), case


def test_amax_of_nothing_is_zero() -> None:
    assert compute_amax(torch.empty(0, 16)) == 0


# --- scale


def test_scale_is_the_correctly_rounded_quotient() -> None:
    amax = torch.rand(100_000) + 0.5
    exact = (
        448.0 / amax.double()
    ).float()  # float64 has bits enough that rounding twice is rounding once
    assert torch.equal(compute_scale(amax, E4M3.max), exact)
    assert not torch.equal(448.0 / amax, exact), (
        "torch now divides truly by a number; the detour can go"
    )


@pytest.mark.parametrize(
    ("amax", "want"),
    [
        (2.0, 224.0),
        (0.0, 7.0),
        (INF, 7.0),
        (NAN, 7.0),
        (1e-45, FLT_MAX),
        (FLT_MAX, 448.0 / FLT_MAX),
    ],
)
def test_scale_at_the_edges(amax: float, want: float) -> None:
    got = compute_scale(torch.tensor(amax), E4M3.max, fallback=torch.tensor(7.0))
    assert got == torch.tensor(want)


def test_margin_halves_the_scale() -> None:
    assert compute_scale(torch.tensor(2.0), E5M2.max * 2.0**-3) == 57344 / 2 / 8


# --- the fused rule of Transformer Engine, worked out by hand on delayed_scaling.cu


@pytest.mark.parametrize(
    ("algo", "history", "now", "rolled", "scale"),
    [
        # row 0 gathers, rows 1.. are the past, oldest first; the row that falls out (1) still counts under "max"
        ("max", [4, 1, 2, 3], 4, [0, 2, 3, 4], 448 / 4),
        ("max", [1, 8, 2, 3], 1, [0, 2, 3, 1], 448 / 8),
        ("most_recent", [1, 8, 2, 3], 1, [0, 2, 3, 1], 448 / 1),
        ("max", [1, 2, 2, 3], 16, [0, 2, 3, 16], 448 / 16),  # another rank saw more than this one
        ("max", [0, 8, 2, 3], 0, [0, 8, 2, 3], 7.0),  # nothing seen: neither rolls nor moves
        ("most_recent", [0, 8, 2, 3], 0, [0, 8, 2, 3], 7.0),
        ("max", [2, 8, 2, 3], 0, [0, 2, 3, 2], 448 / 8),  # nothing reduced: the local row counts
        ("max", [INF, 1, 2, 3], INF, [0, 2, 3, INF], 7.0),
        (
            "max",
            [2, 1, 2, INF],
            2,
            [0, 2, INF, 2],
            7.0,
        ),  # infinity stays in the window and freezes the scale
        ("most_recent", [2, 1, 2, INF], 2, [0, 2, INF, 2], 448 / 2),
        ("max", [NAN, 1, 2, 3], NAN, [0, 2, 3, NAN], 448 / 3),  # fmax(NaN, 3) is 3
        ("max", [2, NAN, NAN, 1], 2, [0, NAN, 1, 2], 448 / 2),
        ("most_recent", [NAN, 1, 2, 3], NAN, [0, 2, 3, NAN], 7.0),
        ("max", [5], 5, [0], 448 / 5),
        ("most_recent", [5], 5, [0], 448 / 5),
        ("max", [4, 9], 4, [0, 4], 448 / 9),
    ],
)
def test_roll_by_hand(
    algo: str, history: list[float], now: float, rolled: list[float], scale: float
) -> None:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 2)

    got_history, got_scale = roll_amax_history(
        column(history), torch.full((2,), 7.0), torch.full((2,), now), torch.full((2,), 448.0), algo
    )
    assert torch.equal(got_history.nan_to_num(nan=-1), column(rolled).nan_to_num(nan=-1))
    assert torch.equal(got_scale, torch.full((2,), torch.tensor(scale).item()))


# --- the update of whole layers


def test_each_column_has_its_format_and_margin() -> None:
    one = layer(amax_history_len=4, margin=1)
    one.fp8_amax_history[0] = torch.tensor([1.0, 2.0, 4.0])
    update_scales([one])
    assert one.fp8_scale.tolist() == [224, 112, 7168]
    assert one.fp8_amax_history.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 2, 4]]


def test_a_scale_stays_unset_until_there_is_an_amax() -> None:
    one = layer(amax_history_len=4)
    one.fp8_amax_history[0] = torch.tensor([1.0, 0.0, INF])
    update_scales([one])
    assert one.fp8_scale.tolist() == [448, 0, 0]


def test_interval_moves_scales_every_third_step_and_rolls_at_each() -> None:
    one, seen = layer(amax_history_len=8, amax_compute_algo="most_recent", interval=3), []
    for step in range(1, 8):
        one.fp8_amax_history[0, :2] = float(step)
        if step >= 5:
            one.fp8_amax_history[0, 2] = float(step)
        update_scales([one], step=step)
        seen.append(one.fp8_scale.tolist())
    # set at once while unset, then at steps 3 and 6
    assert [round(448 / s[0], 4) for s in seen] == [1, 1, 3, 3, 3, 6, 6]
    assert [s[2] and round(57344 / s[2], 4) for s in seen] == [0, 0, 0, 0, 5, 6, 6]
    assert one.fp8_amax_history[1:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_interval_needs_the_step() -> None:
    with pytest.raises(ValueError, match="interval=2 needs the number of the optimizer step"):
        update_scales([layer(interval=2)])


def test_layers_of_several_scalings_in_one_update() -> None:
    a, b, c = layer(amax_history_len=4), layer(amax_history_len=2, margin=1), layer(kind="current")
    for one in (a, b):
        one.fp8_amax_history[0] = 2.0
    update_scales([a, b, c])
    assert (a.fp8_scale[0], b.fp8_scale[0], c.fp8_scale) == (224, 112, None)


def test_discard_forgets_the_step_and_rolls_nothing() -> None:
    one = layer(amax_history_len=3)
    one.fp8_amax_history.copy_(torch.arange(9.0).view(3, 3) + 1)
    discard_amax([one])
    assert one.fp8_amax_history.tolist() == [[0, 0, 0], [4, 5, 6], [7, 8, 9]]


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match="kind='delay'; choose one of delayed, current"):
        Scaling(kind="delay")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="amax_history_len=0"):
        Scaling(amax_history_len=0)


def _reduced(world: World) -> list[list[Tensor]]:
    layers = [layer(amax_history_len=3), layer(amax_history_len=3)]
    layers[0].fp8_amax_history[0] = (
        torch.tensor([1.0, 5.0, 0.0]) if world.first else torch.tensor([2.0, 4.0, 8.0])
    )
    if not world.first:
        layers[1].fp8_amax_history[0] = 7.0  # rank 0 did not run this one
    update_scales(layers, dist.group.WORLD)
    return [[one.fp8_scale, one.fp8_amax_history] for one in layers]


def test_two_ranks_agree_on_the_largest_amax(tmp_path: Path) -> None:
    first, second = on_ranks(2, _reduced, tmp_path)
    for (scale, history), other in zip(first, second, strict=True):
        assert torch.equal(scale, other[0])
        assert torch.equal(history, other[1])
    assert first[0][1][-1].tolist() == [2, 5, 8]
    assert first[1][0].tolist() == [64, 64, 8192]
