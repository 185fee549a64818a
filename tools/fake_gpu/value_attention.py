"""Fused attention of GPUs on CPU tensors, by its formula, in float32, rounded once. Parameters are those of torch's operators.

What a GPU keeps of random numbers is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Attended = tuple[Tensor, Tensor]
"""Output, of the dtype of the queries, and logsumexp, float32 [B, heads, T]."""


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, dropout: float, causal: int, scale: float | None
) -> Tensor:
    """Scores [B, heads, T, S], masked; `causal` 1 lets the first query see the first key, 2 the last one the last. Raises
    NotImplementedError for dropout, which no recipe has: its mask would be made of a GPU's random numbers."""
    if dropout:
        raise NotImplementedError("dropout of attention")
    scores = (
        q.float() @ _by_head(k, q).float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    )
    if bias is not None:
        scores = (
            scores.masked_fill(~bias, -torch.inf)
            if bias.dtype == torch.bool
            else scores + bias.float()
        )
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").tril(
            scores.shape[-1] - scores.shape[-2] if causal == 2 else 0
        )
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _by_head(k: Tensor, q: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    dropout: float,
    causal: int,
    scale: float | None,
) -> Attended:
    scores = _scores(q, k, bias, dropout, causal, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)  # a query that sees no key
    return (weights @ _by_head(v, q).float()).to(q.dtype), lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dropout: float,
    causal: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and of the bias, the last in float32 [B, heads, T, S]."""
    weights = (
        (_scores(q, k, bias, dropout, causal, scale) - lse[..., : q.shape[-2], None].float())
        .exp()
        .nan_to_num(0.0)
    )
    do, factor = grad.float(), q.shape[-1] ** -0.5 if scale is None else scale
    ds = weights * (do @ _by_head(v, q).float().mT - (do * out.float()).sum(-1, keepdim=True))
    dk, dv = (ds.mT @ q.float() * factor, weights.mT @ do)
    dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for t in (dk, dv))
    return (ds @ _by_head(k, q).float() * factor).to(q.dtype), dk, dv, ds


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Flash attention, whose causal queries are the last of the keys (FlashAttention 2.1)."""
    return (
        *attention(q, k, v, None, dropout_p, 2 * is_causal, scale),
        None,
        None,
        q.shape[2],
        k.shape[2],
        None,
        None,
        None,
    )


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: Any,
    cum_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Any,
    offset: Any,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    return attention_backward(grad, q, k, v, None, out, lse, dropout_p, 2 * is_causal, scale)[:3]


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = attention(q, k, v, bias, dropout_p, int(is_causal), scale)
    return out, _padded(lse) if compute_log_sumexp else None, None, None


def efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Any,
    offset: Any,
    dropout_p: float,
    wanted: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    *made, ds = attention_backward(grad, q, k, v, bias, out, lse, dropout_p, int(is_causal), scale)
    found = [*made, ds.sum_to_size(bias.shape).to(bias.dtype) if bias is not None else None]
    return tuple(t if asked else None for t, asked in zip(found, wanted, strict=True))


def by_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
) -> tuple[Any, ...]:
    """`_efficient_attention_forward`, of [B, T, heads, D]."""
    _refuse_lengths(cum_q, seqlen_k, window_size)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = attention(q, k, v, bias, dropout_p, custom_mask_type, scale)
    return (
        out.transpose(1, 2),
        _padded(lse) if compute_log_sumexp else None,
        None,
        None,
        q.shape[2],
        k.shape[2],
    )


def by_tokens_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    max_q: Any,
    max_k: Any,
    lse: Tensor,
    dropout_p: float,
    seed: Any,
    offset: Any,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    """`_efficient_attention_backward`."""
    _refuse_lengths(cum_q, more.get("window_size"))
    grad, q, k, v, out = (t.transpose(1, 2) for t in (grad, q, k, v, out))
    *made, ds = attention_backward(
        grad, q, k, v, bias, out, lse, dropout_p, custom_mask_type, scale
    )
    return *(t.transpose(1, 2) for t in made), ds.sum_to_size(bias.shape).to(
        bias.dtype
    ) if bias is not None and bias_requires_grad else None


def _refuse_lengths(*given: Any) -> None:
    """Raise NotImplementedError where sequences have several lengths or windows, which torch's own callers alone ask for, with nested
    tensors."""
    if any(each is not None for each in given):
        raise NotImplementedError("attention of sequences of several lengths")


def _padded(lse: Tensor) -> Tensor:
    """Logsumexp as torch's efficient attention keeps it: of whole 32 queries, infinite where there are none."""
    return torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)


HANDLERS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention.default": flash,
    "aten._scaled_dot_product_flash_attention_backward.default": flash_backward,
    "aten._scaled_dot_product_efficient_attention.default": efficient,
    "aten._scaled_dot_product_efficient_attention_backward.default": efficient_backward,
    "aten._efficient_attention_forward.default": by_tokens,
    "aten._efficient_attention_backward.default": by_tokens_backward,
}
