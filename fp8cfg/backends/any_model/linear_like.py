"""Linear stand-ins: nn.Linear in place of linear modules with another weight layout.

These are Conv1D of transformers, convolutions with kernels of 1, and the packed projection of
nn.MultiheadAttention. A stand-in is converted like any linear layer. Its weight is changed to a
matrix [out, in] in place and stays the same Parameter. `state_dict` and `load_state_dict` keep the
original layout, so checkpoints match the plain model. `convert_back` restores the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.backends.any_model.conversion_state import REASON, add_rows
from fp8cfg.backends.any_model.module_swap import CARRIED, linear_with, replaced
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.stored_weights import shared_weights

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LinearLayout:
    """How a module stores and applies the weight of a linear layer.

    Attributes:
        matrix: Returns the weight of the module as [out, in], a view.
        weight: Returns a matrix [out, in] in the layout of the module, a view.
        forward: Computes the module's output from the module, a linear function from [..., in] to
            [..., out], and the input. None if the linear function is all.
    """

    matrix: Callable[[Tensor], Tensor]
    weight: Callable[[nn.Module, Tensor], Tensor]
    forward: Callable[[nn.Module, Callable[[Tensor], Tensor], Tensor], Tensor] | None = None


def layout_of(module: nn.Module) -> LinearLayout | None:
    """Returns the layout of `module`, or None if it is not exactly such a module.

    Subclasses, patched forwards and additional parameters could compute something else.
    """
    cls = type(module)
    if "forward" in vars(module) or {*module._parameters, *module._buffers, *module._modules} != {
        "weight",
        "bias",
    }:
        return None
    # Compared by name, so that transformers is not imported.
    if (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return CONV1D
    return POINTWISE if cls in _CONVOLUTIONS and _pointwise(module) else None


def as_linear(module: nn.Module, layout: LinearLayout) -> nn.Linear:
    """Returns an nn.Linear on the meta device with the shape and dtype of `module`."""
    outputs, inputs = layout.matrix(module.get_parameter("weight").to("meta")).shape
    dtype = module.get_parameter("weight").dtype
    return nn.Linear(
        inputs, outputs, bias=module._parameters["bias"] is not None, device="meta", dtype=dtype
    )


def _pointwise(conv: nn.Module) -> bool:
    """Whether a convolution is a linear layer over channels: kernels of 1, no padding, one group.

    A stride only skips positions.
    """
    assert isinstance(conv, _CONVOLUTIONS)
    padded = conv.padding not in ("valid", "same") and any(conv.padding)
    return set(conv.kernel_size) == {1} and conv.groups == 1 and not padded


def _channels_last(conv: nn.Module, linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies `linear` to the channels of `x` [batch, in, ...] or [in, ...].

    The result has the memory format of `x`, as from a convolution.
    """
    assert isinstance(conv, _CONVOLUTIONS)
    at = -len(conv.kernel_size) - 1
    is_last = x.movedim(at, -1).is_contiguous()
    for dim, step in enumerate(conv.stride, at + 1):
        # unfold with a window of 1 keeps every step-th position.
        x = x.unfold(dim, 1, step).squeeze(-1) if step > 1 else x
    y = linear(x.movedim(at, -1).contiguous()).movedim(-1, at)
    return y if is_last else y.contiguous()


def _transposed(weight: Tensor) -> Tensor:
    """Returns the weight of Conv1D [in, out] as [out, in]."""
    return weight.t() if weight.dim() == 2 else weight


def _transposed_back(conv1d: nn.Module, matrix: Tensor) -> Tensor:
    """Returns a matrix [out, in] as the weight of Conv1D."""
    return matrix.t()


def _flat(weight: Tensor) -> Tensor:
    """Returns the weight of a convolution with kernels of 1 as [out, in]."""
    return weight.flatten(1) if weight.dim() > 2 else weight


def _kernels_of_1(conv: nn.Module, matrix: Tensor) -> Tensor:
    """Returns a matrix [out, in] as the weight of a convolution with kernels of 1."""
    assert isinstance(conv, _CONVOLUTIONS)
    return matrix.reshape(*matrix.shape, *conv.kernel_size)


CONV1D = LinearLayout(_transposed, _transposed_back)
POINTWISE = LinearLayout(_flat, _kernels_of_1, _channels_last)

NAME = "in_proj"
CROSS = "query, key and value differ: parts of it are multiplied"
"""Reason for the high precision of the packed projection in cross-attention."""
_NESTED = "used_nested_tensor"
"""Attribute of an nn.TransformerEncoder whose use_nested_tensor was turned off."""


def name_in(attention: str) -> str:
    """Returns the name of the packed projection of the attention module `attention`."""
    return f"{attention}.{NAME}".removeprefix(".")


def takes(module: nn.Module | None, shared: Collection[Tensor]) -> bool:
    """Whether `module` is an nn.MultiheadAttention whose packed projection can be a linear layer.

    Args:
        module: The module.
        shared: Weights that more than one module holds.
    """
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


