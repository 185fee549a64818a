"""Training-loop interface of the low-bit optimizers: loss scale, clipping and skipped steps, on gradients of any codec.

    backward   p.grad, or stored in its codec soon after it is there; multiplied by the loss scale
    step       unscale -> norm, finite? -> clip -> Adam on what is stored -> hooks -> weights in FP8 from their masters

Gradients are unscaled and clipped as the step reads them, in float32. A stored one that holds an infinity or NaN has a scale that
is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.optim.deferred_step import taken
from fp8cfg.optim.loss_scale import LossScaler
from fp8cfg.optim.low_bit.gradients import norms
from fp8cfg.optim.low_bit.optimizer import LowBitAdam, LowBitAdamW, LowBitOptimizer


class LowBitTraining(LowBitOptimizer):
    """What `MixedPrecisionOptimizer` is to a float32 optimizer, and with the same attributes: after a step `grad_norm` is the
    norm before clipping (float32, unscaled), `steps` counts those that were not skipped, `clip_grad` of 0 clips nothing,
    `adds_stored` stores the gradients of every backward pass, added to those before.

    `on_step` is called after the update and before weights in FP8 are written, `on_skip` where gradients were not finite.

    Where state is sharded, `on_written` is called once weights are written, to hand them round; `sum_norms` adds up the
    norms of all gradients over the ranks where each has those of its own alone, an empty gradient standing for the others.
    """

    def __init__(
        self,
        *args: Any,
        loss_scaler: LossScaler | None = None,
        clip_grad: float = 0.0,
        adds_stored: bool = False,
        **options: Any,
    ) -> None:
        self.loss_scaler, self.clip_grad = loss_scaler, clip_grad
        self.grad_norm, self.steps, self._made = 0.0, 0, False
        self.on_step: list[Callable[[], None]] = []
        self.on_skip: list[Callable[[], None]] = []
        self.on_written: list[Callable[[], None]] = []
        self.sum_norms: Callable[[Tensor], Tensor] | None = None
        super().__init__(*args, **options)
        if adds_stored:
            self._always = self.storing(add=True)
            self._always.__enter__()

    @torch.no_grad()
    def step(self, closure: None = None) -> bool:  # type: ignore[override]
        """One update; False where it was skipped because gradients are not finite. A skipped step changes the loss scale and
        nothing else. Raises RuntimeError as `LowBitOptimizer.step` does.
        """
        if closure is not None:
            raise TypeError("step takes no closure: the loss may be scaled")
        self._written.check()
        self.store_grads()
        finite = self._prepare_gradients()
        if finite:
            self._update()
            self.steps += 1
        for hook in self.on_step if finite else self.on_skip:
            hook()
        if finite and self._writes():
            self.write_parameters()
        self._written.remember()
        self.gradients.spent = True
        return finite

    def _writes(self) -> bool:
        """Whether weights are written in a step that the host takes for made. What the device skips writes them again as they are,
        once they are those of their masters; until a step was made they are of values that these were rounded from, and the host
        waits where a loss scale lets the run go on."""
        self._made = (
            self._made
            or self.deferred is None
            or self.loss_scaler is None
            or not self.deferred.skip
        )
        return self._made

    @torch.no_grad()
    def write_parameters(self) -> None:
        """As `LowBitOptimizer.write_parameters`, and then `on_written`."""
        super().write_parameters()
        for hook in self.on_written:
            hook()
        self._written.remember()

    @property
    def masters(self) -> dict[nn.Parameter, Tensor]:
        """The float32 values of the masters of parameters that are written from one; made anew."""
        return {
            p: self.columns[p].source.decode(self.state[p]["master"])
            for p in self.writers
            if self.owns(p)
        }

    def state_json(self) -> dict[str, Any]:
        """The rest of the state, for JSON; step counts, loss scale and codecs among it."""
        scale = None if self.loss_scaler is None else self.loss_scaler.state()
        return {**super().state_json(), "steps": self.steps, "loss_scale": scale}

    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """As `LowBitOptimizer.load_state`; raises ValueError also for a loss scale on one side alone."""
        if (json.get("loss_scale") is None) != (self.loss_scaler is None):
            raise ValueError(
                "optimizer state: the loss must be scaled by both the saved run and this one, or by"
                " neither"
            )
        super().load_state(tensors, json)
        self.steps = int(json["steps"])
        if self.loss_scaler is not None:
            self.loss_scaler.load_state(json["loss_scale"])

    def count(self, by: int, stepped: Collection[nn.Parameter]) -> None:
        """Count steps, or less of them, of these parameters."""
        self.steps += by
        for p in stepped:
            self.state[p]["step"] += by

    def _prepare_gradients(self) -> bool:
        """Compute the norm of gradients, unscaled, and the factor that unscales and clips them; whether the step is to be made,
        true where the device is to know it alone."""
        found = [(p, grad) for p in self.columns if (grad := self.gradients.of(p)) is not None]
        here = [(p, grad) for p, grad in found if grad]
        known = dict(
            zip(
                (p for p, _ in here),
                norms([self.columns[p].read for p, _ in here], [g for _, g in here]),
                strict=True,
            )
        )
        each = {
            p: known[p] if p in known else torch.zeros((), dtype=torch.float32, device=p.device)
            for p, _ in found
        }
        total = self.norm_over_ranks(partial(self._norm_of, each))
        factor = taken(self, lambda scaler, _: 1.0 / scaler.scale if scaler else 1.0, torch.float64)
        if self.deferred is not None:
            norm = (total.double() * factor).float()
            self.grad_factor = _clipping(norm.double(), self.clip_grad) * factor
            self.deferred.decide(norm, [p for p, _ in found])
            return True
        norm = (total.cpu().double() * factor).float()
        self.grad_factor, self.grad_norm = (
            (_clipping(norm.double(), self.clip_grad) * factor).item(),
            norm.item(),
        )
        finite = math.isfinite(self.grad_norm)
        if self.loss_scaler is not None:
            self.loss_scaler.update(found_inf=not finite)
        return finite

    def _norm_of(
        self, each: Mapping[nn.Parameter, Tensor], params: Sequence[nn.Parameter]
    ) -> Tensor:
        """The norm of the gradients of `params`, of those that have one, from `each`."""
        norms = [each[p] for p in params if p in each]
        if not norms:
            return torch.zeros((), dtype=torch.float32, device=next(iter(self.columns)).device)
        stacked = torch.stack(norms)
        total: Tensor = torch.linalg.vector_norm(
            self.sum_norms(stacked) if self.sum_norms else stacked
        )
        return total


class LowBitTrainingAdamW(LowBitTraining, LowBitAdamW):
    """LowBitAdamW in a training loop."""


class LowBitTrainingAdam(LowBitTraining, LowBitAdam):
    """LowBitAdam in a training loop."""


def _clipping(norm: Tensor, most: float) -> Tensor:
    """What gradients of that norm, float64 [], are multiplied by so that it is at most `most`; 0 clips nothing."""
    if most <= 0.0:
        return torch.ones_like(norm)
    return torch.where(norm > most, torch.full_like(norm, most) / (norm + 1e-6), 1.0)
