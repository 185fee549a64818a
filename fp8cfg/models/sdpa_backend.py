"""SDPA backend: which kernel torch chooses for a layer's F.scaled_dot_product_attention.

The kernels are flash, efficient, cudnn and math. torch chooses by GPU, cuDNN version, dtype, mask
and shapes, and does not report its choice. A silent "math" stores the full matrix of probabilities
and is several times slower.

`sdpa_backends` asks torch's dispatcher. It runs each layer's attention on tensors with the shapes,
dtype and layout of the run, and replaces the call of F.scaled_dot_product_attention by a query. So
the layer's code decides on masks and grouped queries, and nothing is computed.
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
"""Matrix products and a softmax without a fused kernel. A soft cap of scores needs them."""


def sdpa_backends(
    model: nn.Module, batch: int, length: int, dtype: torch.dtype, documents: bool = False
) -> dict[str, str]:
    """Returns the backend of each attention in high precision.

    Attention in FP8 or of another library is left out.

    Args:
        model: A Transformer.
        batch: Sequences in a microbatch.
        length: Tokens of a sequence.
        dtype: The compute dtype.
        documents: Whether a mask separates documents.

    Returns:
        Backend by the attention's name. Under context parallelism the chunks of a sequence can have
        different backends, which are joined by " and ".
    """
    # Layers with the same shapes are queried once.
    backends_by_shape: dict[tuple[Any, ...], str] = {}
    backends = {}
    for name, layer in model.named_modules():
        # isinstance: FSDP2 subclasses our layer. A library's layer, such as te.TransformerLayer,
        # keeps our modules as children, but does not call them.
        if not isinstance(layer, TransformerLayer):
            continue
        if type(layer).forward is not TransformerLayer.forward:
            continue
        attention = layer.self_attention
        core, lengths = _core_calls(attention.core_attention, length)
        if type(core) is not CoreAttention:
            continue
        shape = (
            attention.num_query_groups,
            attention.heads_per_group,
            attention.head_dim,
            core.scale,
            core.window,
            core.softcap,
        )
        if shape not in backends_by_shape:
            names = set()
            for num_queries, num_keys in lengths:
                names.add(
                    _query_backend(attention, core, batch, num_queries, num_keys, dtype, documents)
                )
            backends_by_shape[shape] = " and ".join(sorted(names))
        backends[f"{name}.self_attention.core_attention"] = backends_by_shape[shape]
    return backends


def backend_name(choice: int) -> str:
    """Returns the name of a value of torch's SDPBackend, such as "flash"."""
    for label, backend in SDPBackend.__members__.items():
        if backend.value == choice:
            return label.lower().removesuffix("_attention")
    return str(choice)


def _core_calls(core: Any, length: int) -> tuple[nn.Module, list[tuple[int, int]]]:
    """Returns the CoreAttention that runs, and the numbers of queries and keys of its calls."""
    # Attention of context parallelism (parallel/context.py) wraps it and calls it for each chunk.
    if hasattr(core, "lengths"):
        return core.core, core.lengths(length)
    return core, [(length, length)]


def _query_backend(
    attention: SelfAttention,
    core: CoreAttention,
    batch: int,
    num_queries: int,
    num_keys: int,
    dtype: torch.dtype,
    documents: bool,
) -> str:
    if core.softcap is not None:
        return EXPLICIT
    device = attention.linear_qkv.weight.device

    def empty_heads(length: int, num_heads: int) -> Tensor:
        # Allocated as [B, T, heads, head_dim], because kernels also check strides.
        shape = (batch, length, num_heads, attention.head_dim)
        heads = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
        return heads.transpose(1, 2)

    num_groups = attention.num_query_groups
    q = empty_heads(num_queries, num_groups * attention.heads_per_group)
    k = empty_heads(num_keys, num_groups)
    v = empty_heads(num_keys, num_groups)
    mask = None
    if documents:
        mask = torch.empty(batch, 1, num_queries, num_keys, dtype=dtype, device=device)
    with torch.enable_grad(), _BackendQuery() as query:
        core(q, k, v, mask)
    return str(query.chosen)


class _BackendQuery(TorchFunctionMode):
    """Replaces F.scaled_dot_product_attention by a query for its backend, kept in `chosen`."""

    chosen: str = EXPLICIT

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = args
        if isinstance(kwargs.get("attn_mask"), CausalBias):
            self.chosen = _causal_bias_backend(q, k, v, kwargs["enable_gqa"])
        else:
            self.chosen = backend_name(torch._fused_sdp_choice(q, k, v, **kwargs))
        return torch.empty_like(q)


def _causal_bias_backend(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> str:
    """Returns the backend of a call with a CausalBias."""
    # A CausalBias has no values to query with. It chooses by itself: CausalBias._dispatch in torch
    # 2.11 to 2.13.
    params = SDPAParams(q, k, v, None, 0.0, False, enable_gqa)
    if can_use_flash_attention(params):
        return "flash"
    if can_use_efficient_attention(params):
        return "efficient"
    return "math"
