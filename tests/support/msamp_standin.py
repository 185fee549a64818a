"""MS-AMP stand-in for CPU tests: its public API, written after its source (0.4), with the state and arithmetic of its classes in
plain torch.

Kept as there: tensors with a scale are no torch.Tensors; FP8 of both formats is uint8; weights come back trained and untied;
plain parameters that are not float32 are never updated; every product goes through `Gemm.fp8_gemm`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

WORDS = (
    "precision=bf16_fp8",
    "backend=msamp",
    "fp8.amax_history_len=16",
    "fp8.reduce_amax=false",
    "storage.accumulate=stored",
)
FLOAT8 = {
    "kFloat8E4M3": (torch.float8_e4m3fn, 448.0),
    "kFloat8E5M2": (torch.float8_e5m2, 57344.0),
    "kFloat16": (torch.float16, 65504.0),
}
PACKAGE = {
    "msamp/__init__.py": "",
    "msamp/nn/__init__.py": "from tests.support.msamp_standin import FP8Linear, LinearReplacer, ScalingParameter, clip_grad_norm_, model_state",
    "msamp/optim/__init__.py": "from tests.support.msamp_standin import LBAdam, LBAdamW",
    "msamp/common/__init__.py": "",
    "msamp/operators/__init__.py": "",
    "msamp/common/dtype/__init__.py": "from tests.support.msamp_standin import Dtypes",
    "msamp/common/tensor/__init__.py": "from tests.support.msamp_standin import ScalingMeta, ScalingTensor",
    "msamp/common/utils/__init__.py": "from tests.support.msamp_standin import Device",
    "msamp/operators/gemm/__init__.py": "from tests.support.msamp_standin import Gemm",
    **{
        f"{name}.py": ""
        for name in (
            "msamp_adamw",
            "msamp_arithmetic",
            "msamp_quantize",
            "transformer_engine_extensions",
            "deepspeed",
            "colorlog",
        )
    },
    "libmsamp_dist.so": "",
}


@contextmanager
def msamp(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package under `folder`, importable while this lasts, with what it needs beside it."""
    from fp8cfg.backends.msamp import rules

    for name, text in PACKAGE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(rules, "LIBRARY", folder / "libmsamp_dist.so")
    monkeypatch.setattr(torch.Tensor, "cast", cast, raising=False)
    monkeypatch.setattr(Gemm, "fp8_gemm", Gemm.fp8_gemm)  # which the backend replaces
    monkeypatch.setattr(model_state, "metas", [])
    try:
        yield folder
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "msamp"]:
            del sys.modules[name]


class Dtypes:
    kfloat32, kfloat16, kfloat8_e4m3, kfloat8_e5m2 = (
        SimpleNamespace(name=n) for n in ("kFloat32", "kFloat16", "kFloat8E4M3", "kFloat8E5M2")
    )
    dtype_to_qtype = {  # noqa: RUF012
        torch.float16: kfloat16,
        torch.float32: kfloat32,
        torch.uint8: kfloat8_e4m3,
        torch.int8: kfloat8_e5m2,
    }


class ScalingMeta:
    def __init__(self, qtype: Any, window_size: int = 1) -> None:
        self.qtype, self.window_size = qtype, window_size
        self.scale, self.scale_inv = torch.ones(()), torch.ones(())
        self.amax, self.amax_counter = torch.zeros(window_size), torch.zeros((), dtype=torch.int32)

    @staticmethod
    def compute_scaling_factor(
        amax: torch.Tensor, scale: torch.Tensor, fp_max: float, margin: int
    ) -> torch.Tensor:
        exp = torch.floor(torch.log2(fp_max / amax)) - margin
        sf = torch.round(torch.pow(2, torch.abs(exp)))
        sf = torch.where(torch.isfinite(amax) & (amax > 0.0), sf, scale)
        return torch.where(exp < 0, 1 / sf, sf)

    def copy_(self, other: ScalingMeta) -> None:
        for name in ("scale", "scale_inv", "amax", "amax_counter"):
            getattr(self, name).copy_(getattr(other, name))


