"""Errors of a GEMM under several scalings, measured on sampled rows and columns.

The operands are quantized as the FP8 layers would do it, by the same functions of `numerics`. Scales
come from the whole tensor. Only the sampled rows are rounded and multiplied:

    fprop   tokens x output features         error of each token
    dgrad   tokens x input features          error of each input feature
    wgrad   output x input features          error of each row and of each column

Each token passes through a norm later, and Adam rescales each weight. So a small row counts as much
as a large one: the error of a GEMM is the root mean square of the relative errors of its rows or
columns. A row that is lost counts as 1.

Gradients are sums in which large terms cancel. What is left is small next to the noise of a
minibatch, and rounding errors of that size do no harm. So the error of a gradient is relative to the
sum without cancellation, sqrt(sum_k a_ik^2 b_jk^2). That sum alone would hide a row of an operand
that is rounded to zero. The relative error of the operand's row counts if it is larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fp8cfg.numerics.amax import compute_amax_or_nan, replace_nan
from fp8cfg.numerics.formats import RandomStream, random_key
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD
from fp8cfg.numerics.linear_operands import CONTRACTED
from fp8cfg.numerics.quantize import hadamard_transform, quantize, quantize_tiles
from fp8cfg.numerics.scaling import (
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    Scaling,
    compute_scale,
    global_scale_from_amax,
    scales_from_amaxes,
)
from fp8cfg.numerics.scaling_settings import scaling_of
from fp8cfg.schema.fp8 import FP8

ROLES = {FPROP: (INPUT, WEIGHT), DGRAD: (GRAD_OUTPUT, WEIGHT), WGRAD: (GRAD_OUTPUT, INPUT)}
"""The two operands of each GEMM."""
SAMPLED = 32
"""Rows that are sampled of activations and gradients. Half of them if they are long."""
LONG = 2048
"""Elements of a long row. In wgrad a row has all tokens."""
SAMPLED_WEIGHTS = 128
"""Neighboring rows that are sampled of a weight. Square tiles have at most so many."""
COMPARED = {FPROP: (1,), DGRAD: (0,), WGRAD: (0, 1)}
"""Dimensions of the product over which an error is one number: 1 gives rows, 0 gives columns."""
VALUES = 9
"""Numbers of a GEMM under one scaling, see `GemmError`."""


@dataclass(frozen=True)
class Candidate:
    """A scaling to measure.

    Attributes:
        name: Name in tables, such as "delayed hybrid".
        preset: Name of the precision preset.
        overrides: Overrides on top of the preset, such as "fp8.granularity=row".
        fp8: The resulting FP8 settings.
    """

    name: str
    preset: str
    overrides: tuple[str, ...]
    fp8: FP8

    @cached_property
    def scaling(self) -> Scaling:
        """The scaling of its layers."""
        return scaling_of(self.fp8)

    @cached_property
    def keys(self) -> dict[int, Scaling]:
        """What the operand of each role depends on. Candidates with equal keys share operands."""
        scaling = self.scaling
        return {
            INPUT: replace(scaling, backward=scaling.forward),
            WEIGHT: replace(scaling, backward=scaling.forward),
            GRAD_OUTPUT: replace(scaling, forward=scaling.backward),
        }


@dataclass(frozen=True)
class OperandError:
    """What quantization does to one operand.

    Attributes:
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        error: Error of the product if only this operand is quantized. See the module.
        snr: Signal-to-noise ratio of the operand in dB.
        underflow: Fraction of its elements that are not zero and become zero.
        overflow: Fraction of its elements that are clipped.
    """

    role: int
    error: float
    snr: float
    underflow: float
    overflow: float


@dataclass(frozen=True)
class GemmError:
    """Error of a GEMM under one scaling.

    Attributes:
        error: Error of the product with both operands quantized. See the module.
        operands: The first and the second operand.
    """

    error: float
    operands: tuple[OperandError, OperandError]

    @classmethod
    def read(cls, gemm: int, values: Sequence[float]) -> GemmError:
        """Makes it from the numbers of `measure_gemm`."""
        first, second = ROLES[gemm]
        return cls(
            values[0], (OperandError(first, *values[1:5]), OperandError(second, *values[5:9]))
        )

    @property
    def blamed(self) -> OperandError:
        """The operand that adds more to the error."""
        return max(self.operands, key=lambda operand: operand.error)


@dataclass
class TensorSample:
    """Sampled rows of one operand of a GEMM.

    Attributes:
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        gemm: FPROP, DGRAD or WGRAD.
        tensor: The tensor as stored, [R, C].
        amax: Amax of the whole tensor, float32 [].
        delayed_scales: Scale under each candidate with delayed scaling, float32 [], by key.
        number: Selects other rows each time.
        seed: Seed of stochastic rounding.
    """

    role: int
    gemm: int
    tensor: Tensor
    amax: Tensor
    delayed_scales: dict[Scaling, Tensor] = field(default_factory=dict)
    number: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        axis = CONTRACTED[self.role, self.gemm]
        self.axis = axis
        # The contracted dimension comes last.
        self.matrix = self.tensor if axis == 1 else self.tensor.t()
        rows = sampled_rows(self.matrix.shape, self.role == WEIGHT, self.number)
        self.rows = self.matrix[rows.to(self.tensor.device)].contiguous()

    @cached_property
    def transformed(self) -> tuple[Tensor, Tensor]:
        """The sampled rows after the Hadamard transform, and the amax of the whole matrix."""
        whole = hadamard_transform(self.matrix)
        return hadamard_transform(self.rows), compute_amax_or_nan(whole)

    def quantized(self, scaling: Scaling) -> tuple[Tensor, Tensor, Tensor]:
        """Quantizes the sampled rows.

        Returns:
            The values that are rounded, the rounded values, both float32 [rows, K], and the scale
            of delayed scaling, float32 [], 0 for other scalings.
        """
        fmt = scaling.format_of(self.role)
        tile = scaling.tile(self.role, 1)
        no_scale = torch.zeros((), dtype=torch.float32, device=self.rows.device)
        if tile is None:
            stored = self.delayed_scales.get(scaling)
            scale = scales_from_amaxes(self.amax, self.role, scaling, stored)
            operand = quantize(self.rows, scale, fmt, torch.float32)
            assert operand.scale_inv is not None
            rounded = operand.data * operand.scale_inv
            return self.rows.float(), rounded, scale if scaling.layout.history else no_scale
        rows, amax = self.rows, self.amax
        if scaling.uses_hadamard(self.role, self.axis):
            rows, amax = self.transformed
        global_scale = global_scale_from_amax(amax) if scaling.layout.two_levels else None
        random = None
        if scaling.rounds_stochastically(self.role):
            device = rows.device
            draw = torch.full((), self.number, dtype=torch.int32, device=device)
            random = RandomStream(random_key(self.seed).to(device), draw, lane=self.axis)
        operand = quantize_tiles(rows, tile, fmt, scaling, torch.float32, global_scale, random)
        rounded = operand.data
        if operand.scale_inv is not None:  # otherwise the scales are multiplied into the data
            rounded = rounded * operand.scale_inv
        return rows.float(), rounded, no_scale


def sampled_rows(shape: Sequence[int], is_weight: bool, number: int) -> Tensor:
    """Returns the sampled rows of a matrix of `shape`, int64."""
    count = shape[0]
    if is_weight:
        # Whole tiles, because square tiles have one scale for neighboring rows.
        runs = -(-count // SAMPLED_WEIGHTS)
        start = number % max(1, runs) * SAMPLED_WEIGHTS
        return torch.arange(start, min(start + SAMPLED_WEIGHTS, count), dtype=torch.int64)
    sampled = SAMPLED if shape[1] <= LONG else SAMPLED // 2
    if count <= sampled:
        return torch.arange(count, dtype=torch.int64)
    # At random: evenly spaced rows could all be of the same attention head or expert.
    generator = torch.Generator().manual_seed(number)
    return torch.randperm(count, generator=generator, dtype=torch.int64)[:sampled]


@torch.no_grad()
def measure_gemm(
    gemm: int, first: TensorSample, second: TensorSample, candidates: Sequence[Candidate]
) -> Tensor:
    """Measures a GEMM under each candidate.

    The host waits for nothing.

    Args:
        gemm: FPROP, DGRAD or WGRAD.
        first: The first operand.
        second: The second operand.
        candidates: The scalings.

    Returns:
        float32 [candidates, VALUES], for `GemmError.read`.
    """
    operands: dict[tuple[int, Scaling], _Quantized] = {}
    products: dict[tuple[Scaling, Scaling], Tensor] = {}
    exact = first.rows.float() @ second.rows.float().t()
    size = exact
    if gemm != FPROP:
        squares = first.rows.float().square() @ second.rows.float().square().t()
        size = torch.maximum(exact.abs(), squares.sqrt())
    rows = []
    for candidate in candidates:
        keys = candidate.keys[first.role], candidate.keys[second.role]
        for sample, key in zip((first, second), keys, strict=True):
            if (sample.role, key) not in operands:
                operands[sample.role, key] = _Quantized.of(sample, key)
        if keys not in products:
            a, b = operands[first.role, keys[0]], operands[second.role, keys[1]]
            both = a.rounded @ b.rounded.t() - exact
            only_a = (a.rounded - a.values) @ b.values.t()
            only_b = a.values @ (b.rounded - b.values).t()
            zero_a, zero_b = torch.zeros_like(a.errors), torch.zeros_like(b.errors)
            error = relative_error(gemm, both, size, a.errors, b.errors)
            error_a = relative_error(gemm, only_a, size, a.errors, zero_b)
            error_b = relative_error(gemm, only_b, size, zero_a, b.errors)
            products[keys] = torch.cat(
                [torch.stack([error, error_a]), a.statistics, error_b[None], b.statistics]
            )
        rows.append(products[keys])
    return torch.stack(rows)


@dataclass(frozen=True)
class _Quantized:
    """A quantized sample.

    Attributes:
        values: The values before rounding, float32 [rows, K].
        rounded: The values after rounding, float32 [rows, K].
        errors: Relative error of each row, float32 [rows].
        statistics: Signal-to-noise ratio, underflow and overflow, float32 [3].
    """

    values: Tensor
    rounded: Tensor
    errors: Tensor
    statistics: Tensor

    @classmethod
    def of(cls, sample: TensorSample, scaling: Scaling) -> _Quantized:
        values, rounded, scale = sample.quantized(scaling)
        largest = scaling.format_of(sample.role).max * (1 + 2.0**-20)
        underflow = ((values != 0) & (rounded == 0)).float().mean()
        overflow = ((values * scale).abs() > largest).float().mean()
        signal = torch.linalg.vector_norm(values, dim=1)
        noise = torch.linalg.vector_norm(rounded - values, dim=1)
        errors = torch.where(signal > 0, noise / signal, 0.0)
        snr = 20 * torch.log10(torch.linalg.vector_norm(signal) / torch.linalg.vector_norm(noise))
        # 0 / 0 of a tensor of zeros is NaN. It has no noise.
        snr = torch.where(noise.amax() > 0, snr, torch.inf)
        return cls(values, rounded, errors, torch.stack([snr, underflow, overflow]))


def relative_error(gemm: int, error: Tensor, size: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Returns the error of a product, as the module describes it, float32 [].

    Args:
        gemm: FPROP, DGRAD or WGRAD.
        error: Error of the product, float32 [M, N].
        size: What the error is relative to, float32 [M, N].
        first: Relative errors of the rows of the first operand, float32 [M].
        second: Relative errors of the rows of the second operand, float32 [N].
    """
    worst = torch.zeros((), dtype=torch.float32, device=error.device)
    for dim, of_operand in ((1, first), (0, second)):
        if dim not in COMPARED[gemm]:
            continue
        norms = torch.linalg.vector_norm(size, dim=dim)
        lost = torch.linalg.vector_norm(error, dim=dim) / norms
        if gemm != FPROP:
            lost = torch.fmax(lost, of_operand)
        counts = norms > 0  # such as tokens without a loss
        lost = torch.where(counts, lost.clamp(max=1.0), 0.0)
        mean = lost.square().sum() / counts.sum().clamp(min=1)
        worst = torch.fmax(worst, mean.sqrt())
    return worst


