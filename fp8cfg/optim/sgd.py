"""SGD as torch's, by its fused kernel alone, which decides on the device whether a step is made (`found_inf`).

torch has no fused step of SGD for tensors that are split over ranks (DTensor, 2.13): each rank steps its part. And its kernel
leaves the first momentum as it was allocated where the first step is skipped; here it is 0 before, of which momentum makes the
gradient, as torch's first step does without dampening.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fp8cfg.optim.low_bit.shards import local


class SGD(torch.optim.SGD):
    """torch.optim.SGD(fused=True) with a momentum that is there before the first step, for DTensors too. Takes no dampening."""

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients; none where the attribute `found_inf`, float32 [], is 1."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            momenta = [self._momentum(p) for p in params] if group["momentum"] else []
            sgd(
                [local(p) for p in params],
                [local(p.grad) for p in params],
                [local(m) for m in momenta],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                fused=True,
                found_inf=getattr(self, "found_inf", None),
            )

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        made: Tensor = state["momentum_buffer"]
        return made