class ScalingTensor:
    def __init__(self, value: torch.Tensor, meta: ScalingMeta) -> None:
        self.value, self.meta, self.grad, self.requires_grad = value, meta, None, False

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    device = property(lambda self: self.value.device)
    qtype = property(lambda self: self.meta.qtype)
    is_leaf = property(lambda self: True)
    is_sparse = property(lambda self: False)
    numel = lambda self: self.value.numel()  # noqa: E731
    is_floating_point = lambda self: False  # noqa: E731

    def detach(self) -> ScalingTensor:
        return ScalingTensor(self.value, self.meta)

    def float(self) -> torch.Tensor:
        data = (
            self.value
            if self.value.dtype == torch.float16
            else self.value.view(FLOAT8[self.qtype.name][0])
        )
        return data.float() * self.meta.scale_inv

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        return self.float().to(dtype)

    def mul_(self, other: Any) -> ScalingTensor:
        self.meta.scale_inv *= other
        return self

    def copy_(self, other: ScalingTensor) -> None:
        self.value.copy_(other.value)
        self.meta.copy_(other.meta)

    def has_inf_or_nan(self) -> bool:
        return not bool(torch.isfinite(self.meta.amax[0]))


class ScalingParameter(ScalingTensor):
    def __init__(self, tensor: ScalingTensor) -> None:
        super().__init__(tensor.value, tensor.meta)
        self.requires_grad = True


def cast(
    x: torch.Tensor, qtype: Any, meta: ScalingMeta | None = None, sync: bool = False
) -> ScalingTensor:
    meta = meta or ScalingMeta(qtype)
    dtype, top = FLOAT8[qtype.name]
    amax = x.detach().abs().amax().float() if x.numel() else torch.zeros(())
    meta.amax[0] = amax
    if meta.window_size == 1 or meta.amax_counter < meta.window_size or sync:
        meta.scale.copy_(ScalingMeta.compute_scaling_factor(amax, meta.scale, top, 0))
    meta.scale_inv.copy_(1 / meta.scale)
    value = (x.float() * meta.scale).clamp(-top, top).to(dtype)
    return ScalingTensor(value if dtype == torch.float16 else value.view(torch.uint8), meta)


class Device:
    supported = True

    @classmethod
    def is_fp8_supported(cls) -> bool:
        return cls.supported


