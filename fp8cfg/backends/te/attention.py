"""FP8 attention: te.DotProductAttention in the place of `core_attention`, where fp8.dot_product_attention asks for it.

Its arithmetic is cuDNN's, which no CPU has: this file has been tested for what it asks of Transformer Engine, not for numbers.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.backends.gemm_plan import ATTENTION_GEMMS, Kinds, plan_attention
from fp8cfg.backends.module_swap import replaced
from fp8cfg.backends.te.attention_rules import attention_misfit
from fp8cfg.backends.te.build import check
from fp8cfg.backends.te.engine import entered
from fp8cfg.backends.te.state import HISTORY, SCALE, load_columns
from fp8cfg.config.fp8 import FP8
from fp8cfg.numerics.stored_form import in_stored_form

PRODUCTS = 3
"""As many as Transformer Engine's attention counts: it keeps three columns for each forward and two backward."""


def chosen_kernel() -> str:
    """The kernel that Transformer Engine chose last for an attention of its own: "flash", "fused" (cuDNN) or "unfused"; empty where
    none has run. It keeps the choice in a variable of a module, private in 2.20, and says it elsewhere in debug logs alone.
    """
    chosen = getattr(sys.modules.get(_CHOOSING), "_attention_backends", {})
    return next(
        (kind for kind in ("flash", "fused", "unfused") if chosen.get(f"use_{kind}_attention")), ""
    )


_CHOOSING = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


class TEAttention(nn.Module):
    """softmax(q kᵀ / √head_dim) v, causal: q [B, heads, T, head_dim], k and v [B, G, T, head_dim], out as q.

    `ran` holds the kinds of the operands of each product that ran in FP8, None for high precision. The state of delayed scaling,
    which S and dP have under current scaling too, is saved in Transformer Engine's own order of columns, forward and backward.
    """

    def __init__(self, plain: nn.Module, module: Any, recipe: Any) -> None:
        super().__init__()
        self._beside = (plain, module, recipe)
        self.ran: dict[str, Kinds] = dict.fromkeys(ATTENTION_GEMMS)
        self.train(plain.training)

    @property
    def plain(self) -> nn.Module:
        """The high-precision attention that this module replaced."""
        return self._beside[0]

    @property
    def recipe(self) -> Any:
        """Transformer Engine's recipe."""
        return self._beside[2]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        module = self._beside[1]
        y: Tensor = module(
            *(t.transpose(1, 2).contiguous() for t in (q, k, v))
        )  # [B, T, heads * head_dim]
        self._record(module, y)
        return y.view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)

    def _record(self, module: Any, y: Tensor) -> None:
        ran = module.fp8 and module.fp8_meta["recipe"].fp8_dpa
        if ran or (
            torch.is_grad_enabled() and self.training
        ):  # an evaluation in high precision says nothing of training
            self.ran.update(
                dict.fromkeys(ATTENTION_GEMMS[:2], _kinds(module, "fwd", "fwd") if ran else None)
            )
        if y.requires_grad:
            backward = _kinds(module, "bwd", "fwd") if ran else None
            y.register_hook(partial(_note, self.ran, backward))

    def _states(self) -> list[Any]:
        """The buffers of delayed scaling, forward and backward; none under MXFP8."""
        meta = self._beside[1].fp8_meta
        return [
            meta[key]
            for key in ("scaling_fwd", "scaling_bwd")
            if hasattr(meta.get(key), "amax_history")
        ]

    def forward_histories(self) -> list[Tensor]:
        """The amax histories that a forward pass writes to."""
        return [state.amax_history for state in self._states()[:1]]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if in_stored_form() and (states := self._states()):
            destination[prefix + SCALE] = torch.cat([state.scale for state in states])
            destination[prefix + HISTORY] = torch.cat([state.amax_history for state in states], 1)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        saved = {
            name: state_dict.pop(prefix + name)
            for name in (SCALE, HISTORY)
            if prefix + name in state_dict
        }
        columns = [(state, i) for state in self._states() for i in range(state.scale.numel())]
        try:
            load_columns(columns, saved)
        except ValueError as e:
            rest[-1].append(f"{prefix[:-1]}: {e}")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"te.{type(self._beside[1]).__name__}, {type(self.recipe).__name__}"


def misfits(model: nn.Module, fp8: FP8) -> list[str]:
    """The settings of `model` that FP8 attention does not support, a line each; those of the GPU where there is one to ask."""
    if not fp8.dot_product_attention:
        return []
    if any(getattr(module, "window", None) for module in model.modules()):
        return [
            "fp8.dot_product_attention=true: not with model.sliding_window under backend=te, whose"
            " FP8 attention has windows on new GPUs alone; write backend=native"
        ]
    if not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability()
    sizes = {
        int(module.head_dim)  # type: ignore[arg-type]
        for module in model.modules()
        if hasattr(module, "core_attention")
    }
    return [line for size in sorted(sizes) if (line := attention_misfit(size, capability))]


def convert(model: nn.Module, fp8: FP8, te: Any, recipe: Any) -> None:
    """Replace each `core_attention` that is to run in FP8 by Transformer Engine's."""
    found = [
        name.rpartition(".")[0]
        for name, _ in model.named_modules()
        if name.endswith(".core_attention")
    ]
    for name, planned in zip(found, plan_attention(fp8, len(found)), strict=True):
        if any(planned.gemms):
            replaced(
                model, f"{name}.core_attention", _converted(model.get_submodule(name), te, recipe)
            )


def _converted(attention: Any, te: Any, recipe: Any) -> TEAttention:
    """`attention.core_attention`, the attention of one layer of the model, as Transformer Engine's. Its state is made now, as its
    first pass would make it."""
    heads, scale = (
        attention.num_query_groups * attention.heads_per_group,
        attention.core_attention.scale,
    )
    module = te.DotProductAttention(
        heads,
        attention.head_dim,
        num_gqa_groups=attention.num_query_groups,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
        **({} if scale is None else {"softmax_scale": scale}),
    )
    check(
        module,
        {
            "num_attention_heads": heads,
            "hidden_size_per_attention_head_k": attention.head_dim,
            "num_gqa_groups": attention.num_query_groups,
            "qkv_format": "bshd",
            "attn_mask_type": "causal",
            "unfused_attention.attention_dropout.p": 0.0,
        },
    )
    with torch.no_grad(), entered(te, True, recipe):  # no gradients: leaving it moves no scales
        module.init_fp8_metadata(num_gemms=PRODUCTS)
    return TEAttention(attention.core_attention, module, recipe)


def _kinds(module: Any, first: str, second: str) -> Kinds:
    kinds = [
        str(module.quantizers[f"scaling_{side}"][0].dtype.name)[-4:].lower()
        for side in (first, second)
    ]
    return kinds[0], kinds[1]


def _note(ran: dict[str, Kinds], kinds: Kinds, gradient: Tensor) -> None:
    ran.update(dict.fromkeys(ATTENTION_GEMMS[2:], kinds))
