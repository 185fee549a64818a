"""Quantization statistics: amax, scales, underflow, overflow and rounding error of every FP8 operand, in one pass over a model.

An observer beside the arithmetic: it quantizes what the layers see once more, by the same rules, and compares. Underflow and
overflow are the two ends of one choice: a larger scale flushes fewer small elements to zero and saturates more large ones.
The shares are those of Transformer Engine's debug statistics (underflows%, overflows%), without the percent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8cfg.numerics.amax import compute_amax, split_tiles
from fp8cfg.numerics.formats import Format, RandomStream, round_to_format
from fp8cfg.numerics.fp8_linear import CONTRACTED, FP8Linear
from fp8cfg.numerics.fp8_weights import decoded
from fp8cfg.numerics.fsdp_weights import GatheredWeight, whole_master
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD
from fp8cfg.numerics.overflow_counts import pause_overflow_counts
from fp8cfg.numerics.quantize import hadamard_transform
from fp8cfg.numerics.scaling import (
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    Scaling,
    TileScales,
    choose_tensor_scale,
    compute_global_scale,
    compute_tile_scales,
)
from fp8cfg.numerics.state_dict_conversion import ROUNDING_COUNT
from fp8cfg.numerics.stored_state import AMAX, BACKWARD_AMAX, RAN

TENSORS = {INPUT: "input", WEIGHT: "weight", GRAD_OUTPUT: "grad_output"}
CHUNK = 1 << 25
"""Elements measured at a time, for which there are several float32 copies."""


class Statistics(NamedTuple):
    """Statistics of one tensor of one layer, as the first of its products in FP8 reads it: fprop for inputs and weights, dgrad for
    the gradients of outputs.

    `amax` skips NaN. `scale_min` and `scale_max` are over the tiles that are not all zero, None where all are. Shares of the
    elements: `underflow` is not zero and becomes zero, `overflow` lies beyond the largest value of the format after scaling.
    `error` is rms(rounded - tensor) / rms(tensor) over finite elements, 0 for a tensor of zeros. `zeros` and `nonfinite` are
    counts out of `element_numbers`."""

    layer: str
    tensor: str
    format: str
    amax: float
    scale_min: float | None
    scale_max: float | None
    underflow: float
    overflow: float
    error: float
    zeros: int
    nonfinite: int
    elements: int


def collect_statistics(
    model: nn.Module,
    run: Callable[[], object],
    masters: Mapping[nn.Parameter, Tensor] | None = None,
) -> list[Statistics]:
    """Statistics of the FP8 layers of `model`, collected while `run()` makes one forward and backward pass of it, eagerly where it
    is compiled. A layer that is called several times is measured in its first call.

    Weights that are held in float8 alone are compared with `masters`, what they are quantized from by parameter; those without
    one are left out. One that FSDP2 gathers in float8 is compared with its shards, put together: all ranks call this then, before
    weights are gathered. Afterwards gradients, amax histories, the record of products and random numbers are what they were; other
    buffers that a forward pass writes are not. Raises ValueError where no FP8 layer ran, as outside of its region.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, FP8Linear)}
    probe = _Probe(
        masters or {},
        {
            layer: layer.parameter
            for layer in layers.values()
            if hasattr(layer.parameter, "placements")
        },
    )
    with _unchanged(model), torch.compiler.set_stance("force_eager"):
        handles = [
            layer.register_forward_hook(partial(probe.forward, name), with_kwargs=True)
            for name, layer in layers.items()
        ]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
    if not probe.found:
        raise ValueError("no FP8 layer ran: the pass must be inside of the model's FP8 region")
    return [
        probe.found[key].read(*key)
        for key in sorted(probe.found, key=lambda k: ([*layers].index(k[0]), k[1]))
    ]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Context manager that restores everything that a forward and a backward pass change."""
    buffers = [(name.rpartition(".")[2], buffer) for name, buffer in model.named_buffers()]
    changing = [
        b for leaf, b in buffers if leaf in (*RAN, AMAX, BACKWARD_AMAX, "gemms_ran", ROUNDING_COUNT)
    ]
    changing += [b[0] for leaf, b in buffers if leaf == "fp8_amax_history"]
    parameters = list(model.parameters())
    before = [t.clone() for t in changing]
    gradients = [p.grad for p in parameters]
    devices = {p.device.index for p in parameters if p.device.type == "cuda"}
    for p in parameters:
        p.grad = None
    try:
        with torch.random.fork_rng(sorted(devices)), pause_overflow_counts():
            yield
    finally:
        for t, old in zip(changing, before, strict=True):
            t.copy_(old)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


class _Probe:
    def __init__(
        self, masters: Mapping[nn.Parameter, Tensor], shards: Mapping[nn.Module, nn.Parameter]
    ) -> None:
        self.masters, self.shards = masters, shards
        self.found: dict[tuple[str, int], _Measured] = {}
        self._seen: set[str] = set()

    def forward(self, name: str, layer: FP8Linear, args: Any, kwargs: Any, y: Tensor) -> None:
        """The hook of a layer. Activation checkpointing calls it again, and by then the layer has been seen."""
        if name in self._seen or not layer.region.applies():
            return
        self._seen.add(name)
        self._measure(name, layer, INPUT, (*args, *kwargs.values())[0])
        weight: Tensor | None = layer.parameter
        if layer.codec:
            weight = layer.dequantized_weight(torch.float32)
        elif isinstance(weight, GatheredWeight) and weight.codec:
            weight = decoded(weight.stored, weight.codec, torch.float32)
        elif isinstance(weight, GatheredWeight):
            weight = whole_master(self.shards[layer]) if layer in self.shards else None
        elif layer.fp8_params and isinstance(weight, nn.Parameter):
            weight = self.masters.get(weight)
        if weight is not None:
            self._measure(name, layer, WEIGHT, weight)
        if y.requires_grad:
            y.register_hook(partial(self._measure, name, layer, GRAD_OUTPUT))

    def _measure(self, name: str, layer: FP8Linear, role: int, t: Tensor) -> None:
        reads = [
            slot
            for slot in (FPROP, DGRAD, WGRAD)
            if (role, slot) in CONTRACTED and not layer.high_precision[slot]
        ]
        if not reads or t.numel() == 0:
            return
        scaling = layer.scaling
        with torch.no_grad(), torch.autocast(t.device.type, enabled=False):
            t = t.detach().reshape(-1, t.shape[-1])
            if CONTRACTED[role, reads[0]] == 0:
                t = hadamard_transform(t.t()) if scaling.uses_hadamard(role, 0) else t.t()
            tile = scaling.tile(role, 1)
            one = (
                choose_tensor_scale(
                    t, role, scaling, layer.fp8_scale, layer.fp8_amax_history, record=False
                )
                if tile is None
                else None
            )
            random = (
                layer.random(CONTRACTED[role, reads[0]])
                if scaling.rounds_stochastically(role)
                else None
            )
            self.found[name, role] = _measured(t.contiguous(), role, scaling, one, random)


class _Measured(NamedTuple):
    """Statistics of a tensor as scalars that are still on its device."""

    format: Format
    elements: int
    values: Tensor  # float64: amax, smallest and largest scale, then the sums of `_sums`

    def read(self, layer: str, role: int) -> Statistics:
        amax, low, high, underflow, overflow, zeros, nonfinite, lost, total = self.values.tolist()
        n = self.elements
        return Statistics(
            layer,
            TENSORS[role],
            self.format.name,
            amax,
            scale_min=low if high else None,
            scale_max=high if high else None,
            underflow=underflow / n,
            overflow=overflow / n,
            error=(lost / total) ** 0.5 if total else 0.0,
            zeros=int(zeros),
            nonfinite=int(nonfinite),
            elements=n,
        )


def _measured(
    t: Tensor, role: int, scaling: Scaling, one: Tensor | None, random: RandomStream | None
) -> _Measured:
    """Statistics of `t` [R, C], whose last dimension is contracted. `one` is its scale where it has a single one, `random` the
    stream of stochastic rounding.
    """
    fmt, tile = scaling.format_of(role), scaling.tile(role, 1)
    whole = compute_global_scale(t) if scaling.layout.two_levels else None
    rows = max(1, CHUNK // t.shape[1] // 128) * 128  # no tile is higher
    scales, sums = [], []
    for i, part in enumerate(torch.split(t, rows)):
        v = split_tiles(part, tile or (0, 0))
        if one is not None:
            encode, decode = one, one.reciprocal()
            scales.append(one.expand(2))
        else:
            encode, decode = compute_tile_scales(v, fmt, scaling, whole)
            scales.append(_extremes(encode, v))
        if whole is not None:
            decode = decode * whole.reciprocal()
        uniform = (
            random.uniform(i * rows * v.shape[2] * v.shape[3], v.numel()).view(v.shape)
            if random
            else None
        )
        sums.append(_sums(part, v, fmt, TileScales(encode, decode), uniform))
    low, high = torch.stack(scales).double().unbind(1)
    first = torch.stack([compute_amax(t).double(), low.amin(), high.amax()])
    return _Measured(fmt, t.numel(), torch.cat([first, torch.stack(sums).sum(0)]))


def _extremes(scales: Tensor, v: Tensor) -> Tensor:
    """The smallest and the largest scale of tiles that are not all zero; infinity and 0 where all are."""
    used = (v != 0).any(3, keepdim=True).any(1, keepdim=True)
    return torch.stack(
        [torch.where(used, scales, torch.inf).amin(), torch.where(used, scales, 0.0).amax()]
    )


def _sums(
    part: Tensor, v: Tensor, fmt: Format, scales: TileScales, uniform: Tensor | None
) -> Tensor:
    """Over the elements of `part`, which are those of `v` without what completes its tiles: how many underflow, overflow, are
    zero, are not finite; sums of squares of errors and of values."""
    x = v.float()
    scaled = x * scales.encode
    q = round_to_format(scaled, fmt, torch.float32, uniform)
    finite = x.abs() < torch.inf
    # amax x (max / amax) may be the float32 above max; that is no overflow.
    counts = [(x != 0) & (q == 0), scaled.abs() > fmt.max * (1 + 2.0**-20), part == 0, ~finite]
    norms = [
        torch.linalg.vector_norm(torch.where(finite, t, 0.0), dtype=torch.float64)
        for t in (q * scales.decode - x, x)
    ]
    return torch.stack([*(c.count_nonzero().double() for c in counts), *(n * n for n in norms)])
