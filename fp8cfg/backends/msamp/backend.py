"""MS-AMP backend: MS-AMP's FP8Linear for linear layers, and its LBAdamW or LBAdam for the model.

It has not run with MS-AMP's kernels. They need torch 2.1, MS-AMP's own NCCL and an H100. It ran
once with the Python of MS-AMP 0.4 over emulated kernels. Tests on CPUs use a stand-in of MS-AMP's
public API with the same losses.

Differences from the native backend:

- Scales are powers of two. The first 16 steps scale tensors by their own amax, later ones by the
  largest of 16 amaxes.
- A moment with an amax below 1e-36 gets an infinite scale. Its parameter becomes NaN in the next
  step.
- MS-AMP keeps all scales of a process in one table. Two models roll each other's histories.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.backends.any_model.conversion_state import count
from fp8cfg.backends.any_model.module_swap import linear_with, replace_module
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
"""Tensors of a ScalingMeta."""
_LAYERS: weakref.WeakValueDictionary[int, WatchedLinear] = weakref.WeakValueDictionary()
"""Layers by the id of their scaling metas, which the operands of each GEMM carry."""
_META_FORMATS = {
    "weight": ("kFloat16", 1),
    "input": ("kFloat8E4M3", 16),
    "wgrad": ("kFloat8E4M3", 1),
    "ograd": ("kFloat8E5M2", 16),
}
"""Format and history length of each scaling meta of a layer. The rules reject other recipes."""


def convert(
    model: nn.Module,
    fp8: FP8,
    plan: Sequence[PlannedLinear],
    region: Region,
    product: str,
    compute: torch.dtype = torch.bfloat16,
    fp8_gather: bool = False,
) -> None:
    """Replaces linear layers, as in `Backend.convert`. Weights become MS-AMP's ScalingParameters.

    Raises:
        ConfigError: A weight is tied, several ranks run, or MS-AMP finds no H100.
        BackendError: A layer of MS-AMP has other formats than expected.
    """
    names = [planned.name for planned in plan if planned.fp8]
    _check_supported(model, names)
    device = import_module("msamp.common.utils").Device
    if not device.is_fp8_supported():
        raise ConfigError(
            "backend=msamp: MS-AMP multiplies in FP8 only on GPUs with H100 in their name, unlike"
            " this one; set backend=native"
        )
    package = import_module("msamp.nn")
    record_gemms(import_module("msamp.operators.gemm").Gemm, device)
    linears = [model.get_submodule(name) for name in names]
    # LinearReplacer replaces children, so the layers get a parent.
    layers: Any = package.LinearReplacer.replace(nn.ModuleList(linears))
    for name, linear, layer in zip(names, linears, layers, strict=True):
        assert isinstance(linear, nn.Linear)
        layer.__class__ = watched_class(package.FP8Linear)
        layer.bias = linear.bias
        # MS-AMP's weights all require gradients at first.
        layer.weight.requires_grad = linear.weight.requires_grad
        metas = {"weight": layer.weight.meta, **layer.scaling_metas}
        formats = {key: (meta.qtype.name, meta.window_size) for key, meta in metas.items()}
        same("FP8Linear", _META_FORMATS, formats)
        layer.watch(region, compute)
        replace_module(model, name, layer)


def _check_supported(model: nn.Module, names: Sequence[str]) -> None:
    """Raises ConfigError for tied weights and for several ranks."""
    tied = shared_weights(model)
    errors = []
    for name in names:
        if model.get_submodule(name).weight in tied:
            errors.append(
                f"backend=msamp: MS-AMP would untie the weight of {name}, which another module has"
                f" too; set fp8.exclude=[{name}], or fp8.output_layer=false if it is the output"
                " layer"
            )
    refuse_if(errors)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            "backend=msamp: several ranks need its NCCL, through DeepSpeed: see `fp8cfg export"
            " deepspeed`; set backend=native, or run one process"
        )


class WatchedLinear(StoredWeight):
    """First base class of a converted layer, before MS-AMP's FP8Linear.

    The input is [..., in_features], the output [..., out_features] in the dtype of the input.

    Attributes:
        region: The autocast region.
        gemm_kinds: Operand formats of the GEMMs that ran, by name.
        weight: A ScalingParameter of MS-AMP [out_features, in_features]. It is no torch.Tensor.
        scaling_metas: Scales and amaxes of input, wgrad and ograd (grad_output).
        read_as: Dtype represented by the weight.
    """

    region: Region
    gemm_kinds: dict[str, Kinds]
    weight: Any
    bias: nn.Parameter | None
    scaling_metas: dict[str, Any]
    read_as: torch.dtype

    def watch(self, region: Region, read_as: torch.dtype) -> None:
        """Sets the attributes that MS-AMP's FP8Linear does not have."""
        self.region = region
        self.gemm_kinds = dict.fromkeys(GEMMS)
        self.read_as = read_as

    def forward(self, x: Tensor) -> Tensor:
        """Runs in FP8 inside of the region, otherwise in high precision.

        Raises:
            RuntimeError: The layer is trained outside of the region. MS-AMP has no weight gradient
                there.
        """
        needs_grad = torch.is_grad_enabled()
        count(self, x)
        if not self.region.applies():
            if needs_grad and self.weight.requires_grad:
                raise RuntimeError(
                    "backend=msamp: layers train inside of the autocast context; evaluate under"
                    " torch.no_grad()"
                )
            if needs_grad and self.training:
                self.gemm_kinds["fprop"] = HIGH_PRECISION
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self.weight.to(x.dtype), bias)
        # Here and not in `watch`, because a copied layer has new metas.
        for meta in self.scaling_metas.values():
            _LAYERS[id(meta)] = self
        # Evaluation must not change the scales of training.
        amax = self.scaling_metas["input"].amax
        amax_before = amax[0].clone()
        y: Tensor = super().forward(x)
        if not needs_grad:
            amax[0] = amax_before
        return y

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch's AveragedModel copies a model and calls `detach` of its weights. MS-AMP does not.
        self.weight.detach = _refuse_averages

    def fp8_state(self) -> dict[str, Tensor]:
        """Returns scales and amaxes of weight, input and gradients by name, without copies."""
        tensors = {}
        metas = {"weight": self.weight.meta, **self.scaling_metas}
        for name, meta in metas.items():
            for attribute in _STATE:
                tensors[f"fp8_{name}_{attribute}"] = getattr(meta, attribute)
        return tensors

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if in_stored_form():
            weight = self.weight.value.detach()
        else:
            weight = self.state_dict_entry(self.weight.float().to(self.read_as))
        destination[f"{prefix}weight"] = weight
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()
        if in_stored_form():
            for name, tensor in self.fp8_state().items():
                destination[prefix + name] = tensor

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
        fp8_state = self.fp8_state()
        # Without FP8 state the weight is in high precision.
        is_stored_form = any(prefix + name in state_dict for name in fp8_state)
        targets: dict[str, Any] = {}
        if self.bias is not None:
            targets["bias"] = self.bias
        if is_stored_form:
            targets |= {"weight": self.weight.value, **fp8_state}
        expected = list(dict.fromkeys(["weight", *targets]))
        missing_keys += [prefix + name for name in expected if prefix + name not in state_dict]
        for key in state_dict:
            if key.startswith(prefix) and key.removeprefix(prefix) not in expected:
                unexpected_keys.append(key)
        if not is_stored_form and f"{prefix}weight" in state_dict:
            self._load_high_precision(state_dict[f"{prefix}weight"])
        with torch.no_grad():
            for name, target in targets.items():
                if prefix + name in state_dict:
                    target.copy_(state_dict[prefix + name])

    @torch.no_grad()
    def _load_high_precision(self, weight: Tensor) -> None:
        """Quantizes `weight` [out_features, in_features], and resets all scales and amaxes."""
        float32 = weight.to(self.weight.value.device).float()
        self.weight.copy_(float32.cast(self.weight.meta.qtype))  # type: ignore[attr-defined]
        for meta in self.scaling_metas.values():
            meta.amax.zero_()
            meta.amax_counter.zero_()
            meta.scale.fill_(1.0)
            meta.scale_inv.fill_(1.0)


