"""FP8 attention under fp8.dot_product_attention: te.DotProductAttention replaces `core_attention`.

cuDNN computes it, and no CPU has cuDNN. Tests cover the arguments that Transformer Engine gets, not
the numbers.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.backends.any_model.module_swap import replace_module
from fp8cfg.backends.gemm_plan import ATTENTION_GEMMS, Kinds, plan_attention
from fp8cfg.backends.te.engine_builder import check_fields
from fp8cfg.backends.te.layers import format_of, te_autocast
from fp8cfg.backends.te.rules import attention_misfit
from fp8cfg.backends.te.state import HISTORY, SCALE, load_columns
from fp8cfg.numerics.stored_state import in_stored_form
from fp8cfg.schema.fp8 import FP8

NUM_GEMMS = 3
"""Number of GEMMs in the FP8 state of te.DotProductAttention.

It has three columns per GEMM for the forward pass, and two for the backward pass.
"""
_FORWARD_GEMMS = ATTENTION_GEMMS[:2]
_BACKWARD_GEMMS = ATTENTION_GEMMS[2:]
_KERNEL_CHOICE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
"""Module with the choice of the attention kernel."""


def chosen_kernel() -> str:
    """Returns the attention kernel that Transformer Engine chose last.

    It is "flash", "fused" (cuDNN) or "unfused", or "" if no attention has run. Version 2.20 keeps
    the choice in a private variable. Otherwise it only appears in debug logs.
    """
    choice = getattr(sys.modules.get(_KERNEL_CHOICE), "_attention_backends", {})
    for kernel in ("flash", "fused", "unfused"):
        if choice.get(f"use_{kernel}_attention"):
            return kernel
    return ""


class TEAttention(nn.Module):
    """Causal attention softmax(q kᵀ / √head_dim) v, computed by te.DotProductAttention.

    The query is [batch, heads, tokens, head_dim], key and value are [batch, groups, tokens,
    head_dim]. The output has the shape of the query.

    The state dict has `fp8_scale` and `fp8_amax_history` in the column order of Transformer Engine,
    forward before backward. S and dP have delayed scaling under current scaling too.

    Args:
        plain: The replaced attention.
        module: The te.DotProductAttention.
        recipe: The recipe object of Transformer Engine.

    Attributes:
        gemm_kinds: Operand formats of the GEMMs that ran in FP8, by name. None is high precision.
    """

    def __init__(self, plain: nn.Module, module: Any, recipe: Any) -> None:
        super().__init__()
        # In a tuple, because torch would register the modules themselves as submodules.
        self._unregistered = (plain, module)
        self.recipe = recipe
        self.gemm_kinds: dict[str, Kinds] = dict.fromkeys(ATTENTION_GEMMS)
        self.train(plain.training)

    @property
    def plain(self) -> nn.Module:
        """The replaced high-precision attention."""
        return self._unregistered[0]

    @property
    def te_module(self) -> Any:
        """The te.DotProductAttention."""
        return self._unregistered[1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Transformer Engine wants [batch, tokens, heads, head_dim], in this memory order.
        operands = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
        y: Tensor = self.te_module(*operands)  # [batch, tokens, heads * head_dim]
        self._record_gemms(y)
        batch, heads, tokens, head_dim = q.shape
        return y.view(batch, tokens, heads, head_dim).transpose(1, 2)

    def _record_gemms(self, y: Tensor) -> None:
        """Records the operand formats of this pass, from Transformer Engine's own state."""
        module = self.te_module
        forward_kinds: Kinds = None
        backward_kinds: Kinds = None
        is_fp8 = module.fp8 and module.fp8_meta["recipe"].fp8_dpa
        if is_fp8:
            forward_format = format_of(module.quantizers["scaling_fwd"][0])
            backward_format = format_of(module.quantizers["scaling_bwd"][0])
            forward_kinds = forward_format, forward_format
            backward_kinds = backward_format, forward_format
        # High-precision evaluation shows nothing about training.
        if is_fp8 or (torch.is_grad_enabled() and self.training):
            self.gemm_kinds.update(dict.fromkeys(_FORWARD_GEMMS, forward_kinds))
        if y.requires_grad:
            y.register_hook(partial(_record_backward, self.gemm_kinds, backward_kinds))

    def _states(self) -> list[Any]:
        """Returns the forward and backward states of delayed scaling. MXFP8 has none."""
        meta = self.te_module.fp8_meta
        states = [meta.get("scaling_fwd"), meta.get("scaling_bwd")]
        return [state for state in states if hasattr(state, "amax_history")]

    def forward_histories(self) -> list[Tensor]:
        """Returns the amax histories [length, columns] that a forward pass changes."""
        return [state.amax_history for state in self._states()[:1]]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        states = self._states()
        if in_stored_form() and states:
            destination[prefix + SCALE] = torch.cat([state.scale for state in states])
            destination[prefix + HISTORY] = torch.cat([state.amax_history for state in states], 1)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        saved = {}
        for name in (SCALE, HISTORY):
            if prefix + name in state_dict:
                saved[name] = state_dict.pop(prefix + name)
        columns = []
        for state in self._states():
            columns += [(state, index) for index in range(state.scale.numel())]
        error_messages = rest[-1]
        try:
            load_columns(columns, saved)
        except ValueError as e:
            error_messages.append(f"{prefix[:-1]}: {e}")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"te.{type(self.te_module).__name__}, {type(self.recipe).__name__}"