def take(model: nn.Module, names: Collection[str]) -> None:
    """Adds the packed projection as a linear layer to each attention that `names` selects."""
    for name, module in list(model.named_modules()):
        if name_in(name) in names and takes(module, ()):
            assert isinstance(module, nn.MultiheadAttention)
            layer = linear_with(module.in_proj_weight, module.in_proj_bias).train(module.training)
            module._modules = {NAME: layer, **module._modules}


def attach_attention(model: nn.Module) -> None:
    """Makes attentions call their linear layer, and keeps its weight out of `state_dict`."""
    for attention in _taken(model):
        layer: nn.Module = attention.get_submodule(NAME)
        vars(attention)["forward"] = partial(_forward, attention)
        vars(layer).update(
            _save_to_state_dict=partial(_save_attention, layer),
            _load_from_state_dict=partial(_load_attention, attention, layer),
        )
    for encoder in _encoders(model):
        # Only torch's fast path supports nested tensors, and hooks of converted layers disable it.
        if encoder.use_nested_tensor:
            vars(encoder).update({"use_nested_tensor": False, _NESTED: True})


def give_back(model: nn.Module) -> None:
    """Removes the linear layers from attentions."""
    for encoder in _encoders(model):
        encoder.use_nested_tensor |= vars(encoder).pop(_NESTED, False)
    for attention in list(_taken(model)):
        vars(attention).pop("forward", None)
        del attention._modules[NAME]


def _taken(model: nn.Module) -> Iterator[nn.MultiheadAttention]:
    """Yields the attentions with a linear layer for the packed projection."""
    return (m for m in model.modules() if type(m) is nn.MultiheadAttention and NAME in m._modules)


