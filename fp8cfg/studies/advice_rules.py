"""Rules of precision advice: overrides against unhealthy GEMMs, and the choice of a scaling."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from fp8cfg.backends.gemm_plan import GEMMS, PlannedLinear
from fp8cfg.numerics.statistics import TENSORS
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.recipe import Recipe
from fp8cfg.studies.advice_scalings import Choice, Cover
from fp8cfg.studies.operand_errors import AmaxSeries, Candidate, GemmError

ALARM = 2.0
"""Error of an unhealthy GEMM, as a multiple of the error of normally distributed operands.

One bit less of mantissa doubles rounding errors. So an unhealthy GEMM has lost more than one of the
two or three mantissa bits of FP8."""
ORDER = (
    "current hybrid",
    "delayed hybrid",
    "current row hybrid",
    "current e4m3",
    "current row e4m3",
    "block e4m3",
    "block hybrid",
    "mxfp8",
)
"""Scalings by preference, as in docs/choosing-a-precision.md. Blackwell prefers mxfp8.

NVFP4 is absent. It is advised only if the recipe names it."""
TOLERANCE = 0.05
"""Share of all FLOPs. A preferred scaling may lose this much more than the healthiest scaling.

So a few unhealthy layers do not rule out a preferred scaling."""
_LAYER = re.compile(r"^layers\.(\d+)\.")
_INDEX = re.compile(r"(?<![^.])\d+(?=\.)")


def group_of(layer: str) -> str:
    """Returns the group of a layer in tables, such as layers.*.mlp.linear_fc1."""
    return _INDEX.sub("*", layer)


# --- errors of layers


@dataclass(frozen=True)
class LayerError:
    """Error of one GEMM of one layer under one scaling, in the median step.

    Attributes:
        layer: Name of the layer.
        scaling: Name of the scaling.
        gemm: "fprop", "dgrad" or "wgrad".
        error: Relative error of the product.
        healthy: The same error of normally distributed operands.
        tensor: The operand with the larger error: "input", "weight" or "grad_output".
        snr: Signal-to-noise ratio of this operand in dB.
        underflow: Fraction of its elements rounded to zero.
        overflow: Fraction of its elements clipped.
    """

    layer: str
    scaling: str
    gemm: str
    error: float
    healthy: float
    tensor: str
    snr: float
    underflow: float
    overflow: float

    @property
    def ratio(self) -> float:
        """The error as a multiple of the healthy error."""
        return self.error / self.healthy

    @property
    def alarming(self) -> bool:
        """Whether the GEMM is unhealthy under this scaling."""
        return self.ratio > ALARM

    def __str__(self) -> str:
        parts = [
            f"{self.gemm} error {self.error:.1%}, {self.ratio:.1f} times healthy",
            f"{self.tensor} has {self.snr:.1f} dB",
        ]
        if self.underflow >= 0.001:
            parts.append(f"{self.underflow:.1%} become zero")
        if self.overflow > 0:
            # One clipped element may be 1e-8 of a tensor. It should not be shown as 0.00%.
            parts.append(f"{max(self.overflow, 0.0001):.2%} are clipped")
        return ", ".join(parts)


def layer_errors(
    errors: Mapping[tuple[str, int], Sequence[Sequence[GemmError]]],
    candidates: Sequence[Candidate],
    healthy: Sequence[Mapping[int, float]],
) -> list[LayerError]:
    """Returns the error of each GEMM and scaling in its median step.

    Args:
        errors: Errors of each step and candidate, as in `OperandProbe.errors`.
        candidates: The scalings.
        healthy: Errors of normally distributed operands, from `healthy_errors`.
    """
    of_layers = []
    for (layer, gemm), steps in errors.items():
        for index, candidate in enumerate(candidates):
            # The median step, with all of its figures: one bad batch does not decide. Of two middle
            # steps, the worse one.
            of_steps = sorted((step[index] for step in steps), key=lambda error: error.error)
            typical = of_steps[len(of_steps) // 2]
            blamed = typical.blamed
            of_layers.append(
                LayerError(
                    layer,
                    candidate.name,
                    GEMMS[gemm],
                    typical.error,
                    healthy[index][gemm],
                    TENSORS[blamed.role],
                    blamed.snr,
                    blamed.underflow,
                    blamed.overflow,
                )
            )
    return of_layers


# --- overrides


@dataclass(frozen=True)
class Override:
    """An override with its reasons.

    Attributes:
        word: The override, such as "fp8.margin=1".
        reasons: A line for each layer, with its error.
    """

    word: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Remedy:
    """Overrides under which a scaling is healthy.

    Attributes:
        scaling: Name of the scaling.
        preset: Overrides to choose the scaling. Empty for the recipe's own scaling.
        overrides: Overrides on top, against unhealthy GEMMs.
        recipe: The recipe with all overrides. None if no layer is left in FP8.
        layers: Layers to keep out of FP8. Layers healed by margin or history are not listed.
        kept: Healthy layers at both ends of the model, kept out of FP8 by the preset.
        share: Share of matmul FLOPs in FP8 with the overrides.
        share_before: Share of matmul FLOPs in FP8 without the overrides.
    """

    scaling: str
    preset: tuple[str, ...]
    overrides: tuple[Override, ...]
    recipe: Recipe | None
    layers: tuple[str, ...]
    kept: tuple[str, ...]
    share: float
    share_before: float

    @property
    def lost(self) -> float:
        """Share of all matmul FLOPs lost to the overrides."""
        return self.share_before - self.share

    @property
    def words(self) -> list[str]:
        """All overrides."""
        return [*self.preset, *(override.word for override in self.overrides)]


def find_remedy(
    choice: Choice,
    errors: Sequence[LayerError],
    amaxes: Mapping[str, AmaxSeries],
    measured: Sequence[int],
    cover: Cover,
    change: Callable[[Recipe, Sequence[str]], Recipe],
) -> Remedy:
    """Finds the overrides under which a scaling is healthy.

    Args:
        choice: The scaling.
        errors: The errors of all layers and scalings.
        amaxes: Amaxes of each layer.
        measured: The measured steps, from 1.
        cover: Plans the coverage of a recipe.
        change: Adds overrides to a recipe.

    Returns:
        The overrides with the largest share of FLOPs in FP8.
    """
    candidate = choice.candidate
    unhealthy = _unhealthy(errors, candidate.name, choice.coverage.linears)
    overrides: list[Override] = []
    if candidate.scaling.layout.history:
        # Current scaling is delayed scaling with the right scale. So if a layer is healthy under
        # current scaling, only its delayed scale is at fault. A margin or a shorter history keeps
        # this layer in FP8.
        current = candidate.name.replace("delayed", "current")
        stale = {
            name: layer_errors
            for name, layer_errors in unhealthy.items()
            if name in amaxes and name not in _unhealthy(errors, current, choice.coverage.linears)
        }
        if any(error.scaling == current for error in errors) and stale:
            overrides += delayed_overrides(candidate, stale, amaxes, measured)
            unhealthy = {
                name: layer_errors for name, layer_errors in unhealthy.items() if name not in stale
            }
    share = 0.0
    chosen: list[Override] = []
    final: Recipe | None = None
    for option in _layer_options(choice, unhealthy):
        try:
            recipe = change(choice.recipe, [override.word for override in (*overrides, *option)])
            share_of_option = cover(recipe).share
        except ConfigError:  # no layer is left in FP8
            continue
        # Above zero: without FP8 FLOPs there is no remedy.
        if share_of_option > share:
            share, chosen, final = share_of_option, [*overrides, *option], recipe
    return Remedy(
        candidate.name,
        candidate.overrides,
        tuple(chosen),
        final,
        tuple(unhealthy),
        _kept_by_preset(choice, errors),
        share,
        choice.coverage.share,
    )


def _unhealthy(
    errors: Sequence[LayerError], scaling: str, linears: Sequence[PlannedLinear]
) -> dict[str, list[LayerError]]:
    """Returns the unhealthy GEMMs planned in FP8, by layer."""
    # The probe also measures GEMMs in high precision, such as the output layer.
    planned = {linear.name: linear.products for linear in linears}
    unhealthy: dict[str, list[LayerError]] = {}
    for error in errors:
        if error.scaling == scaling and error.alarming and planned[error.layer][error.gemm]:
            unhealthy.setdefault(error.layer, []).append(error)
    return unhealthy


def _kept_by_preset(choice: Choice, errors: Sequence[LayerError]) -> tuple[str, ...]:
    """Returns the healthy layers at both ends, kept out of FP8 by the preset."""
    alarming = {
        error.layer for error in errors if error.scaling == choice.candidate.name and error.alarming
    }
    measured = {error.layer for error in errors} - alarming
    return tuple(
        linear.name
        for linear in choice.coverage.linears
        if linear.name in measured and linear.reason.startswith("fp8.high_precision_at_")
    )


def choose_remedy(remedies: Sequence[Remedy], is_blackwell: bool) -> Remedy | None:
    """Returns the most preferred scaling with few FLOPs lost to unhealthy layers.

    Args:
        remedies: The remedy of each scaling.
        is_blackwell: Whether the GPU is a Blackwell or newer.

    Returns:
        The remedy. None if no scaling has layers left in FP8.
    """
    order = ("mxfp8", *ORDER) if is_blackwell else ORDER
    usable = []
    for remedy in remedies:
        if remedy.recipe is not None and remedy.scaling in order:
            usable.append(remedy)
    # Lost FLOPs, not FLOPs in FP8: a preset with BF16 layers at both ends loses nothing by them.
    min_lost = min((remedy.lost for remedy in usable), default=0.0)
    healthy = [remedy for remedy in usable if remedy.lost <= min_lost + TOLERANCE]
    return min(healthy, key=lambda remedy: order.index(remedy.scaling), default=None)


def _layer_options(
    choice: Choice, unhealthy: Mapping[str, Sequence[LayerError]]
) -> list[list[Override]]:
    """Returns alternative lists of overrides against unhealthy GEMMs."""
    if not unhealthy:
        return [[]]
    options = [_excluded(choice, unhealthy)]
    all_errors = [error for errors in unhealthy.values() for error in errors]
    gemms = {error.gemm for error in all_errors}
    if len(gemms) < len(GEMMS):
        # The keys of override_linear_precision hold for all layers. One GEMM of every layer may
        # still cost fewer FLOPs than all three GEMMs of many layers.
        option = []
        for gemm in GEMMS:
            if gemm in gemms:
                of_gemm = [error for error in all_errors if error.gemm == gemm]
                worst = max(of_gemm, key=lambda error: error.ratio)
                reason = f"{len(of_gemm)} layers, the worst is {worst.layer}: {worst}"
                option.append(Override(f"fp8.override_linear_precision.{gemm}=true", (reason,)))
        options.append(option)
    return options


def _excluded(choice: Choice, unhealthy: Mapping[str, Sequence[LayerError]]) -> list[Override]:
    """Returns overrides to keep whole layers out of FP8, by as few keys as possible."""
    in_fp8 = [linear.name for linear in choice.coverage.linears if linear.fp8]
    reasons = {
        name: f"{name}: {max(errors, key=lambda error: error.ratio)}"
        for name, errors in unhealthy.items()
    }
    overrides = []
    remaining = set(unhealthy)
    outputs = {linear.name for linear in choice.coverage.linears if linear.output} & remaining
    if outputs:
        # Excluding the output layer would contradict fp8.output_layer=true.
        overrides.append(
            Override("fp8.output_layer=false", tuple(reasons[name] for name in sorted(outputs)))
        )
        remaining -= outputs
    # Whole Transformer layers at an end: a number is shorter than a list of names.
    for key, layers in _whole_ends(in_fp8, remaining).items():
        count = getattr(choice.recipe.fp8, key) + len(layers)
        names = {name for layer in layers for name in layer}
        overrides.append(
            Override(f"fp8.{key}={count}", tuple(reasons[name] for name in sorted(names)))
        )
        remaining -= names
    if remaining:
        # A pattern such as layers.*.mlp.linear_fc1 if all layers of a group are unhealthy. The rest
        # by name. The recipe's own patterns stay, because the override replaces the list.
        groups: dict[str, list[str]] = {}
        for name in in_fp8:
            groups.setdefault(group_of(name), []).append(name)
        patterns = list(choice.recipe.fp8.exclude)
        for pattern, members in groups.items():
            chosen = [name for name in members if name in remaining]
            if len(members) > 1 and all(name in unhealthy for name in members) and chosen:
                patterns.append(pattern)
            else:
                patterns += chosen
        word = f"fp8.exclude=[{','.join(patterns)}]"
        overrides.append(
            Override(word, tuple(reasons[name] for name in in_fp8 if name in remaining))
        )
    return overrides


def _whole_ends(in_fp8: Sequence[str], unhealthy: set[str]) -> dict[str, list[set[str]]]:
    """Finds Transformer layers at both ends of the model with only unhealthy linear layers.

    Args:
        in_fp8: Linear layers in FP8, in model order.
        unhealthy: Unhealthy linear layers.

    Returns:
        For each key of fp8, the linear layers of each such Transformer layer. Empty if all layers
        are unhealthy, because both keys would claim them.
    """
    layers: dict[int, set[str]] = {}
    for name in in_fp8:
        number = _LAYER.match(name)
        if number:
            layers.setdefault(int(number[1]), set()).add(name)
    ends: dict[str, list[set[str]]] = {}
    if all(names <= unhealthy for names in layers.values()):
        return ends
    # From each end to the first Transformer layer with a healthy linear layer.
    for key, order in (
        ("high_precision_at_start", sorted(layers)),
        ("high_precision_at_end", sorted(layers, reverse=True)),
    ):
        for index in order:
            if not layers[index] <= unhealthy:
                break
            ends.setdefault(key, []).append(layers[index])
    return ends


# --- delayed scaling


def delayed_overrides(
    candidate: Candidate,
    stale: Mapping[str, Sequence[LayerError]],
    amaxes: Mapping[str, AmaxSeries],
    measured: Sequence[int],
) -> list[Override]:
    """Returns overrides for tensors with an outdated delayed scale.

    A growing tensor is clipped by an old scale: fp8.margin leaves headroom. A shrinking tensor
    underflows: a shorter fp8.amax_history_len forgets the large amaxes sooner.

    Args:
        candidate: The scaling.
        stale: Unhealthy GEMMs by layer, all healthy under current scaling.
        amaxes: Amaxes of each layer.
        measured: The measured steps, from 1.
    """
    roles = {name: role for role, name in TENSORS.items()}
    overrides = []
    clipped = [error for errors in stale.values() for error in errors if error.overflow > 0]
    sunk = [error for errors in stale.values() for error in errors if error.overflow == 0]
    fp8 = candidate.fp8
    if clipped:
        growth, error = max(
            (
                (_growth(amaxes[error.layer], roles[error.tensor], candidate, measured), error)
                for error in clipped
            ),
            key=lambda pair: pair[0],
        )
        # A margin of m divides the scale by 2^m. At least one step up, because the growth is a
        # median over steps and may miss the step with the clipping. The schema allows up to 16.
        margin = min(16, fp8.margin + max(1, math.ceil(math.log2(max(growth, 1.0)))))
        reason = (
            f"{error.layer}: {error.tensor} grows to {growth:.3g} times its amax history; {error}"
        )
        overrides.append(Override(f"fp8.margin={margin}", (reason,)))
    if sunk:
        error = max(sunk, key=lambda error: error.ratio)
        series = amaxes[error.layer]
        role = roles[error.tensor]
        length = _history_length(series, role, candidate, measured)
        drop = 1 / _growth(series, role, candidate, measured)
        reason = (
            f"{error.layer}: {error.tensor} is {drop:.3g} times below its amax history; {error}"
        )
        overrides.append(Override(f"fp8.amax_history_len={length}", (reason,)))
    return overrides


def _growth(series: AmaxSeries, role: int, candidate: Candidate, measured: Sequence[int]) -> float:
    """Returns the median of amax / largest amax of the history, over the measured steps."""
    values = [float(step[role]) for step in series.steps]
    ratios = []
    for step in measured:
        if step > len(values):
            break  # the layer did not run again
        # The scale of a step comes from earlier steps only. Index step - 1 is the step itself.
        window = values[max(0, step - 1 - candidate.fp8.amax_history_len) : step - 1]
        history = max(window, default=0.0)
        # An amax of 0 is a layer without tokens, such as an idle expert.
        if history > 0 and values[step - 1] > 0:
            ratios.append(values[step - 1] / history)
    return median(ratios) if ratios else 1.0


def _history_length(
    series: AmaxSeries, role: int, candidate: Candidate, measured: Sequence[int]
) -> int:
    """Returns a history length under which the scale is at most 4 times too small.

    Shortens the current length by factors of 4. If no length suffices, it is 1.
    """
    # A scale 4 times too small costs two bits of exponent range and no mantissa.
    length = candidate.fp8.amax_history_len
    while length > 1:
        length = max(1, length // 4)
        shorter = replace(
            candidate, fp8=candidate.fp8.model_copy(update={"amax_history_len": length})
        )
        if _growth(series, role, shorter, measured) >= 1 / 4:
            break
    return length
