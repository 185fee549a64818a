"""Packed projections of nn.MultiheadAttention: `in_proj_weight` [3 * embed, embed], a Parameter, as a linear layer named in_proj.

torch's forward multiplies `in_proj_weight` and `out_proj.weight` by itself, past any layer that holds them. Where a model is
converted it is exchanged for one that calls the two layers, and computes the rest as torch's `multi_head_attention_forward` (2.13)
does. The Parameter stays the attention's, under its name; the layer shares it.

Self-attention alone is one product of the whole matrix. Where query, key and value differ its parts are multiplied apart, in high
precision, and the layer says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.backends.exclusions import REASON
from fp8cfg.backends.flops import add_rows
from fp8cfg.backends.module_swap import linear_with

NAME = "in_proj"
CROSS = "query, key and value differ: parts of it are multiplied"
"""Why the layer stays in high precision in an attention that is not over its own input."""
_NESTED = "used_nested_tensor"
"""Attribute of an nn.TransformerEncoder that did."""


def name_in(attention: str) -> str:
    """The name of the layer of the module called `attention`."""
    return f"{attention}.{NAME}".removeprefix(".")


def takes(module: nn.Module | None, shared: Collection[Tensor]) -> bool:
    """Whether `module` is an nn.MultiheadAttention whose packed projection can be a linear layer; `shared` are weights that more
    than one module holds."""
    return (
        type(module) is nn.MultiheadAttention
        and "forward" not in vars(module)
        and NAME not in module._modules
        and (
            {name for name, p in module._parameters.items() if p is not None}
            <= {"in_proj_weight", "in_proj_bias"}
            and module.in_proj_weight is not None
            and not module.add_zero_attn
            and module.in_proj_weight not in shared
        )
    )


def as_linear(attention: nn.Module) -> nn.Linear:
    """An nn.Linear of the shape and the dtype of the packed projection, without memory."""
    assert isinstance(attention, nn.MultiheadAttention)
    outputs, inputs = attention.in_proj_weight.shape
    return nn.Linear(
        inputs,
        outputs,
        bias=attention.in_proj_bias is not None,
        device="meta",
        dtype=attention.in_proj_weight.dtype,
    )


def take(model: nn.Module, names: Collection[str]) -> None:
    """Give each nn.MultiheadAttention of `model` whose layer is among `names` that layer."""
    for name, module in list(model.named_modules()):
        if name_in(name) in names and takes(module, ()):
            assert isinstance(module, nn.MultiheadAttention)
            layer = linear_with(module.in_proj_weight, module.in_proj_bias).train(module.training)
            module._modules = {NAME: layer, **module._modules}


def attach(model: nn.Module) -> None:
    """Let attentions call their layers, which leave the weight to them in a `state_dict()`."""
    for attention in _taken(model):
        layer: nn.Module = attention.get_submodule(NAME)
        vars(attention)["forward"] = partial(_forward, attention)
        vars(layer).update(
            _save_to_state_dict=partial(_save, layer),
            _load_from_state_dict=partial(_load, attention, layer),
        )
    for encoder in _encoders(model):
        if (
            encoder.use_nested_tensor
        ):  # what torch's fast path alone multiplies, which the hooks of converted layers rule out
            vars(encoder).update({"use_nested_tensor": False, _NESTED: True})


def give_back(model: nn.Module) -> None:
    """Take the layers out of the attentions again."""
    for encoder in _encoders(model):
        encoder.use_nested_tensor |= vars(encoder).pop(_NESTED, False)
    for attention in list(_taken(model)):
        vars(attention).pop("forward", None)
        del attention._modules[NAME]


def _taken(model: nn.Module) -> Iterator[nn.MultiheadAttention]:
    return (m for m in model.modules() if type(m) is nn.MultiheadAttention and NAME in m._modules)


def _encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    return [m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and any(_taken(m))]


def _forward(
    attention: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As nn.MultiheadAttention.forward."""
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "nn.MultiheadAttention: is_causal=True is a hint about attn_mask, which it needs"
        )
    lanes = [_first_batch(attention, t) for t in _projected(attention, query, key, value)]
    q, k, v = (
        t.view(*t.shape[:2], attention.num_heads, -1).transpose(1, 2) for t in lanes
    )  # [batch, heads, length, head_dim]
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        mask, is_causal = _mask(q, attn_mask, key_padding_mask), False
    dropout = attention.dropout if attention.training else 0.0
    weights = None
    if need_weights:
        scores = q * math.sqrt(1.0 / q.shape[-1]) @ k.transpose(-2, -1)
        weights = F.dropout(
            torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout
        )
        out = weights @ v
        weights = weights.mean(dim=1) if average_attn_weights else weights
        weights = weights if query.dim() == 3 else weights.squeeze(0)
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    out = attention.out_proj(out.transpose(1, 2).flatten(2))
    return (
        out.squeeze(0)
        if query.dim() == 2
        else out
        if attention.batch_first
        else out.transpose(0, 1)
    ), weights


def _projected(
    attention: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """Query, key and value [..., embed] for all heads."""
    layer = attention.get_submodule(NAME)
    if query is key and key is value:
        return layer(query).chunk(3, dim=-1)  # type: ignore[no-any-return]
    vars(layer)[REASON] = CROSS
    add_rows(layer, (query.shape[:-1].numel() + 2 * key.shape[:-1].numel()) // 3)
    bias: Tensor | None = attention.in_proj_bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    parts = zip((query, key, value), attention.in_proj_weight.chunk(3), biases, strict=True)
    return tuple(F.linear(x, weight, own) for x, weight, own in parts)


def _first_batch(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """`x` as [batch, length, embed]."""
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if attention.batch_first else x.transpose(0, 1)


def _mask(q: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """What is added to the scores [batch, heads, length, keys]; None where that is nothing. Of `attn_mask` [length, keys] or
    [batch * heads, length, keys] and `key_padding_mask` [batch, keys] or, unbatched, [keys], True is minus infinity.
    """
    masks = []
    if attn_mask is not None:
        masks.append(
            attn_mask
            if attn_mask.dim() == 2
            else attn_mask.view(*q.shape[:2], *attn_mask.shape[1:])
        )
    if key_padding_mask is not None:
        masks.append(key_padding_mask.view(len(q), 1, 1, -1))
    found = [_added(mask, q.dtype) for mask in masks]
    return sum(found[1:], found[0]) if found else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return (
        torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
        if mask.dtype == torch.bool
        else mask.to(dtype)
    )


def _save(layer: nn.Module, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    type(layer)._save_to_state_dict(layer, state, prefix, keep_vars)
    for name in ("weight", "bias"):
        state.pop(f"{prefix}{name}", None)


def _load(
    attention: nn.MultiheadAttention,
    layer: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *rest: Any,
) -> None:
    """After the attention has loaded what it shares with `layer`, or, with `assign`, has new Parameters."""
    for name, p in {"weight": attention.in_proj_weight, "bias": attention.in_proj_bias}.items():
        if p is not None:
            layer._parameters[name] = p
            state = {**state, f"{prefix}{name}": p.detach()}
    type(layer)._load_from_state_dict(layer, state, prefix, *rest)
