"""Linear layouts: modules that compute y = x Wᵀ + b as nn.Linear does, with the weight or the features in another order.

| module | weight | features |
| --- | --- | --- |
| Conv1D of transformers (GPT-2 and its descendants) | [in, out] | last |
| nn.Conv1d, nn.Conv2d, nn.Conv3d with kernels of 1 (pointwise convolutions) | [out, in, 1, ...] | channels, before the positions |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LinearLayout:
    """`matrix` has a module's weight as [out, in], `weight` a matrix as the module's weight, both as views. `forward` is what the
    module computes, of itself, a function from x [..., in] to y [..., out], and its input; None where that function is all.
    """

    matrix: Callable[[Tensor], Tensor]
    weight: Callable[[nn.Module, Tensor], Tensor]
    forward: Callable[[nn.Module, Callable[[Tensor], Tensor], Tensor], Tensor] | None = None


def layout_of(module: nn.Module) -> LinearLayout | None:
    """The layout of `module`; None for any that is not exactly of these classes, or does or holds something else."""
    cls = type(module)
    if "forward" in vars(module) or {*module._parameters, *module._buffers, *module._modules} != {
        "weight",
        "bias",
    }:
        return None
    if (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return CONV1D
    return POINTWISE if cls in _CONVOLUTIONS and _pointwise(module) else None


def as_linear(module: nn.Module, layout: LinearLayout) -> nn.Linear:
    """An nn.Linear of the shape and the dtype of `module`, without memory."""
    outputs, inputs = layout.matrix(module.get_parameter("weight").to("meta")).shape
    dtype = module.get_parameter("weight").dtype
    return nn.Linear(
        inputs, outputs, bias=module._parameters["bias"] is not None, device="meta", dtype=dtype
    )


def _pointwise(conv: nn.Module) -> bool:
    """Whether it reads one position for each that it writes: a stride leaves positions out, padding would add some."""
    assert isinstance(conv, _CONVOLUTIONS)
    padded = conv.padding not in ("valid", "same") and any(conv.padding)
    return set(conv.kernel_size) == {1} and conv.groups == 1 and not padded


def _channels_last(conv: nn.Module, linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`x` [batch, in, ...] or [in, ...]; the result has its memory format."""
    assert isinstance(conv, _CONVOLUTIONS)
    at = -len(conv.kernel_size) - 1
    is_last = x.movedim(at, -1).is_contiguous()
    for dim, step in enumerate(conv.stride, at + 1):
        x = x.unfold(dim, 1, step).squeeze(-1) if step > 1 else x
    y = linear(x.movedim(at, -1).contiguous()).movedim(-1, at)
    return y if is_last else y.contiguous()


def _transposed(weight: Tensor) -> Tensor:
    return weight.t() if weight.dim() == 2 else weight


def _transposed_back(conv1d: nn.Module, matrix: Tensor) -> Tensor:
    return matrix.t()


def _flat(weight: Tensor) -> Tensor:
    return weight.flatten(1) if weight.dim() > 2 else weight


def _kernels_of_1(conv: nn.Module, matrix: Tensor) -> Tensor:
    assert isinstance(conv, _CONVOLUTIONS)
    return matrix.reshape(*matrix.shape, *conv.kernel_size)


CONV1D = LinearLayout(_transposed, _transposed_back)
POINTWISE = LinearLayout(_flat, _kernels_of_1, _channels_last)