class Gemm:
    @classmethod
    def fp8_gemm(
        cls,
        mat_a: Any,
        mat_b: Any,
        out_qtype: Any,
        accumulate: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        product = mat_b.float() @ mat_a.float().t()
        return (product if out is None else out.float() + product).to(out_qtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, metas: Any, holder: torch.Tensor
    ) -> torch.Tensor:
        ctx.x, ctx.w = (
            cast(x, Dtypes.kfloat8_e4m3, metas["input"]),
            weight.float().cast(Dtypes.kfloat8_e4m3),
        )  # type: ignore[attr-defined]
        ctx.weight, ctx.metas, ctx.x_needs = weight, metas, x.requires_grad
        return Gemm.fp8_gemm(ctx.w, ctx.x, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        g = cast(dy, Dtypes.kfloat8_e5m2, ctx.metas["ograd"])
        t = lambda a: ScalingTensor(a.value.t().contiguous(), a.meta)  # noqa: E731
        dx = Gemm.fp8_gemm(t(ctx.w), g, dy.dtype) if ctx.x_needs else None
        if ctx.weight.requires_grad:
            old = ctx.weight.grad
            dw = Gemm.fp8_gemm(
                t(ctx.x),
                t(g),
                dy.dtype,
                accumulate=old is not None,
                out=None if old is None else old.to(dy.dtype),
            )
            ctx.weight.grad = cast(dw, Dtypes.kfloat8_e4m3, ctx.metas["wgrad"], sync=True)
        return dx, None, None, None


class ScalingModule(nn.Module):
    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ScalingParameter):
            self._parameters[name] = value  # type: ignore[assignment]
        else:
            super().__setattr__(name, value)


class FP8Linear(ScalingModule):
    def __init__(self, in_features: int, out_features: int, use_bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = ScalingParameter(
            ScalingTensor(
                torch.empty(out_features, in_features, dtype=torch.float16),
                ScalingMeta(Dtypes.kfloat16),
            )
        )
        self.bias = nn.Parameter(torch.empty(out_features)) if use_bias else None
        self.scaling_metas = {
            "input": ScalingMeta(Dtypes.kfloat8_e4m3, 16),
            "wgrad": ScalingMeta(Dtypes.kfloat8_e4m3),
            "ograd": ScalingMeta(Dtypes.kfloat8_e5m2, 16),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        model_state.ready = True
        out = _Product.apply(
            x.reshape(-1, x.shape[-1]),
            self.weight,
            self.scaling_metas,
            torch.zeros((), requires_grad=True),
        )
        return (out if self.bias is None else out + self.bias.to(out.dtype)).view(*x.shape[:-1], -1)


class LinearReplacer:
    @classmethod
    @torch.no_grad()
    def replace(cls, model: nn.Module) -> nn.Module:
        for name, child in list(model.named_children()):
            if isinstance(child, nn.Linear):
                new = FP8Linear(child.in_features, child.out_features, child.bias is not None)
                new.weight.copy_(cast(child.weight, Dtypes.kfloat16))  # type: ignore[attr-defined]
                setattr(model, name, new)
                model_state.metas.append(new.scaling_metas)
            else:
                cls.replace(child)
        return model


model_state = SimpleNamespace(metas=[], ready=False)


def clip_grad_norm_(parameters: Any, max_norm: float) -> torch.Tensor:
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = (
        torch.stack([g.to(torch.float32).norm() for g in grads]).norm()
        if grads
        else torch.tensor(0.0)
    )
    if max_norm > 0 and (coefficient := (max_norm / (norm + 1e-6)).clamp(max=1.0)) < 1.0:
        for g in grads:
            g.mul_(coefficient)
    return norm


class LBAdamW:
    use_adam = False

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any,
        eps: float,
        weight_decay: float = 0.0,
        *,
        exp_avg_dtype: Any,
        exp_avg_sq_dtype: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.param_groups: list[dict[str, Any]] = [{**defaults, **group} for group in params]
        self.state: dict[Any, dict[str, Any]] = {}
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype

    def step(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self._step(
                    p,
                    self.state[p],
                    **{k: group[k] for k in ("lr", "betas", "eps", "weight_decay")},
                )
        for metas in model_state.metas if model_state.ready else ():
            for meta in (metas["input"], metas["ograd"]):
                meta.amax_counter += 1
                meta.scale.copy_(
                    ScalingMeta.compute_scaling_factor(
                        meta.amax.max(), meta.scale, FLOAT8[meta.qtype.name][1], 0
                    )
                )
                meta.amax.copy_(meta.amax.roll(1))
                meta.amax[0] = 0
        model_state.ready = False

    def _step(
        self,
        p: Any,
        state: dict[str, Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        state["step"] += 1
        w, raw = p.float(), p.grad.float()
        g = raw + weight_decay * w if self.use_adam else raw
        w = w if self.use_adam else w * (1 - lr * weight_decay)
        m = betas[0] * state["exp_avg"].float() + (1 - betas[0]) * g
        v = betas[1] * state["exp_avg_sq"].float() + (1 - betas[1]) * g * g
        denominator = v.double().sqrt().float() / math.sqrt(1 - betas[1] ** state["step"]) + eps
        w = w - lr / (1 - betas[0] ** state["step"]) * (m / denominator)
        if isinstance(p, ScalingTensor):
            p.copy_(cast(w, Dtypes.kfloat16))
        elif p.dtype == torch.float32:
            p.copy_(w)
        for key, new in (("exp_avg", m), ("exp_avg_sq", v)):
            if isinstance(kept := state[key], ScalingTensor):
                kept.value.copy_(cast(new, kept.qtype).value)
                kept.meta.scale = float(
                    ScalingMeta.compute_scaling_factor(
                        new.abs().max(), torch.ones(()), FLOAT8[kept.qtype.name][1], 0
                    )
                )
                kept.meta.scale_inv.fill_(1.0 / kept.meta.scale)
            else:
                kept.copy_(new)


class LBAdam(LBAdamW):
    use_adam = True
