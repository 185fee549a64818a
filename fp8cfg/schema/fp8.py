"""The `fp8` node: how linear layers run in FP8."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fp8cfg.schema.node import Node
from fp8cfg.schema.scalings import SCALINGS, ScalingName


class OverrideLinearPrecision(Node):
    """GEMMs that stay in high precision in every linear layer (TE 1.x override_linear_precision)."""

    home: ClassVar[str] = "fp8.override_linear_precision"

    fprop: bool = False
    """Keep the forward product y = x w^T in high precision. Default false (TE 1.x)."""
    dgrad: bool = False
    """Keep the input gradient dx = dy w in high precision. Default false (TE 1.x)."""
    wgrad: bool = False
    """Keep the weight gradient dw = dy^T x in high precision. Default false (TE 1.x; Megatron's fp8_wgrad is its inverse)."""


class FP8(Node):
    """How linear layers run in FP8: formats, scaling, and which layers do."""

    home: ClassVar[str] = "fp8"

    enabled: bool = False
    """Whether linear layers run in FP8. Default false; the FP8 presets set it."""
    scaling: ScalingName = "delayed"
    """Where scales come from: past amaxes (delayed), the tensor itself (current), 128-wide blocks (block), blocks of 32 with
    E8M0 scales (mxfp8), blocks of 16 (nvfp4). Default delayed (TE DelayedScaling, NeMo bf16_with_fp8_mixed)."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: E4M3 forward, E5M2 for gradients; e4m3: E4M3 everywhere. Default hybrid (TE, NeMo)."""
    margin: int = Field(default=0, ge=0, le=16)
    """Delayed scaling: scales are divided by 2^margin, as headroom. Default 0 (TE)."""
    interval: int = Field(default=1, ge=1)
    """Delayed scaling: optimizer steps between updates of the scales; the history rolls in every step. Default 1 (TE 1.x)."""
    amax_history_len: int = Field(default=1024, ge=1, le=65536)
    """Delayed scaling: steps of amaxes (absolute maxima) in the history of each tensor. Default 1024 (TE, NeMo presets)."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Delayed scaling: which amax of the history sets the scale. Default max (TE, NeMo presets)."""
    reduce_amax: bool = True
    """Delayed scaling: take the maximum of amaxes over the data-parallel group. Default true (TE)."""
    tp_only_amax_red: bool = False
    """Delayed scaling: take the maximum only over tensor- and context-parallel ranks, so that each data-parallel rank scales by
    its own tokens. Default false (Megatron)."""
    granularity: Literal["tensor", "row"] = "tensor"
    """Current scaling: one scale for a tensor, or one for each row along the contracted dimension. Default tensor (TE
    Float8CurrentScaling, NeMo tensorwise); row is torchao's rowwise."""
    use_power_2_scales: bool | None = None
    """Current and block scaling: round scales down to powers of two. Default null: true under block (TE use_f32_scales) and
    with scales of rows (torchao's from_recipe_name("rowwise")), false under current with one of a tensor (TE)."""
    enable_2d_quantization: bool | None = None
    """Block, mxfp8 and nvfp4: scale weights in squares, so that fprop and dgrad read the same values. Default null: true under
    block (128x128) and nvfp4 (16x16), false under mxfp8 (TE)."""
    random_hadamard_transform: bool = True
    """nvfp4: apply a random Hadamard transform to 16 tokens at a time of the operands of wgrad, which spreads outliers. Default
    true (TE disable_rht=False)."""
    stochastic_rounding: bool = True
    """nvfp4: round gradients up or down at random, without bias. Default true (TE disable_stochastic_rounding=False)."""
    first_step: Literal["auto", "in_time", "te"] = "auto"
    """Delayed scaling with an empty history: in_time scales each tensor by its own amax (MS-AMP's warm-up); te uses scale 1,
    which flushes small gradients to zero. Default auto: te under backend=te, which has nothing else, otherwise in_time."""
    params: bool = False
    """Store the weights of FP8 layers only in FP8 (FP8 primary weights), with fp32 masters in the optimizer. Default false (TE);
    NeMo's presets set it (fp8_param_gather)."""
    keep_transpose_cache: bool = False
    """fp8.params: cache the transpose of each weight, which dgrad reads, for all microbatches of a step in fit. Takes one byte
    per parameter; otherwise each backward pass makes it. Default false (Megatron keep_fp8_transpose_cache)."""
    override_linear_precision: OverrideLinearPrecision = Field(
        default_factory=OverrideLinearPrecision
    )
    """GEMMs that stay in high precision in every layer."""
    high_precision_at_start: int = Field(default=0, ge=0)
    """Transformer layers at the start that stay in high precision. Default 0 (NeMo num_layers_at_start_in_bf16)."""
    high_precision_at_end: int = Field(default=0, ge=0)
    """Transformer layers at the end that stay in high precision. Default 0 (NeMo num_layers_at_end_in_bf16)."""
    include: tuple[str, ...] = ()
    """Glob patterns of layer names that run in FP8; empty means all. A pattern without a match is an error. Default all."""
    exclude: tuple[str, ...] = ()
    """Glob patterns of layer names that stay in high precision; wins over include. Patterns may name norms too, which backend=te
    then does not replace. Default none."""
    output_layer: bool = False
    """Whether the output layer (the LM head) runs in FP8 too. Default false (Megatron, torchtitan)."""
    dot_product_attention: bool = False
    """Run the GEMMs of attention in FP8, under delayed and current scaling (TE fp8_dpa). high_precision_at_start and
    high_precision_at_end apply to attention; include and exclude do not. Default false (TE)."""
    multi_head_attention: bool = False
    """FP8 tensors between the projections and attention too (TE fp8_mha). Default false (TE)."""
    use_autocast_during_eval: bool = False
    """Evaluate in FP8; otherwise evaluation runs in high precision. Default false (Accelerate)."""
    emulate: bool = False
    """Emulate FP8 on a GPU, with or without FP8 units; a CPU always emulates. Default false: a GPU without FP8 units is an
    error."""
    min_coverage: float = Field(default=0.0, ge=0.0, le=1.0)
    """Minimum share of matmul FLOPs in FP8. A run with less stops with exit code 3. Default 0: any share above zero."""


def own_scales(fp8: FP8) -> bool:
    """Returns whether each data-parallel rank has its own delayed scales."""
    return fp8.tp_only_amax_red or not fp8.reduce_amax


def _scalings_by_key() -> dict[str, tuple[str, ...]]:
    """Inverts Descriptor.keys: returns the scalings that read each key."""
    scalings: dict[str, tuple[str, ...]] = {}
    for name, scaling in SCALINGS.items():
        for key in scaling.keys:
            scalings[key] = (*scalings.get(key, ()), name)
    return scalings


ONLY_UNDER = _scalings_by_key()
"""Keys of `fp8` that only some scalings read, with these scalings."""


def power_2_scales(fp8: FP8) -> bool:
    """Returns fp8.use_power_2_scales with null resolved."""
    if fp8.use_power_2_scales is not None:
        return fp8.use_power_2_scales
    return SCALINGS[fp8.scaling].power_2_scales or per_row(fp8)


def weights_2d(fp8: FP8) -> bool:
    """Returns fp8.enable_2d_quantization with null resolved."""
    if fp8.enable_2d_quantization is not None:
        return fp8.enable_2d_quantization
    return SCALINGS[fp8.scaling].weights_2d


def transforms(fp8: FP8) -> bool:
    """Returns whether operands of wgrad go through the random Hadamard transform."""
    has_key = "random_hadamard_transform" in SCALINGS[fp8.scaling].keys
    return has_key and fp8.random_hadamard_transform


def per_row(fp8: FP8) -> bool:
    """Returns whether each row of a tensor has its own scale."""
    return fp8.granularity == "row"
