"""What a lowered graph calls. Each function imports torch when it is called, so that a graph can be made without it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fp8cfg.backends.planning import PlannedLinear
from fp8cfg.config.fp8 import FP8
from fp8cfg.config.training import Optim
from fp8cfg.job import PreparedModel
from fp8cfg.models.config import TransformerConfig

if TYPE_CHECKING:
    import torch

    from fp8cfg.optim import LossScaler
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def transformer(config: TransformerConfig, recompute: bool, device: str, seed: int) -> torch.nn.Module:
    """The model in float32 on `device`, its weights drawn from `seed`; shaped on the meta device first."""
    import torch

    from fp8cfg.models.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(config, recompute=recompute)
    model.to_empty(device=device)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def prepared_model(
    model: torch.nn.Module, compute: str, fp8: FP8, plan: Sequence[PlannedLinear], product: str, grad_dtype: str
) -> PreparedModel:
    """`model` (float32) with its linear layers in FP8 as planned and its parameters in `compute`; the float32 originals
    become the optimizer's masters, so that no second copy is made."""
    import torch

    from fp8cfg.backends import native
    from fp8cfg.numerics import Region, fp8_linears
    from fp8cfg.optim.groups import set_grad_dtype

    region = Region()
    originals = {name: p.detach() for name, p in model.named_parameters()}
    if fp8.enabled:
        native.convert(model, fp8, plan, region, product)
    dtype = getattr(torch, _DTYPES[compute])
    for p in model.parameters():
        if p.dtype == torch.float32 and dtype != torch.float32:
            p.data = p.data.to(dtype)
    gradients = getattr(torch, _DTYPES[grad_dtype])
    set_grad_dtype(model.parameters(), gradients)
    for layer in fp8_linears(model):
        layer.set_weight_grad_dtype(gradients)
    narrow = {name for name, p in model.named_parameters() if p.dtype != torch.float32}
    device = next(model.parameters()).device
    return PreparedModel(model, {n: t for n, t in originals.items() if n in narrow}, region, device)


def optimizer(
    prepared: PreparedModel, optim: Optim, clip_grad: float, reduce_amax: bool, loss_scaler: LossScaler | None
) -> MixedPrecisionOptimizer:
    """The optimizer over `prepared.model`'s parameters; its step rolls the FP8 histories before it writes weights."""
    import torch.distributed as dist

    from fp8cfg.backends import native
    from fp8cfg.numerics.update import discard_amax, fp8_layers, update_scales
    from fp8cfg.optim.groups import param_groups
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer

    model = prepared.model
    named = dict(model.named_parameters())
    layers = list(fp8_layers(model))
    built = MixedPrecisionOptimizer(
        param_groups(model, optim.weight_decay), _inner(optim, prepared.device),
        masters={named[name]: master for name, master in prepared.masters.items()},
        writers={p: layer.set_weight for p, layer in native.float8_weights(model).items()},
        loss_scaler=loss_scaler, clip_grad=clip_grad)

    def move_scales() -> None:
        group = dist.group.WORLD if reduce_amax and dist.is_available() and dist.is_initialized() else None
        update_scales(layers, group=group, step=built.steps)

    built.on_step.append(move_scales)
    built.on_skip.append(lambda: discard_amax(layers))
    return built


def _inner(optim: Optim, device: torch.device) -> Any:
    import torch

    if optim.name == "sgd":
        return partial(torch.optim.SGD, lr=optim.lr, momentum=optim.momentum, fused=True)
    cls = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    return partial(cls, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
