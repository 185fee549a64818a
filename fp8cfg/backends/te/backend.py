"""Transformer Engine backend: genuine TE modules around the model's Parameters, and TE's recipe read back from the object.

It has not run on a GPU: it is tested on CPUs with Transformer Engine's own Python (recipes, modules, quantizers, autocast, state)
over a stand-in for its kernels, and with all of Transformer Engine on a fake GPU, whose kernels compute nothing (tools/fake_gpu).
tests/gpu/test_te.py is what a GPU has to show.

What differs from native, for whoever compares: Transformer Engine rolls histories and moves scales once for each forward pass
(native: once for each optimizer step), and counts the amaxes of a step that was skipped. Where te.TransformerLayer takes a whole
layer, it also chooses the kernel of attention in high precision. Masters of weights that are stored in FP8 are our optimizer's,
float32, written with `quantize_`, as TE's FusedAdam writes its own.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.backends.any_model.module_swap import linear_with, replaced
from fp8cfg.backends.gemm_plan import PlannedLinear, excluded
from fp8cfg.backends.protocol import Observed
from fp8cfg.backends.stored_weights import shared_weights
from fp8cfg.backends.te import attention
from fp8cfg.backends.te.attention import (
    Maker,
    TEAttention,
    TEDecoderLayer,
    check,
    chosen_kernel,
    described,
)
from fp8cfg.backends.te.layers import (
    TEMLP,
    Engine,
    TELinear,
    TENorm,
    entered,
    kind,
    listened,
    manager,
)
from fp8cfg.backends.te.recipe import recipe_of
from fp8cfg.backends.te.rules import contradictions
from fp8cfg.numerics import Region
from fp8cfg.numerics.formats import E4M3, E5M2
from fp8cfg.numerics.scaling import compute_range_used
from fp8cfg.numerics.stored_state import say_scales_anew
from fp8cfg.schema.errors import refuse_if
from fp8cfg.schema.fp8 import FP8


def fuse(model: nn.Module, make: Maker) -> None:
    """Give one engine, in place, to what can be fused in the Transformer layers of `model`, whose linear layers are TELinear.
    te.LayerNormMLP knows no backward pass in high precision (backward_override), and fails on a frozen norm whose input needs no
    gradient (it asks the bias that RMSNorm lacks); then the norm goes with `linear_fc1` alone."""
    from fp8cfg.models.transformer import TransformerLayer

    whole_mlp = getattr(make.recipe, "backward_override", None) is None
    for name, layer in list(model.named_modules()):
        if type(layer) is TransformerLayer:
            at = f"{name}." if name else ""
            obstacle = attention.obstacle(layer, make) if name else "it is the model itself"
            if not obstacle:
                attention.convert_decoder(model, name, layer, make)
                continue
            for linear in layer.modules():
                if isinstance(linear, TELinear):
                    linear.obstacle = obstacle
            if (
                layer.placement == "post" or layer.selective
            ):  # no norm stands before a product, or it is computed again
                continue
            _fuse_norm(f"{at}input_layernorm", model, layer.self_attention.linear_qkv, make)
            if (
                whole_mlp
                and layer.config.activation == "swiglu"
                and layer.pre_mlp_layernorm.weight.requires_grad
            ):
                _fuse_mlp(at, model, layer, make)
            else:
                _fuse_norm(f"{at}pre_mlp_layernorm", model, layer.mlp.linear_fc1, make)


def _fuse_norm(name: str, model: nn.Module, linear: Any, make: Maker) -> None:
    """The norm called `name` and the layer behind it."""
    norm: Any = model.get_submodule(name)
    if norm not in make.kept and _fusable(norm, linear):
        held = TENorm(norm, None)
        make(
            "LayerNormLinear",
            [linear],
            (linear.in_features, linear.out_features),
            {"layer_norm_weight": (held, "weight"), "weight": (linear, "weight")},
            eps=norm.eps,
            normalization="RMSNorm",
        )
        replaced(model, name, held)


def _fuse_mlp(at: str, model: nn.Module, layer: Any, make: Maker) -> None:
    fc1, fc2, norm = layer.mlp.linear_fc1, layer.mlp.linear_fc2, layer.pre_mlp_layernorm
    if norm not in make.kept and _fusable(norm, fc1, fc2):
        held = TENorm(norm, None)
        make(
            "LayerNormMLP",
            [fc1, fc2],
            (fc1.in_features, fc2.in_features),
            {
                "layer_norm_weight": (held, "weight"),
                "fc1_weight": (fc1, "weight"),
                "fc2_weight": (fc2, "weight"),
            },
            eps=norm.eps,
            normalization="RMSNorm",
            activation="swiglu",
        )
        replaced(model, f"{at}pre_mlp_layernorm", held)
        replaced(model, f"{at}mlp", TEMLP(layer.mlp, fc1, fc2))


def _fusable(norm: Any, *linears: nn.Module) -> bool:
    """Whether one module can compute all of them: all in FP8, and no hook observes what passes between them."""
    if norm.kind != "RMSNorm" or norm.zero_centered:
        return False
    return all(isinstance(m, TELinear) and m.bias is None for m in linears) and not any(
        map(listened, (norm, *linears))
    )


_WATCHES: weakref.WeakSet[RangeWatch] = weakref.WeakSet()
_FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}


class RangeWatch:
    """What the tensors of `engines`, which a model has, used of the range of their scales since the last step, the largest of its
    microbatches: input, weight and grad_output of each linear layer."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines, self._used = tuple(engines), dict[bool, Tensor]()
        self._places: Tensor | None = None
        self._layers: list[TELinear] = [linear for engine in engines for linear in engine.linears]
        for engine in engines:
            engine.ranges = self
        _WATCHES.add(self)

    @torch.no_grad()
    def take(self, forward: bool) -> None:
        """Note what a pass used, before its histories are rolled."""
        side = "scaling_fwd" if forward else "scaling_bwd"
        states = [engine.module.fp8_meta[side] for engine in self._engines]
        amaxes, scales = (
            torch.cat([state.amax_history[0] for state in states]),
            torch.cat([state.scale for state in states]),
        )
        reach = _FORMATS[kind(self._engines[0].module.quantizers[side][0])].reach
        used = compute_range_used(amaxes, scales, torch.tensor(reach, dtype=torch.float32))
        self._used[forward] = (
            torch.maximum(used, self._used[forward]) if forward in self._used else used
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a copied layer or model is not watched, and brings none of the other layers along."""

    def settle(self, made: bool) -> None:
        """Give the layers what the passes since the last call used, where the step was `made`."""
        used, self._used = self._used, {}
        rows: Sequence[Tensor | None] = [None] * len(self._layers)
        if made and len(used) == 2:
            both = torch.cat([used[True], used[False]])
            rows = both[self._columns(both.device, len(used[True]))].unbind()
        for layer, row in zip(self._layers, rows, strict=True):
            layer.range_used = row

    def _columns(self, device: torch.device, backward: int) -> Tensor:
        """Where the columns of each layer are, int64 [layers, 3] on `device`, copied there once; those of the backward pass begin
        at `backward`. A module has three for each product forward (input, weight, output), and two backward (grad_output,
        grad_input)."""
        if self._places is None:
            products = range(len(self._layers))  # of all modules, in their order
            places = [[3 * n, 3 * n + 1, backward + 2 * n] for n in products]
            self._places = torch.tensor(places, dtype=torch.int64, device=device)
        return self._places


def watch_ranges(engines: Sequence[Engine]) -> None:
    """Watch `engines`, if their recipe has delayed scaling. Transformer Engine tells nobody that it moves scales (2.20), so that
    its function is replaced, once for the process."""
    if not engines or not engines[0].recipe.delayed():
        return
    RangeWatch(engines)
    update = manager().reduce_and_update_fp8_tensors
    if hasattr(update, "takes_ranges"):
        return

    def reduce_and_update_fp8_tensors(forward: bool = True) -> None:
        for watch in list(_WATCHES):
            watch.take(forward)
        update(forward)

    reduce_and_update_fp8_tensors.takes_ranges = True  # type: ignore[attr-defined]
    manager().reduce_and_update_fp8_tensors = staticmethod(reduce_and_update_fp8_tensors)


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
    refuse_if([*contradictions(fp8, os.environ), *attention.misfits(model, fp8)])
    te = importlib.import_module("transformer_engine.pytorch")
    kept = {module for name, module in model.named_modules() if excluded(name, fp8)}
    make = Maker(te, recipe_of(fp8), fp8.params, shared_weights(model), compute, kept)
    for planned in plan:
        if planned.fp8:
            linear = model.get_submodule(planned.name)
            assert isinstance(linear, nn.Linear)
            replaced(model, planned.name, TELinear(linear))
    if fp8.dot_product_attention:
        attention.convert(model, fp8, te, make.recipe)
    fuse(model, make)
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
