"""Bytes that the Triton kernels write on a GPU beside those of plain torch code on the CPU: data, transposes, scales and amaxes.

Where the hardware multiplies FP8 the kernels are what runs (numerics/kernels/launch.py); plain code is what tests hold to Transformer
Engine's Python. Among the tensors are every bfloat16 number, which under a scale of 1 has every half between two FP8 numbers, subnormal
ones, NaN, infinities and zeros. Each combination of what a kernel is compiled for costs a second, so there is one shape to a dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8cfg.numerics import E2M1, E4M3, Scaling, compute_amax
from fp8cfg.numerics.amax import compute_amax_or_nan, record_amax
from fp8cfg.numerics.formats import RandomStream
from fp8cfg.numerics.fp8_weights import store
from fp8cfg.numerics.gemm import Operand, hardware_layout
from fp8cfg.numerics.kernels import launch
from fp8cfg.numerics.kernels import store as fused_store
from fp8cfg.numerics.kernels.launch import quantize_nvfp4_fused
from fp8cfg.numerics.quantize import hadamard_transform, quantize, quantize_tiles
from fp8cfg.numerics.scaling import (
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    choose_tensor_scale,
    global_scale_from_amax,
)
from tools.gpu_rows.byte_counts import ByteCounts

SCALINGS = {
    "delayed": {
        "": Scaling(margin=1, amax_history_len=4),
        "as TE starts": Scaling(first_step="te", amax_history_len=4),
    },
    "current": {"": Scaling("current"), "by powers of 2": Scaling("current", power_2_scales=True)},
    "row": {
        "": Scaling("current", granularity="row"),
        "by powers of 2": Scaling("current", granularity="row", power_2_scales=True),
    },
    "block": {
        "": Scaling("block", weights_2d=True),
        "by powers of 2": Scaling("block", weights_2d=True, power_2_scales=True),
        "1x128 weights": Scaling("block", power_2_scales=True),
    },
    "mxfp8": {
        "": Scaling("mxfp8", backward=E4M3),
        "32x32 weights": Scaling("mxfp8", backward=E4M3, weights_2d=True),
    },
    "nvfp4": {
        name: Scaling(
            "nvfp4",
            forward=E2M1,
            backward=E2M1,
            weights_2d=True,
            hadamard=hadamard,
            stochastic=stochastic,
        )
        for name, hadamard, stochastic in (
            ("", False, False),
            ("at random", False, True),
            ("transformed", True, True),
        )
    },
}
"""Variants of each scaling by name. Gradients are E5M2 but under MX."""
RANDOM = (12345, -678901), 3
"""The key of random numbers, and the count of draws."""
SHAPES = {torch.bfloat16: (256, 256), torch.float32: (130, 140), torch.float16: (33, 1)}


def refused(device: str) -> str:
    """Why the kernels do not run on `device`; empty where they do."""
    if device == "cpu":
        return "a CPU runs plain code"
    if not launch.HAS_TRITON:
        return "Triton is not installed"
    least = "the conversion to float8 needs compute capability " + ".".join(
        map(str, fused_store.FP8_CONVERSION_CAPABILITY)
    )
    return (
        "" if torch.cuda.get_device_capability() >= fused_store.FP8_CONVERSION_CAPABILITY else least
    )


def matrices() -> Iterator[tuple[str, Tensor]]:
    """Matrices on the CPU by name."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    yield "every bfloat16 number", every.view(256, 256)
    g = torch.Generator().manual_seed(0)
    for dtype, shape in SHAPES.items():
        x = torch.randn(shape, generator=g)
        spread = x * torch.exp(4 * torch.randn(shape, generator=g))
        spread[: shape[0] // 2, : shape[1] // 2] = 0
        odd, infinite = x.clone(), x.clone()
        odd.view(-1)[::7] = torch.nan
        infinite.view(-1)[-1] = -torch.inf
        made = {
            "normal": x,
            "spread": spread,
            "small": spread * 1e-20,
            "subnormal": x * 1e-40,
            "zeros": x * 0,
            "NaN": odd,
            "infinite": infinite,
        }
        yield from (
            (f"{name} {str(dtype).removeprefix('torch.')} {shape[0]} x {shape[1]}", t.to(dtype))
            for name, t in made.items()
        )


def by_kernels(
    t: Tensor,
    role: int,
    scaling: Scaling,
    scales: Tensor | None = None,
    history: Tensor | None = None,
    lane: int = 1,
) -> Operand:
    """The operand of `t`, `other` included, as it is made on a GPU; amaxes go into `history`. What is rounded at random is so for
    products that contract dimension `lane` of the tensor."""
    if scaling.tile(role, 1) is None:
        return launch.quantize_tensor_fused(
            t, role, scaling, scales, history, record=True, both=True
        )
    if scaling.layout.scale == "e4m3":
        return quantize_nvfp4_fused(
            t, role == WEIGHT, draw_of(scaling, role, lane, t.device), history, role
        )
    return launch.quantize_tiles_fused(t, role, scaling, 1, True, history)


def draw_of(scaling: Scaling, role: int, lane: int, device: torch.device) -> RandomStream | None:
    """What rounds the tensor of that role at random; None where it is rounded to nearest."""
    key, count = (torch.tensor(number, dtype=torch.int32, device=device) for number in RANDOM)
    return RandomStream(key, count, lane) if scaling.rounds_stochastically(role) else None


def plainly(
    t: Tensor,
    role: int,
    scaling: Scaling,
    scales: Tensor | None = None,
    history: Tensor | None = None,
    lane: int = 1,
) -> Operand:
    """The same in plain torch code."""
    fmt, tiles = scaling.format_of(role), [scaling.tile(role, axis) for axis in (1, 0)]
    if tiles[0] is None or tiles[1] is None:
        made = quantize(
            t, choose_tensor_scale(t, role, scaling, scales, history, record=True), fmt, fmt.dtype
        )
        return made._replace(columnwise=made.t())
    record = None if history is None else history[0, role]
    whole = (
        global_scale_from_amax(amax := compute_amax_or_nan(t))
        if scaling.layout.scale == "e4m3"
        else None
    )
    if whole is not None and record is not None:
        record_amax(record, amax)
    random, record = draw_of(scaling, role, lane, t.device), None if whole is not None else record
    along, across = (
        quantize_tiles(t, tile, fmt, scaling, fmt.dtype, whole, random, record)
        for tile in tiles
        if tile
    )
    return along._replace(columnwise=across.t())


def kernel_bits(name: str, device: str = "cuda") -> ByteCounts:
    """Bytes of the kernels and of plain code under the scaling of that name."""
    counts = ByteCounts()
    for variant, scaling in SCALINGS[name].items():
        for matrix, t in matrices():
            if (
                scaling.layout.scale == "e4m3"
            ):  # beside NaN the scale of the tensor is NaN, and codes of NaN are any
                t = t.nan_to_num(0.0, torch.inf, -torch.inf)
            where, given = f"{matrix}, {name} scaling{f' {variant}' * bool(variant)}", t.to(device)
            for scales, history in states(scaling):
                for role in (INPUT, GRAD_OUTPUT, *[WEIGHT] * scaling.weights_2d):
                    _operand(counts, scaling, role, t, given, scales, history, where)
                if scaling.uses_hadamard(INPUT, 0):
                    _transformed(counts, scaling, t, device, history, f"{where} for wgrad")
                    continue
                _stored(counts, scaling, t, given, scales, history, f"{where}, stored")
            if scaling.tile(WEIGHT, 1) is None:
                _known_scales(counts, scaling, t, given, where)
            elif matrix.startswith("every") and scaling.layout.scale != "e4m3":
                _one_dimension(counts, scaling, t, given, where)
    return counts


def states(scaling: Scaling) -> Iterator[tuple[Tensor | None, Tensor]]:
    """Scales [3] and amax histories [4, 3] to quantize with: scales that are not set yet, that saturate nothing, that saturate much."""
    history = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    if not scaling.layout.history:
        yield None, history
        return
    for scale in (1.0 if scaling.first_step == "te" else 0.0, 0.37, 1e30):
        yield torch.full((3,), scale), history


def _transformed(
    counts: ByteCounts, scaling: Scaling, t: Tensor, device: str, history: Tensor, where: str
) -> None:
    """Both operands of wgrad under NVFP4: of the transform, which is a product of torch's and rounds as that does, one result."""
    form = hadamard_transform(t.t()).nan_to_num(0.0, torch.inf, -torch.inf)
    for role in (INPUT, GRAD_OUTPUT):
        _operand(counts, scaling, role, form, form.to(device), None, history, where, lane=0)


def _operand(
    counts: ByteCounts,
    scaling: Scaling,
    role: int,
    t: Tensor,
    given: Tensor,
    scales: Tensor | None,
    history: Tensor,
    where: str,
    lane: int = 1,
) -> None:
    kept, there, after = history.to(given.device, copy=True), _on(given, scales), history.clone()
    got, want = (
        by_kernels(given, role, scaling, there, kept, lane),
        plainly(t, role, scaling, scales, after, lane),
    )
    sides = [
        (got, *_as(got, want)),
        *([(got.t(), *_as(got.t(), want.t()))] if got.columnwise else []),
    ]
    for what, (ours, data, _) in zip(("data", "transposes"), sides, strict=False):
        counts.compare(what, ours.data, data, where)
    for ours, _, scale_inv in sides:
        counts.compare("scales", ours.scale_inv, scale_inv, where)
    if want.global_scale_inv is not None:
        counts.compare("scales", got.global_scale_inv, want.global_scale_inv, where)
    counts.compare("amaxes", kept, _recorded(scaling, role, t, history, after), where)


def _as(ours: Operand, theirs: Operand) -> tuple[Tensor, Tensor | None]:
    """Data and scales of `theirs`, laid out as products read them where `ours` are."""
    if ours.scale_inv is None or ours.scale_inv.dim() != 1:
        return theirs.data, theirs.scale_inv
    data, scale_inv = hardware_layout(theirs._replace(data=theirs.data.contiguous()))
    return data.view(ours.data.dtype)[:, : ours.data.shape[1]], scale_inv


def _stored(
    counts: ByteCounts,
    scaling: Scaling,
    t: Tensor,
    given: Tensor,
    scales: Tensor | None,
    history: Tensor,
    where: str,
) -> None:
    """A weight as fp8.params stores it."""
    kept, after = history.to(given.device, copy=True), history.clone()
    scale = (
        choose_tensor_scale(t, WEIGHT, scaling, scales, after, record=True)
        if scaling.tile(WEIGHT, 1) is None
        else None
    )
    got, want = (
        fused_store.store_and_record(given, scaling, _on(given, scales), kept, None),
        store(t, scaling, scale, after[0, WEIGHT]),
    )
    for field, theirs in want._asdict().items():
        if theirs is not None:
            counts.compare(
                "scales" if "scale" in field else "data", getattr(got, field), theirs, where
            )
    counts.compare("amaxes", kept, _recorded(scaling, WEIGHT, t, history, after), where)


def _known_scales(
    counts: ByteCounts, scaling: Scaling, t: Tensor, given: Tensor, where: str
) -> None:
    """Rows of a weight under its scale, and amaxes alone."""
    for scale in (torch.tensor(1.0), torch.tensor(0.37)):
        got, want = (
            fused_store.store_scaled(given, scaling, scale.to(given.device)),
            store(t, scaling, scale),
        )
        counts.compare("data", got.data, want.data, f"{where}, scale {scale}")
        counts.compare("scales", got.scale_inv, want.scale_inv, where)
    amax = compute_amax(t).abs()  # on a CPU that of zeros may be -0
    counts.compare(
        "amaxes", fused_store.compute_amaxes([given, given]).abs(), torch.stack([amax, amax]), where
    )
    for unset in (True, False) if scaling.layout.history else ():
        scales = torch.full((3,), 0.0 if unset else 2.0, device=given.device)
        counts.compare(
            "amaxes",
            launch.compute_amax_if_unset(given, scales, WEIGHT),
            amax.view(1) if unset else torch.zeros(1),
            where,
        )


def _one_dimension(
    counts: ByteCounts, scaling: Scaling, t: Tensor, given: Tensor, where: str
) -> None:
    """What only one product contracts."""
    want = plainly(t, INPUT, scaling)
    for axis in (1, 0):
        got, theirs = (
            launch.quantize_tiles_fused(given, INPUT, scaling, axis, False, None),
            want if axis else want.t().t(),
        )
        along, beside = (got, theirs) if axis else (got.t(), theirs.t())
        data, scale_inv = _as(along, beside)
        counts.compare("data", along.data, data, f"{where}, dimension {axis} alone")
        counts.compare("scales", along.scale_inv, scale_inv, f"{where}, dimension {axis} alone")


def _on(given: Tensor, t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(given.device)


def _recorded(scaling: Scaling, role: int, t: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """What kernels leave of a history where plain code leaves `after`: of many scales, which are made of this moment's amaxes, an
    infinite one alone."""
    if scaling.tile(role, 1) is None or scaling.layout.scale == "e4m3":
        return after
    left = before.clone()
    if t.isinf().any():
        left[0, role] = torch.inf
    return left
