"""Low-bit AdamW and Adam: weights, masters, gradients and moments in fewer than 32 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8cfg.numerics.async_copies import copy_to_device
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
    """Base class of LowBitAdamW and LowBitAdam.

    A parameter is one of these:

    - The stored weight, if its dtype is the dtype of an unscaled weight codec.
    - The data of a stored weight with a scale (`held`).
    - Written from a master by a function (`writers`).
    - Otherwise a working copy of the stored weight in its own dtype. Each step writes it.

    The constructor creates the state, so load weights first. Gradients must be finite: infinities
    and NaN would stay in the moments. Parameters may be shards of FSDP2 or tensor parallelism
    (columns.py).

    Args:
        params: Named parameters: `param_groups(model, weight_decay)` or `model.named_parameters()`.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        columns: Codecs of the parameters. A group may have other ones.
        originals: Values from before rounding, for the first weights and masters.
        held: Functions to get the tensors of weights with a scale. They are called at each use,
            because a model may move to another device.
        writers: Functions to store a master into the parameter.
        owned: ZeRO: names of this rank's parameters. Other ranks keep the state of the rest.
        seed: Seed of stochastic rounding.
        compiled: Whether to compile the step on a CPU too. The bits stay the same there.

    Attributes:
        grad_factor: Factor of the gradients in a step.
        largest: Elementwise maximum over the ranks with shards of a tensor, for per-tensor scales.
        parts: Positions of this rank's parameters in tensors split by tensor parallelism.
        whole: Columns of the full tensors.
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
        # Frees the original weights, which only the first state needs.
        self._originals = {}

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds named parameters with their hyperparameters, and creates their state.

        Raises:
            ValueError: A hyperparameter is out of range, a name is taken, or a parameter is not
                supported.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_hyperparameters(group)
        for name, p in named_parameters(group):
            if name in self.names.values():
                raise ValueError(f"two parameters are named {name}, and state is kept by name")
            self._add(name, p, group["columns"])
        self._written.remember()

    def _add(self, name: str, p: nn.Parameter, columns: Columns) -> None:
        """Creates the state of one parameter."""
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
        # A write to such a parameter by other code would be lost in the next step.
        if self.state[p].keys() & {"master", "weight"}:
            self._written.watch(p)

    def owns(self, p: nn.Parameter) -> bool:
        """Whether this rank keeps the state of `p` and steps it."""
        return self._owned is None or self.names[p] in self._owned

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter with a gradient.

        Gradients with a codec are stored first. After the step, new gradients replace them.

        Raises:
            RuntimeError: Other code wrote to a parameter whose value is stored elsewhere.
        """
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
        """Steps all groups. On shards it finds the amaxes of full tensors first."""
        each = [(group["columns"], self._works(group)) for group in self.param_groups]
        if self.largest is None or not any(columns.per_tensor for columns, _ in each):
            for columns, works in each:
                adam_step(columns, self.decoupled, works, self.compiled)
            return
        # One collective for all groups: `largest` reduces their amaxes together.
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
        """Returns the tensors to step in a group, and increments the step counts.

        Parameters of other ranks are counted too.
        """

        @cache
        def factors_of(step: int, device: torch.device) -> Tensor:
            return self._factors(group, step, device)

        works, random = list[Work](), group["columns"].stochastic
        skip = None if self.deferred is None else self.deferred.skip
        for p in group["params"]:
            if (grad := self.gradients.of(p)) is not None:
                state = self.state[p]
                # Parameters of other ranks count too, so that all ranks save the same JSON.
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
        """Returns the factors of a step on the device, float32 [10]."""
        values = hyper(group, self.decoupled, step, group["lr"])
        # A deferred step has its factor on the device. Otherwise all ten numbers are sent together.
        if not isinstance(self.grad_factor, Tensor):
            return copy_to_device(
                torch.tensor([*values, self.grad_factor], dtype=torch.float32), device
            )
        hyperparameters = copy_to_device(torch.tensor(values, dtype=torch.float32), device)
        return torch.cat([hyperparameters, self.grad_factor.float().view(1)])

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Stores the masters into the parameters of `writers`, as each step does."""
        for p, write in ((p, write) for p, write in self.writers.items() if self.owns(p)):
            write(self.columns[p].source.decode(self.state[p]["master"]))
        self._written.remember()

    @property
    def stored_grads(self) -> dict[nn.Parameter, EncodedTensor]:
        """The gradients that are stored in a codec, by parameter."""
        return self.gradients.stored

    def store_grads(self) -> None:
        """Stores each `.grad` whose columns have a codec for gradients.

        Raises:
            RuntimeError: A gradient is stored already. Gradients are summed first and rounded once.
        """
        self.gradients.store_all()

    def storing(self, add: bool = False) -> AbstractContextManager[None]:
        """Context for the last backward pass before a step: stores gradients as they complete.

        On a GPU a few are stored together. The gradients of all parameters then never exist in full
        precision at once.

        Args:
            add: Add each gradient to the stored one and round the sum again. For every backward
                pass.
        """
        return self.gradients.storing(add)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, including stored ones."""
        self.gradients.clear()
        super().zero_grad(set_to_none)

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns the state by names such as `<parameter>.exp_avg.scale_inv`. No copies.

        It has both moments, the master, and the weight if the parameter is a working copy.
        """
        return collect_tensors(self.names, self.state)

    def state_json(self) -> dict[str, Any]:
        """Returns class, seed, step counts and codecs for JSON.

        The learning rate belongs to the schedule.
        """
        return {"optimizer": type(self).__name__, "seed": self.seed, "state": self._entries()}

    def _entries(self) -> dict[str, Any]:
        """Returns the JSON entries of the parameters."""
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
        """Restores the results of `state_tensors` and `state_json` for the owned parameters.

        Training then continues with the same bits. Load the model's weights first: a parameter that
        is the stored weight is not in the state.

        Raises:
            ValueError: Optimizer, names, shapes, dtypes or codecs differ. Nothing was changed.
        """
        mine = self.state_tensors()
        # With ZeRO a checkpoint has the state of all ranks. The rest of it belongs to other ranks.
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
        """Returns the tensors of a weight that is stored with a scale, or None."""
        return self.held[p]() if p in self.held else None

    def _key(self, p: nn.Parameter, what: str) -> Tensor:
        """Returns a random key for the purpose `what` in the current step."""
        return copy_to_device(
            random_key(self.seed, self.names[p], what, self.state[p].get("step", 0)), p.device
        )

    def _step_key(self, p: nn.Parameter) -> Tensor:
        """Returns the random key of a parameter, cached on its device.

        The device derives the keys of single steps from it.
        """
        if p not in self._step_keys or self._step_keys[p].device != p.device:
            self._step_keys[p] = copy_to_device(
                random_key(self.seed, self.names[p], "step"), p.device
            )
        return self._step_keys[p]