def _refuse_averages(*args: Any) -> NoReturn:
    raise RuntimeError(
        f"this weight is stored with a scale by MS-AMP and cannot store an average; {INSTEAD}"
    )


@functools.cache
def watched_class(linear: type) -> type:
    """Returns a subclass of MS-AMP's class `linear` with a region and a record of GEMMs."""
    return type("MSAMPLinear", (WatchedLinear, linear), {})


def record_gemms(gemm: Any, device: Any) -> None:
    """Makes `gemm.fp8_gemm`, which runs all FP8 GEMMs of MS-AMP, record its operands.

    The record is in the layer. If MS-AMP finds no FP8 on `device`, it multiplies and is recorded in
    high precision.
    """
    multiply = gemm.fp8_gemm
    # The patch is for the whole process.
    if hasattr(multiply, "records"):
        return

    def fp8_gemm(mat_a: Any, mat_b: Any, *args: Any, **kwargs: Any) -> Any:
        _record(mat_a.meta, mat_b.meta, device.is_fp8_supported())
        return multiply(mat_a, mat_b, *args, **kwargs)

    fp8_gemm.records = True  # type: ignore[attr-defined]
    gemm.fp8_gemm = staticmethod(fp8_gemm)


def _record(a: Any, b: Any, is_fp8: bool) -> None:
    """Records a GEMM in its layer.

    The operands (a, b) are (weight, input) in fprop, (weight, grad_output) in dgrad, and (input,
    grad_output) in wgrad.

    Args:
        a: Scaling meta of the first operand.
        b: Scaling meta of the second operand. It always belongs to the layer.
        is_fp8: Whether the GEMM runs in FP8.
    """
    layer = _LAYERS.get(id(b))
    if layer is None:
        return
    input_meta = layer.scaling_metas["input"]
    if b is input_meta:
        product = "fprop"
    elif a is input_meta:
        product = "wgrad"
    else:
        product = "dgrad"
    kinds: Kinds = HIGH_PRECISION
    if is_fp8:
        kinds = KINDS[b.qtype.name], KINDS[a.qtype.name]
    layer.gemm_kinds[product] = kinds


