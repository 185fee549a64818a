"""Triton kernels under Triton's interpreter, on a CPU: scaled values, amaxes, scales and layouts are those of the plain torch code.

The last step, float32 to FP8, is the hardware's and not the interpreter's: test_kernel_code.py looks for its instruction. Here the
kernels write float32 instead. That of Triton 3.6's interpreter rounds halves away from zero (17 becomes 18 in E4M3, 21 becomes 22),
does not saturate (464, 480 and 1e6 are NaN in E4M3; in E5M2 1e6 is infinity), loses the carry into the exponent (480 is 256 in E5M2),
makes 384 of NaN and 256 of infinity in E4M3, and truncates subnormal numbers (3 * 2^-10 is 2^-9 in E4M3). tools/gpu_rows/kernel_bits.py
compares the bytes on a GPU.

The interpreter is chosen when Triton is imported, hence the process of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8cfg.numerics import E2M1, E4M3, E5M2, Format, Scaling
from fp8cfg.numerics.block_scaling import e8m0_bytes
from fp8cfg.numerics.fp8_weights import Stored, store
from fp8cfg.numerics.gemm_operand import Operand
from fp8cfg.numerics.microscaled_mm import laid_out, swizzled, swizzled_size
from fp8cfg.numerics.quantize import quantize_tiles
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT, amax_of, record_amax, scale_now
from fp8cfg.numerics.stochastic_rounding import Random
from fp8cfg.scalings import Tile
from tests.support.interpreted import interpreted, not_interpreted, quantize_by_kernels, under_the_interpreter

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy, of infinities and NaN: the interpreter computes with it


@pytest.mark.slow
@not_interpreted
def test_under_the_interpreter() -> None:
    under_the_interpreter(__file__)


SCALINGS = {
    "delayed": Scaling(margin=1, amax_history_len=4), "delayed te": Scaling(first_step="te", amax_history_len=4), "current": Scaling("current"),
    "current pow2": Scaling("current", power_2_scales=True),
}  # fmt: skip
SHAPES = [(64, 64), (33, 70), (130, 1)]


def contents(shape: tuple[int, int]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g)
    spread = x * torch.exp(4 * torch.randn(shape, generator=g))
    spread[: shape[0] // 2, : shape[1] // 2] = 0
    odd = x.clone()
    odd.view(-1)[:: 7] = torch.nan
    infinite = x.clone()
    infinite.view(-1)[-1] = -torch.inf
    return {"normal": x, "spread": spread, "small": spread * 1e-20, "tiny": x * 1e-40, "zeros": torch.zeros(shape), "nan": odd, "inf": infinite}


def saturated(v: Tensor, fmt: Format) -> Tensor:
    return torch.where(v.isnan(), v, v.clamp(-fmt.max, fmt.max))


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("role", [INPUT, GRAD_OUTPUT])
def test_values_amaxes_scales_and_layouts(kind: str, role: int, shape: tuple[int, int]) -> None:
    from fp8cfg.numerics import triton_kernels

    scaling = SCALINGS[kind]
    fmt = scaling.format_of(role)
    history_cases = ((0.0, True), (0.0, False), (3.0, True), (1e30, True), (1e30, False)) if scaling.layout.history else ((None, True), (None, False))
    for i, (name, t) in enumerate(contents(shape).items()):
        dtype = torch.float32 if name == "tiny" else (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        for scale, record in history_cases:
            x, where = t.to(dtype), f"{name} {dtype} scale {scale} record {record}"
            scales = None if scale is None else torch.full((3,), scale if kind == "delayed" else scale or 1.0)
            history = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
            kept = history.clone()
            want = scale_now(x, role, scaling, scales, kept, record)
            data, transposed, scale_inv = torch.empty(shape), torch.empty(shape[::-1]), torch.empty(())
            target = fmt.max * 2.0**-scaling.margin if scales is not None else fmt.max
            power_2 = scaling.power_2_scales and scales is None
            seen = history if record else None
            triton_kernels.cast(x, scales, seen, role, target, fmt.max, power_2, data, transposed, scale_inv)
            exact = saturated(x.float() * want, fmt)
            assert torch.equal(scale_inv, want.reciprocal()), where
            assert torch.equal(data.view(torch.int32)[~exact.isnan()], exact.view(torch.int32)[~exact.isnan()]), where
            assert torch.equal(data.isnan(), exact.isnan()) and torch.equal(transposed.nan_to_num(7.0), data.t().nan_to_num(7.0)), where
            assert torch.equal(history, kept), where


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_known_scale(shape: tuple[int, int]) -> None:
    from fp8cfg.numerics import triton_kernels

    scale = torch.tensor([3.7])
    for name, t in contents(shape).items():
        data, scale_inv, exact = torch.empty(shape), torch.empty(()), saturated(t * scale, E4M3)
        triton_kernels.cast(t, scale, None, 0, E4M3.max, E4M3.max, False, data, None, scale_inv, amaxes=scale)
        assert torch.equal(data.isnan(), exact.isnan()) and torch.equal(data.nan_to_num(7.0), exact.nan_to_num(7.0)), name
        assert torch.equal(scale_inv, scale.reciprocal()[0])


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_amaxes_of_parts(shape: tuple[int, int]) -> None:
    from fp8cfg.numerics import triton_kernels

    for name, t in contents(shape).items():
        parts = torch.zeros(triton_kernels.PARTS)
        triton_kernels.amaxes_of_parts(t, parts)
        assert torch.equal(parts.amax(), amax_of(t)) and not parts[triton_kernels.part_count(t):].any(), name


@interpreted
def test_many_parts_and_no_transpose() -> None:
    """More elements than the programs of the first kernel read at once: each goes round."""
    from fp8cfg.numerics import triton_kernels

    t = torch.randn(257, 5000, generator=torch.Generator().manual_seed(2))
    t[200, 4999] = 1000.0
    parts, data, scale_inv = triton_kernels.PARTS, torch.empty(t.shape), torch.empty(())
    triton_kernels.PARTS = 16
    try:
        triton_kernels.cast(t, None, None, INPUT, E4M3.max, E4M3.max, False, data, None, scale_inv)
    finally:
        triton_kernels.PARTS = parts
    assert data[200, 4999] == E4M3.max and scale_inv == torch.tensor(448.0).div(1000.0).reciprocal()
    assert torch.equal(data, saturated(t * torch.tensor(448.0).div(1000.0), E4M3)) and E5M2.max > E4M3.max


def filled(rows: int, columns: int) -> Tensor:
    """Room for swizzled scales of 1x32, with something in it."""
    return torch.full((swizzled_size(rows, -(-columns // 32)),), 77, dtype=torch.uint8)


def plain(x: Tensor, tile: Tile, scaling: Scaling, fmt: Format) -> tuple[Tensor, Tensor]:
    """The scaled values of `x`, saturated, and the inverse scales of its tiles, by plain torch code."""
    from fp8cfg.numerics.block_scaling import spread, tile_scales, tiled

    encode, decode = tile_scales(tiled(x, tile).float(), fmt, scaling, None, x.dtype)
    return saturated(x.float() * spread(encode[:, 0, :, 0], tuple(x.shape), tile), fmt), decode[:, 0, :, 0]


def check_tiles(made: tuple[Tensor, ...], x: Tensor, tiles: tuple[Tile, Tile], scaling: Scaling, fmt: Format, where: str) -> None:
    """Values before their conversion and scales along both dimensions are those of plain torch code, bit for bit."""
    for tile, data, scale_inv in ((tiles[0], made[0], made[1]), (tiles[1], made[2].t(), made[3].t())):
        exact, want = plain(x, tile, scaling, fmt)
        assert torch.equal(scale_inv.isnan(), want.isnan()) and torch.equal(scale_inv.nan_to_num(7.0), want.nan_to_num(7.0)), (where, tile)
        assert torch.equal(data.isnan(), exact.isnan()) and torch.equal(data.nan_to_num(7.0), exact.nan_to_num(7.0)), (where, tile)


@interpreted
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (130, 140), (1, 300)], ids=str)
def test_mx_along_both_dimensions(shape: tuple[int, int], square: bool) -> None:
    """1x32, 32x1 and 32x32 tiles with E8M0 scales, swizzled and as a weight is stored; among the contents blocks of zeros, of NaN, of
    infinities and of subnormal numbers."""
    from fp8cfg.numerics import triton_block_kernel

    scaling, (r, c) = Scaling("mxfp8", backward=E4M3, weights_2d=square), shape
    for i, (name, t) in enumerate(contents(shape).items()):
        x = t if name == "tiny" else t.to((torch.bfloat16, torch.float32, torch.float16)[i % 3])
        made = torch.empty(r, c), filled(r, c), torch.empty(c, r), filled(c, r)
        triton_block_kernel.cast_blocks(x, 0.0, E4M3.max, False, square, *made, mx=32, seen=(seen := torch.zeros(())))
        assert seen == (torch.inf if name == "inf" else 0), name
        for tile, data, scales, v in (((32, 32) if square else (1, 32), *made[:2], x), ((32, 32) if square else (1, 32), *made[2:], x.t())):
            exact, decode = plain(v, tile, scaling, E4M3)
            assert torch.equal(data.isnan(), exact.isnan()) and torch.equal(data.nan_to_num(7.0), exact.nan_to_num(7.0)), (name, tile)
            rows = decode.repeat_interleave(tile[0], 0)[: len(v)]
            assert torch.equal(scales, swizzled(e8m0_bytes(rows))), (name, tile)
        packed = [e8m0_bytes(plain(v, tile, scaling, E4M3)[1]) for v, tile in ((x, (32, 32) if square else (1, 32)), (x, (32, 1)))]
        stored = torch.empty(r, c), torch.empty_like(packed[0]), *(() if square else (torch.empty(r, c), torch.empty_like(packed[1])))
        triton_block_kernel.cast_blocks(x, 0.0, E4M3.max, False, square, *stored, *(None,) * (4 - len(stored)), mx=32, transpose=False)
        for data, scales, want, bytes_ in zip(stored[::2], stored[1::2], (made[0], made[2].t()), packed, strict=False):
            assert torch.equal(scales, bytes_) and torch.equal(data.nan_to_num(7.0), want.nan_to_num(7.0)), name


@interpreted
@pytest.mark.parametrize("kind", ["rows", "squares", "at random"])
@pytest.mark.parametrize("shape", [(128, 256), (130, 140), (1, 300), (256, 70)], ids=str)
def test_four_bits(shape: tuple[int, int], kind: str) -> None:
    """Codes, scales of tiles and of the tensor, and the recorded amax of NVFP4; here the kernel rounds, not the hardware."""
    from fp8cfg.numerics import triton_block_kernel
    from fp8cfg.numerics.block_scaling import amax_or_nan, first_level_of

    scaling, square = Scaling("nvfp4", forward=E2M1, backward=E2M1), kind == "squares"
    random = (torch.tensor([12345, -678901], dtype=torch.int32), torch.tensor(3, dtype=torch.int32)) if kind == "at random" else None
    for i, (name, t) in enumerate(contents(shape).items()):
        x, lane = t if name == "tiny" else t.to((torch.bfloat16, torch.float32, torch.float16)[i % 3]), i % 2
        seen, kept = torch.full((), 0.5), torch.full((), 0.5)
        record_amax(kept, amax := amax_or_nan(x))
        q = quantize_tiles(x, (16, 16) if square else (1, 16), E2M1, scaling, E2M1.dtype, first_level_of(amax), Random(*random, lane) if random else None)
        sides = [q, q.t()] if square else [q]
        made = [room for side in sides for room in four_bit_room(*side.data.shape)]
        whole = torch.empty(())
        triton_block_kernel.cast_four_bits(x.contiguous(), *made, *() if square else (None, None), whole, random, lane, seen)
        assert torch.equal(seen, kept), name
        assert q.whole_inv is not None and torch.equal(whole.nan_to_num(7.0), q.whole_inv.nan_to_num(7.0)), name
        for side, codes, scales in zip(sides, made[::2], made[1::2], strict=True):
            want, want_scales = laid_out(side._replace(data=side.data.contiguous()))
            assert torch.equal(scales, want_scales), name
            assert name == "nan" or torch.equal(codes, want), name
        held = store(x, Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=square))
        stored = [None if field is None else torch.full_like(field, 1.0) for field in held]
        triton_block_kernel.cast_four_bits(x.contiguous(), *stored, transpose=False)
        for field, kept_field in zip(stored, held, strict=True):
            assert field is kept_field is None or torch.equal(field.float().nan_to_num(7.0), kept_field.float().nan_to_num(7.0)), name


@interpreted
@pytest.mark.parametrize("kind", ["mxfp8", "mxfp8 squares", "nvfp4", "nvfp4 rows"])
def test_operands_of_all_products(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hardware gets of input, weight and gradient for each product: transforms, draws and orientations with the kernels."""
    from fp8cfg.numerics import nvfp4
    from fp8cfg.numerics.fused_quantize import quantize_tiles_fused

    four, squares = "nvfp4" in kind, "rows" not in kind and kind != "mxfp8"
    scaling = Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=squares) if four else Scaling("mxfp8", backward=E4M3, weights_2d=squares)
    random, t = (torch.tensor([5, -7], dtype=torch.int32), torch.tensor(2, dtype=torch.int32)), exact(208, 160)

    def operand(role: int, axis: int, fused: bool = False, both: bool = False) -> Operand:
        monkeypatch.setattr(nvfp4, "fuses_four_bits", lambda t, carrier: fused)
        if four:
            return nvfp4.quantize_nvfp4(t, role, axis, scaling, None, random)
        tile = scaling.tile(role, axis)
        assert tile is not None
        return quantize_tiles_fused(t, role, scaling, axis, both, None) if fused else quantize_tiles(t, tile, E4M3, scaling, E4M3.dtype)

    for role in (INPUT, WEIGHT, GRAD_OUTPUT):
        shared = operand(role, 1, fused=True, both=True)
        made = [shared, shared.t() if shared.other else operand(role, 0, fused=True).t()]
        if not scaling.directional(role):  # for dgrad alone, too
            made[1] = operand(role, 1, fused=True).t()
        wants = [operand(role, 1), operand(role, 0).t()]
        for got, want, axis in zip(made, wants, (1, 0), strict=True):
            assert got.how == "scaled_mm" and got.kind == ("e2m1" if four else "e4m3")
            want = want._replace(data=want.data.contiguous())
            for a, b in zip(laid_out(got), laid_out(want), strict=True):
                assert torch.equal(a, b), (role, axis)
            assert (got.whole_inv is None) == (want.whole_inv is None) == (not four)
            assert got.whole_inv is None or want.whole_inv is None or torch.equal(got.whole_inv, want.whole_inv), (role, axis)


