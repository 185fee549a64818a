"""Triton kernels of scales of tiles under Triton's interpreter, on a CPU: MX, rows and blocks have the values, scales and layouts of the
plain torch code.

The interpreter is chosen when Triton is imported, hence the process of its own. What kernels write here: tests/support/kernel_values.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8cfg.numerics import E4M3, E5M2, Scaling
from fp8cfg.numerics.gemm import swizzle_scales, swizzled_scale_size
from fp8cfg.numerics.scaling import encode_e8m0
from tests.support.interpreted import interpreted, not_interpreted, under_the_interpreter
from tests.support.kernel_values import check_tiles, contents, plain

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton"
)  # numpy, of infinities and NaN: the interpreter computes with it


@pytest.mark.slow
@not_interpreted
def test_under_the_interpreter() -> None:
    under_the_interpreter(__file__)


def filled(rows: int, columns: int) -> Tensor:
    """Room for swizzled scales of 1x32, with something in it."""
    return torch.full((swizzled_scale_size(rows, -(-columns // 32)),), 77, dtype=torch.uint8)


@interpreted
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (130, 140), (1, 300)], ids=str)
def test_mx_along_both_dimensions(shape: tuple[int, int], square: bool) -> None:
    """1x32, 32x1 and 32x32 tiles with E8M0 scales, swizzled and as a weight is stored; among the contents blocks of zeros, of NaN, of
    infinities and of subnormal numbers."""
    from fp8cfg.numerics.kernels import blocks

    scaling, (r, c) = Scaling("mxfp8", backward=E4M3, weights_2d=square), shape
    for i, (name, t) in enumerate(contents(shape).items()):
        x = t if name == "tiny" else t.to((torch.bfloat16, torch.float32, torch.float16)[i % 3])
        made = torch.empty(r, c), filled(r, c), torch.empty(c, r), filled(c, r)
        blocks.cast_blocks(
            x, 0.0, E4M3.max, False, square, *made, mx=32, record=(seen := torch.zeros(()))
        )
        assert seen == (torch.inf if name == "inf" else 0), name
        for tile, data, scales, v in (
            ((32, 32) if square else (1, 32), *made[:2], x),
            ((32, 32) if square else (1, 32), *made[2:], x.t()),
        ):
            exact, decode = plain(v, tile, scaling, E4M3)
            assert torch.equal(data.isnan(), exact.isnan()) and torch.equal(
                data.nan_to_num(7.0), exact.nan_to_num(7.0)
            ), (name, tile)
            rows = decode.repeat_interleave(tile[0], 0)[: len(v)]
            assert torch.equal(scales, swizzle_scales(encode_e8m0(rows))), (name, tile)
        packed = [
            encode_e8m0(plain(v, tile, scaling, E4M3)[1])
            for v, tile in ((x, (32, 32) if square else (1, 32)), (x, (32, 1)))
        ]
        stored = (
            torch.empty(r, c),
            torch.empty_like(packed[0]),
            *(() if square else (torch.empty(r, c), torch.empty_like(packed[1]))),
        )
        blocks.cast_blocks(
            x,
            0.0,
            E4M3.max,
            False,
            square,
            *stored,
            *(None,) * (4 - len(stored)),
            mx=32,
            transpose=False,
        )
        for data, scales, want, bytes_ in zip(
            stored[::2], stored[1::2], (made[0], made[2].t()), packed, strict=False
        ):
            assert torch.equal(scales, bytes_) and torch.equal(
                data.nan_to_num(7.0), want.nan_to_num(7.0)
            ), name


@interpreted
@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (130, 270), (1, 300)], ids=str)
def test_rows_and_columns(shape: tuple[int, int], power_2: bool) -> None:
    from fp8cfg.numerics.kernels import rows as triton_row_kernel

    scaling, (r, c) = Scaling("current", granularity="row", power_2_scales=power_2), shape
    for i, (name, t) in enumerate(contents(shape).items()):
        fmt = (E4M3, E5M2)[i % 2]
        x = t if name == "tiny" else t.to((torch.bfloat16, torch.float32, torch.float16)[i % 3])
        made = torch.empty(r, c), torch.empty(r, 1), torch.empty(c, r), torch.empty(c, 1)
        triton_row_kernel.cast_rows(x, fmt.max, power_2, *made, record=(seen := torch.zeros(())))
        assert seen == (torch.inf if name == "inf" else 0), name
        check_tiles(made, x, ((1, 0), (0, 1)), scaling, fmt, name)
        alone = torch.empty(r, c), torch.empty(r, 1), torch.empty(c, r), torch.empty(c, 1)
        triton_row_kernel.cast_rows(x, fmt.max, power_2, *alone[:2], None, None)
        triton_row_kernel.cast_rows(
            x, fmt.max, power_2, None, None, *alone[2:], record=seen.zero_()
        )
        assert seen == (torch.inf if name == "inf" else 0), name
        stored = torch.empty(r, c), torch.empty(1, c)
        triton_row_kernel.cast_rows(x, fmt.max, power_2, None, None, *stored, transpose=False)
        pairs = [*zip(made, alone, strict=True), (made[2].t(), stored[0]), (made[3].t(), stored[1])]
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs), name


@interpreted
def test_columns_are_the_first_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are fewer and take longer than those of rows, which fill up what they leave."""
    from fp8cfg.numerics.kernels import rows as triton_row_kernel

    kernel, (r, c) = triton_row_kernel._cast_rows, (130, 270)
    programs = -(-c // triton_row_kernel.STRIP_T)
    monkeypatch.setattr(
        triton_row_kernel,
        "_cast_rows",
        {(-(-r // triton_row_kernel.STRIP) + programs,): kernel[(programs,)]},
    )
    made = [torch.full(shape, -7.0) for shape in ((r, c), (r, 1), (c, r), (c, 1))]
    triton_row_kernel.cast_rows(torch.ones(r, c), E4M3.max, False, *made)
    assert [(t == -7).all().item() for t in made] == [True, True, False, False] and (
        made[2] == E4M3.max
    ).all()


@interpreted
@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (130, 140), (1, 300)], ids=str)
def test_blocks_along_both_dimensions(shape: tuple[int, int], square: bool, power_2: bool) -> None:
    """Values before their conversion, scales and layouts of 1x128, 128x1 and 128x128 tiles."""
    from fp8cfg.numerics.kernels import blocks

    scaling, (r, c) = Scaling("block", power_2_scales=power_2, weights_2d=square), shape
    for i, (name, t) in enumerate(contents(shape).items()):
        fmt = (E4M3, E5M2)[i % 2]
        x = t if name == "tiny" else t.to((torch.bfloat16, torch.float32, torch.float16)[i % 3])
        tiles = ((128, 128),) * 2 if square else ((1, 128), (128, 1))
        sizes = (
            ((-(-r // 128), -(-c // 128)), (-(-c // 128), -(-r // 128)))
            if square
            else ((r, -(-c // 128)), (c, -(-r // 128)))
        )
        down = [
            torch.empty(size).t().contiguous().t() for size in sizes
        ]  # as products read them; square ones stand along rows
        made = (
            torch.empty(r, c),
            down[0],
            torch.empty(c, r),
            torch.empty(sizes[1]) if square else down[1],
        )
        highest = torch.finfo(x.dtype).max
        blocks.cast_blocks(
            x, highest, fmt.max, power_2, square, *made, record=(seen := torch.zeros(()))
        )
        assert seen == (torch.inf if name == "inf" else 0), name
        check_tiles(made, x, tiles, scaling, fmt, name)
        if not square:
            stored = torch.empty(r, c), torch.empty(-(-r // 128), c)
            blocks.cast_blocks(
                x, highest, fmt.max, power_2, square, None, None, *stored, transpose=False
            )
            assert all(
                torch.equal(a.nan_to_num(7.0), b.t().nan_to_num(7.0))
                for a, b in zip(stored, made[2:], strict=True)
            ), name
