"""Recording of torchao's matrix products: base class of its layers, with an autocast region and the operands of every product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fp8cfg.backends.gemm_plan import HIGH_PRECISION, Kinds
from fp8cfg.numerics import Region
from fp8cfg.numerics.decoded_weight import operand

KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_PAIRS: list[Kinds] = [
    None,
    HIGH_PRECISION,
    *((a, b) for a in KINDS.values() for b in KINDS.values()),
]


def decode(code: int) -> Kinds:
    """The kinds of one entry of `WatchedLinear.gemms_ran`."""
    return _PAIRS[code]


class _Products(TorchFunctionMode):
    """Torch function mode that records the operands of each `torch.mm` in the library's code."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Kinds] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.mm:
            a, b = (KINDS.get(_data(t).dtype) for t in args)
            self.seen.append((a, b) if a and b else HIGH_PRECISION)
        return func(*args, **(kwargs or {}))

    def record(self, ran: Tensor, first: int) -> None:
        """Write the operands seen to `ran`, from slot `first` on: an operation on a tensor, so that a compiled graph has it."""
        for slot, kinds in enumerate(self.seen, first):
            ran[slot].fill_(_PAIRS.index(kinds))


def _data(t: Tensor) -> Tensor:
    """The eight-bit tensor inside of torchao's Float8TrainingTensor and MXTensor."""
    for name in ("_data", "qdata"):
        if isinstance(inner := getattr(t, name, None), Tensor):
            return inner
    return t


class _Unpacked:
    """The context of a backward pass, its saved tensors unpacked: that may run a forward pass again, which is not to be seen."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def watched(function: type[torch.autograd.Function]) -> Any:
    """`function`, of the library, with the record of a layer for one more argument before its own. Its forward pass makes fprop,
    its backward pass dgrad and then wgrad."""

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, ran: Tensor, *arguments: Any) -> Any:
            ctx.ran = ran
            with _Products() as products:
                y = function.forward(ctx, *arguments)
            products.record(ran, 0)
            return y

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            unpacked = _Unpacked(ctx)
            with _Products() as products:
                inputs = function.backward(unpacked, *gradients)
            products.record(ctx.ran, 1)
            return None, *inputs

    return torch._dynamo.allow_in_graph(Watched)


class WatchedLinear(nn.Linear):
    """Base class of a torchao layer: in FP8 while its region is active, an nn.Linear otherwise. `gemms_ran`, int32 [3], holds the
    operand kinds of the last fprop, dgrad and wgrad, evaluations in high precision apart: see `decode`.
    """

    region: Region
    gemms_ran: Tensor
    _parameters: dict[str, nn.Parameter]  # type: ignore[assignment]

    def watch(self, region: Region) -> None:
        """Attach the region and the record to the layer."""
        self.region = region
        self.register_buffer(
            "gemms_ran",
            torch.zeros(3, dtype=torch.int32, device=self.weight.device),
            persistent=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.region.applies():
            if torch.is_grad_enabled() and self.training:
                for slot, runs in enumerate(
                    (True, x.requires_grad, self._parameters["weight"].requires_grad)
                ):
                    if runs:
                        self.gemms_ran[slot].fill_(_PAIRS.index(HIGH_PRECISION))
            return F.linear(x, self.high_precision_weight, self.bias)
        device = x.device.type
        if torch.is_autocast_enabled(device):  # torchao asks about CUDA alone
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            y = self.multiply(x)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def high_precision_weight(self) -> Tensor:
        """The weight that is used outside of the region."""
        return operand(self)

    def multiply(self, x: Tensor) -> Tensor:
        """The library's product x [..., in] Wᵀ, recorded."""
        raise NotImplementedError
