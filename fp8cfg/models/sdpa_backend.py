"""SDPA backend: the kernel of F.scaled_dot_product_attention that torch chooses for each layer: flash, efficient, cudnn or math.

The choice depends on the GPU, on cuDNN, on the dtype, on masks and on shapes, and nothing tells: math keeps a whole matrix of
probabilities and takes several times as long. It is asked of torch's own dispatcher, by the call that the function itself makes,
for tensors of a run's shapes, dtype and layout; each layer's own code makes that call, and decides on mask and grouped queries, and
nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from fp8cfg.models.attention import CoreAttention, SelfAttention
from fp8cfg.models.transformer import TransformerLayer

EXPLICIT = "explicit"
"""Products and a softmax of our own, which a soft cap of scores needs."""


class _Asked(TorchFunctionMode):
    """Asks for the backend of each call of F.scaled_dot_product_attention in place of making it."""

    chosen: str = EXPLICIT

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        (q, k, v), given = args, kwargs or {}
        last = isinstance(given.get("attn_mask"), CausalBias)
        self.chosen = (
            _of_last(q, k, v, given["enable_gqa"])
            if last
            else name(torch._fused_sdp_choice(q, k, v, **given))
        )
        return torch.empty_like(q)


def _of_last(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> str:
    """The backend of queries that are the last of the keys: their CausalBias has no values to ask with, and chooses itself (torch
    2.11 to 2.13, CausalBias._dispatch)."""
    params = SDPAParams(q, k, v, None, 0.0, False, grouped)
    return (
        "flash"
        if can_use_flash_attention(params)
        else "efficient"
        if can_use_efficient_attention(params)
        else "math"
    )


def name(choice: int) -> str:
    """The name of a value of torch's SDPBackend, such as "flash"."""
    known = {
        backend.value: label.lower().removesuffix("_attention")
        for label, backend in SDPBackend.__members__.items()
    }
    return known.get(choice, str(choice))


def sdpa_backends(
    model: nn.Module, batch: int, length: int, dtype: torch.dtype, documents: bool = False
) -> dict[str, str]:
    """By the name of each attention in high precision, the backend for `batch` sequences of `length` tokens, trained in `dtype`;
    `documents` are kept apart by a mask. Of sequences that ranks split, those of all chunks, where they differ by " and ".
    Attention in FP8 or of another library is left out."""
    made: dict[tuple[Any, ...], str] = {}
    found = {}
    for layer, module in model.named_modules():
        # FSDP2 makes a class below ours; a library's own layer keeps our modules and does not call them.
        if (
            not isinstance(module, TransformerLayer)
            or type(module).forward is not TransformerLayer.forward
        ):
            continue
        own = module.self_attention
        core, lengths = _calls(own.core_attention, length)
        if type(core) is CoreAttention:
            kind = (
                own.num_query_groups,
                own.heads_per_group,
                own.head_dim,
                core.scale,
                core.window,
                core.softcap,
            )
            if kind not in made:
                made[kind] = " and ".join(
                    sorted({_chosen(own, core, batch, each, dtype, documents) for each in lengths})
                )
            found[f"{layer}.self_attention.core_attention"] = made[kind]
    return found


def _calls(core: Any, length: int) -> tuple[nn.Module, list[tuple[int, int]]]:
    """`core`, or that inside of an attention over split sequences (parallel/context.py), with queries and keys of its calls."""
    return (
        (core.core, core.lengths(length))
        if hasattr(core, "lengths")
        else (core, [(length, length)])
    )


def _chosen(
    own: SelfAttention,
    core: CoreAttention,
    batch: int,
    lengths: tuple[int, int],
    dtype: torch.dtype,
    documents: bool,
) -> str:
    """The backend of as many queries and keys as `lengths` has."""
    if core.softcap is not None:
        return EXPLICIT
    device, (queries, keys) = own.linear_qkv.weight.device, lengths

    def heads(length: int, count: int) -> Tensor:
        return torch.empty(
            batch, length, count, own.head_dim, dtype=dtype, device=device, requires_grad=True
        ).transpose(1, 2)

    groups = own.num_query_groups
    mask = (torch.empty(batch, 1, queries, keys, dtype=dtype, device=device),) if documents else ()
    with torch.enable_grad(), _Asked() as asked:
        core(
            heads(queries, groups * own.heads_per_group),
            heads(keys, groups),
            heads(keys, groups),
            *mask,
        )
    return str(asked.chosen)