# --- amax histories


class AmaxSeries:
    """Amaxes of the three tensors of a layer over the steps of a run.

    Attributes:
        steps: One row for each finished step, float32 [3].
    """

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self._current: Tensor | None = None

    def record(self, role: int, t: Tensor) -> Tensor:
        """Folds a tensor into the amaxes of this step. Returns its own amax, float32 []."""
        amax = compute_amax_or_nan(t)
        if self._current is None:
            self._current = torch.zeros(3, dtype=torch.float32, device=amax.device)
        torch.fmax(self._current[role], replace_nan(amax), out=self._current[role])
        return amax

    def end_step(self) -> None:
        """Adds the amaxes of this step to the history."""
        if self._current is not None:
            self.steps.append(self._current)
        self._current = None

    def scale(self, role: int, scaling: Scaling) -> Tensor | None:
        """Returns the scale that delayed scaling has by now, float32 [], None in the first step."""
        if not self.steps:
            return None
        newest = 1 if scaling.amax_compute_algo == "most_recent" else scaling.amax_history_len
        amax = torch.stack([step[role] for step in self.steps[-newest:]]).amax()
        # Like a scale that was never set: the next tensor is scaled by itself.
        return compute_scale(amax, scaling.scaled_max(role), fallback=0.0)


# --- healthy operands