def _record_backward(gemm_kinds: dict[str, Kinds], kinds: Kinds, gradient: Tensor) -> None:
    """Gradient hook: records the backward GEMMs of an attention."""
    gemm_kinds.update(dict.fromkeys(_BACKWARD_GEMMS, kinds))


def misfits(model: nn.Module, fp8: FP8) -> list[str]:
    """Returns an error for each property of `model` that FP8 attention does not support.

    Head sizes depend on the GPU. They are not checked without one.
    """
    if not fp8.dot_product_attention:
        return []
    if any(getattr(module, "window", None) for module in model.modules()):
        return [
            "fp8.dot_product_attention=true: not with model.sliding_window under backend=te, whose"
            " FP8 attention has windows only on new GPUs; set backend=native"
        ]
    if not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability()
    head_dims = {
        int(module.head_dim)  # type: ignore[arg-type]
        for module in model.modules()
        if hasattr(module, "core_attention")
    }
    errors = [attention_misfit(head_dim, capability) for head_dim in sorted(head_dims)]
    return [error for error in errors if error]


def convert_attention(model: nn.Module, fp8: FP8, te: Any, recipe: Any) -> None:
    """Replaces each `core_attention` that the plan has in FP8, in place."""
    names = []
    for name, _ in model.named_modules():
        if name.endswith(".core_attention"):
            names.append(name.removesuffix(".core_attention"))
    for name, planned in zip(names, plan_attention(fp8, len(names)), strict=True):
        if any(planned.gemms):
            attention = _te_attention(model.get_submodule(name), te, recipe)
            replace_module(model, f"{name}.core_attention", attention)


def _te_attention(attention: Any, te: Any, recipe: Any) -> TEAttention:
    """Returns the replacement for the core attention of a layer's attention module.

    Raises:
        BackendError: te.DotProductAttention has other fields than requested.
    """
    heads = attention.num_query_groups * attention.heads_per_group
    options = {}
    if attention.core_attention.scale is not None:
        options["softmax_scale"] = attention.core_attention.scale
    module = te.DotProductAttention(
        heads,
        attention.head_dim,
        num_gqa_groups=attention.num_query_groups,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
        **options,
    )
    expected = {
        "num_attention_heads": heads,
        "hidden_size_per_attention_head_k": attention.head_dim,
        "num_gqa_groups": attention.num_query_groups,
        "qkv_format": "bshd",
        "attn_mask_type": "causal",
        "unfused_attention.attention_dropout.p": 0.0,
    }
    check_fields(module, expected)
    # Creates scales and histories now, because a state dict must have them before the first pass.
    # With gradients the exit of the context would update scales.
    with torch.no_grad(), te_autocast(te, True, recipe):
        module.init_fp8_metadata(num_gemms=NUM_GEMMS)
    return TEAttention(attention.core_attention, module, recipe)