def _encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    """Returns the nn.TransformerEncoders that contain such attentions."""
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
    """Computes nn.MultiheadAttention.forward with the packed projection as a layer."""
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "nn.MultiheadAttention: is_causal=True is a hint about attn_mask, which it needs"
        )
    # q, k and v become [batch, heads, length, head_dim].
    lanes = [_first_batch(attention, t) for t in _projected(attention, query, key, value)]
    q, k, v = (t.view(*t.shape[:2], attention.num_heads, -1).transpose(1, 2) for t in lanes)
    # Like torch: is_causal replaces attn_mask if SDPA can apply it.
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
    """Returns query, key and value of all heads, [..., embed].

    If they have different inputs, the parts of the weight multiply in high precision.
    """
    layer = attention.get_submodule(NAME)
    if query is key and key is value:
        return layer(query).chunk(3, dim=-1)  # type: ignore[no-any-return]
    vars(layer)[REASON] = CROSS
    # A row of the packed layer makes q, k and v. Here q and k, v have different numbers of rows.
    add_rows(layer, (query.shape[:-1].numel() + 2 * key.shape[:-1].numel()) // 3)
    bias: Tensor | None = attention.in_proj_bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    parts = zip((query, key, value), attention.in_proj_weight.chunk(3), biases, strict=True)
    return tuple(F.linear(x, weight, own) for x, weight, own in parts)


def _first_batch(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """Returns `x` as [batch, length, embed]."""
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if attention.batch_first else x.transpose(0, 1)


def _mask(q: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """Returns the mask to add to the scores [batch, heads, length, keys], or None.

    Args:
        q: Query [batch, heads, length, head_dim].
        attn_mask: [length, keys] or [batch * heads, length, keys]. True becomes minus infinity.
        key_padding_mask: [batch, keys], or [keys] without a batch. True becomes minus infinity.
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
    """Converts a bool mask to numbers that are added to scores."""
    return (
        torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
        if mask.dtype == torch.bool
        else mask.to(dtype)
    )


def _save_attention(layer: nn.Module, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Saves the layer without weight and bias, which the attention saves."""
    type(layer)._save_to_state_dict(layer, state, prefix, keep_vars)
    for name in ("weight", "bias"):
        state.pop(f"{prefix}{name}", None)


def _load_attention(
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


SHELL = "replaced_module"
"""Attribute of a stand-in: a tuple of the original module without its Parameters, and its layout.
A tuple, because torch would register a bare module as a submodule."""
_ENTRIES = "_save_to_state_dict", "_load_from_state_dict"
"""Methods that torch calls to save and load a layer."""
ADAPTED = ".base_layer"
"""Suffix of a layer with a PEFT adapter. The adapter reads its weight."""
Shells = dict[str, tuple[nn.Module, LinearLayout]]
"""Original modules without their Parameters, and their layouts, by name."""


def planned_as(model: nn.Module, fp8: bool) -> dict[str, nn.Linear]:
    """Returns an nn.Linear on the meta device for each module that can have a stand-in, by name.

    Modules are left out if another module shares the weight. Without `fp8` only Conv1D is included.
    """
    shared, found = shared_weights(model), dict[str, nn.Linear]()
    for name, module in model.named_modules():
        layout = (
            layout_of(module) if name and module._parameters.get("weight") not in shared else None
        )
        # A convolution gains nothing from a matrix in high precision, and PEFT adapters read its
        # weight as a kernel.
        if layout is CONV1D or (layout and fp8 and not name.endswith(ADAPTED)):
            found[name] = as_linear(module, layout)
        elif fp8 and takes(module, shared):
            found[name_in(name)] = attention_as_linear(module)
    return found


def to_linear(model: nn.Module, plan: Sequence[PlannedLinear]) -> Shells:
    """Replaces each module of `plan` in another layout by an nn.Linear, in place.

    A convolution that stays in high precision is not replaced.

    Returns:
        The replaced modules. Call `attach` with them after the conversion.
    """
    found: Shells = {}
    take(model, [planned.name for planned in plan])
    for name, fp8 in [(planned.name, planned.fp8) for planned in plan]:
        module = model.get_submodule(name)
        if (layout := layout_of(module)) is not None and (fp8 or layout is CONV1D):
            weight, bias = module._parameters["weight"], module._parameters["bias"]
            assert weight is not None
            _relaid(weight, layout.matrix)
            replaced(model, name, linear := linear_with(weight, bias))
            del vars(linear)[CARRIED]  # the FP8 layer that replaces it sets its own
            module._parameters.update(weight=None, bias=None)
            if not layout.forward:
                _tell_adapter(model, name, transposed=False)
            found[name] = module, layout
    return found


def attach(model: nn.Module, found: Shells) -> None:
    """Makes the replacements of `found` save, load and multiply in the original layout."""
    attach_attention(model)
    for name, (module, layout) in found.items():
        layer = model.get_submodule(name)
        entries = partial(_save, layer, module, layout), partial(_load, layer, layout)
        vars(layer).update({SHELL: (module, layout)} | dict(zip(_ENTRIES, entries, strict=True)))
        if layout.forward:
            vars(layer)["forward"] = partial(
                layout.forward, module, partial(type(layer).forward, layer)
            )


def shells(model: nn.Module) -> Shells:
    """Returns the original module and layout of each stand-in of `model`, by name."""
    return {
        name: vars(layer)[SHELL] for name, layer in model.named_modules() if SHELL in vars(layer)
    }


def back(model: nn.Module, found: Shells) -> None:
    """Puts the original modules back in place of their plain nn.Linear."""
    for name, (module, layout) in found.items():
        linear = model.get_submodule(name)
        for own in (SHELL, "forward", *_ENTRIES):
            vars(linear).pop(own, None)
        vars(linear)[CARRIED] = []
        weight = linear._parameters["weight"]
        assert weight is not None
        _relaid(weight, partial(layout.weight, module))
        module._parameters.update(weight=weight, bias=linear._parameters["bias"])
        replaced(model, name, module)
        if not layout.forward:
            _tell_adapter(model, name, transposed=True)
    give_back(model)


def _tell_adapter(model: nn.Module, name: str, transposed: bool) -> None:
    """Sets fan_in_fan_out of the PEFT layer around a Conv1D.

    It tells PEFT whether the weight is transposed.
    """
    adapter = model.get_submodule(name.rpartition(".")[0])
    if isinstance(getattr(adapter, "fan_in_fan_out", None), bool):
        adapter.fan_in_fan_out = transposed  # type: ignore[assignment]


def _relaid(weight: nn.Parameter, relay: Callable[[Tensor], Tensor]) -> None:
    """Changes the layout of a Parameter and of its gradient, in place."""
    # A gradient can only be assigned in the shape of its weight, so it is set afterwards.
    gradient, weight.grad = weight.grad, None
    weight.data = relay(weight.data).contiguous()
    if gradient is not None:
        weight.grad = relay(gradient).contiguous()


def _save(
    layer: nn.Module,
    module: nn.Module,
    layout: LinearLayout,
    state: dict[str, Any],
    prefix: str,
    keep_vars: bool,
) -> None:
    """Saves a stand-in with the weight in the original layout, except in the stored form."""
    type(layer)._save_to_state_dict(layer, state, prefix, keep_vars)
    if not _stored(state, prefix):
        state[f"{prefix}weight"] = layout.weight(module, state[f"{prefix}weight"])


def _load(
    layer: nn.Module, layout: LinearLayout, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Loads a stand-in from a state dict in the original layout or in the stored form."""
    weight = state.get(f"{prefix}weight")
    if isinstance(weight, Tensor) and not _stored(state, prefix):
        state = {**state, f"{prefix}weight": layout.matrix(weight)}
    type(layer)._load_from_state_dict(layer, state, prefix, *rest)


def _stored(state: Iterable[str], prefix: str) -> bool:
    """Whether `state` has the weight as FP8 codes, which are always [out, in]."""
    return any(name.startswith(f"{prefix}fp8_weight") for name in state)
