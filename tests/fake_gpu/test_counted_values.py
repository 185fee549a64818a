"""Values that the Triton kernels count, under Triton's interpreter, on a CPU: those that plain code finds.

The interpreter is chosen when Triton is imported, hence the process of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8cfg.numerics import E4M3, E5M2, Format
from fp8cfg.numerics.gemm import swizzled_scale_size
from tests.support.interpreted import interpreted, not_interpreted, under_the_interpreter
from tests.support.kernel_values import contents

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton"
)  # numpy, of infinities and NaN: the interpreter computes with it
SHAPE = (130, 300)  # several programs of each kernel, not all of them full


@pytest.mark.slow
@not_interpreted
def test_under_the_interpreter() -> None:
    under_the_interpreter(__file__)


def tensors() -> dict[str, Tensor]:
    """One with many infinite values and NaN beside the usual ones."""
    found = contents(SHAPE)
    several = found["nan"].clone()
    several.view(-1)[::11] = torch.inf
    several.view(-1)[5::1001] = -torch.inf
    return {**found, "several": several, "large": found["normal"] * 100}


@interpreted
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_of_one_scale(fmt: Format) -> None:
    """Delayed, where finite values are clipped, with and without a record; of a scale that is not set, and of current scaling, none."""
    from fp8cfg.numerics.kernels import tensor

    clipped = 0
    for name, t in tensors().items():
        for scale, record in (
            (0.7 * fmt.max, True),
            (0.7 * fmt.max, False),
            (0.0, True),
            (None, True),
        ):
            counts, scales = (
                torch.zeros(4),
                None if scale is None else torch.tensor([1.0, scale, 1.0]),
            )
            history = torch.zeros(4, 3) if record else None
            made = torch.empty(2, *SHAPE)
            for data, more in zip(made, ({"counts": counts, "reach": fmt.reach}, {}), strict=True):
                tensor.cast(
                    t,
                    scales,
                    history,
                    1,
                    fmt.max,
                    fmt.max,
                    False,
                    data,
                    torch.empty(SHAPE[::-1]),
                    torch.empty(()),
                    **more,
                )
            assert torch.equal(made[0].view(torch.int32), made[1].view(torch.int32)), (
                "data are the same, counted or not"
            )
            infinite = t.isinf()
            beyond = ((t.abs() * scale > fmt.reach) & ~infinite).sum() if scale else 0
            assert counts.tolist() == [beyond, infinite.sum(), 0, 0], (name, scale, record)
            clipped += int(beyond)
    assert clipped > 10_000


@interpreted
@pytest.mark.parametrize(
    "kind",
    [
        "rows",
        "rows alone",
        "columns alone",
        "blocks",
        "blocks across",
        "squares",
        "MX",
        "MX squares",
        "four bits",
        "four bits squares",
    ],
)
def test_of_tiles_once_for_both_dimensions(kind: str) -> None:
    from fp8cfg.numerics.kernels import blocks
    from fp8cfg.numerics.kernels import rows as triton_row_kernel

    (r, c), square = SHAPE, "squares" in kind
    for name, t in tensors().items():
        seen, counts = torch.zeros(()), torch.zeros(4)
        along, across = (
            (torch.empty(r, c), torch.empty(r, 1)),
            (torch.empty(c, r), torch.empty(c, 1)),
        )
        if "four" in kind:
            sides = [
                x
                for rows, columns in ((r, c), (c, r))[: 1 + square]
                for x in (
                    torch.empty(rows, -(-columns // 32) * 16, dtype=torch.uint8),
                    torch.empty(swizzled_scale_size(rows, -(-columns // 16)), dtype=torch.uint8),
                )
            ]
            blocks.cast_nvfp4(
                t,
                *sides,
                *() if square else (None, None),
                torch.empty(()),
                record=seen,
                counts=counts,
            )
        elif "MX" in kind:
            scales = [
                torch.empty(swizzled_scale_size(n, -(-k // 32)), dtype=torch.uint8)
                for n, k in ((r, c), (c, r))
            ]
            blocks.cast_blocks(
                t,
                0.0,
                E4M3.max,
                False,
                square,
                along[0],
                scales[0],
                across[0],
                scales[1],
                mx=32,
                record=seen,
                counts=counts,
            )
        elif "rows" in kind or "columns" in kind:
            wanted = (
                *(along if "columns" not in kind else (None, None)),
                *(across if "alone" not in kind or "columns" in kind else (None, None)),
            )
            triton_row_kernel.cast_rows(t, E4M3.max, False, *wanted, record=seen, counts=counts)
        else:
            down = 128 if square else 1
            one, other = (
                torch.empty(-(-r // down), -(-c // 128)),
                torch.empty(-(-c // down), -(-r // 128)),
            )
            first = (None, None) if "across" in kind else (along[0], one)
            blocks.cast_blocks(
                t,
                1e38,
                E4M3.max,
                False,
                square,
                *first,
                across[0],
                other,
                record=seen,
                counts=counts,
            )
        nan_wins = (
            "four" in kind and t.isnan().any()
        )  # in the scale of the whole tensor, and in its products
        assert counts.tolist() == [0, 0 if nan_wins else t.isinf().sum(), 0, 0], name
        assert seen == torch.inf or not counts.any()


@interpreted
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_of_what_plain_operations_quantized(fmt: Format) -> None:
    """Under a scale and under scales of its own, in any order of strides; nothing is read where the amax says that all fits."""
    from fp8cfg.numerics.kernels import tensor

    clipped = 0
    for name, values in tensors().items():
        for t in (values, values.view(10, 13, 300), values.bfloat16()):
            for scale in (torch.tensor(0.7 * fmt.max), None):
                counts, infinite = torch.zeros(4), t.isinf()
                tensor.count(
                    t,
                    t.abs().nan_to_num(0.0, posinf=torch.inf).amax().float(),
                    scale,
                    counts,
                    fmt.reach,
                )
                beyond = (
                    0
                    if scale is None
                    else ((t.abs().float() * scale > fmt.reach) & ~infinite).sum()
                )
                assert counts.tolist() == [beyond, infinite.sum(), 0, 0], (
                    name,
                    t.shape,
                    t.dtype,
                    scale,
                )
                clipped += int(beyond)
            tensor.count(t, torch.ones(()), torch.tensor(fmt.max), counts.zero_(), fmt.reach)
            assert counts.tolist() == [0, 0, 0, 0], name
    assert clipped > 10_000
