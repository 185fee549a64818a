"""Selective activation recomputation: outputs between the GEMMs of a layer are not saved.

This is Megatron's recompute_granularity=selective (arXiv 2205.05198, section 5) for the modules
core_attn and layernorm, and for the activation function, which Megatron recomputes in experts only
(moe_act). These parts are cheap, and their outputs take much memory.

Autograd would save such an output twice: for its operation and as the input of the next layer.
`recompute_in_backward` prevents the first. `discard_output` prevents the second: the next layer
saves a placeholder, and its backward pass computes the output again, once for both (Megatron's
CheckpointWithoutOutput). GEMMs are never repeated. FP8 layers quantize a recomputed input with the
same scale and record its amax once. All values are those of a run without recomputation.

Norms and activation functions use `recompute_in_backward` without recompute_granularity too, as
fused kernels do. Only `discard_output` is specific to "selective".

In compiled code a layer is a checkpoint of torch, with the outputs of GEMMs saved (selective
activation checkpointing). The compiler decides about the rest.
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


def recompute_in_backward(function: Function, owner: nn.Module | None, *inputs: Tensor) -> Tensor:
    """Calls `function(*inputs)`, saves only the inputs, and calls it again in the backward pass.

    Args:
        function: It must be deterministic and draw no random numbers.
        owner: The module with the parameters that `function` reads. None if it reads none.
        *inputs: Its arguments.

    Returns:
        The output of `function`.
    """
    parameters = [] if owner is None else list(owner.parameters())
    needs_grad = any(tensor.requires_grad for tensor in (*inputs, *parameters))
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not needs_grad:
        return function(*inputs)
    output: Tensor = _Recompute.apply(function, owner, len(inputs), *inputs, *parameters)
    return output


def discard_output(
    output: Tensor, transform: Function | None = None, transformed: Tensor | None = None
) -> AbstractContextManager[Any]:
    """Returns a context in which operations do not save `output` for the backward pass.

    They save a placeholder to recompute it. Other tensors are saved as usual. If `output` is not
    from `recompute_in_backward`, the context does nothing.

    Args:
        output: An output of `recompute_in_backward`.
        transform: A function of `output`, such as an all-gather.
        transformed: transform(output). With `transform` this tensor is not saved, instead of
            `output`.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    node: Any = output.grad_fn
    if not isinstance(node, _NODE):
        return nullcontext()
    discarded = output if transformed is None else transformed
    storage = discarded.untyped_storage()._cdata
    tensor_type, dtype = type(discarded), discarded.dtype

    def pack(tensor: Tensor) -> Any:
        # Layers save views of their input, so compare the storage.
        has_same_type = type(tensor) is tensor_type and tensor.dtype == dtype
        if has_same_type and tensor.untyped_storage()._cdata == storage:
            view = tensor.shape, tensor.stride(), tensor.storage_offset()
            return _DiscardedView(node, transform, *view)
        return tensor

    def unpack(saved: Any) -> Any:
        if isinstance(saved, _DiscardedView):
            return saved.restore()
        return saved

    return saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class _DiscardedView:
    """A view of a discarded tensor: the output of `node`, or `transform` of it."""

    node: Any
    transform: Function | None
    shape: Sequence[int]
    stride: Sequence[int]
    offset: Any

    @torch.no_grad()
    def restore(self) -> Tensor:
        """Recomputes the tensor. The node keeps it until its own backward pass is done."""
        tensor = _recompute_output(self.node).detach()
        if self.transform is not None:
            if self.node.transformed is None:
                self.node.transformed = self.transform(tensor)
            tensor = self.node.transformed
        return tensor.as_strided(self.shape, self.stride, self.offset)


class _Recompute(torch.autograd.Function):
    """Autograd function of `recompute_in_backward`.

    Attributes of the context:
        graph: After recomputation, the inputs and parameters, and the output. None before it.
        transformed: After recomputation, the transformed output of `_DiscardedView`, if any.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Function, owner: nn.Module | None, num_inputs: int, *tensors: Tensor
    ) -> Tensor:
        # `tensors` are the inputs and then the parameters: autograd returns gradients for these.
        inputs = tensors[:num_inputs]
        ctx.function = function
        ctx.owner = owner
        ctx.graph = None
        ctx.transformed = None
        ctx.save_for_backward(*inputs)
        ctx.autocast = _current_autocast(inputs[0].device.type)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        output = _recompute_output(ctx)
        tensors = ctx.graph[0]
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        # allow_unused: the function may ignore an input.
        computed = torch.autograd.grad(output, differentiable, grad_output, allow_unused=True)
        remaining = iter(computed)
        gradients: list[Tensor | None] = []
        for tensor in tensors:
            gradients.append(next(remaining) if tensor.requires_grad else None)
        ctx.graph = None
        ctx.transformed = None
        return None, None, None, *gradients


_NODE: Any = _Recompute._backward_cls  # the class of `grad_fn` of its outputs


def _recompute_output(node: Any) -> Tensor:
    """Returns the output of a `_Recompute` node, with a new graph.

    The node caches it until its backward pass, so the function runs once.
    """
    if node.graph is None:
        needs_grad = node.needs_input_grad[3:]
        # Not strict: `needs_grad` also has the parameters.
        inputs = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(node.saved_tensors, needs_grad, strict=False)
        ]
        # The module's current parameters: FSDP2 replaces sharded with gathered ones.
        parameters = [] if node.owner is None else list(node.owner.parameters())
        with torch.enable_grad(), node.autocast():
            output = node.function(*inputs)
        node.graph = [*inputs, *parameters], output
    cached: Tensor = node.graph[1]
    return cached


def _current_autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a function that makes a torch.autocast context with the current settings."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled, cache_enabled=False)


_ATEN = torch.ops.aten
_GEMMS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._scaled_mm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def keep_gemm_outputs() -> Any:
    """Returns the contexts of torch's checkpoint (`context_fn`) for a layer in compiled code."""
    return create_selective_checkpoint_contexts(_checkpoint_policy)


def _checkpoint_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Operators of fp8cfg quantize. A second call would record the amax twice.
    is_quantization = getattr(op, "namespace", "") == "fp8cfg"
    if op in _GEMMS or is_quantization:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
