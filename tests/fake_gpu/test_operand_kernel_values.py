"""Triton kernels of NVFP4, and of the operands of all products, under Triton's interpreter, on a CPU: codes, scales and layouts are those
of the plain torch code, also of one of two tensor-parallel ranks.

The interpreter is chosen when Triton is imported, hence the process of its own. What kernels write here: tests/support/kernel_values.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8cfg.numerics import E2M1, E4M3, Scaling
from fp8cfg.numerics.amax import record_amax
from fp8cfg.numerics.formats import RandomStream
from fp8cfg.numerics.fp8_weights import store
from fp8cfg.numerics.gemm import Operand, hardware_layout, swizzled_scale_size
from fp8cfg.numerics.quantize import quantize_tiles
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from tests.support.interpreted import interpreted, not_interpreted, under_the_interpreter
from tests.support.kernel_values import contents, exact

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton"
)  # numpy, of infinities and NaN: the interpreter computes with it


@pytest.mark.slow
@not_interpreted
def test_under_the_interpreter() -> None:
    under_the_interpreter(__file__)


def four_bit_room(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Room for codes and scales, with something in it."""
    return (
        torch.full((rows, -(-columns // 32) * 16), 77, dtype=torch.uint8),
        torch.full((swizzled_scale_size(rows, -(-columns // 16)),), 77, dtype=torch.uint8),
    )


@interpreted
@pytest.mark.parametrize("kind", ["rows", "squares", "at random"])
@pytest.mark.parametrize("shape", [(128, 256), (130, 140), (1, 300), (256, 70)], ids=str)
def test_four_bits(shape: tuple[int, int], kind: str) -> None:
    """Codes, scales of tiles and of the tensor, and the recorded amax of NVFP4; here the kernel rounds, not the hardware."""
    from fp8cfg.numerics.amax import compute_amax_or_nan
    from fp8cfg.numerics.kernels import blocks
    from fp8cfg.numerics.scaling import global_scale_from_amax

    scaling, square = Scaling("nvfp4", forward=E2M1, backward=E2M1), kind == "squares"
    random = (
        (torch.tensor([12345, -678901], dtype=torch.int32), torch.tensor(3, dtype=torch.int32))
        if kind == "at random"
        else None
    )
    for i, (name, t) in enumerate(contents(shape).items()):
        x, lane = (
            t if name == "tiny" else t.to((torch.bfloat16, torch.float32, torch.float16)[i % 3]),
            i % 2,
        )
        seen, kept = torch.full((), 0.5), torch.full((), 0.5)
        record_amax(kept, amax := compute_amax_or_nan(x))
        q = quantize_tiles(
            x,
            (16, 16) if square else (1, 16),
            E2M1,
            scaling,
            E2M1.dtype,
            global_scale_from_amax(amax),
            RandomStream(*random, lane) if random else None,
        )
        sides = [q, q.t()] if square else [q]
        made = [room for side in sides for room in four_bit_room(*side.data.shape)]
        whole = torch.empty(())
        blocks.cast_nvfp4(
            x.contiguous(), *made, *() if square else (None, None), whole, random, lane, seen
        )
        assert torch.equal(seen, kept), name
        assert q.global_scale_inv is not None and torch.equal(
            whole.nan_to_num(7.0), q.global_scale_inv.nan_to_num(7.0)
        ), name
        for side, codes, scales in zip(sides, made[::2], made[1::2], strict=True):
            want, want_scales = hardware_layout(side._replace(data=side.data.contiguous()))
            assert torch.equal(scales, want_scales), name
            assert name == "nan" or torch.equal(codes, want), name
        held = store(x, Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=square))
        stored = [None if field is None else torch.full_like(field, 1.0) for field in held]
        blocks.cast_nvfp4(x.contiguous(), *stored, transpose=False)
        for field, kept_field in zip(stored, held, strict=True):
            assert field is kept_field is None or torch.equal(
                field.float().nan_to_num(7.0), kept_field.float().nan_to_num(7.0)
            ), name


@interpreted
@pytest.mark.parametrize("kind", ["mxfp8", "mxfp8 squares", "nvfp4", "nvfp4 rows"])
def test_operands_of_all_products(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hardware gets of input, weight and gradient for each product: transforms, draws and orientations with the kernels."""
    from fp8cfg.numerics import quantize
    from fp8cfg.numerics.kernels.launch import quantize_tiles_fused

    four, squares = "nvfp4" in kind, "rows" not in kind and kind != "mxfp8"
    scaling = (
        Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=squares)
        if four
        else Scaling("mxfp8", backward=E4M3, weights_2d=squares)
    )
    random, t = (
        (torch.tensor([5, -7], dtype=torch.int32), torch.tensor(2, dtype=torch.int32)),
        exact(208, 160),
    )

    def operand(role: int, axis: int, fused: bool = False, both: bool = False) -> Operand:
        monkeypatch.setattr(quantize, "can_fuse_nvfp4", lambda t, carrier: fused)
        if four:
            return quantize.quantize_nvfp4(t, role, axis, scaling, None, random)
        tile = scaling.tile(role, axis)
        assert tile is not None
        return (
            quantize_tiles_fused(t, role, scaling, axis, both, None)
            if fused
            else quantize_tiles(t, tile, E4M3, scaling, E4M3.dtype)
        )

    for role in (INPUT, WEIGHT, GRAD_OUTPUT):
        shared = operand(role, 1, fused=True, both=True)
        made = [shared, shared.t() if shared.columnwise else operand(role, 0, fused=True).t()]
        if not scaling.directional(role):  # for dgrad alone, too
            made[1] = operand(role, 1, fused=True).t()
        wants = [operand(role, 1), operand(role, 0).t()]
        for got, want, axis in zip(made, wants, (1, 0), strict=True):
            assert got.execution == "scaled_mm" and got.format_name == ("e2m1" if four else "e4m3")
            want = want._replace(data=want.data.contiguous())
            for a, b in zip(hardware_layout(got), hardware_layout(want), strict=True):
                assert torch.equal(a, b), (role, axis)
            assert (got.global_scale_inv is None) == (want.global_scale_inv is None) == (not four)
            assert (
                got.global_scale_inv is None
                or want.global_scale_inv is None
                or torch.equal(got.global_scale_inv, want.global_scale_inv)
            ), (role, axis)


@interpreted
@pytest.mark.parametrize("kind", ["rows", "nvfp4", "nvfp4 along rows", "nvfp4 as it is"])
@pytest.mark.parametrize("role", [INPUT, WEIGHT, GRAD_OUTPUT])
def test_parts_have_the_scales_that_the_plain_code_gives_them(
    kind: str, role: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two tensor-parallel ranks, of a row-parallel or column-parallel layer; the other one has larger amaxes in some places."""
    from fp8cfg.numerics import amax as amax_group
    from fp8cfg.numerics import quantize
    from fp8cfg.numerics import scaling as block_scaling
    from fp8cfg.numerics.kernels import launch
    from fp8cfg.parallel.tensor import COLUMN_PARALLEL_AMAXES, ROW_PARALLEL_AMAXES

    asked: list[tuple[int, ...]] = []

    def largest(amax: Tensor, group: str) -> Tensor:
        asked.append(tuple(amax.flatten().shape))
        theirs = torch.full_like(
            amax, 0x40E00000 if amax.dtype == torch.int32 else 7.0
        )  # of two forms, or of every third row
        return torch.where(
            (torch.arange(amax.numel()) % 3 == 0).view(amax.shape),
            torch.maximum(amax, theirs),
            amax,
        )

    for module in (amax_group, block_scaling, launch):
        monkeypatch.setattr(module, "all_reduce_max", largest)
    four, parts = (
        kind != "rows",
        amax_group.AmaxGroup(
            ROW_PARALLEL_AMAXES if role == INPUT else COLUMN_PARALLEL_AMAXES, "two ranks"
        ),
    )
    scaling = (
        Scaling(
            "nvfp4",
            forward=E2M1,
            backward=E2M1,
            weights_2d=kind != "nvfp4 along rows",
            hadamard="as it" not in kind,
            stochastic=False,
        )
        if four
        else Scaling("current", backward=E4M3, granularity="row", power_2_scales=True)
    )
    t = exact(208, 160)

    def operands(fused: bool) -> list[Operand]:
        monkeypatch.setattr(quantize, "can_fuse_nvfp4", lambda t, carrier: fused)
        if four:
            made = quantize.quantize_nvfp4(t, role, 1, scaling, None, None, None, parts, both=True)
            return [made, made.t()]
        if fused:
            made = launch.quantize_tiles_fused(t, role, scaling, 1, True, None, parts)
            return [made, made.t()]
        tiles = [(axis, tile) for axis in (1, 0) if (tile := scaling.tile(role, axis))]
        along, across = (
            quantize_tiles(t, tile, E4M3, scaling, E4M3.dtype, group=parts.group_of(role, tile))
            for _, tile in tiles
        )
        return [along, across.t()]

    gots, by_kernels = operands(fused=True), [*asked]
    wants, asked[:] = operands(fused=False), asked[len(by_kernels) :]
    assert by_kernels == asked and len(asked) == 1, "one collective for both directions"
    for got, want in zip(gots, wants, strict=True):
        want = want._replace(data=want.data.contiguous())
        pairs = (
            [*zip(hardware_layout(got), hardware_layout(want), strict=True)]
            if four
            else [(got.data, want.data), (got.scale_inv, want.scale_inv)]
        )
        assert all(
            torch.equal(a.float(), b.float()) for a, b in pairs if a is not None and b is not None
        )
        assert not four or (
            got.global_scale_inv is not None
            and want.global_scale_inv is not None
            and torch.equal(got.global_scale_inv, want.global_scale_inv)
        )
