"""Counts of clipped and infinite values in layers: of each tensor once, where it is quantized first; the same in compiled code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8cfg.numerics import (
    E2M1,
    E4M3,
    E5M2,
    FP8Linear,
    Region,
    Scaling,
    overflow,
    overflow_counts,
    seed_rounding,
    update_scales,
)
from fp8cfg.numerics.fp8_attention import FP8Attention
from fp8cfg.numerics.overflow_counts import take_step_counts
from fp8cfg.numerics.statistics import collect_statistics

CPU = torch.device("cpu")
SCALINGS = {
    "delayed": Scaling(amax_history_len=4),
    "delayed te": Scaling(amax_history_len=4, first_step="te"),
    "current": Scaling("current"),
    "row": Scaling("current", granularity="row"),
    "mxfp8": Scaling("mxfp8", backward=E4M3),
    "block": Scaling("block", backward=E4M3),
    "nvfp4": Scaling("nvfp4", forward=E2M1, backward=E2M1),
}


@pytest.fixture(autouse=True)
def counted_from_here_on() -> None:
    take_step_counts(CPU)


def layer(scaling: Scaling, **how: bool) -> FP8Linear:
    torch.manual_seed(0)
    made = FP8Linear.from_linear(nn.Linear(32, 48, bias=False), scaling, Region(True), **how)  # type: ignore[arg-type]
    seed_rounding(made, 1)
    return made


def taken() -> list[float]:
    return take_step_counts(CPU)[:2].tolist()


def microbatch(model: nn.Module, x: Tensor, gradient: Tensor, again: bool = False) -> None:
    """A pass forth and back, whose forward pass is computed again where it says so."""
    x = x.clone().requires_grad_()
    y = checkpoint(model, x, use_reentrant=False) if again else model(x)
    y.backward(gradient)


@pytest.mark.parametrize("again", [False, True])
def test_clipped_values_are_those_beyond_the_reach_of_the_scale(again: bool) -> None:
    """Of the input, the weight and the gradient, over two microbatches; the largest finite and an infinite value of each count apart."""
    model, x, gradient = layer(SCALINGS["delayed"]), torch.randn(64, 32), torch.randn(64, 48)
    microbatch(model, x, gradient, again)
    update_scales([model], step=1)
    assert taken() == [0, 0]
    assert model.fp8_scale is not None
    x, gradient = x * 2, gradient * 3
    x[3, 3], gradient[5, :2] = torch.inf, -torch.inf
    scales, expected = model.fp8_scale.tolist(), 0
    for t, scale, fmt in ((x, scales[0], E4M3), (gradient, scales[2], E5M2)):
        expected += int(((t.abs() * scale > fmt.reach) & t.isfinite()).sum())
    assert expected > 20
    for _ in range(2):
        microbatch(model, x, gradient, again)
    assert taken() == [2 * expected, 2 * 3] and taken() == [0, 0]
    update_scales([model], step=2)
    found = overflow(model)
    assert found is not None and found.infinite == 2


@pytest.mark.parametrize("kind", SCALINGS)
def test_infinite_values_are_counted_once_however_many_products_read_them(kind: str) -> None:
    """Tensors that are quantized along both dimensions among them; finite ones fit into scales of their own."""
    model, x, gradient = layer(SCALINGS[kind]), torch.randn(64, 32), torch.randn(64, 48)
    model.weight.data[1, 2] = torch.inf
    x[3, 3:5] = torch.inf
    gradient[5:10, 7] = -torch.inf
    with torch.no_grad():
        model(x)
    assert taken() == [0, 0], "of an evaluation"
    microbatch(model, x, gradient, again=True)
    clipped, infinite = taken()
    assert infinite == 8 and (clipped == 0 or kind == "delayed te")


def counts_of_steps(scaling: Scaling, backend: str, again: bool) -> list[list[float]]:
    """Of four steps of two microbatches and an evaluation: as scales know tensors, of larger ones, of infinite ones, and of an infinite
    weight too. `again` computes forward passes again, inside of the graph where there is a `backend`."""
    layers, counts = nn.ModuleList([layer(scaling), layer(scaling)]), []

    def both(x: Tensor) -> Tensor:  # which read one tensor, whose amax a graph has once
        return layers[0](x) + layers[1](x)

    def passed(x: Tensor) -> Tensor:
        y = checkpoint(both, x, use_reentrant=False) if again else both(x)
        assert isinstance(y, Tensor)
        return y

    torch._dynamo.reset()
    forward = torch.compile(passed, fullgraph=True, backend=backend) if backend else passed
    for step in range(4):
        torch.manual_seed(step)
        x, gradient = torch.randn(64, 32) * 3**step, torch.randn(64, 48) * 5**step
        if step >= 2:
            x[3, 3:5], gradient[5:9, 7] = torch.inf, -torch.inf
        if step == 3:
            layers[1].weight.data[1, 2] = torch.inf
        for _ in range(2):
            forward(x.clone().requires_grad_()).backward(gradient)
        update_scales([*layers], step=step + 1)  # type: ignore[list-item]
        counts.append(taken())
        with torch.no_grad():
            forward(x)
    taken()
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend", "again"),
    [
        ("delayed", "inductor", False),
        ("delayed", "aot_eager", True),
        ("delayed te", "aot_eager", False),
        ("current", "aot_eager", True),
        ("row", "aot_eager", False),
        ("mxfp8", "aot_eager", False),
        ("block", "aot_eager", True),
        ("nvfp4", "aot_eager", False),
    ],
)
def test_compiled_code_counts_what_eager_code_does(kind: str, backend: str, again: bool) -> None:
    eager = counts_of_steps(SCALINGS[kind], "", again)
    assert [infinite for _, infinite in eager] == [0, 0, 24, 26] and (
        eager[1][0] > 1000
    ) == kind.startswith("delayed")
    assert counts_of_steps(SCALINGS[kind], backend, again) == eager


@pytest.mark.slow
def test_a_compiled_layer_that_is_computed_again_counts_once() -> None:
    model, x = layer(SCALINGS["current"]), torch.randn(64, 32)
    x[3, 3:5] = torch.inf
    microbatch(
        torch.compile(model, fullgraph=True, backend="aot_eager"),
        x,
        torch.randn(64, 48),
        again=True,
    )  # type: ignore[arg-type]
    assert taken() == [0, 2]


@pytest.mark.parametrize("again", [False, True])
def test_values_of_attention_are_counted(again: bool) -> None:
    """What grows where a tensor was largest is clipped to what it was, so that all that is made of it still fits."""
    torch.manual_seed(0)
    attention = FP8Attention(Scaling(amax_history_len=4), Region(True))
    q, k, v, gradient = (torch.randn(2, 2, 16, 16) for _ in range(4))
    v[0, 0, 3, 3], gradient[1, 1, 5, 5] = 9.0, -9.0

    def step() -> list[float]:
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        y = checkpoint(attention, *inputs, use_reentrant=False) if again else attention(*inputs)
        y.backward(gradient)
        update_scales([attention], step=1)
        return taken()

    assert step() == [0, 0]
    v[0, 0, 3, 3], gradient[1, 1, 5, 5] = 900.0, -torch.inf
    assert step() == [1, 1]


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_stored_weight_is_counted_where_it_is_written(kind: str) -> None:
    model = layer(SCALINGS[kind], fp8_params=True)
    assert taken() == [0, 0]
    master = torch.randn(48, 32)
    master[3, :3] = torch.inf
    model.set_weight(master)
    assert taken() == [0, 3]
    microbatch(model, torch.randn(64, 32), torch.randn(64, 48))
    assert taken() == [0, 0], "and not where it is read"


def test_statistics_beside_a_step_are_not_counted() -> None:
    model, x = layer(SCALINGS["current"]), torch.randn(64, 32)
    x[3, 3] = torch.inf
    collect_statistics(model, lambda: microbatch(model, x, torch.randn(64, 48)))
    assert taken() == [0, 0]


def test_a_ring_of_places_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow_counts, "NUM_SLOTS", 3)
    monkeypatch.setattr(overflow_counts, "_rings", {})
    model, x = layer(SCALINGS["current"]), torch.randn(64, 32)
    for many in (1, 0, 2, 3, 0, 5):
        x[3, :] = 1.0
        x[3, :many] = torch.inf
        microbatch(model, x, torch.randn(64, 48))
        assert taken() == [0, many]


@pytest.mark.parametrize(
    "name",
    [
        "count_overflow",
        "quantize_tensor",
        "quantize_blocks",
        "quantize_four_bits",
        "store_tensor",
        "store_blocks",
        "store_four_bits",
    ],
)
def test_operators_that_count_go_into_no_cuda_graph(name: str) -> None:
    """It would add to the place of one step for ever. What Inductor captures is in tests/fake_gpu/test_cuda_graphs.py."""
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.fp8cfg, name).default.tags
