"""Errors of a GEMM under several scalings, measured on sampled rows and columns.

The operands are quantized by the functions of FP8 layers (numerics/). Scales come from the whole
tensor. Only the sampled rows are rounded and multiplied:

    fprop   tokens x output features         error of each token
    dgrad   tokens x input features          error of each input feature
    wgrad   output x input features          error of each row and of each column

A later norm rescales each token, and Adam rescales each weight. So a small row counts as much as a
large one. The error of a GEMM is the root mean square of the relative errors of its rows or
columns. A lost row counts as 1.

Gradients are sums of large terms with different signs. The sum is small next to the noise of a
minibatch, and rounding errors of its size do no harm. So the error of a gradient is relative to the
sum without cancellation: sqrt(sum_k a_ik^2 b_jk^2). This reference would hide a row of an operand
rounded to zero. So the relative error of the operand's row counts if it is larger.

Contents:

    make_sample      samples the rows of one operand
    measure_gemm     measures the errors of one GEMM under each scaling
    relative_error   reduces the error of a product to one number
    AmaxSeries       the amax history of delayed scaling
    healthy_errors   the errors of normally distributed operands, a reference for all others
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
"""Sampled rows of activations and gradients. Half as many if rows are long.

With all rows, a measurement would take several GEMMs of full size for each scaling."""
LONG = 2048
"""Elements of a long row. In wgrad a row has all tokens of a microbatch."""
SAMPLED_WEIGHTS = 128
"""Sampled rows of a weight. They are neighbors, enough for the largest square tile."""
COMPARED = {FPROP: (1,), DGRAD: (0,), WGRAD: (0, 1)}
"""Dimensions of a product to reduce: 1 returns an error for each row, 0 for each column."""
VALUES = 9
"""Number of figures of a GEMM under one scaling, see `GemmError.read`."""


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
        """The scaling of its layers, as numerics/ takes it."""
        return scaling_of(self.fp8)

    @cached_property
    def keys(self) -> dict[int, Scaling]:
        """The scaling of each role without settings of other roles.

        Candidates with equal keys share quantized operands.
        """
        # hybrid and e4m3 differ in the gradients only, so they share inputs and weights.
        scaling = self.scaling
        return {
            INPUT: replace(scaling, backward=scaling.forward),
            WEIGHT: replace(scaling, backward=scaling.forward),
            GRAD_OUTPUT: replace(scaling, forward=scaling.backward),
        }


@dataclass(frozen=True)
class OperandError:
    """Errors of one quantized operand.

    Attributes:
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        error: Error of the product with only this operand quantized. See the module.
        snr: Signal-to-noise ratio of the operand in dB.
        underflow: Fraction of its elements rounded from nonzero values to zero.
        overflow: Fraction of its elements clipped.
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
        operands: Errors of the first and the second operand.
    """

    error: float
    operands: tuple[OperandError, OperandError]

    @classmethod
    def read(cls, gemm: int, values: Sequence[float]) -> GemmError:
        """Converts a row of `measure_gemm`.

        Args:
            gemm: FPROP, DGRAD or WGRAD.
            values: Error of the product, then error, SNR, underflow and overflow of both operands.
        """
        first, second = ROLES[gemm]
        return cls(
            values[0], (OperandError(first, *values[1:5]), OperandError(second, *values[5:9]))
        )

    @property
    def blamed(self) -> OperandError:
        """The operand with the larger error."""
        return max(self.operands, key=lambda operand: operand.error)


@dataclass
class TensorSample:
    """Sampled rows of one operand of a GEMM.

    Attributes:
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        gemm: FPROP, DGRAD or WGRAD.
        tensor: The tensor as stored, [R, C].
        amax: Amax of the whole tensor, float32 [].
        delayed_scales: Scale by key of each candidate with delayed scaling, float32 [].
        number: Number of the measurement. Each number samples other rows.
        seed: Seed of stochastic rounding.
        axis: Contracted dimension of the tensor as stored.
        matrix: The tensor with the contracted dimension last, [M, K].
        rows: The sampled rows, [rows, K].
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
        # Products are rows @ rows.t() for all three GEMMs, and tiles extend along rows.
        self.matrix = self.tensor if axis == 1 else self.tensor.t()
        rows = sampled_rows(self.matrix.shape, self.role == WEIGHT, self.number)
        self.rows = self.matrix[rows.to(self.tensor.device)].contiguous()

    @cached_property
    def transformed(self) -> tuple[Tensor, Tensor]:
        """The sampled rows and the amax of the whole matrix, both after the Hadamard transform."""
        # NVFP4's global scale comes from the transformed tensor.
        whole = hadamard_transform(self.matrix)
        return hadamard_transform(self.rows), compute_amax_or_nan(whole)

    def quantized(self, scaling: Scaling) -> tuple[Tensor, Tensor, Tensor]:
        """Quantizes the sampled rows.

        Args:
            scaling: A value of `Candidate.keys`.

        Returns:
            The values before and after rounding, both float32 [rows, K], and the scale of delayed
            scaling, float32 []. The scale is 0 for other scalings, because they never clip.
        """
        fmt = scaling.format_of(self.role)
        # Axis 1, because `rows` has the contracted dimension last, whatever the GEMM.
        tile = scaling.tile(self.role, 1)
        no_scale = torch.zeros((), dtype=torch.float32, device=self.rows.device)
        if tile is None:
            # None under current scaling and in the first step of delayed scaling: the tensor is
            # scaled by its own amax.
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
            # dgrad and wgrad round the same gradient along two dimensions with other random
            # numbers, hence the lane.
            draw = torch.full((), self.number, dtype=torch.int32, device=device)
            random = RandomStream(random_key(self.seed).to(device), draw, lane=self.axis)
        operand = quantize_tiles(rows, tile, fmt, scaling, torch.float32, global_scale, random)
        rounded = operand.data
        if operand.scale_inv is not None:  # otherwise the scales are multiplied into the data
            rounded = rounded * operand.scale_inv
        return rows.float(), rounded, no_scale