def optimizer(
    prepared: PreparedModel,
    precision: Precision,
    optim: Optim,
    clip_grad: float,
    loss_scaler: LossScaler | None,
) -> MSAMPOptimizer:
    """Returns LBAdamW or LBAdam over the parameters of a model, as in `Backend.optimizer`.

    The moments have the dtypes of the opt_level. msamp.initialize is not used: it takes an AdamW of
    torch 2.7 or later for an Adam, and fails on its new defaults.
    """
    from fp8cfg.backends.msamp.optimizer import MSAMPOptimizer

    package = import_module("msamp.optim")
    cls = package.LBAdamW if optim.name == "adamw" else package.LBAdam
    exp_avg_dtype, exp_avg_sq_dtype = torch.float32, torch.float32
    if level(precision) == "O2":
        exp_avg_dtype, exp_avg_sq_dtype = torch.uint8, torch.float16

    def build(groups: list[dict[str, Any]]) -> Any:
        return cls(
            groups,
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
        )

    # ScalingParameters are their own masters.
    prepared.masters.clear()
    return MSAMPOptimizer(prepared.model, build, optim.weight_decay, clip_grad, loss_scaler)


def _layers(model: nn.Module) -> dict[str, WatchedLinear]:
    """Returns the converted layers by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, WatchedLinear)
    }


def autocast(model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    """Returns the context of `Backend.autocast`."""
    layers = list(_layers(model).values())
    if not layers:
        return nullcontext()
    # All layers of a model share one region.
    return layers[0].region.entered(enabled)


def observed(model: nn.Module) -> Observed:
    """Returns the operand kinds of each GEMM that ran, by layer."""
    return {name: dict(layer.gemm_kinds) for name, layer in _layers(model).items()}


def forget_observed(model: nn.Module) -> None:
    """Clears the record of GEMMs before the next observed step."""
    for layer in _layers(model).values():
        layer.gemm_kinds.update(dict.fromkeys(layer.gemm_kinds))


def record(model: nn.Module) -> dict[str, Any]:
    """Returns no additional entries."""
    return {}


def cache_weights(model: nn.Module, on: bool = True) -> None:
    """Does nothing. Weights are ScalingParameters, and each pass quantizes them."""


def writers(model: nn.Module) -> dict[nn.Parameter, Callable[[Tensor], None]]:
    """Returns nothing: MS-AMP's optimizer writes the weights."""
    return {}


def after_step(model: nn.Module, group: dist.ProcessGroup | None, step: int) -> None:
    """Does nothing. MS-AMP's optimizer updates the scales in its step."""


def after_skip(model: nn.Module) -> None:
    """Does nothing. The next step finds infinite amaxes and scales tensors by their own amax."""


def plain(layer: nn.Module) -> nn.Linear | None:
    """Returns an nn.Linear with a float32 weight, or None for other modules."""
    if not isinstance(layer, WatchedLinear):
        return None
    weight = nn.Parameter(layer.weight.float(), requires_grad=layer.weight.requires_grad)
    return linear_with(weight, layer.bias)