def healthy_errors(candidates: Iterable[Candidate]) -> list[dict[int, float]]:
    """Measures the GEMMs of normally distributed operands: the error that each format has anyway.

    Returns:
        For each candidate the error of each GEMM.
    """
    candidates = list(candidates)
    generator = torch.Generator().manual_seed(0)
    tokens, inputs, outputs = 512, 512, 512

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=torch.float32, generator=generator)

    tensors = {
        INPUT: normal(tokens, inputs),
        WEIGHT: normal(outputs, inputs),
        GRAD_OUTPUT: normal(tokens, outputs),
    }
    series = AmaxSeries()
    for role, t in tensors.items():
        series.record(role, t)
    series.end_step()
    healthy: list[dict[int, float]] = [{} for _ in candidates]
    for gemm, roles in ROLES.items():
        samples = [make_sample(role, gemm, tensors[role], series, candidates) for role in roles]
        values = measure_gemm(gemm, samples[0], samples[1], candidates)
        for errors, row in zip(healthy, values.tolist(), strict=True):
            errors[gemm] = row[0]
    return healthy


def make_sample(
    role: int,
    gemm: int,
    tensor: Tensor,
    series: AmaxSeries,
    candidates: Iterable[Candidate],
    amax: Tensor | None = None,
    number: int = 0,
    seed: int = 0,
) -> TensorSample:
    """Samples an operand, with the scales of delayed scaling from the history.

    Args:
        role: See TensorSample.
        gemm: See TensorSample.
        tensor: See TensorSample.
        series: Amaxes of the past steps.
        candidates: The scalings.
        amax: Amax of `tensor` if known.
        number: See TensorSample.
        seed: See TensorSample.
    """
    scales: dict[Scaling, Tensor] = {}
    for candidate in candidates:
        if candidate.scaling.layout.history:
            key = candidate.keys[role]
            scale = series.scale(role, key)
            if scale is not None:
                scales[key] = scale
    if amax is None:
        amax = compute_amax_or_nan(tensor)
    return TensorSample(role, gemm, tensor, amax, scales, number, seed)
