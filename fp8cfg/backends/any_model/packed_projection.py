"""Packed projection of nn.MultiheadAttention as a linear layer.

The module multiplies one Parameter `in_proj_weight` for query, key and value itself. The conversion
adds an nn.Linear child `in_proj` with this Parameter and converts it like any linear layer.
`state_dict` and `load_state_dict` keep the original names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.backends.any_model.conversion_state import REASON, add_rows
from fp8cfg.backends.any_model.module_swap import linear_with

NAME = "in_proj"
CROSS = "query, key and value differ: parts of it are multiplied"
"""Reason for the high precision of the packed projection in cross-attention."""
_NESTED = "used_nested_tensor"
"""Attribute of an nn.TransformerEncoder whose use_nested_tensor was turned off."""


def packed_name(attention: str) -> str:
    """Returns the name of the packed projection of the attention module `attention`."""
    return f"{attention}.{NAME}".removeprefix(".")


def has_convertible_projection(module: nn.Module | None, shared: Collection[Tensor]) -> bool:
    """Whether `module` is an nn.MultiheadAttention whose packed projection can be a linear layer.

    Args:
        module: The module.
        shared: Weights that more than one module holds.
    """
    if type(module) is not nn.MultiheadAttention:
        return False
    if "forward" in vars(module) or NAME in module._modules:
        return False
    # Attentions with other sizes for key and value have separate weights. bias_k and bias_v add
    # tokens, as add_zero_attn does.
    parameters = {name for name, p in module._parameters.items() if p is not None}
    if not parameters <= {"in_proj_weight", "in_proj_bias"} or module.in_proj_weight is None:
        return False
    return not module.add_zero_attn and module.in_proj_weight not in shared


def attention_as_linear(attention: nn.Module) -> nn.Linear:
    """Returns an nn.Linear on the meta device with the shape and dtype of the packed projection."""
    assert isinstance(attention, nn.MultiheadAttention)
    outputs, inputs = attention.in_proj_weight.shape
    return nn.Linear(
        inputs,
        outputs,
        bias=attention.in_proj_bias is not None,
        device="meta",
        dtype=attention.in_proj_weight.dtype,
    )


def add_projections(model: nn.Module, names: Collection[str]) -> None:
    """Adds the packed projection as a linear layer to each attention that `names` selects."""
    for name, module in list(model.named_modules()):
        if packed_name(name) in names and has_convertible_projection(module, shared=()):
            assert isinstance(module, nn.MultiheadAttention)
            layer = linear_with(module.in_proj_weight, module.in_proj_bias).train(module.training)
            # First, because q, k and v are computed before the output projection.
            module._modules = {NAME: layer, **module._modules}


def attach_projections(model: nn.Module) -> None:
    """Makes attentions call their linear layer, and keeps its weight out of `state_dict`."""
    for attention in _attentions(model):
        layer: nn.Module = attention.get_submodule(NAME)
        vars(attention)["forward"] = partial(_forward, attention)
        vars(layer).update(
            _save_to_state_dict=partial(_save_projection, layer),
            _load_from_state_dict=partial(_load_projection, attention, layer),
        )
    for encoder in _encoders(model):
        # Only torch's fast path supports nested tensors, and hooks of converted layers disable it.
        if encoder.use_nested_tensor:
            vars(encoder).update({"use_nested_tensor": False, _NESTED: True})


def remove_projections(model: nn.Module) -> None:
    """Removes the linear layers from attentions."""
    for encoder in _encoders(model):
        encoder.use_nested_tensor |= vars(encoder).pop(_NESTED, False)
    for attention in list(_attentions(model)):
        vars(attention).pop("forward", None)
        del attention._modules[NAME]


def _attentions(model: nn.Module) -> Iterator[nn.MultiheadAttention]:
    """Yields the attentions with a linear layer for the packed projection."""
    for module in model.modules():
        if type(module) is nn.MultiheadAttention and NAME in module._modules:
            yield module


def _encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    """Returns the nn.TransformerEncoders that contain such attentions."""
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    return [encoder for encoder in encoders if any(_attentions(encoder))]


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
    """Computes nn.MultiheadAttention.forward with the packed projection as a layer."""
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "nn.MultiheadAttention: is_causal=True is a hint about attn_mask, which it needs"
        )
    projected = _project(attention, query, key, value)
    q, k, v = (_split_heads(attention, tensor) for tensor in projected)
    # Like torch: is_causal replaces attn_mask if SDPA can apply it.
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        is_causal = False
        mask = _score_mask(q, attn_mask, key_padding_mask)
    dropout = attention.dropout if attention.training else 0.0
    weights = None
    if need_weights:
        # SDPA does not return the weights.
        scores = q * math.sqrt(1.0 / q.shape[-1]) @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask
        weights = F.dropout(torch.softmax(scores, dim=-1), dropout)
        out = weights @ v
        if average_attn_weights:
            weights = weights.mean(dim=1)
        if query.dim() == 2:
            weights = weights.squeeze(0)
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    out = attention.out_proj(out.transpose(1, 2).flatten(2))  # [batch, length, embed]
    if query.dim() == 2:
        out = out.squeeze(0)
    elif not attention.batch_first:
        out = out.transpose(0, 1)
    return out, weights


def _project(
    attention: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """Returns query, key and value of all heads, [..., embed].

    If they have different inputs, the parts of the weight multiply in high precision.
    """
    layer = attention.get_submodule(NAME)
    if query is key and key is value:
        return layer(query).chunk(3, dim=-1)  # type: ignore[no-any-return]
    vars(layer)[REASON] = CROSS
    # A row of the packed layer makes q, k and v. Here q and k, v have different numbers of rows.
    num_rows = query.shape[:-1].numel() + 2 * key.shape[:-1].numel()
    add_rows(layer, num_rows // 3)
    weights = attention.in_proj_weight.chunk(3)
    biases: tuple[Tensor | None, ...] = (None, None, None)
    if attention.in_proj_bias is not None:
        biases = attention.in_proj_bias.chunk(3)
    inputs = (query, key, value)
    return tuple(
        F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)
    )


def _split_heads(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """Returns a projected input as [batch, heads, length, head_dim]."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    elif not attention.batch_first:
        x = x.transpose(0, 1)
    batch, length, _ = x.shape
    return x.view(batch, length, attention.num_heads, -1).transpose(1, 2)


