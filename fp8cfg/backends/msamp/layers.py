"""FP8Linear of MS-AMP with an autocast region, a record of what its products multiply, and state saved as plain tensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.backends.flops import count
from fp8cfg.backends.gemm_plan import GEMMS, HIGH_PRECISION, Kinds
from fp8cfg.numerics import Region
from fp8cfg.numerics.stored_form import StoredWeight, in_stored_form
from fp8cfg.numerics.weight_access import INSTEAD

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
            else self.saved(self.weight.float().to(self.read_as))
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
