"""Low-bit AdamW and Adam: weights, masters, gradients and moments stored in fewer than 32 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8cfg.numerics.async_copies import sent
from fp8cfg.numerics.codecs import EncodedTensor
from fp8cfg.numerics.formats import StridedStart, random_key
from fp8cfg.optim.loss_scale import LossScaler
from fp8cfg.optim.low_bit.adam_step import Work, adam_step, amaxes_of_steps
from fp8cfg.optim.low_bit.adam_update import check_hyperparameters, hyper
from fp8cfg.optim.low_bit.columns import FLOAT32, Columns, first_element, local
from fp8cfg.optim.low_bit.gradients import StoredGradients, norms
from fp8cfg.optim.low_bit.state import (
    STORED,
    check_parameter,
    check_state,
    collect_json,
    collect_tensors,
    fresh_state,
    recoded,
    restore,
    slot_of,
)
from fp8cfg.optim.mixed_precision import Named, WriteGuard, named_parameters
from fp8cfg.optim.state_dict import NamedOptimizer


class LowBitOptimizer(NamedOptimizer):
    """Base class of LowBitAdamW and LowBitAdam. `params` are named: `param_groups(model, weight_decay)` or
    `model.named_parameters()`. Each group has its `columns`, the codecs of its parameters.

    A parameter whose dtype is that of an unscaled weight codec is the stored weight; so is the first tensor of what `held`
    gives: the tensors that a weight with a scale is kept in, outside of the optimizer, asked for at each use since a model may
    be moved. Parameters of `writers` have a master, and that function stores its value in them. Any other parameter is a
    working copy of the stored weight, in its own dtype, rewritten by each step. `originals` are values from before the parameters
    were rounded; weights and masters start from them. State is made here: load weights first, build this afterwards.

    Gradients are expected finite; infinities and NaN reach the moments and stay. Under a `grad` codec, `store_grads` moves
    `.grad` into `stored_grads`, and a step does so with what is left; once a step has read them, those of the next backward pass
    take their place. Of the parameters that are not `owned`, by name, no state is kept, and a step leaves them to the rank that
    owns them. A step reads gradients times `grad_factor`. `seed` is that of stochastic rounding. `compiled` runs torch.compile on
    the step: the same bits on a CPU.

    Parameters may be float32 shards that FSDP2 splits, their own masters, or `parts` of tensors, by their places in these, or both
    (shards.py). `largest` is then the elementwise maximum over the ranks that have the others, for scales of whole tensors;
    `whole` are the columns of tensors that are not split.
    """

    decoupled: ClassVar[bool]

    def __init__(
        self,
        params: Named,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        columns: Columns = FLOAT32,
        originals: Mapping[nn.Parameter, Tensor] | None = None,
        held: Mapping[nn.Parameter, Callable[[], EncodedTensor]] | None = None,
        writers: Mapping[nn.Parameter, Callable[[Tensor], None]] | None = None,
        owned: Container[str] | None = None,
        seed: int = 0,
        compiled: bool = False,
    ) -> None:
        self.names: dict[nn.Parameter, str] = {}
        self.columns: dict[nn.Parameter, Columns] = {}
        self.seed, self.compiled = seed, compiled
        self.grad_factor: float | Tensor = 1.0
        self._step_keys: dict[nn.Parameter, Tensor] = {}
        self.gradients = StoredGradients(self.names, self._key)
        self._written = WriteGuard(self.names, "the optimizer had stored their values")
        self.held, self.writers = dict(held or {}), dict(writers or {})
        self._owned = owned
        self.largest: Callable[[Tensor], Tensor] | None = None
        self.parts: Mapping[nn.Parameter, StridedStart] = {}
        self.whole: Collection[Columns] = ()
        self._originals = originals or {}
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "columns": columns,
            },
        )
        self._originals = {}

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add named parameters with their hyperparameters, and make their state. Raises ValueError for hyperparameters out of
        their range, a name that is taken, and parameters that cannot be worked on."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_hyperparameters(group)
        for name, p in named_parameters(group):
            if name in self.names.values():
                raise ValueError(f"two parameters are named {name}, and state is kept by name")
            self._add(name, p, group["columns"])
        self._written.remember()

    def _add(self, name: str, p: nn.Parameter, columns: Columns) -> None:
        check_parameter(name, p, columns, p in self.held or p in self.writers, p in self.writers)
        self.names[p], self.columns[p] = name, columns
        if columns.grad is not None:
            self.gradients.codecs[p] = columns.grad
        held, here = self._held(p), local(p.detach())
        value = self._originals.get(p, columns.weight.decode(held) if held else here)
        state = fresh_state(
            here, columns, value, self._key(p, "start"), () if p in self.writers else held
        )
        codecs = {column: str(getattr(columns, column)) for column in STORED if column in state}
        self.state[p] = {**(state if self.owns(p) else {}), "step": 0, "codecs": codecs}
        if self.state[p].keys() & {"master", "weight"}:
            self._written.watch(p)

    def owns(self, p: nn.Parameter) -> bool:
        """Whether this optimizer keeps the state of `p` and steps it."""
        return self._owned is None or self.names[p] in self._owned

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Raises RuntimeError if someone else has written to a parameter
        whose value is kept elsewhere: the step would silently undo that."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._written.check()
        self.store_grads()
        self._update()
        self.write_parameters()
        self.gradients.spent = True
        return loss

    def _update(self) -> None:
        each = [(group["columns"], self._works(group)) for group in self.param_groups]
        if self.largest is None or not any(columns.per_tensor for columns, _ in each):
            for columns, works in each:
                adam_step(columns, self.decoupled, works, self.compiled)
            return
        known = [
            amaxes_of_steps(c, self.decoupled, works, self.compiled)
            for c, works in each
            if c.per_tensor and works
        ]
        left = iter(self.largest(torch.cat(known)).unbind() if known else ())
        for columns, works in each:
            adam_step(
                columns,
                self.decoupled,
                works,
                self.compiled,
                [next(left) if columns.per_tensor else None for _ in works],
            )

    def _works(self, group: dict[str, Any]) -> list[Work]:
        """The pending steps of the parameters of a group that have a gradient; increments their step counts."""

        @cache
        def factors_of(step: int, device: torch.device) -> Tensor:
            return self._factors(group, step, device)

        works, random = list[Work](), group["columns"].stochastic
        skip = None if self.deferred is None else self.deferred.skip
        for p in group["params"]:
            if (grad := self.gradients.of(p)) is not None:
                state = self.state[p]
                state["step"] += 1
                if self.owns(p):
                    slot = slot_of(local(p), state, grad, self._held(p), p in self.writers)
                    factors = factors_of(state["step"], p.device)
                    key, first = (
                        self._step_key(p) if random else None,
                        first_element(p, self.parts.get(p)),
                    )
                    works.append(Work(slot, factors, key, skip, first))
        return works

    def _factors(self, group: dict[str, Any], step: int, device: torch.device) -> Tensor:
        """The factors of a step on the device, float32 [10]."""
        values = hyper(group, self.decoupled, step, group["lr"])
        if not isinstance(self.grad_factor, Tensor):
            return sent(torch.tensor([*values, self.grad_factor], dtype=torch.float32), device)
        hyperparameters = sent(torch.tensor(values, dtype=torch.float32), device)
        return torch.cat([hyperparameters, self.grad_factor.float().view(1)])

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Store the masters in the parameters of `writers`, as each step does."""
        for p, write in ((p, write) for p, write in self.writers.items() if self.owns(p)):
            write(self.columns[p].source.decode(self.state[p]["master"]))
        self._written.remember()

    @property
    def stored_grads(self) -> dict[nn.Parameter, EncodedTensor]:
        """The gradients that are stored in a codec."""
        return self.gradients.stored

    def store_grads(self) -> None:
        """Move each `.grad` whose columns have a `grad` codec into `stored_grads`. Raises RuntimeError where there already is
        one: gradients are summed first, and rounded once."""
        self.gradients.store_all()

    def storing(self, add: bool = False) -> AbstractContextManager[None]:
        """Context manager for the last backward pass before a step: gradients with a codec are stored as soon as they are
        complete, on a GPU a few together, so that they are never all present at full width. With `add` for every backward pass:
        each gradient is added to the stored one, and the sum is rounded again.
        """
        return self.gradients.storing(add)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, the stored ones too."""
        self.gradients.clear()
        super().zero_grad(set_to_none)

    def state_tensors(self) -> dict[str, Tensor]:
        """The state itself, no copies: `<parameter>.exp_avg`, `<parameter>.exp_avg.scale_inv`, and so on for exp_avg_sq, the
        master, and the weight where the parameter is a working copy of it."""
        return collect_tensors(self.names, self.state)

    def state_json(self) -> dict[str, Any]:
        """The rest of the state, for JSON: class, seed, step counts, codecs. The learning rate is a schedule's."""
        return {"optimizer": type(self).__name__, "seed": self.seed, "state": self._entries()}

    def _entries(self) -> dict[str, Any]:
        found = collect_json(self.names, self.state)
        return {
            name: (
                {**entry, "codecs": {"master": "fp32", **entry["codecs"]}}
                if name in self.masters_of
                else entry
            )
            for name, entry in found.items()
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Restore the results of `state_tensors` and `state_json`, for the parameters owned here. Training then continues with the
        same bits.

        Parameters that are the stored weight are the model's state: load them first. Raises ValueError, before anything is
        changed, for another optimizer, missing and unexpected names, other shapes, dtypes and codecs.
        """
        mine = self.state_tensors()
        elsewhere = {f"{name}." for p, name in self.names.items() if not self.owns(p)}
        tensors = {
            k: t
            for k, t in tensors.items()
            if k in mine or not any(k.startswith(prefix) for prefix in elsewhere)
        }
        if "state" in json:
            columns = {*self.columns.values(), *self.whole}
            tensors, json = recoded(
                self.names, columns, tensors, json, self._entries(), self._key, self.parts
            )
        check_state(tensors, mine, json, self.state_json())
        restore(self.names, self.state, self.columns, tensors, json["state"])
        self.seed = int(json["seed"])
        self._step_keys.clear()
        self._written.remember()

    def _held(self, p: nn.Parameter) -> EncodedTensor | None:
        return self.held[p]() if p in self.held else None

    def _key(self, p: nn.Parameter, what: str) -> Tensor:
        return sent(
            random_key(self.seed, self.names[p], what, self.state[p].get("step", 0)), p.device
        )

    def _step_key(self, p: nn.Parameter) -> Tensor:
        """The key of all steps of a parameter, on its device; that of one is made there."""
        if p not in self._step_keys or self._step_keys[p].device != p.device:
            self._step_keys[p] = sent(random_key(self.seed, self.names[p], "step"), p.device)
        return self._step_keys[p]


class LowBitAdamW(LowBitOptimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    decoupled = True


class LowBitAdam(LowBitOptimizer):
    """Adam with L2 regularization: the decay is part of the gradient, and so of the moments."""

    decoupled = False


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
        factor = 1.0 if self.loss_scaler is None else 1.0 / self.loss_scaler.scale
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