def sampled_rows(shape: Sequence[int], is_weight: bool, number: int) -> Tensor:
    """Chooses rows of a matrix.

    Args:
        shape: Shape of the matrix, [M, K].
        is_weight: Whether to choose neighbors.
        number: Number of the measurement.

    Returns:
        Indices, int64 [rows].
    """
    count = shape[0]
    if is_weight:
        # Whole tiles, because square tiles have one scale for neighboring rows. Each measurement
        # takes the next tiles.
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

    The host does not wait for the device.

    Args:
        gemm: FPROP, DGRAD or WGRAD.
        first: The first operand.
        second: The second operand.
        candidates: The scalings.

    Returns:
        float32 [candidates, VALUES], for `GemmError.read`. NaN if an operand has infinities or NaN.
    """
    # Candidates share operands and products if their keys are equal.
    operands: dict[tuple[int, Scaling], _Quantized] = {}
    products: dict[tuple[Scaling, Scaling], Tensor] = {}
    exact = first.rows.float() @ second.rows.float().t()
    size = exact
    if gemm != FPROP:
        # The sum without cancellation, see the module.
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
            # After a Hadamard transform `values` differ from the rows, but their product does not:
            # the transform is orthogonal and both operands have it.
            both = a.rounded @ b.rounded.t() - exact
            only_a = (a.rounded - a.values) @ b.values.t()
            only_b = a.values @ (b.rounded - b.values).t()
            zero_a, zero_b = torch.zeros_like(a.errors), torch.zeros_like(b.errors)
            # The order of `GemmError.read`.
            error = relative_error(gemm, both, size, a.errors, b.errors)
            error_a = relative_error(gemm, only_a, size, a.errors, zero_b)
            error_b = relative_error(gemm, only_b, size, zero_a, b.errors)
            products[keys] = torch.cat(
                [torch.stack([error, error_a]), a.statistics, error_b[None], b.statistics]
            )
        rows.append(products[keys])
    is_finite = torch.isfinite(first.amax) & torch.isfinite(second.amax)
    return torch.where(is_finite, torch.stack(rows), torch.nan)


@dataclass(frozen=True)
class _Quantized:
    """A quantized sample.

    Attributes:
        values: The values before rounding, float32 [rows, K].
        rounded: The values after rounding, float32 [rows, K].
        errors: Relative error of each row, float32 [rows].
        statistics: SNR in dB, underflow and overflow as fractions, float32 [3].
    """

    values: Tensor
    rounded: Tensor
    errors: Tensor
    statistics: Tensor

    @classmethod
    def of(cls, sample: TensorSample, scaling: Scaling) -> _Quantized:
        """Quantizes a sample and measures its errors."""
        values, rounded, scale = sample.quantized(scaling)
        # The scale is rounded, so the amax may land just above the maximum. This is no overflow.
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
    """Reduces the error of a product to one number. See the module.

    Args:
        gemm: FPROP, DGRAD or WGRAD.
        error: Error of the product, float32 [M, N].
        size: Reference of the relative error, float32 [M, N].
        first: Relative errors of the rows of the first operand, float32 [M].
        second: Relative errors of the rows of the second operand, float32 [N].

    Returns:
        Root mean square of the relative errors, float32 []. For wgrad the larger one of rows and
        columns.
    """
    worst = torch.zeros((), dtype=torch.float32, device=error.device)
    for dim, of_operand in ((1, first), (0, second)):
        if dim not in COMPARED[gemm]:
            continue
        norms = torch.linalg.vector_norm(size, dim=dim)
        lost = torch.linalg.vector_norm(error, dim=dim) / norms
        if gemm != FPROP:
            # The reference without cancellation hides a row of an operand rounded to zero.
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
        steps: Amaxes of input, weight and grad_output in each step up to the last one in which the
            layer ran, float32 [3].
    """

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self._current: Tensor | None = None
        self._num_idle = 0

    def record(self, role: int, t: Tensor) -> Tensor:
        """Folds a tensor into the amaxes of this step. Returns its own amax, float32 []."""
        # A step has several microbatches: fmax over them, as in FP8 layers. NaN doesn't enter the
        # history, but the returned amax keeps it.
        amax = compute_amax_or_nan(t)
        if self._current is None:
            self._current = torch.zeros(3, dtype=torch.float32, device=amax.device)
        torch.fmax(self._current[role], replace_nan(amax), out=self._current[role])
        return amax

    def end_step(self) -> None:
        """Adds the amaxes of this step to the history."""
        if self._current is None:
            self._num_idle += 1
            return
        # An idle layer, such as an expert without tokens, has an amax of 0 in its history. So has a
        # step with infinite gradients: the optimizer skips it, and FP8 layers drop its amaxes.
        self.steps += [torch.zeros_like(self._current)] * self._num_idle
        is_finite = torch.isfinite(self._current).all()
        self.steps.append(torch.where(is_finite, self._current, 0.0))
        self._current = None
        self._num_idle = 0

    def scale(self, role: int, scaling: Scaling) -> Tensor | None:
        """Returns the current scale of delayed scaling, float32 [], or None in the first step."""
        if not self.steps:
            return None
        newest = 1 if scaling.amax_compute_algo == "most_recent" else scaling.amax_history_len
        amax = torch.stack([step[role] for step in self.steps[-newest:]]).amax()
        # 0 is a scale without an update: the tensor is scaled by its own amax.
        return compute_scale(amax, scaling.scaled_max(role), fallback=0.0)


# --- healthy operands


def healthy_errors(candidates: Iterable[Candidate]) -> list[dict[int, float]]:
    """Measures GEMMs of normally distributed operands: the unavoidable error of each format.

    Returns:
        For each candidate the error by GEMM.
    """
    candidates = list(candidates)
    generator = torch.Generator().manual_seed(0)
    # The error of a random sum hardly depends on its length. 512 is a multiple of all tiles.
    tokens, inputs, outputs = 512, 512, 512

    def normal(rows: int, columns: int) -> Tensor:
        """Returns a random matrix on the CPU, equal on all machines."""
        return torch.randn(rows, columns, dtype=torch.float32, generator=generator)

    tensors = {
        INPUT: normal(tokens, inputs),
        WEIGHT: normal(outputs, inputs),
        GRAD_OUTPUT: normal(tokens, outputs),
    }
    # The history has the amaxes of the same tensors, so delayed scales fit.
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
    """Samples an operand and computes its delayed scales from the history.

    Args:
        role: See TensorSample.
        gemm: See TensorSample.
        tensor: See TensorSample.
        series: Amaxes of the past steps.
        candidates: The scalings.
        amax: Amax of `tensor`, float32 []. None to compute it.
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
