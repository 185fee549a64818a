"""Transformer Engine backend: genuine TE modules around the model's Parameters.

This backend has not run on a GPU. Tests on CPUs run Transformer Engine's own Python (recipes,
modules, quantizers, autocast, state) over a stand-in for its kernels. Other tests run all of it on
a fake GPU with kernels that compute nothing (tools/fake_gpu). tests/gpu/test_te.py needs a GPU.

Differences from the native backend:

- Transformer Engine rolls histories and updates scales after each forward pass, native after each
  optimizer step. Amaxes of a skipped step count.
- te.TransformerLayer also chooses the kernel of attention in high precision.

Master weights of FP8 weights are float32 and belong to our optimizer. It writes the weights with
`quantize_`, like TE's FusedAdam.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.backends.any_model.module_swap import linear_with, replace_module
from fp8cfg.backends.gemm_plan import PlannedLinear, is_excluded
from fp8cfg.backends.protocol import Observed
from fp8cfg.backends.stored_weights import shared_weights
from fp8cfg.backends.te import attention, decoder
from fp8cfg.backends.te.attention import TEAttention, chosen_kernel
from fp8cfg.backends.te.decoder import TEDecoderLayer, describe_decoder_layers
from fp8cfg.backends.te.engine_builder import EngineBuilder, check_fields
from fp8cfg.backends.te.layers import TEMLP, Engine, TELinear, TENorm, is_observed, te_autocast
from fp8cfg.backends.te.range_watch import watch_ranges
from fp8cfg.backends.te.recipe import recipe_of
from fp8cfg.backends.te.rules import contradictions
from fp8cfg.numerics import Region
from fp8cfg.numerics.stored_state import say_scales_anew
from fp8cfg.schema.errors import refuse_if
from fp8cfg.schema.fp8 import FP8


def convert(
    model: nn.Module,
    fp8: FP8,
    plan: Sequence[PlannedLinear],
    region: Region,
    product: str,
    compute: torch.dtype = torch.bfloat16,
    fp8_gather: bool = False,
) -> None:
    """Replaces linear layers, norms and attention, as in `Backend.convert`.

    Decoder layers of fp8cfg.models are fused. FP8 weights represent weights in `compute`. `region`
    has no effect, use `autocast`.

    Raises:
        ConfigError: An NVTE_* variable contradicts `fp8`, or FP8 attention does not support the
            heads of the model.
        BackendError: An object of Transformer Engine differs from the recipe.
    """
    refuse_if([*contradictions(fp8, os.environ), *attention.misfits(model, fp8)])
    te = importlib.import_module("transformer_engine.pytorch")
    excluded = {module for name, module in model.named_modules() if is_excluded(name, fp8)}
    builder = EngineBuilder(
        te, recipe_of(fp8), fp8.params, shared_weights(model), compute, excluded
    )
    for planned in plan:
        if planned.fp8:
            linear = model.get_submodule(planned.name)
            assert isinstance(linear, nn.Linear)
            replace_module(model, planned.name, TELinear(linear))
    if fp8.dot_product_attention:
        attention.convert_attention(model, fp8, te, builder.recipe)
    fuse(model, builder)
    for layer in _linears(model).values():
        if not hasattr(layer, "engine"):
            _build_linear_engine(layer, builder)
    for name, module in list(model.named_modules()):
        if module in excluded:
            continue
        norm = _te_norm(module, te)
        if norm is not None:
            replace_module(model, name, TENorm(module, norm))
    watch_ranges(_engines(model))


def _build_linear_engine(layer: TELinear, builder: EngineBuilder) -> None:
    """Builds te.Linear for a layer that is not fused with others."""
    parameters: dict[str, tuple[nn.Module, str]] = {"weight": (layer, "weight")}
    if layer.bias is not None:
        parameters["bias"] = (layer, "bias")
    builder.build_engine(
        "Linear",
        [layer],
        (layer.in_features, layer.out_features),
        parameters,
        bias=layer.bias is not None,
    )


def fuse(model: nn.Module, builder: EngineBuilder) -> None:
    """Fuses norms, linear layers and MLPs of the decoder layers of fp8cfg.models, in place.

    te.TransformerLayer computes a whole decoder layer if it can. Otherwise te.LayerNormLinear and
    te.LayerNormMLP compute parts of it.

    Args:
        model: The model. Its FP8 layers are TELinear already.
        builder: The builder of the conversion.
    """
    from fp8cfg.models.transformer import TransformerLayer

    for name, layer in list(model.named_modules()):
        if type(layer) is not TransformerLayer:
            continue
        # The root of a model has no parent to hold its replacement.
        obstacle = decoder.obstacle(layer, builder) if name else "it is the model itself"
        if not obstacle:
            decoder.convert_decoder(model, name, layer, builder)
            continue
        for linear in layer.modules():
            if isinstance(linear, TELinear):
                linear.obstacle = obstacle
        # With layernorm_placement=post no norm is before a GEMM. Selective recomputation computes
        # norms again, without the GEMM.
        if layer.placement == "post" or layer.selective:
            continue
        prefix = f"{name}." if name else ""
        _fuse_norm(model, f"{prefix}input_layernorm", layer.self_attention.linear_qkv, builder)
        # te.LayerNormMLP has no backward pass in high precision. It fails on a frozen norm if its
        # input needs no gradient either, because it reads the missing bias of RMSNorm.
        has_fp8_backward = getattr(builder.recipe, "backward_override", None) is None
        is_swiglu = layer.config.activation == "swiglu"
        if has_fp8_backward and is_swiglu and layer.pre_mlp_layernorm.weight.requires_grad:
            _fuse_mlp(model, prefix, layer, builder)
        else:
            _fuse_norm(model, f"{prefix}pre_mlp_layernorm", layer.mlp.linear_fc1, builder)


def _fuse_norm(model: nn.Module, name: str, linear: Any, builder: EngineBuilder) -> None:
    """Fuses the norm `name` with the linear layer after it, if te.LayerNormLinear supports both."""
    norm: Any = model.get_submodule(name)
    if norm in builder.kept or not _can_fuse(norm, linear):
        return
    fused_norm = TENorm(norm, None)
    builder.build_engine(
        "LayerNormLinear",
        [linear],
        (linear.in_features, linear.out_features),
        {"layer_norm_weight": (fused_norm, "weight"), "weight": (linear, "weight")},
        eps=norm.eps,
        normalization="RMSNorm",
    )
    replace_module(model, name, fused_norm)


def _fuse_mlp(model: nn.Module, prefix: str, layer: Any, builder: EngineBuilder) -> None:
    """Fuses the MLP of a decoder layer with its norm, if te.LayerNormMLP supports both.

    `prefix` is the name of the decoder layer with a dot.
    """
    fc1, fc2, norm = layer.mlp.linear_fc1, layer.mlp.linear_fc2, layer.pre_mlp_layernorm
    if norm in builder.kept or not _can_fuse(norm, fc1, fc2):
        return
    fused_norm = TENorm(norm, None)
    builder.build_engine(
        "LayerNormMLP",
        [fc1, fc2],
        (fc1.in_features, fc2.in_features),
        {
            "layer_norm_weight": (fused_norm, "weight"),
            "fc1_weight": (fc1, "weight"),
            "fc2_weight": (fc2, "weight"),
        },
        eps=norm.eps,
        normalization="RMSNorm",
        activation="swiglu",
    )
    replace_module(model, f"{prefix}pre_mlp_layernorm", fused_norm)
    replace_module(model, f"{prefix}mlp", TEMLP(layer.mlp, fc1, fc2))


def _can_fuse(norm: Any, *linears: nn.Module) -> bool:
    """Whether one module can compute a norm and the linear layers after it.

    All layers must be in FP8 without biases, and no hook may read the tensors between them.
    """
    if norm.kind != "RMSNorm" or norm.zero_centered:
        return False
    for linear in linears:
        if not isinstance(linear, TELinear) or linear.bias is not None:
            return False
    return not any(is_observed(module) for module in (norm, *linears))


def _te_norm(module: nn.Module, te: Any) -> Any | None:
    """Returns the norm of Transformer Engine that computes the same as `module`.

    Returns:
        te.RMSNorm or te.LayerNorm on the meta device. None for other modules, and for norms without
        a weight, in float64, or with an eps that depends on the dtype. te.LayerNorm needs a bias.
    """
    from fp8cfg.models.norms import LayerNorm, RMSNorm

    te_classes: dict[type[nn.Module], str] = {
        RMSNorm: "RMSNorm",
        LayerNorm: "LayerNorm",
        nn.RMSNorm: "RMSNorm",
        nn.LayerNorm: "LayerNorm",
    }
    te_class = te_classes.get(type(module))
    weight = getattr(module, "weight", None)
    eps = getattr(module, "eps", None)
    if te_class is None or weight is None or eps is None or weight.dtype == torch.float64:
        return None
    if te_class == "LayerNorm" and module.bias is None:
        return None
    zero_centered = bool(getattr(module, "zero_centered", False))
    norm = getattr(te, te_class)(
        tuple(weight.shape),
        eps=eps,
        zero_centered_gamma=zero_centered,
        dtype=weight.dtype,
        device="meta",
    )
    check_fields(norm, {"eps": eps, "zero_centered_gamma": zero_centered})
    return norm


def _linears(model: nn.Module) -> dict[str, TELinear]:
    """Returns the linear layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TELinear)}


