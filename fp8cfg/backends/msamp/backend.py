"""MS-AMP backend: MS-AMP's FP8Linear in place of linear layers, and its LBAdamW or LBAdam for the whole model.

It has never run with MS-AMP's kernels, which want torch 2.1, a NCCL of their own and an H100. It was run once with the Python of
MS-AMP 0.4 over emulated kernels, and is tested on CPUs with a stand-in of its public API that gave the same losses.

What differs from native, for whoever compares: scales are powers of two, in time for the first 16 steps and then from the largest
of 16 amaxes. A moment whose amax is below 1e-36 gets an infinite scale, and the parameter becomes NaN in the next step.
MS-AMP keeps all scales of a process in one table: two models there roll each other's histories.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.backends.any_model.conversion_state import count
from fp8cfg.backends.any_model.module_swap import linear_with, replaced
from fp8cfg.backends.gemm_plan import GEMMS, HIGH_PRECISION, Kinds, PlannedLinear
from fp8cfg.backends.protocol import Observed, same
from fp8cfg.backends.stored_weights import shared_weights
from fp8cfg.numerics import Region
from fp8cfg.numerics.fp8_weights import INSTEAD
from fp8cfg.numerics.stored_state import in_stored_form
from fp8cfg.numerics.weight_storage import StoredWeight
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.storage import level
from fp8cfg.schema.training import Optim

if TYPE_CHECKING:
    from fp8cfg.backends.msamp.optimizer import MSAMPOptimizer
    from fp8cfg.backends.protocol import PreparedModel
    from fp8cfg.optim import LossScaler

KINDS = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2"}
_STATE = ("scale", "scale_inv", "amax", "amax_counter")
_LAYERS: weakref.WeakValueDictionary[int, WatchedLinear] = weakref.WeakValueDictionary()
"""The layers by the identities of their scaling metas, which their operands carry into every product."""


class WatchedLinear(StoredWeight):
    """Mixin that precedes MS-AMP's FP8Linear in a converted layer. `weight` is a ScalingParameter, no torch.Tensor."""

    region: Region
    ran: dict[str, Kinds]
    weight: Any
    bias: nn.Parameter | None
    scaling_metas: dict[str, Any]
    read_as: torch.dtype

    def watch(self, region: Region, read_as: torch.dtype) -> None:
        """Attach the region and the record to the layer, and the dtype of the weight that its scaled one stands for."""
        self.region, self.ran, self.read_as = region, dict.fromkeys(GEMMS), read_as

    def forward(self, x: Tensor) -> Tensor:
        """FP8 inside of the region. Outside of it MS-AMP has no gradient of the weight: raises RuntimeError where there would
        be one. A pass without gradients leaves no amax behind."""
        trains = torch.is_grad_enabled()
        count(self, x)
        if not self.region.applies():
            if trains and self.weight.requires_grad:
                raise RuntimeError(
                    "backend=msamp: layers train inside of the autocast context; evaluate under"
                    " torch.no_grad()"
                )
            if trains and self.training:
                self.ran["fprop"] = HIGH_PRECISION
            return F.linear(
                x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
            )
        for meta in self.scaling_metas.values():
            _LAYERS[id(meta)] = self
        amax = self.scaling_metas["input"].amax
        kept = amax[0].clone()
        y: Tensor = super().forward(x)
        if not trains:
            amax[0] = kept
        return y

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a copy `detach` of the weight is refused, which torch's AveragedModel calls, and MS-AMP's own layers do not."""
        super().__setstate__(state)
        self.weight.detach = _refuse_averages

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The scales and amaxes of weight, input and gradients by name, the tensors themselves."""
        for name, meta in {"weight": self.weight.meta, **self.scaling_metas}.items():
            for part in _STATE:
                yield f"fp8_{name}_{part}", getattr(meta, part)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        stored = in_stored_form()
        destination[f"{prefix}weight"] = (
            self.weight.value.detach()
            if stored
            else self.state_dict_entry(self.weight.float().to(self.read_as))
        )
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()
        if stored:
            destination.update({prefix + name: tensor for name, tensor in self.state()})

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        bias = {} if self.bias is None else {"bias": self.bias}
        own = {"weight": self.weight.value, **bias, **dict(self.state())}
        if not any(f"{prefix}{name}" in state_dict for name, _ in self.state()):
            own = {"weight": self.weight, **bias}
            self._forget(state_dict.get(f"{prefix}weight"))
        missing_keys += [prefix + name for name in own if prefix + name not in state_dict]
        unexpected_keys += [
            k for k in state_dict if k.startswith(prefix) and k.removeprefix(prefix) not in own
        ]
        with torch.no_grad():
            for name, tensor in own.items():
                if (
                    saved := state_dict.get(prefix + name)
                ) is not None and tensor is not self.weight:
                    tensor.copy_(saved)

    @torch.no_grad()
    def _forget(self, weight: Tensor | None) -> None:
        """Store a `weight` in high precision; of those before it no amax is kept."""
        if weight is None:
            return
        float32 = weight.to(self.weight.value.device).float()
        self.weight.copy_(float32.cast(self.weight.meta.qtype))  # type: ignore[attr-defined]
        for meta in self.scaling_metas.values():
            (
                meta.amax.zero_(),
                meta.amax_counter.zero_(),
                meta.scale.fill_(1.0),
                meta.scale_inv.fill_(1.0),
            )


