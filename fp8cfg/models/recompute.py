"""Selective activation recomputation: what lies between a layer's products is not kept, and computed again in the backward pass.

Megatron's `recompute_granularity=selective` (arXiv 2205.05198, section 5) with its recompute_modules core_attn and layernorm, and
the activation function, which Megatron repeats in experts alone (moe_act): cheap parts of a layer whose outputs take much memory.
The layer behind such a part keeps that output too, as its input; it is discarded there, and made again when that layer's backward
pass asks for it (Megatron's CheckpointWithoutOutput), once for both. Products themselves are not repeated. FP8 layers quantize an input that
was made again with the same scale, and count it once. Every number is that of a run without recomputation.

Without recomputation norms and activation functions are `recomputed` too, as fused kernels do, and nothing is `discarded`.

In compiled code a layer is a checkpoint that keeps outputs of products (torch's selective activation checkpointing), of which the
compiler makes as few repeated operations as it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Function = Callable[..., Tensor]


def recomputed(function: Function, owner: nn.Module | None, *inputs: Tensor) -> Tensor:
    """`function(*inputs)`, of which nothing but the inputs is kept for the backward pass, where it is called again. `owner` has the
    parameters that it reads, None if it reads none. It must draw no random numbers, and give the same again.
    """
    parameters = [] if owner is None else list(owner.parameters())
    needed = any(t.requires_grad for t in (*inputs, *parameters))
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and needed):
        return function(*inputs)
    made: Tensor = _Recomputed.apply(function, owner, len(inputs), *inputs, *parameters)
    return made


def discarded(
    y: Tensor, through: Function | None = None, read: Tensor | None = None
) -> AbstractContextManager[Any]:
    """A context in which `y`, made by `recomputed`, is not kept by what reads it; another tensor is kept as ever. With `through`
    it is `read` that is not kept, through(y)."""
    if torch.compiler.is_compiling() or not isinstance(node := y.grad_fn, _NODE):
        return nullcontext()
    read = y if read is None else read
    storage, kind, dtype = read.untyped_storage()._cdata, type(read), read.dtype

    def pack(t: Tensor) -> Any:
        if type(t) is kind and t.dtype == dtype and t.untyped_storage()._cdata == storage:
            return _Discarded(node, through, t.shape, t.stride(), t.storage_offset())
        return t

    return saved_tensors_hooks(
        pack, lambda kept: kept.again() if isinstance(kept, _Discarded) else kept
    )


@dataclass(frozen=True)
class _Discarded:
    """A view of an output that was discarded, or of what was made `through` a function of it."""

    node: Any
    through: Function | None
    shape: Sequence[int]
    stride: Sequence[int]
    offset: Any

    @torch.no_grad()
    def again(self) -> Tensor:
        """The view of what is made again, and kept until the backward pass has gone through the output."""
        whole = _outputs(self.node).detach()
        if self.through is not None:
            whole = self.node.read = (
                self.through(whole) if self.node.read is None else self.node.read
            )
        return whole.as_strided(self.shape, self.stride, self.offset)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Function, owner: nn.Module | None, count: int, *tensors: Tensor
    ) -> Tensor:
        ctx.function, ctx.owner, ctx.graph, ctx.read = function, owner, None, None
        ctx.save_for_backward(*tensors[:count])
        ctx.autocast = _autocast(tensors[0].device.type)
        return function(*tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        output = _outputs(ctx)
        wanted = [t for t in ctx.graph[0] if t.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        gradients = [next(found) if t.requires_grad else None for t in ctx.graph[0]]
        ctx.graph = ctx.read = None
        return None, None, None, *gradients


_NODE: Any = _Recomputed._backward_cls  # the type of the node that `apply` leaves in the graph


def _outputs(node: Any) -> Tensor:
    """The output of `node`, made again with a graph of its own, once until the backward pass has gone through that. Parameters are
    those of the module as it is then: FSDP2 changes them between gathered and sharded ones."""
    if node.graph is None:
        needs = node.needs_input_grad[3:]
        inputs = [
            t.detach().requires_grad_(n) for t, n in zip(node.saved_tensors, needs, strict=False)
        ]
        parameters = [] if node.owner is None else list(node.owner.parameters())
        with torch.enable_grad(), node.autocast():
            node.graph = [*inputs, *parameters], node.function(*inputs)
    output: Tensor = node.graph[1]
    return output


def _autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """What makes torch's autocast as it is now."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled, cache_enabled=False)


_OPS = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _OPS.mm.default,
        _OPS.addmm.default,
        _OPS.bmm.default,
        _OPS.baddbmm.default,
        _OPS._scaled_mm.default,
        _OPS._scaled_dot_product_flash_attention.default,
        _OPS._scaled_dot_product_efficient_attention.default,
        _OPS._scaled_dot_product_cudnn_attention.default,
        _OPS._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""What compiled code does not repeat, beside the operators of fp8cfg itself: products, and quantizations, which note amaxes."""


def keep_products() -> Any:
    """The `context_fn` of torch's checkpoint for a layer in compiled code, which keeps outputs of products."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _PRODUCTS or getattr(op, "namespace", "") == "fp8cfg"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