def four_bit_room(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Room for codes and scales, with something in it."""
    return (torch.full((rows, -(-columns // 32) * 16), 77, dtype=torch.uint8),
            torch.full((swizzled_size(rows, -(-columns // 16)),), 77, dtype=torch.uint8))


@interpreted
@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (130, 270), (1, 300)], ids=str)
def test_rows_and_columns(shape: tuple[int, int], power_2: bool) -> None:
    from fp8cfg.numerics import triton_row_kernel

    scaling, (r, c) = Scaling("current", granularity="row", power_2_scales=power_2), shape
    for i, (name, t) in enumerate(contents(shape).items()):
        fmt = (E4M3, E5M2)[i % 2]
        x = t if name == "tiny" else t.to((torch.bfloat16, torch.float32, torch.float16)[i % 3])
        made = torch.empty(r, c), torch.empty(r, 1), torch.empty(c, r), torch.empty(c, 1)
        triton_row_kernel.cast_rows(x, fmt.max, power_2, *made, seen=(seen := torch.zeros(())))
        assert seen == (torch.inf if name == "inf" else 0), name
        check_tiles(made, x, ((1, 0), (0, 1)), scaling, fmt, name)
        alone = torch.empty(r, c), torch.empty(r, 1), torch.empty(c, r), torch.empty(c, 1)
        triton_row_kernel.cast_rows(x, fmt.max, power_2, *alone[:2], None, None)
        triton_row_kernel.cast_rows(x, fmt.max, power_2, None, None, *alone[2:], seen=seen.zero_())
        assert seen == (torch.inf if name == "inf" else 0), name
        stored = torch.empty(r, c), torch.empty(1, c)
        triton_row_kernel.cast_rows(x, fmt.max, power_2, None, None, *stored, transpose=False)
        pairs = [*zip(made, alone, strict=True), (made[2].t(), stored[0]), (made[3].t(), stored[1])]
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs), name


@interpreted
@pytest.mark.parametrize("kind", ["rows", "nvfp4", "nvfp4 along rows", "nvfp4 as it is"])
@pytest.mark.parametrize("role", [INPUT, WEIGHT, GRAD_OUTPUT])
def test_parts_have_the_scales_that_the_plain_code_gives_them(kind: str, role: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two tensor-parallel ranks, of a row-parallel or column-parallel layer; the other one has larger amaxes in some places."""
    from fp8cfg.numerics import amax_group, block_scaling, fused_quantize, nvfp4
    from fp8cfg.parallel.tensor import COLUMN, ROW

    asked: list[tuple[int, ...]] = []

    def largest(amax: Tensor, group: str) -> Tensor:
        asked.append(tuple(amax.flatten().shape))
        theirs = torch.full_like(amax, 0x40E00000 if amax.dtype == torch.int32 else 7.0)  # of two forms, or of every third row
        return torch.where((torch.arange(amax.numel()) % 3 == 0).view(amax.shape), torch.maximum(amax, theirs), amax)

    for module in (amax_group, block_scaling, fused_quantize):
        monkeypatch.setattr(module, "largest", largest)
    four, parts = kind != "rows", amax_group.AmaxGroup(ROW if role == INPUT else COLUMN, "two ranks")
    scaling = Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=kind != "nvfp4 along rows", hadamard="as it" not in kind,
                      stochastic=False) if four else Scaling("current", backward=E4M3, granularity="row", power_2_scales=True)  # fmt: skip
    t = exact(208, 160)

    def operands(fused: bool) -> list[Operand]:
        monkeypatch.setattr(nvfp4, "fuses_four_bits", lambda t, carrier: fused)
        if four:
            made = nvfp4.quantize_nvfp4(t, role, 1, scaling, None, None, None, parts, both=True)
            return [made, made.t()]
        if fused:
            made = fused_quantize.quantize_tiles_fused(t, role, scaling, 1, True, None, parts)
            return [made, made.t()]
        tiles = [(axis, tile) for axis in (1, 0) if (tile := scaling.tile(role, axis))]
        along, across = (quantize_tiles(t, tile, E4M3, scaling, E4M3.dtype, group=parts.over(role, tile)) for _, tile in tiles)
        return [along, across.t()]

    gots, by_kernels = operands(fused=True), [*asked]
    wants, asked[:] = operands(fused=False), asked[len(by_kernels):]
    assert by_kernels == asked and len(asked) == 1, "one collective for both directions"
    for got, want in zip(gots, wants, strict=True):
        want = want._replace(data=want.data.contiguous())
        pairs = [*zip(laid_out(got), laid_out(want), strict=True)] if four else [(got.data, want.data), (got.scale_inv, want.scale_inv)]
        assert all(torch.equal(a.float(), b.float()) for a, b in pairs if a is not None and b is not None)
        assert not four or (got.whole_inv is not None and want.whole_inv is not None and torch.equal(got.whole_inv, want.whole_inv))