def _refuse_averages(*args: Any) -> NoReturn:
    raise RuntimeError(
        f"this weight is stored with a scale by MS-AMP, and no average can be kept in it; {INSTEAD}"
    )


@functools.cache
def watched(linear: type) -> type:
    """Subclass of MS-AMP's class `linear` with region and record."""
    return type("MSAMPLinear", (WatchedLinear, linear), {})


def watch_products(gemm: Any, device: Any) -> None:
    """Let `gemm.fp8_gemm`, which makes all products of MS-AMP, record their operands with the layer that they belong to. Where
    MS-AMP finds no FP8 on `device`, it multiplies in high precision, and the products are recorded as such.
    """
    multiply = gemm.fp8_gemm
    if hasattr(
        multiply, "records"
    ):  # patched by an earlier conversion: the function is one for the whole process
        return

    def fp8_gemm(mat_a: Any, mat_b: Any, *args: Any, **kwargs: Any) -> Any:
        _record(mat_a.meta, mat_b.meta, device.is_fp8_supported())
        return multiply(mat_a, mat_b, *args, **kwargs)

    fp8_gemm.records = True  # type: ignore[attr-defined]
    gemm.fp8_gemm = staticmethod(fp8_gemm)


def _record(a: Any, b: Any, in_fp8: bool) -> None:
    """W and x in fprop, W and dy in dgrad, x and dy in wgrad; all but the weight's are metas of the layer."""
    if (layer := _LAYERS.get(id(b))) is None:
        return
    x = layer.scaling_metas["input"]
    product = "fprop" if b is x else "wgrad" if a is x else "dgrad"
    layer.ran[product] = (KINDS[b.qtype.name], KINDS[a.qtype.name]) if in_fp8 else HIGH_PRECISION


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
            f" set fp8.exclude=[{name}], or fp8.output_layer=false where that is it"
            for name in names
            if model.get_submodule(name).weight in tied
        ]
    )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            "backend=msamp: several ranks need its NCCL, through DeepSpeed: see `fp8cfg export"
            " deepspeed`; set backend=native, or run one process"
        )
    device = import_module("msamp.common.utils").Device
    if not device.is_fp8_supported():
        raise ConfigError(
            "backend=msamp: MS-AMP multiplies in FP8 where the GPU's name has H100 in it, and this"
            " one's has not; set backend=native"
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
