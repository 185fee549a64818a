"""Transformer Engine backend: genuine TE modules around the model's Parameters, and TE's recipe read back from the object.

It has not run on a GPU: it is tested on CPUs with Transformer Engine's own Python (recipes, modules, quantizers, autocast, state)
over a stand-in for its kernels, and with all of Transformer Engine on a fake GPU, whose kernels compute nothing (tools/fake_gpu).
tests/gpu/test_te.py is what a GPU has to show.

What differs from native, for whoever compares: Transformer Engine rolls histories and moves scales once for each forward pass
(native: once for each optimizer step), and counts the amaxes of a step that was skipped. Where te.TransformerLayer takes a whole
layer, it also chooses the kernel of attention in high precision. Masters of weights that are held in FP8 are our optimizer's,
float32, written with `quantize_`, as TE's FusedAdam writes its own.
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

from fp8cfg.backends.gemm_plan import PlannedLinear, excluded
from fp8cfg.backends.module_swap import linear_with, replaced
from fp8cfg.backends.protocol import Observed
from fp8cfg.backends.stored_weights import shared_weights
from fp8cfg.backends.te import attention as te_attention
from fp8cfg.backends.te import fusion as te_fusion
from fp8cfg.backends.te.attention import TEAttention, chosen_kernel
from fp8cfg.backends.te.build import Maker, check
from fp8cfg.backends.te.decoder import TEDecoderLayer, described
from fp8cfg.backends.te.engine import Engine, entered
from fp8cfg.backends.te.environment import contradictions
from fp8cfg.backends.te.layers import TEMLP, TELinear, TENorm
from fp8cfg.backends.te.overflow import watch_ranges
from fp8cfg.backends.te.recipe import recipe_of
from fp8cfg.config.errors import refuse_if
from fp8cfg.config.fp8 import FP8
from fp8cfg.numerics import Region
from fp8cfg.numerics.stored_form import say_scales_anew


def convert(
    model: nn.Module,
    fp8: FP8,
    plan: Sequence[PlannedLinear],
    region: Region,
    product: str,
    compute: torch.dtype = torch.bfloat16,
    fp8_gather: bool = False,
) -> None:
    """See `protocol.Backend`. Norms become Transformer Engine's too, and layers of this project's Transformer are fused. Weights
    that are held in FP8 stand for weights in `compute`, the dtype of the activations. Raises ConfigError for NVTE_* variables that
    contradict `fp8`, and for heads that FP8 attention has no kernel for. `region` is not asked: use `autocast`.
    """
    refuse_if([*contradictions(fp8, os.environ), *te_attention.misfits(model, fp8)])
    te = importlib.import_module("transformer_engine.pytorch")
    kept = {module for name, module in model.named_modules() if excluded(name, fp8)}
    make = Maker(te, recipe_of(fp8), fp8.params, shared_weights(model), compute, kept)
    for planned in plan:
        if planned.fp8:
            linear = model.get_submodule(planned.name)
            assert isinstance(linear, nn.Linear)
            replaced(model, planned.name, TELinear(linear))
    if fp8.dot_product_attention:
        te_attention.convert(model, fp8, te, make.recipe)
    te_fusion.fuse(model, make)
    for layer in _layers(model).values():
        if not hasattr(layer, "place"):
            held = {
                name: (layer, name)
                for name in ("weight", "bias")
                if getattr(layer, name) is not None
            }
            make(
                "Linear",
                [layer],
                (layer.in_features, layer.out_features),
                held,
                bias=layer.bias is not None,
            )
    for name, module in list(model.named_modules()):
        if module not in kept and (norm := _norm(module, te)):
            replaced(model, name, TENorm(module, norm))
    watch_ranges(_engines(model))


def _norm(module: nn.Module, te: Any) -> Any | None:
    """The norm of Transformer Engine that computes the same as `module`; None where there is none: without weights, in float64,
    LayerNorm without a bias, RMSNorm whose eps follows the dtype.
    """
    from fp8cfg.models.norms import LayerNorm, RMSNorm

    kind = {
        RMSNorm: "RMSNorm",
        LayerNorm: "LayerNorm",
        nn.RMSNorm: "RMSNorm",
        nn.LayerNorm: "LayerNorm",
    }.get(type(module))
    weight, eps = getattr(module, "weight", None), getattr(module, "eps", None)
    if kind is None or weight is None or eps is None or weight.dtype == torch.float64:
        return None
    if kind == "LayerNorm" and module.bias is None:
        return None
    centered = bool(getattr(module, "zero_centered", False))
    made = getattr(te, kind)(
        tuple(weight.shape),
        eps=eps,
        zero_centered_gamma=centered,
        dtype=weight.dtype,
        device="meta",
    )
    check(made, {"eps": eps, "zero_centered_gamma": centered})
    return made


def _layers(model: nn.Module) -> dict[str, TELinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, TELinear)}


def _watched(model: nn.Module) -> dict[str, TELinear | TEAttention]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TELinear | TEAttention)
    }


def _engines(model: nn.Module) -> list[Engine]:
    return list({id(layer.place[0]): layer.place[0] for layer in _layers(model).values()}.values())


@contextmanager
def autocast(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """See `protocol.Backend`. With activation checkpointing stay inside until the backward pass is done: scales move when it is
    left. Without gradients no amax is left behind: evaluation in FP8 moves nothing."""
    watched = list(_watched(model).values())
    if not watched:
        yield
        return
    te = importlib.import_module("transformer_engine.pytorch")
    histories = (
        []
        if torch.is_grad_enabled()
        else [h for layer in watched for h in layer.forward_histories()]
    )
    kept = [history[0].clone() for history in histories]
    with entered(te, enabled, watched[0].recipe):
        yield
    for history, row in zip(histories, kept, strict=True):
        history[0] = row


def observed(model: nn.Module) -> Observed:
    return {name: dict(layer.ran) for name, layer in _watched(model).items()}


def forget_observed(model: nn.Module) -> None:
    for layer in _watched(model).values():
        layer.ran.update(dict.fromkeys(layer.ran))


def record(model: nn.Module) -> dict[str, Any]:
    kernel = chosen_kernel()
    return {"te_modules": described(model), **({"te_attention": kernel} if kernel else {})}


def optimizer(
    prepared: Any, precision: Any, optim: Any, clip_grad: float, loss_scaler: Any
) -> None:
    return None


def writers(model: nn.Module) -> dict[nn.Parameter, Callable[[Tensor], None]]:
    return {layer.weight: layer.set_weight for layer in _layers(model).values() if layer.fp8_params}


def cache_weights(model: nn.Module, on: bool = True) -> None:
    """Quantize each weight once per optimizer step, in its first microbatch, and keep it until `after_step`. For a loop that calls
    `after_step`, since nothing else tells that weights have moved; off until this is called.
    """
    for engine in _engines(model):
        engine.caches, engine.weights_moved = on, True


def after_step(
    model: nn.Module, group: dist.ProcessGroup | None, step: int, skip: Tensor | None = None
) -> None:
    """Mark cached weights as stale. Transformer Engine has moved its scales itself, over the group that `autocast` gave it, in a
    step that is skipped too: a weight that is held under a delayed scale would be another if it were written again.
    """
    layers = _layers(model).values()
    say_scales_anew(layers)
    _settle(model, made=True)
    flag = None if skip is None else skip.float().reshape(1)
    for layer in layers:
        layer.skip = flag if layer.recipe.delayed() and layer.fp8_params else None


def after_skip(model: nn.Module) -> None:
    """Mark cached weights as stale: they are unchanged, but Transformer Engine does not take amaxes back, and scales have moved."""
    _settle(model, made=False)


def _settle(model: nn.Module, made: bool) -> None:
    engines = _engines(model)
    for engine in engines:
        engine.weights_moved = True
    for watch in {engine.ranges for engine in engines if engine.ranges}:
        watch.settle(made)


def plain(layer: nn.Module) -> nn.Module | None:
    """See `protocol.Backend`; for what is no linear layer the module whose place it took. Go on with all of them: a
    norm in front of a fused product only passes its input on."""
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