def _fp8_layers(model: nn.Module) -> dict[str, TELinear | TEAttention]:
    """Returns the linear layers and attentions by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TELinear | TEAttention)
    }


def _engines(model: nn.Module) -> list[Engine]:
    """Returns the engines of all linear layers. Layers of an MLP share one."""
    return list(dict.fromkeys(layer.engine for layer in _linears(model).values()))


@contextmanager
def autocast(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Runs layers in FP8, as in `Backend.autocast`.

    With activation checkpointing the backward pass must run inside the context too, because scales
    are updated at its end. Evaluation leaves no amaxes behind.
    """
    layers = list(_fp8_layers(model).values())
    if not layers:
        yield
        return
    te = importlib.import_module("transformer_engine.pytorch")
    histories: list[Tensor] = []
    if not torch.is_grad_enabled():
        for layer in layers:
            histories += layer.forward_histories()
    # Row 0 has the amaxes of the current step.
    first_rows = [history[0].clone() for history in histories]
    with te_autocast(te, enabled, layers[0].recipe):
        yield
    for history, first_row in zip(histories, first_rows, strict=True):
        history[0] = first_row


def observed(model: nn.Module) -> Observed:
    """Returns the operand kinds of each GEMM that ran, by layer."""
    return {name: dict(layer.gemm_kinds) for name, layer in _fp8_layers(model).items()}


