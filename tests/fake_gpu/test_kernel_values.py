"""Triton kernels of one scale a tensor under Triton's interpreter, on a CPU: scaled values, amaxes, scales and layouts are those of the
plain torch code.

The interpreter is chosen when Triton is imported, hence the process of its own. What kernels write here: tests/support/kernel_values.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fp8cfg.numerics import E4M3, E5M2, Scaling
from fp8cfg.numerics.amax import compute_amax
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, choose_tensor_scale
from tests.support.interpreted import interpreted, not_interpreted, under_the_interpreter
from tests.support.kernel_values import contents, saturated

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton"
)  # numpy, of infinities and NaN: the interpreter computes with it


@pytest.mark.slow
@not_interpreted
def test_under_the_interpreter() -> None:
    under_the_interpreter(__file__)


SCALINGS = {
    "delayed": Scaling(margin=1, amax_history_len=4),
    "delayed te": Scaling(first_step="te", amax_history_len=4),
    "current": Scaling("current"),
    "current pow2": Scaling("current", power_2_scales=True),
}
SHAPES = [(64, 64), (33, 70), (130, 1)]


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("role", [INPUT, GRAD_OUTPUT])
def test_values_amaxes_scales_and_layouts(kind: str, role: int, shape: tuple[int, int]) -> None:
    from fp8cfg.numerics.kernels import tensor

    scaling = SCALINGS[kind]
    fmt = scaling.format_of(role)
    history_cases = (
        ((0.0, True), (0.0, False), (3.0, True), (1e30, True), (1e30, False))
        if scaling.layout.history
        else ((None, True), (None, False))
    )
    for i, (name, t) in enumerate(contents(shape).items()):
        dtype = (
            torch.float32
            if name == "tiny"
            else (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        )
        for scale, record in history_cases:
            x, where = t.to(dtype), f"{name} {dtype} scale {scale} record {record}"
            scales = (
                None
                if scale is None
                else torch.full((3,), scale if kind == "delayed" else scale or 1.0)
            )
            history = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
            kept = history.clone()
            want = choose_tensor_scale(x, role, scaling, scales, kept, record)
            data, transposed, scale_inv = (
                torch.empty(shape),
                torch.empty(shape[::-1]),
                torch.empty(()),
            )
            target = fmt.max * 2.0**-scaling.margin if scales is not None else fmt.max
            power_2 = scaling.power_2_scales and scales is None
            seen = history if record else None
            tensor.cast(
                x, scales, seen, role, target, fmt.max, power_2, data, transposed, scale_inv
            )
            exact = saturated(x.float() * want, fmt)
            assert torch.equal(scale_inv, want.reciprocal()), where
            assert torch.equal(
                data.view(torch.int32)[~exact.isnan()], exact.view(torch.int32)[~exact.isnan()]
            ), where
            assert torch.equal(data.isnan(), exact.isnan()) and torch.equal(
                transposed.nan_to_num(7.0), data.t().nan_to_num(7.0)
            ), where
            assert torch.equal(history, kept), where


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_known_scale(shape: tuple[int, int]) -> None:
    from fp8cfg.numerics.kernels import tensor

    scale = torch.tensor([3.7])
    for name, t in contents(shape).items():
        data, scale_inv, exact = torch.empty(shape), torch.empty(()), saturated(t * scale, E4M3)
        tensor.cast(
            t, scale, None, 0, E4M3.max, E4M3.max, False, data, None, scale_inv, amaxes=scale
        )
        assert torch.equal(data.isnan(), exact.isnan()) and torch.equal(
            data.nan_to_num(7.0), exact.nan_to_num(7.0)
        ), name
        assert torch.equal(scale_inv, scale.reciprocal()[0])


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_amaxes_of_parts(shape: tuple[int, int]) -> None:
    from fp8cfg.numerics.kernels import tensor

    for name, t in contents(shape).items():
        parts = torch.zeros(tensor.PARTS)
        tensor.compute_part_amaxes(t, parts)
        assert (
            torch.equal(parts.amax(), compute_amax(t)) and not parts[tensor.num_parts(t) :].any()
        ), name


@interpreted
def test_many_parts_and_no_transpose() -> None:
    """More elements than the programs of the first kernel read at once: each goes round."""
    from fp8cfg.numerics.kernels import tensor

    t = torch.randn(257, 5000, generator=torch.Generator().manual_seed(2))
    t[200, 4999] = 1000.0
    parts, data, scale_inv = tensor.PARTS, torch.empty(t.shape), torch.empty(())
    tensor.PARTS = 16
    try:
        tensor.cast(t, None, None, INPUT, E4M3.max, E4M3.max, False, data, None, scale_inv)
    finally:
        tensor.PARTS = parts
    assert data[200, 4999] == E4M3.max and scale_inv == torch.tensor(448.0).div(1000.0).reciprocal()
    assert (
        torch.equal(data, saturated(t * torch.tensor(448.0).div(1000.0), E4M3))
        and E5M2.max > E4M3.max
    )