@interpreted
@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (130, 140), (1, 300)], ids=str)
def test_blocks_along_both_dimensions(shape: tuple[int, int], square: bool, power_2: bool) -> None:
    """Values before their conversion, scales and layouts of 1x128, 128x1 and 128x128 tiles."""
    from fp8cfg.numerics import triton_block_kernel

    scaling, (r, c) = Scaling("block", power_2_scales=power_2, weights_2d=square), shape
    for i, (name, t) in enumerate(contents(shape).items()):
        fmt = (E4M3, E5M2)[i % 2]
        x = t if name == "tiny" else t.to((torch.bfloat16, torch.float32, torch.float16)[i % 3])
        tiles = ((128, 128),) * 2 if square else ((1, 128), (128, 1))
        sizes = ((-(-r // 128), -(-c // 128)), (-(-c // 128), -(-r // 128))) if square else ((r, -(-c // 128)), (c, -(-r // 128)))
        down = [torch.empty(size).t().contiguous().t() for size in sizes]  # as products read them; square ones stand along rows
        made = torch.empty(r, c), down[0], torch.empty(c, r), torch.empty(sizes[1]) if square else down[1]
        highest = torch.finfo(x.dtype).max
        triton_block_kernel.cast_blocks(x, highest, fmt.max, power_2, square, *made, seen=(seen := torch.zeros(())))
        assert seen == (torch.inf if name == "inf" else 0), name
        check_tiles(made, x, tiles, scaling, fmt, name)
        if not square:
            stored = torch.empty(r, c), torch.empty(-(-r // 128), c)
            triton_block_kernel.cast_blocks(x, highest, fmt.max, power_2, square, None, None, *stored, transpose=False)
            assert all(torch.equal(a.nan_to_num(7.0), b.t().nan_to_num(7.0)) for a, b in zip(stored, made[2:], strict=True)), name


STORED = {
    "delayed": Scaling(), "current": Scaling("current"), "rows": Scaling("current", granularity="row", power_2_scales=True),
    "128x128": Scaling("block", power_2_scales=True, weights_2d=True), "1x128": Scaling("block", power_2_scales=True),
    "MX": Scaling("mxfp8"), "MX 32x32": Scaling("mxfp8", weights_2d=True),
    "NVFP4": Scaling("nvfp4", forward=E2M1, backward=E2M1), "NVFP4 16x16": Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=True),
}  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_by_kernels(monkeypatch)


def exact(rows: int, columns: int) -> Tensor:
    """Numbers that E4M3 holds, with an amax that scales by a power of two: nothing is left for the conversion to round."""
    t = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).clamp(-3.5, 3.5).to(E4M3.dtype).float()
    t[1, 1] = 3.5
    return t


def same(made: Stored, want: Stored) -> bool:
    return all(a is b is None or (a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
               and torch.equal(a.view(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))) for a, b in zip(made, want, strict=True))  # fmt: skip


@interpreted
@pytest.mark.parametrize("shape", [(256, 192), (200, 96), (80, 352)], ids=str)
@pytest.mark.parametrize("kind", STORED)
def test_a_stored_weight_and_its_shards_are_those_of_plain_code(kind: str, shape: tuple[int, int], on_cpu: None) -> None:
    """Fields, layouts, dtypes and bits, with the amax that is recorded; shards of two ranks, of which no tile or all are cut."""
    from fp8cfg.numerics import shard_scales as shards
    from fp8cfg.numerics.fused_store import store_recorded

    scaling, t = STORED[kind], exact(*shape)
    state = (torch.zeros(3), torch.zeros(4, 3)) if scaling.layout.history else (None, None)
    scale = scale_now(t, WEIGHT, scaling, *state, record=False) if scaling.tile(WEIGHT, 1) is None else None
    want = store(t, scaling, scale)
    assert same(store_recorded(t, scaling, *state, None), want), kind
    held = Stored(*(None if field is None else torch.zeros_like(field) for field in want))
    versions = [field._version for field in held if field is not None]
    again = store_recorded(t, scaling, *state, None, held)
    assert same(held, want) and all(a is b for a, b in zip(again, held, strict=True)), "written where it is held"
    assert all(field._version > version for field, version in zip((f for f in held if f is not None), versions, strict=True))
    assert state[1] is None or state[1].tolist() == [[0, 3.5, 0], *[[0, 0, 0]] * 3]
    for ranks in (2, 4):
        pieces, places = t.chunk(ranks), [shards.ShardPlace(shape[0], ranks, rank) for rank in range(ranks)]
        found = [torch.stack(each).amax(0) for each in zip(*shards.shard_amaxes(pieces, scaling, places), strict=True)]
        known = shards.shard_scales(found, scaling, places[0]) if scale is None else shards.ShardScales(scale)
        made = [shards.quantized_shard(piece, scaling, place, known) for piece, place in zip(pieces, places, strict=True)]
        split = shards.split_fields(scaling, places[0])
        joined = Stored(*(
            None if t is None else torch.cat([getattr(each, field) for each in made]) if field in split else t
            for field, t in made[0]._asdict().items()))
        assert same(joined, want), (kind, ranks)


@interpreted
@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_parts_are_scaled_as_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two tensor-parallel ranks, with the larger amax at the other one; what is recorded is its own."""
    from fp8cfg.numerics import amax_group, fused_quantize

    scaling, t, asked = STORED[kind], exact(192, 160), []

    def largest(amax: Tensor, group: str) -> Tensor:
        asked.append((amax.item(), group))
        return torch.maximum(amax, torch.tensor(7.0))

    monkeypatch.setattr(amax_group, "largest", largest)
    parts = amax_group.AmaxGroup(((WEIGHT, 0),), "two ranks")
    for first in (0.0, 2.0) if scaling.layout.history else (None,):
        state = (None, None) if first is None else (torch.full((3,), first), torch.zeros(4, 3))
        made = fused_quantize.quantize_fused(t, WEIGHT, scaling, *state, record=True, both=True, parts=parts)
        scale = torch.tensor(first or E4M3.max / 7.0)
        assert made.scale_inv == 1 / scale and torch.equal(made.data.float(), t * scale)
        assert made.other is not None and torch.equal(made.other.data.float(), made.data.t().float())
        assert state[1] is None or state[1][0].tolist() == [0, 3.5, 0]
        fused_quantize.quantize_fused(t, INPUT, scaling, *state, record=True, both=False, parts=parts)
    read = [0.0 if first else 3.5 for first in ((0.0, 2.0) if scaling.layout.history else (0.0,))]
    assert asked == [(amax, "two ranks") for amax in read], "of the role that is split; not read where its scale is set"