def _score_mask(
    q: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
) -> Tensor | None:
    """Returns the mask to add to the scores [batch, heads, length, keys], or None.

    Args:
        q: Query [batch, heads, length, head_dim].
        attn_mask: [length, keys] or [batch * heads, length, keys]. True becomes minus infinity.
        key_padding_mask: [batch, keys], or [keys] without a batch. True becomes minus infinity.
    """
    mask = None
    if attn_mask is not None:
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.view(*q.shape[:2], *attn_mask.shape[1:])
        mask = _additive_mask(attn_mask, q.dtype)
    if key_padding_mask is not None:
        padding = _additive_mask(key_padding_mask.view(len(q), 1, 1, -1), q.dtype)
        mask = padding if mask is None else mask + padding
    return mask


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a bool mask to numbers that are added to scores."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


def _save_projection(layer: nn.Module, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Saves the layer without weight and bias, which the attention saves."""
    type(layer)._save_to_state_dict(layer, state, prefix, keep_vars)
    for name in ("weight", "bias"):
        state.pop(f"{prefix}{name}", None)


def _load_projection(
    attention: nn.MultiheadAttention,
    layer: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *rest: Any,
) -> None:
    """Loads the layer after its attention, which has loaded the shared weight.

    With `assign` the attention has new Parameters, so the layer takes these over.
    """
    for name, p in {"weight": attention.in_proj_weight, "bias": attention.in_proj_bias}.items():
        if p is not None:
            layer._parameters[name] = p
            state = {**state, f"{prefix}{name}": p.detach()}
    type(layer)._load_from_state_dict(layer, state, prefix, *rest)
