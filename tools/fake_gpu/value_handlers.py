"""Operations that torch computes on a GPU alone, or otherwise there, on CPU tensors: norms, softmax of 16 bits, roots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    over = tuple(range(-len(shape), 0))
    rstd = (
        x.float().square().mean(over, keepdim=True)
        + (torch.finfo(x.dtype).eps if eps is None else eps)
    ).rsqrt()
    y = x.float() * rstd
    return (y if weight is None else y * weight.float()).to(x.dtype), rstd


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Any, Any]:
    over, normed = tuple(range(-len(shape), 0)), x.float() * rstd
    g = grad.float() if weight is None else grad.float() * weight.float()
    dx = rstd * (g - normed * (g * normed).mean(over, keepdim=True))
    dw = (
        (grad.float() * normed).sum(tuple(range(x.dim() - len(shape))))
        if weight is not None
        else None
    )
    return dx.to(x.dtype) if wanted[0] else None, dw.to(weight.dtype) if wanted[
        1
    ] and dw is not None and weight is not None else None


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and rstd are float32 on a GPU."""
    made = torch.ops.aten.native_layer_norm(
        x.float(), shape, *(t if t is None else t.float() for t in (weight, bias)), eps
    )
    return made[0].to(x.dtype), made[1], made[2]


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Any, ...]:
    wide = [t if t is None else t.float() for t in (weight, bias)]
    made = torch.ops.aten.native_layer_norm_backward(
        grad.float(), x.float(), shape, mean, rstd, *wide, wanted
    )
    return tuple(
        t.to(like.dtype) if asked and like is not None else None
        for t, like, asked in zip(made, (x, weight, bias), wanted, strict=True)
    )


def _softmax(name: str) -> Callable[..., Tensor]:
    op = getattr(torch.ops.aten, name)

    def forward(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        made: Tensor = op(x.float() if x.dtype.itemsize == 2 else x, dim, False)
        return made if half_to_float else made.to(x.dtype)

    return forward


def _softmax_backward(name: str) -> Callable[..., Tensor]:
    op = getattr(torch.ops.aten, name)

    def backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(grad.dtype, torch.float32)
        made: Tensor = op(grad.to(wide), out.to(wide), dim, wide)
        return made.to(dtype)

    return backward


def root(x: Tensor) -> Tensor:
    """The nearest to the root, as a GPU gives it. MKL, which torch takes on a CPU, often gives its neighbour."""
    return x.double().sqrt().to(x.dtype) if x.dtype == torch.float32 else x.sqrt()


def root_in_place(x: Tensor) -> Tensor:
    return x.copy_(root(x))


HANDLERS: dict[str, Callable[..., Any]] = {
    "aten._fused_rms_norm.default": rms_norm,
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
    "aten.native_layer_norm.default": layer_norm,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten.sqrt.default": root,
    "aten.sqrt_.default": root_in_place,
    "aten.sqrt.out": lambda x, *, out: out.copy_(root(x)),
    "aten._foreach_sqrt.default": lambda xs: [root(x) for x in xs],
    "aten._foreach_sqrt_.default": lambda xs: [root_in_place(x) for x in xs],
    "aten._softmax.default": _softmax("_softmax"),
    "aten._log_softmax.default": _softmax("_log_softmax"),
    "aten._softmax_backward_data.default": _softmax_backward("_softmax_backward_data"),
    "aten._log_softmax_backward_data.default": _softmax_backward("_log_softmax_backward_data"),
}
