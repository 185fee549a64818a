"""Weight workspace: the quantized weight of a layer, in both layouts, kept from the first pass of an optimizer step to its last.

Microbatches of a step, and passes that are computed again, read the same weight under the same scale: what the first one made of it
is what each of them would make, and the amax that it recorded is theirs. So it is made once, as Transformer Engine's weight
workspace is under `is_first_microbatch` (pytorch/module/base.py, get_weight_workspace). Of a weight that is stored or gathered in
float8 the transpose alone is kept, which dgrad reads, where `keeps_transpose` says so.

In `fit` it is there inside of `weights_kept` alone, which holds the passes of one step: neither a step nor an evaluation nor code
between steps ever reads it, and scales do not move in it. A weight that is another one, or was written to (torch's count of writes),
is quantized again. In compiled code, which cannot count, it is made before the code runs (`FP8Linear.quantize_kept`).

In a user's training loop `fp8.step()` ends it (`end_loop_step`). Fused optimizers and writes to `weight.data` are not counted, so a
layer keeps its weight there only
    after a first `fp8.step()`, which shows that the loop calls it,
    if the step before had several microbatches,
    and while `.grad` is there to be added to, as between microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from fp8cfg.numerics.gemm import DGRAD, FPROP, Operand
from fp8cfg.numerics.scaling import WEIGHT

if TYPE_CHECKING:
    from fp8cfg.numerics.fp8_linear import Plan, State

NOTHING: tuple[None, ...] = (None,) * 6
"""The tensors of two operands that are not kept."""


class Quantized(NamedTuple):
    """A quantized weight as the operand of fprop and of dgrad; None for a product in high precision, for fprop of a weight that is
    stored or gathered in float8, and where no dgrad was asked for."""

    fprop: Operand | None
    dgrad: Operand | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What products read, to be given to an autograd function: of each operand those that `Operand.from_tensors` takes."""
        return tuple(t for operand in self for t in (operand.tensors if operand else (None,) * 3))

    @property
    def kinds(self) -> tuple[Any, Any]:
        """The format and tile of each operand, which `Operand.from_tensors` takes beside its tensors."""
        return self.fprop and (self.fprop.fmt, self.fprop.tile), self.dgrad and (
            self.dgrad.fmt,
            self.dgrad.tile,
        )


class Source(NamedTuple):
    """What a quantized weight was made of, and for: the weight, which stays here so that no other gets its address, torch's count
    of writes to it, the address, the carrier of emulated operands, which products are in high precision, and whether dgrad reads
    it too."""

    weight: Tensor
    version: int
    address: int
    carrier: torch.dtype | None
    high_precision: tuple[bool, bool, bool]
    dgrad: bool

    def serves(self, other: Source) -> bool:
        """Whether what was made of this is what would be made of `other`."""
        return self[1:5] == other[1:5] and self.dgrad >= other.dgrad


class WeightWorkspace(nn.Module):
    """Base class of a linear layer that can keep its quantized weight."""

    keeps_weight = keeps_transpose = False
    in_loop = False
    """Whether the passes are those of a user's loop, whose steps `end_loop_step` ends."""
    loop_passes = 0
    """Forward passes in training since the last `end_loop_step`."""
    quantized_weight: Quantized | None = None
    _quantized_of: Source | None = None

    def keep_weight(self, on: bool) -> None:
        """Whether the weight that the next pass quantizes is kept for those that follow; what was kept is let go either way."""
        self.keeps_weight, self.quantized_weight, self._quantized_of = on, None, None

    def end_loop_step(self) -> None:
        """Drops the quantized weight after an optimizer step of a user's loop."""
        is_sharded = hasattr(
            self._parameters["weight"], "placements"
        )  # FSDP2 frees it between passes
        self.keep_weight(on=self.loop_passes > 1 and not is_sharded)
        self.loop_passes = 0

    def _loop_can_reuse(self, plan: Plan) -> bool:
        """Whether this pass of a user's loop may read the weight that an earlier one quantized; it is counted."""
        if not plan.record:
            return False
        if torch._C._current_graph_task_id() == -1:  # not a recomputation in a backward pass
            self.loop_passes += 1
        weight = self._parameters["weight"]
        return weight is not None and (weight.grad is not None or not weight.requires_grad)

    def kept_weight(self, w: Tensor, plan: Plan, state: State, dgrad: bool) -> Quantized | None:
        """The weight `w` as products of a pass read it, where one is kept; made where there is none yet, and this pass records
        amaxes. `dgrad` says whether its backward pass multiplies by the weight. Nothing is kept of a weight in a codec.
        """
        stored = state.stored
        if stored is not None and (plan.codec is not None or not self.keeps_transpose):
            return None
        if torch.compiler.is_compiling():
            of = self._quantized_of if self.keeps_weight and not self.in_loop else None
            there = (
                of is not None
                and of.carrier == plan.carrier
                and of.high_precision == plan.high_precision
            )
            return self.quantized_weight if there else None
        reuses = not self.in_loop or self._loop_can_reuse(plan)
        if not self.keeps_weight:
            return None
        read = w if stored is None else stored
        source = Source(
            read, read._version, read.data_ptr(), plan.carrier, plan.high_precision, dgrad
        )
        if reuses and self._quantized_of is not None and self._quantized_of.serves(source):
            return self.quantized_weight
        slots = [
            slot
            for slot, wanted in ((FPROP, stored is None), (DGRAD, dgrad))
            if wanted and not plan.high_precision[slot]
        ]
        if not slots or not plan.record or _counted_off():
            return None
        with torch.no_grad():
            made = plan.operands(WEIGHT, slots, lambda *how: plan.weight(w.detach(), state, *how))
            if stored is not None:  # read by stride until now
                made = {
                    slot: operand._replace(data=operand.data.contiguous())
                    for slot, operand in made.items()
                }
        self.quantized_weight, self._quantized_of = (
            Quantized(made.get(FPROP), _aliased(made.get(DGRAD))),
            source,
        )
        return self.quantized_weight

    @property
    def kept_bytes(self) -> int:
        """The bytes of the weight that is kept."""
        kept = self.quantized_weight.tensors if self.quantized_weight else ()
        return sum(
            {
                s.data_ptr(): s.nbytes()
                for s in (t.untyped_storage() for t in kept if t is not None)
            }.values()
        )

    def __getstate__(self) -> dict[str, Any]:
        kept = ("keeps_weight", "quantized_weight", "_quantized_of")
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name not in kept}


def _counted_off() -> bool:
    """Whether a selective checkpoint counts the operations of this pass off against those of another one, which would be fewer."""
    modes = _get_current_dispatch_mode_stack()
    return any(
        isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode) for mode in modes
    )


def _aliased(operand: Operand | None) -> Operand | None:
    """`operand` with tensors of its own over the same memory: Dynamo takes no tensor twice as an input of an autograd function."""
    return operand and Operand.from_tensors(
        [t if t is None else t.detach() for t in operand.tensors], (operand.fmt, operand.tile)
    )


@contextmanager
def weights_kept(model: nn.Module, on: bool = True) -> Iterator[None]:
    """A context of the passes of one optimizer step, in which each weight of `model` is quantized once, where `on` says so. Nobody
    writes to weights in it, other than by torch's operations on the Parameter itself."""
    layers = (
        [module for module in model.modules() if isinstance(module, WeightWorkspace)] if on else []
    )
    for layer in layers:
        layer.keep_weight(on=True)
    try:
        yield
    finally:
        for layer in layers:
            layer.keep_weight(on=False)
