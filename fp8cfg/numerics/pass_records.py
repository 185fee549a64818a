"""Pass records: what the forward and the backward pass of a layer note, each in buffers of its own, and what they come to.

A compiler hands a buffer that both passes write from one graph to the other, and copies it on the way: four more launches a layer.
Buffers that one pass alone writes are written where they are. Each has a place for all three products or tensors, so that the two
are put together by their sum or maximum, wherever somebody reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp8cfg.numerics.stored_form import in_stored_form

RAN = ("ran_forward", "ran_backward")
"""int32 [3] each: the records of products (numerics/gemm.py)."""
BACKWARD_AMAX = "fp8_backward_amax"
"""float32 [1, 3]: the running maxima of a backward pass, as row 0 of the amax record has them."""
AMAX = "fp8_amax"
"""float32 [1, 3], of attention [1, 6]: the amax record of a layer without a history, which is there for infinite amaxes. Finite
ones are not all in it: kernels that scale tiles write infinity alone."""


class PassRecords(nn.Module):
    """Base class of a linear layer that records its passes."""

    ran_forward: Tensor
    ran_backward: Tensor
    fp8_amax_history: Tensor | None
    fp8_amax: Tensor | None
    fp8_backward_amax: Tensor

    def record_passes(self, history: bool, device: torch.device) -> None:
        """Register the buffers; `history` where there is one, whose row 0 is the amax record."""
        for name in RAN:
            self.register_buffer(
                name, torch.zeros(3, dtype=torch.int32, device=device), persistent=False
            )
        self.register_buffer(
            AMAX,
            None if history else torch.zeros(1, 3, dtype=torch.float32, device=device),
            persistent=False,
        )
        self.register_buffer(
            BACKWARD_AMAX, torch.zeros(1, 3, dtype=torch.float32, device=device), persistent=False
        )

    @property
    def gemms_ran(self) -> Tensor:
        """int32 [3] for fprop, dgrad and wgrad: what each product last multiplied, see `gemm.decode`. A new tensor."""
        return self.ran_forward + self.ran_backward

    def clear_gemms_ran(self) -> None:
        """Forget which products ran."""
        for name in RAN:
            getattr(self, name).zero_()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if in_stored_form():
            fold_backward([self])
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if prefix + "fp8_amax_history" in state_dict:
            forget_backward([self])


class Recorded(Protocol):
    """A layer with an amax record."""

    fp8_amax_history: Tensor | None
    fp8_amax: Tensor | None


def amax_record(layer: Recorded) -> Tensor:
    """The buffer whose row 0 has the running maximum of each tensor since the last update: the history under delayed scaling."""
    record = layer.fp8_amax if layer.fp8_amax_history is None else layer.fp8_amax_history
    assert record is not None, "a layer has one of the two"
    return record


@torch.no_grad()
def fold_backward(layers: Iterable[PassRecords]) -> None:
    """Fold the amaxes of backward passes into the amax records of `layers`, which then have all; in few launches."""
    pairs = [(amax_record(layer)[0], layer.fp8_backward_amax[0]) for layer in layers]
    if pairs:
        rows, seen = zip(*pairs, strict=True)
        torch._foreach_maximum_(rows, seen)


@torch.no_grad()
def forget_backward(layers: Iterable[PassRecords]) -> None:
    """Begin anew with the amaxes of backward passes."""
    if seen := [layer.fp8_backward_amax for layer in layers]:
        torch._foreach_zero_(seen)
