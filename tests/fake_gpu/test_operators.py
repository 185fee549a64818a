"""The operators of fused quantization as torch checks them (opcheck): schemas, what they change, their fake implementations, tracing.

Under Triton's interpreter: the fake GPU computes nothing, and the check would take what memory held for a change. Operators that write
into given float8 tensors are left out: the check multiplies what is written, and torch (2.13) has no product of float8 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import library

pytest.importorskip("triton")

from fp8cfg.numerics import E4M3, E5M2
from tests.support.interpreted import interpreted, not_interpreted, under_the_interpreter

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # numpy, of infinities and NaN: the interpreter computes with it


@pytest.mark.slow
@not_interpreted
def test_under_the_interpreter() -> None:
    under_the_interpreter(__file__)


def state(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((3,), scale), torch.zeros(4, 3)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("compute_amax_if_unset", (None, 0)),
        ("compute_amax_if_unset", (state()[0], 0)),
        ("quantize_tensor", (None, None, None, E4M3.max, True, 0, E4M3.dtype, True)),
        ("quantize_tensor", (*state(), None, E5M2.max, False, 2, E5M2.dtype, False)),
        ("quantize_tensor", (*state(0.0), torch.ones(1), E4M3.max, False, 1, E4M3.dtype, True)),
        ("quantize_tensor", (*state(), torch.ones(0), E4M3.max, False, 1, E4M3.dtype, True)),
        ("quantize_blocks", (128, E4M3.dtype, False, True, True, True, None, 1, None, None)),
        ("quantize_blocks", (128, E5M2.dtype, True, False, True, False, state()[1], 2, None, None)),
        ("quantize_blocks", (32, E4M3.dtype, False, False, True, True, state()[1], 1, None, None)),
        (
            "quantize_blocks",
            (0, E4M3.dtype, True, False, False, True, state()[1], 1, None, torch.ones(96)),
        ),
        ("count_overflow", (torch.ones(()), None, 0, E4M3.reach)),
        ("count_overflow", (torch.ones(()), torch.tensor(E5M2.max), 2, E5M2.reach)),
        ("quantize_four_bits", (True, None, None, 0, state()[1], 1, None)),
        (
            "quantize_four_bits",
            (
                False,
                torch.tensor([1, 2], dtype=torch.int32),
                torch.tensor(3, dtype=torch.int32),
                1,
                None,
                2,
                torch.ones(()),
            ),
        ),
    ],
)
def test_an_operator_is_what_it_says(name: str, rest: tuple[Any, ...], dtype: torch.dtype) -> None:
    t = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    t[0, 0] = torch.inf  # goes into the history
    library.opcheck(getattr(torch.ops.fp8cfg, name).default, (t, *rest))


@interpreted
def test_a_change_that_is_not_said_is_found() -> None:
    @library.custom_op("fp8cfg_test::quietly", mutates_args=())
    def quietly(t: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        history.add_(1)
        return t.clone()

    with pytest.raises(Exception, match="history is not defined as mutable but was mutated"):
        library.opcheck(quietly, (torch.ones(2), torch.zeros(2)), test_utils="test_schema")