class LowBitAdamW(LowBitOptimizer):
    """AdamW: Adam with decoupled weight decay (arXiv 1711.05101)."""

    decoupled = True


class LowBitAdam(LowBitOptimizer):
    """Adam with L2 regularization: the weight decay is part of the gradient and of the moments."""

    decoupled = False


class LowBitTraining(LowBitOptimizer):
    """Low-bit optimizer with clipping and loss scaling, like `MixedPrecisionOptimizer`.

    Args:
        loss_scaler: The fp16 loss scale.
        clip_grad: Largest norm of the gradients. 0 does not clip.
        adds_stored: Whether every backward pass adds its gradients to the stored ones.

    Attributes:
        grad_norm: Norm of the gradients before clipping, float32, unscaled.
        steps: Steps that were not skipped.
        on_step: Called after the update and before FP8 weights are written.
        on_skip: Called if gradients were not finite.
        on_written: Called after weights are written, for example to broadcast them under ZeRO.
        sum_norms: Sums the norms of all gradients over ranks, if each rank has only some of them. A
            missing gradient has the norm 0.
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
        """Updates the parameters. See `MixedPrecisionOptimizer.step`.

        Returns:
            False if the step was skipped because gradients are not finite. Only the loss scale
            changes then.

        Raises:
            RuntimeError: Other code wrote to a parameter whose value is stored elsewhere.
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
        """Whether to write weights after a step that the host takes as done.

        If the device skips a deferred step, the same weights are written again. That is only
        harmless after a first real step: before it, weights were rounded from original values and
        not from masters. With a loss scale the run continues after a skipped step, so the host
        waits for the decision.
        """
        self._made = (
            self._made
            or self.deferred is None
            or self.loss_scaler is None
            or not self.deferred.skip
        )
        return self._made

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Stores the masters into the parameters, then calls `on_written`."""
        super().write_parameters()
        for hook in self.on_written:
            hook()
        self._written.remember()

    @property
    def masters(self) -> dict[nn.Parameter, Tensor]:
        """Decoded float32 masters of the parameters with a writer. New tensors at each call."""
        return {
            p: self.columns[p].source.decode(self.state[p]["master"])
            for p in self.writers
            if self.owns(p)
        }

    def state_json(self) -> dict[str, Any]:
        """Returns the JSON of `LowBitOptimizer.state_json` with step count and loss scale."""
        scale = None if self.loss_scaler is None else self.loss_scaler.state()
        return {**super().state_json(), "steps": self.steps, "loss_scale": scale}

    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Restores the state as in `LowBitOptimizer.load_state`.

        Raises:
            ValueError: The state does not fit, or only one side has a loss scale.
        """
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
        """Adds `by` to the step counts of the run and of the `stepped` parameters."""
        self.steps += by
        for p in stepped:
            self.state[p]["step"] += by

    def _prepare_gradients(self) -> bool:
        """Computes the norm of the gradients and the factor that unscales and clips them.

        Returns:
            Whether to make the step. True if the device decides.
        """
        found = [(p, grad) for p in self.columns if (grad := self.gradients.of(p)) is not None]
        # An empty tuple is a gradient that another rank stores (ZeRO-2). Its norm is 0 here.
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
        """Returns the norm of the gradients of `params`, float32 []."""
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
    """Returns the factor that clips gradients with the norm `norm`, float64 [], to `most`."""
    if most <= 0.0:
        return torch.ones_like(norm)
    return torch.where(norm > most, torch.full_like(norm, most) / (norm + 1e-6), 1.0)
