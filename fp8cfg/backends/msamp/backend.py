"""MS-AMP backend: MS-AMP's FP8Linear in place of linear layers, and its LBAdamW or LBAdam for the whole model.

It has never run with MS-AMP's kernels, which want torch 2.1, a NCCL of their own and an H100. It was run once with the Python of
MS-AMP 0.4 over emulated kernels, and is tested on CPUs with a stand-in of its public API that gave the same losses.

What differs from native, for whoever compares: scales are powers of two, in time for the first 16 steps and then from the largest
of 16 amaxes. A moment whose amax is below 1e-36 gets an infinite scale, and the parameter becomes NaN in the next step.
MS-AMP keeps all scales of a process in one table: two models there roll each other's histories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.module_swap import linear_with, replaced
from fp8cfg.backends.msamp.layers import WatchedLinear, watch_products, watched
from fp8cfg.backends.protocol import Observed, same
from fp8cfg.backends.stored_weights import shared_weights
from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.fp8 import FP8
from fp8cfg.config.precision import Precision
from fp8cfg.config.storage import level
from fp8cfg.config.training_nodes import Optim
from fp8cfg.numerics import Region

if TYPE_CHECKING:
    from fp8cfg.backends.msamp.optimizer import MSAMPOptimizer
    from fp8cfg.backends.prepared_model import PreparedModel
    from fp8cfg.optim import LossScaler

_WANTED = {
    "weight": ("kFloat16", 1),
    "input": ("kFloat8E4M3", 16),
    "wgrad": ("kFloat8E4M3", 1),
    "ograd": ("kFloat8E5M2", 16),
}
"""Format and window of each meta of a layer; the recipe says the same, or `msamp_rules` has refused it."""


def convert(
    model: nn.Module,
    fp8: FP8,
    plan: Sequence[PlannedLinear],
    region: Region,
    product: str,
    compute: torch.dtype = torch.bfloat16,
    fp8_gather: bool = False,
) -> None:
    """See `protocol.Backend`; weights become MS-AMP's own parameters. Raises ConfigError for tied weights, which MS-AMP would
    untie, for several ranks, and on a GPU that MS-AMP does not take for an H100."""
    names = [planned.name for planned in plan if planned.fp8]
    tied = shared_weights(model)
    refuse_if(
        [
            f"backend=msamp: MS-AMP would untie the weight of {name}, which another module has too;"
            f" write fp8.exclude=[{name}], or fp8.output_layer=false where that is it"
            for name in names
            if model.get_submodule(name).weight in tied
        ]
    )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            "backend=msamp: several ranks need its NCCL, through DeepSpeed: see `fp8cfg export"
            " deepspeed`; write backend=native, or run one process"
        )
    device = import_module("msamp.common.utils").Device
    if not device.is_fp8_supported():
        raise ConfigError(
            "backend=msamp: MS-AMP multiplies in FP8 where the GPU's name has H100 in it, and this"
            " one's has not; write backend=native"
        )
    package = import_module("msamp.nn")
    watch_products(import_module("msamp.operators.gemm").Gemm, device)
    linears = [model.get_submodule(name) for name in names]
    layers: Any = package.LinearReplacer.replace(nn.ModuleList(linears))
    for name, old, layer in zip(names, linears, layers, strict=True):
        assert isinstance(old, nn.Linear)
        layer.__class__ = watched(package.FP8Linear)
        layer.bias = old.bias
        layer.weight.requires_grad = old.weight.requires_grad  # MS-AMP's are all trained
        metas = {"weight": layer.weight.meta, **layer.scaling_metas}
        same(
            "FP8Linear",
            _WANTED,
            {key: (meta.qtype.name, meta.window_size) for key, meta in metas.items()},
        )
        layer.watch(region, compute)
        replaced(model, name, layer)


def optimizer(
    prepared: PreparedModel,
    precision: Precision,
    optim: Optim,
    clip_grad: float,
    loss_scaler: LossScaler | None,
) -> MSAMPOptimizer:
    """LBAdamW or LBAdam over the parameters of `prepared.model`, with the moments of the level. It is built directly:
    msamp.initialize takes an AdamW of torch 2.7 and later for an Adam, and chokes on its new defaults.
    """
    from fp8cfg.backends.msamp.optimizer import MSAMPOptimizer

    package = import_module("msamp.optim")
    cls = package.LBAdamW if optim.name == "adamw" else package.LBAdam
    moments = (
        (torch.uint8, torch.float16) if level(precision) == "O2" else (torch.float32, torch.float32)
    )

    def build(groups: list[dict[str, Any]]) -> Any:
        return cls(
            groups,
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            exp_avg_dtype=moments[0],
            exp_avg_sq_dtype=moments[1],
        )

    prepared.masters.clear()
    return MSAMPOptimizer(prepared.model, build, optim.weight_decay, clip_grad, loss_scaler)


def _layers(model: nn.Module) -> Iterator[tuple[str, WatchedLinear]]:
    return (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, WatchedLinear)
    )


def autocast(model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    _, layer = next(_layers(model), (None, None))
    return layer.region.entered(enabled) if layer else nullcontext()


def observed(model: nn.Module) -> Observed:
    return {name: dict(layer.ran) for name, layer in _layers(model)}


def forget_observed(model: nn.Module) -> None:
    for _, layer in _layers(model):
        layer.ran.update(dict.fromkeys(layer.ran))


def record(model: nn.Module) -> dict[str, Any]:
    return {}


def cache_weights(model: nn.Module, on: bool = True) -> None:
    """Does nothing: weights are MS-AMP's own parameters, and each pass quantizes those it reads."""


def writers(model: nn.Module) -> dict[nn.Parameter, Callable[[Tensor], None]]:
    return {}


def after_step(model: nn.Module, group: dist.ProcessGroup | None, step: int) -> None:
    """Does nothing: MS-AMP's optimizer moves the scales in its step."""


def after_skip(model: nn.Module) -> None:
    """Does nothing: the next step finds the amaxes that were not finite, and scales in time again."""


def plain(layer: nn.Module) -> nn.Linear | None:
    if not isinstance(layer, WatchedLinear):
        return None
    return linear_with(
        nn.Parameter(layer.weight.float(), requires_grad=layer.weight.requires_grad), layer.bias
    )