def forget_observed(model: nn.Module) -> None:
    """Clears the record of GEMMs before the next observed step."""
    for layer in _fp8_layers(model).values():
        layer.gemm_kinds.update(dict.fromkeys(layer.gemm_kinds))


def record(model: nn.Module) -> dict[str, Any]:
    """Returns the Transformer Engine modules of each decoder layer, and the attention kernel."""
    entries: dict[str, Any] = {"te_modules": describe_decoder_layers(model)}
    kernel = chosen_kernel()
    if kernel:
        entries["te_attention"] = kernel
    return entries


def optimizer(
    prepared: Any, precision: Any, optim: Any, clip_grad: float, loss_scaler: Any
) -> None:
    """Returns None: any optimizer can train the layers."""
    return None


def writers(model: nn.Module) -> dict[nn.Parameter, Callable[[Tensor], None]]:
    """Returns the functions that quantize masters into trained FP8 weights."""
    return {
        layer.weight: layer.set_weight
        for layer in _linears(model).values()
        if layer.fp8_params and layer.weight.requires_grad
    }


def cache_weights(model: nn.Module, on: bool = True) -> None:
    """Makes layers quantize each weight in the first microbatch of a step only.

    Only for loops that call `after_step`, because nothing else tells that weights have changed.
    """
    for engine in _engines(model):
        engine.caches_weights = on
        engine.weights_changed = True


def after_step(
    model: nn.Module, group: dist.ProcessGroup | None, step: int, skip: Tensor | None = None
) -> None:
    """Marks cached weights as stale. Transformer Engine has already updated its scales.

    Its scales also change in a skipped step. An FP8 weight with a delayed scale must then not be
    written, because the same master would give other codes. `skip` prevents this.
    """
    layers = _linears(model).values()
    say_scales_anew(layers)
    _end_step(model, skipped=False)
    skip_flag = None
    if skip is not None:
        skip_flag = skip.float().reshape(1)
    for layer in layers:
        layer.skip = skip_flag if layer.recipe.delayed() and layer.fp8_params else None


def after_skip(model: nn.Module) -> None:
    """Marks cached weights as stale.

    The weights did not change, but the scales did. Transformer Engine does not drop the amaxes.
    """
    _end_step(model, skipped=True)


def _end_step(model: nn.Module, skipped: bool) -> None:
    engines = _engines(model)
    for engine in engines:
        engine.weights_changed = True
    for watch in {engine.ranges for engine in engines if engine.ranges}:
        watch.end_step(skipped)


def plain(layer: nn.Module) -> nn.Module | None:
    """Returns the plain module of a converted layer, as in `Backend.plain`.

    A fused norm returns its input, so all layers of a model must be converted back.
    """
    if isinstance(layer, TENorm | TEMLP | TEAttention | TEDecoderLayer):
        return layer.plain
    if not isinstance(layer, TELinear):
        return None
    if not layer.fp8_params:
        return linear_with(layer.weight, layer.bias)
    weight = nn.Parameter(
        layer.dequantized_weight(layer.weight.dtype), requires_grad=layer.weight.requires_grad
    )
    return linear_with(weight, layer.bias)
