"""Operations that torch computes on a GPU alone, or otherwise there, on CPU tensors: fused attention, norms, softmax of 16 bits, roots.

Attention is that of the formula, in float32, rounded once: dropout is refused. What a GPU keeps of random numbers is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Attended = tuple[Tensor, Tensor]
"""Output, of the dtype of the queries, and logsumexp, float32 [B, heads, T]."""


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: int, scale: float | None) -> Tensor:
    """Scores [B, heads, T, S], masked; `causal` 1 lets the first query see the first key, 2 the last one the last."""
    scores = q.float() @ _by_head(k, q).float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.float()
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").tril(scores.shape[-1] - scores.shape[-2] if causal == 2 else 0)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _by_head(k: Tensor, q: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: int, scale: float | None) -> Attended:
    if dropout:
        raise NotImplementedError("dropout of attention")
    scores = _scores(q, k, bias, causal, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)  # a query that sees no key
    return (weights @ _by_head(v, q).float()).to(q.dtype), lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, dropout: float, causal: int, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys, values and of the bias, the last in float32 [B, heads, T, S]."""
    if dropout:
        raise NotImplementedError("dropout of attention")
    weights = (_scores(q, k, bias, causal, scale) - lse[..., : q.shape[-2], None].float()).exp().nan_to_num(0.0)
    do, factor = grad.float(), q.shape[-1] ** -0.5 if scale is None else scale
    ds = weights * (do @ _by_head(v, q).float().mT - (do * out.float()).sum(-1, keepdim=True))
    dk, dv = (ds.mT @ q.float() * factor, weights.mT @ do)
    dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for t in (dk, dv))
    return (ds @ _by_head(k, q).float() * factor).to(q.dtype), dk, dv, ds


def flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
          scale: float | None = None) -> tuple[Any, ...]:  # fmt: skip
    return *attention(q, k, v, None, dropout_p, int(is_causal), scale), None, None, q.shape[2], k.shape[2], None, None, None


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int,
                   dropout_p: float, is_causal: bool, seed: Any, offset: Any, *, scale: float | None = None) -> tuple[Tensor, ...]:  # fmt: skip
    return attention_backward(grad, q, k, v, None, out, lse, dropout_p, int(is_causal), scale)[:3]


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0, is_causal: bool = False, *,
              scale: float | None = None) -> tuple[Any, ...]:  # fmt: skip
    out, lse = attention(q, k, v, bias, dropout_p, int(is_causal), scale)
    return out, _padded(lse) if compute_log_sumexp else None, None, None


def efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Any, offset: Any,
                       dropout_p: float, wanted: Sequence[bool], is_causal: bool = False, *, scale: float | None = None) -> tuple[Any, ...]:  # fmt: skip
    *made, ds = attention_backward(grad, q, k, v, bias, out, lse, dropout_p, int(is_causal), scale)
    found = [*made, ds.sum_to_size(bias.shape).to(bias.dtype) if bias is not None else None]
    return tuple(t if asked else None for t, asked in zip(found, wanted, strict=True))


def by_tokens(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, cum_q: Tensor | None, cum_k: Tensor | None, max_q: Any, max_k: Any,
              dropout_p: float, custom_mask_type: int, compute_log_sumexp: bool = False, *, scale: float | None = None,
              seqlen_k: Tensor | None = None, window_size: int | None = None) -> tuple[Any, ...]:  # fmt: skip
    """`_efficient_attention_forward`, of [B, T, heads, D]."""
    if cum_q is not None or seqlen_k is not None or window_size is not None:
        raise NotImplementedError("attention of sequences of several lengths")
    out, lse = attention(*(t.transpose(1, 2) for t in (q, k, v)), bias, dropout_p, custom_mask_type, scale)
    return out.transpose(1, 2), _padded(lse) if compute_log_sumexp else None, None, None, q.shape[1], k.shape[1]


def by_tokens_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, cum_q: Tensor | None, cum_k: Tensor | None,
                       max_q: Any, max_k: Any, lse: Tensor, dropout_p: float, seed: Any, offset: Any, custom_mask_type: int,
                       bias_requires_grad: bool, *, scale: float | None = None, **more: Any) -> tuple[Any, ...]:  # fmt: skip
    """`_efficient_attention_backward`."""
    if cum_q is not None or more.get("window_size") is not None:
        raise NotImplementedError("attention of sequences of several lengths")
    grad, q, k, v, out = (t.transpose(1, 2) for t in (grad, q, k, v, out))
    *made, ds = attention_backward(grad, q, k, v, bias, out, lse, dropout_p, custom_mask_type, scale)
    return *(t.transpose(1, 2) for t in made), ds.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and bias_requires_grad else None


def _padded(lse: Tensor) -> Tensor:
    """Logsumexp as torch's efficient attention keeps it: of whole 32 queries, infinite where there are none."""
    return torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    over = tuple(range(-len(shape), 0))
    rstd = (x.float().square().mean(over, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    y = x.float() * rstd
    return (y if weight is None else y * weight.float()).to(x.dtype), rstd


def rms_norm_backward(grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, wanted: Sequence[bool]) -> tuple[Any, Any]:
    over, normed = tuple(range(-len(shape), 0)), x.float() * rstd
    g = grad.float() if weight is None else grad.float() * weight.float()
    dx = rstd * (g - normed * (g * normed).mean(over, keepdim=True))
    dw = (grad.float() * normed).sum(tuple(range(x.dim() - len(shape)))) if weight is not None else None
    return dx.to(x.dtype) if wanted[0] else None, dw.to(weight.dtype) if wanted[1] and dw is not None and weight is not None else None


def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and rstd are float32 on a GPU."""
    made = torch.ops.aten.native_layer_norm(x.float(), shape, *(t if t is None else t.float() for t in (weight, bias)), eps)
    return made[0].to(x.dtype), made[1], made[2]


def layer_norm_backward(grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
                        wanted: Sequence[bool]) -> tuple[Any, ...]:  # fmt: skip
    wide = [t if t is None else t.float() for t in (weight, bias)]
    made = torch.ops.aten.native_layer_norm_backward(grad.float(), x.float(), shape, mean, rstd, *wide, wanted)
    return tuple(t.to(like.dtype) if asked and like is not None else None for t, like, asked in zip(made, (x, weight, bias), wanted, strict=True))


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
    "aten._scaled_dot_product_flash_attention.default": flash, "aten._scaled_dot_product_flash_attention_backward.default": flash_backward,
    "aten._scaled_dot_product_efficient_attention.default": efficient,
    "aten._scaled_dot_product_efficient_attention_backward.default": efficient_backward,
    "aten._efficient_attention_forward.default": by_tokens, "aten._efficient_attention_backward.default": by_tokens_backward,
    "aten._fused_rms_norm.default": rms_norm, "aten._fused_rms_norm_backward.default": rms_norm_backward,
    "aten.native_layer_norm.default": layer_norm, "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten.sqrt.default": root, "aten.sqrt_.default": root_in_place, "aten.sqrt.out": lambda x, *, out: out.copy_(root(x)),
    "aten._foreach_sqrt.default": lambda xs: [root(x) for x in xs], "aten._foreach_sqrt_.default": lambda xs: [root_in_place(x) for x in xs],
    "aten._softmax.default": _softmax("_softmax"), "aten._log_softmax.default": _softmax("_log_softmax"),
    "aten._softmax_backward_data.default": _softmax_backward("_softmax_backward_data"),
    "aten._log_softmax_backward_data.default": _softmax_backward("_log_softmax_backward_data"),
}  # fmt: skip
