"""Low-bit AdamW and Adam: weights, masters, gradients and moments in fewer than 32 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8cfg.numerics.async_copies import copy_to_device
from fp8cfg.numerics.codecs import EncodedTensor
from fp8cfg.numerics.formats import StridedStart, random_key
from fp8cfg.optim.loss_scale import LossScaler, check_loss_scale
from fp8cfg.optim.low_bit.adam_step import TensorUpdate, adam_step, amaxes_of_steps
from fp8cfg.optim.low_bit.adam_update import check_hyperparameters, step_factors
from fp8cfg.optim.low_bit.columns import FLOAT32, Columns, first_element, local
from fp8cfg.optim.low_bit.gradients import StoredGradients, norms
from fp8cfg.optim.low_bit.state import (
    STORED,
    check_parameter,
    check_state,
    collect_json,
    collect_tensors,
    convert_codecs,
    create_state,
    restore,
    slot_of,
)
from fp8cfg.optim.mixed_precision import Named, WriteGuard, named_parameters
from fp8cfg.optim.state_dict import NamedOptimizer


class LowBitOptimizer(NamedOptimizer):
    """Base class of LowBitAdamW and LowBitAdam.

    A parameter is one of these:

    - The stored weight, if its dtype is the dtype of an unscaled weight codec.
    - The data of a stored weight with a scale (`encoded_weights`).
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
        encoded_weights: Functions to get the tensors of weights with a scale. They are called at
            each use, because a model may move to another device.
        writers: Functions to store a master into the parameter.
        owned: ZeRO: names of this rank's parameters. Other ranks keep the state of the rest.
        seed: Seed of stochastic rounding.
        compiled: Whether to compile the step on a CPU too. The bits stay the same there.

    Attributes:
        grad_factor: Factor of the gradients in a step.
        max_over_ranks: Elementwise maximum over the ranks with shards of a tensor, for per-tensor
            scales.
        shard_starts: Positions of this rank's parameters in tensors split by tensor parallelism.
        full_columns: Columns of the full tensors.
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
        encoded_weights: Mapping[nn.Parameter, Callable[[], EncodedTensor]] | None = None,
        writers: Mapping[nn.Parameter, Callable[[Tensor], None]] | None = None,
        owned: Container[str] | None = None,
        seed: int = 0,
        compiled: bool = False,
    ) -> None:
        self.names: dict[nn.Parameter, str] = {}
        self.columns: dict[nn.Parameter, Columns] = {}
        self.seed = seed
        self.compiled = compiled
        self.grad_factor: float | Tensor = 1.0
        self._step_keys: dict[nn.Parameter, Tensor] = {}
        self.gradients = StoredGradients(self.names, self._key)
        self._write_guard = WriteGuard(self.names, "the optimizer had stored their values")
        self.encoded_weights = dict(encoded_weights or {})
        self.writers = dict(writers or {})
        self._owned = owned
        self.max_over_ranks: Callable[[Tensor], Tensor] | None = None
        self.shard_starts: Mapping[nn.Parameter, StridedStart] = {}
        self.full_columns: Collection[Columns] = ()
        self._originals = originals or {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "columns": columns,
        }
        super().__init__(params, defaults)
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
        for name, parameter in named_parameters(group):
            if name in self.names.values():
                raise ValueError(f"two parameters are named {name}, and state is kept by name")
            self._add(name, parameter, group["columns"])
        self._write_guard.remember()

    def _add(self, name: str, parameter: nn.Parameter, columns: Columns) -> None:
        """Creates the state of one parameter."""
        has_writer = parameter in self.writers
        has_stored_scale = has_writer or parameter in self.encoded_weights
        check_parameter(name, parameter, columns, has_stored_scale, has_writer)
        self.names[parameter] = name
        self.columns[parameter] = columns
        if columns.grad is not None:
            self.gradients.codecs[parameter] = columns.grad
        encoded = self._encoded_weight(parameter)
        local_parameter = local(parameter.detach())
        if parameter in self._originals:
            value = self._originals[parameter]
        elif encoded is not None:
            value = columns.weight.decode(encoded)
        else:
            value = local_parameter
        key = self._key(parameter, "start")
        state = create_state(local_parameter, columns, value, key, encoded, has_writer)
        codecs = {column: str(getattr(columns, column)) for column in STORED if column in state}
        # All ranks save the same JSON, but only one has the tensors.
        if not self.owns(parameter):
            state = {}
        self.state[parameter] = {**state, "step": 0, "codecs": codecs}
        # A write to such a parameter by other code would be lost in the next step.
        if "master" in state or "weight" in state:
            self._write_guard.watch(parameter)

    def owns(self, parameter: nn.Parameter) -> bool:
        """Returns whether this rank keeps the state of a parameter and steps it."""
        return self._owned is None or self.names[parameter] in self._owned

    def drop_others(self) -> None:
        """Drops gradients of parameters that other ranks own, and remembers that they existed."""
        for p in self.names:
            has_grad = p.grad is not None or p in self.stored_grads
            if has_grad and not self.owns(p):
                p.grad = None
                # Empty, because the step only needs to know that there was a gradient.
                self.stored_grads[p] = ()

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
        self._write_guard.check()
        self.store_grads()
        self._update()
        self.write_parameters()
        self.gradients.was_read = True
        return loss

    def _update(self) -> None:
        """Steps all groups. On shards it finds the amaxes of full tensors first."""
        groups = [(group["columns"], self._updates_of(group)) for group in self.param_groups]
        all_amaxes = self._full_amaxes(groups)
        for (columns, updates), amaxes in zip(groups, all_amaxes, strict=True):
            adam_step(columns, self.decoupled, updates, self.compiled, amaxes)

    def _full_amaxes(
        self, groups: Sequence[tuple[Columns, list[TensorUpdate]]]
    ) -> list[Sequence[Tensor] | None]:
        """Returns the amaxes [3] of full tensors for the tensors of each group.

        None for a group without per-tensor scales, or if this rank has full tensors.
        """
        amaxes: list[Sequence[Tensor] | None] = [None] * len(groups)
        if self.max_over_ranks is None:
            return amaxes
        scaled = [
            i for i, (columns, updates) in enumerate(groups) if columns.per_tensor and updates
        ]
        if not scaled:
            return amaxes
        shard_amaxes = []
        for i in scaled:
            columns, updates = groups[i]
            shard_amaxes.append(amaxes_of_steps(columns, self.decoupled, updates, self.compiled))
        # One collective for all groups.
        full_amaxes = self.max_over_ranks(torch.cat(shard_amaxes))
        sizes = [len(group_amaxes) for group_amaxes in shard_amaxes]
        for i, group_amaxes in zip(scaled, full_amaxes.split(sizes), strict=True):
            amaxes[i] = group_amaxes.unbind()
        return amaxes

    def _updates_of(self, group: dict[str, Any]) -> list[TensorUpdate]:
        """Returns the tensors to step in a group, and increments the step counts."""
        # Most parameters have the same step count: send its factors to the device once.
        factors: dict[tuple[int, torch.device], Tensor] = {}
        skip = None if self.deferred is None else self.deferred.skip
        updates = []
        for parameter in group["params"]:
            grad = self.gradients.get(parameter)
            if grad is None:
                continue
            state = self.state[parameter]
            # Parameters of other ranks count too, so that all ranks save the same JSON.
            state["step"] += 1
            if not self.owns(parameter):
                continue
            step_and_device = (state["step"], parameter.device)
            if step_and_device not in factors:
                factors[step_and_device] = self._factors(group, *step_and_device)
            key = None
            if group["columns"].stochastic:
                key = self._step_key(parameter)
            slot = slot_of(
                local(parameter),
                state,
                grad,
                self._encoded_weight(parameter),
                parameter in self.writers,
            )
            first = first_element(parameter, self.shard_starts.get(parameter))
            updates.append(TensorUpdate(slot, factors[step_and_device], key, skip, first))
        return updates

    def _factors(self, group: dict[str, Any], step: int, device: torch.device) -> Tensor:
        """Returns the factors of a step on the device, float32 [10]."""
        values = step_factors(group, self.decoupled, step, group["lr"])
        # Without a deferred step all ten numbers are sent together.
        if not isinstance(self.grad_factor, Tensor):
            values.append(self.grad_factor)
            return copy_to_device(torch.tensor(values, dtype=torch.float32), device)
        factors = copy_to_device(torch.tensor(values, dtype=torch.float32), device)
        return torch.cat([factors, self.grad_factor.float().view(1)])

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Stores the masters into the parameters of `writers`, as each step does."""
        for parameter, write in self.writers.items():
            if self.owns(parameter):
                write(self._decode_master(parameter))
        self._write_guard.remember()

    def _decode_master(self, parameter: nn.Parameter) -> Tensor:
        """Returns the float32 master of a parameter."""
        return self.columns[parameter].source.decode(self.state[parameter]["master"])

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
        entries = collect_json(self.names, self.state)
        for name, entry in entries.items():
            if name in self.masters_of:
                # Under FSDP2 the float32 parameter is the master.
                entry["codecs"] = {"master": "fp32", **entry["codecs"]}
        return entries

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Restores the results of `state_tensors` and `state_json` for the owned parameters.

        Training then continues with the same bits. Load the model's weights first: a parameter that
        is the stored weight is not in the state.

        Raises:
            ValueError: Optimizer, names, shapes, dtypes or codecs differ. Nothing was changed.
        """
        expected = self.state_tensors()
        # With ZeRO a checkpoint has the state of all ranks. Drop the state of other ranks.
        other_prefixes = tuple(
            f"{name}." for parameter, name in self.names.items() if not self.owns(parameter)
        )
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if name in expected or not name.startswith(other_prefixes)
        }
        self.check_saved(json)
        entries = self._entries()
        columns = {*self.columns.values(), *self.full_columns}
        tensors, saved_entries = convert_codecs(
            self.names, columns, tensors, json["state"], entries, self._key, self.shard_starts
        )
        check_state(tensors, expected, saved_entries, entries)
        restore(self.names, self.state, self.columns, tensors, saved_entries)
        self.seed = int(json["seed"])
        self._step_keys.clear()
        self._write_guard.remember()

    def _encoded_weight(self, parameter: nn.Parameter) -> EncodedTensor | None:
        """Returns the tensors of a weight that is stored with a scale, or None."""
        if parameter not in self.encoded_weights:
            return None
        return self.encoded_weights[parameter]()

    def _key(self, parameter: nn.Parameter, purpose: str) -> Tensor:
        """Returns a random key for a purpose in the current step."""
        step = self.state[parameter].get("step", 0)
        key = random_key(self.seed, self.names[parameter], purpose, step)
        return copy_to_device(key, parameter.device)

    def _step_key(self, parameter: nn.Parameter) -> Tensor:
        """Returns the random key of a parameter, cached on its device.

        The device derives the keys of single steps from it.
        """
        key = self._step_keys.get(parameter)
        if key is None or key.device != parameter.device:
            key = random_key(self.seed, self.names[parameter], "step")
            key = copy_to_device(key, parameter.device)
            self._step_keys[parameter] = key
        return key


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
        self.loss_scaler = loss_scaler
        self.clip_grad = clip_grad
        self.grad_norm = 0.0
        self.steps = 0
        self._has_stepped = False
        self.on_step: list[Callable[[], None]] = []
        self.on_skip: list[Callable[[], None]] = []
        self.on_written: list[Callable[[], None]] = []
        self.sum_norms: Callable[[Tensor], Tensor] | None = None
        super().__init__(*args, **options)
        if adds_stored:
            # Entered for the life of the optimizer: each backward pass adds to stored gradients.
            self._storing = self.storing(add=True)
            self._storing.__enter__()

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
        self._write_guard.check()
        self.store_grads()
        finite = self._prepare_gradients()
        if finite:
            self._update()
            self.steps += 1
        for hook in self.on_step if finite else self.on_skip:
            hook()
        if finite and self._should_write():
            self.write_parameters()
        self._write_guard.remember()
        self.gradients.was_read = True
        return finite

    def _should_write(self) -> bool:
        """Returns whether to write weights after a step that the host takes as done.

        If the device skips a deferred step, the same weights are written again. That is only
        harmless after a first real step: before it, weights were rounded from original values and
        not from masters. With a loss scale the run continues after a skipped step, so the host
        waits for the decision.
        """
        if self._has_stepped or self.deferred is None or self.loss_scaler is None:
            self._has_stepped = True
        else:
            self._has_stepped = not self.deferred.skip  # waits for the device
        return self._has_stepped

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Stores the masters into the parameters, then calls `on_written`."""
        super().write_parameters()
        for hook in self.on_written:
            hook()
        self._write_guard.remember()

    @property
    def masters(self) -> dict[nn.Parameter, Tensor]:
        """Decoded float32 masters of the parameters with a writer. New tensors at each call."""
        return {
            parameter: self._decode_master(parameter)
            for parameter in self.writers
            if self.owns(parameter)
        }

    def state_json(self) -> dict[str, Any]:
        """Returns the JSON of `LowBitOptimizer.state_json` with step count and loss scale."""
        scale = None if self.loss_scaler is None else self.loss_scaler.state()
        return {**super().state_json(), "steps": self.steps, "loss_scale": scale}

    def check_saved(self, json: Mapping[str, Any]) -> None:
        """Raises ValueError if saved JSON is of another kind, or only one side has a loss scale."""
        super().check_saved(json)
        check_loss_scale(self.loss_scaler, json["loss_scale"])

    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Restores the state as in `LowBitOptimizer.load_state`.

        Raises:
            ValueError: The state does not fit, or only one side has a loss scale.
        """
        super().load_state(tensors, json)
        self.steps = int(json["steps"])
        if self.loss_scaler is not None:
            self.loss_scaler.load_state(json["loss_scale"])

    def count(self, by: int, stepped: Collection[nn.Parameter]) -> None:
        """Adds `by` to the step counts of the run and of the `stepped` parameters."""
        self.steps += by
        for parameter in stepped:
            self.state[parameter]["step"] += by

    def _prepare_gradients(self) -> bool:
        """Computes the norm of the gradients and the factor that unscales and clips them.

        Returns:
            Whether to make the step. True if the device decides.
        """
        gradients = {}
        for parameter in self.columns:
            gradient = self.gradients.get(parameter)
            if gradient is not None:
                gradients[parameter] = gradient
        norm_of = self._gradient_norms(gradients)
        total = self.norm_over_ranks(partial(self._total_norm, norm_of))
        unscale = 1.0 if self.loss_scaler is None else 1.0 / self.loss_scaler.scale
        if self.deferred is not None:
            norm = (total.double() * unscale).float()
            self.grad_factor = _clip_factor(norm.double(), self.clip_grad) * unscale
            self.deferred.decide(norm, [*gradients])
            return True
        norm = (total.cpu().double() * unscale).float()
        self.grad_factor = (_clip_factor(norm.double(), self.clip_grad) * unscale).item()
        self.grad_norm = norm.item()
        is_finite = math.isfinite(self.grad_norm)
        if self.loss_scaler is not None:
            self.loss_scaler.update(found_inf=not is_finite)
        return is_finite

    def _gradient_norms(
        self, gradients: Mapping[nn.Parameter, EncodedTensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Returns the norm of each gradient, float32 []."""
        # An empty tuple is a gradient that another rank stores (ZeRO-2). Its norm is 0 here.
        stored = {p: gradient for p, gradient in gradients.items() if gradient}
        codecs = [self.columns[parameter].read for parameter in stored]
        norm_of = dict(zip(stored, norms(codecs, [*stored.values()]), strict=True))
        for parameter in gradients:
            if parameter not in norm_of:
                norm_of[parameter] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return norm_of

    def _total_norm(
        self, norm_of: Mapping[nn.Parameter, Tensor], parameters: Sequence[nn.Parameter]
    ) -> Tensor:
        """Returns the norm of the gradients of `parameters`, float32 []."""
        norms = [norm_of[parameter] for parameter in parameters if parameter in norm_of]
        if not norms:
            device = next(iter(self.columns)).device
            return torch.zeros((), dtype=torch.float32, device=device)
        stacked = torch.stack(norms)
        if self.sum_norms is not None:
            stacked = self.sum_norms(stacked)
        total: Tensor = torch.linalg.vector_norm(stacked)
        return total


class LowBitTrainingAdamW(LowBitTraining, LowBitAdamW):
    """LowBitAdamW in a training loop."""


class LowBitTrainingAdam(LowBitTraining, LowBitAdam):
    """LowBitAdam in a training loop."""


def _clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the factor that clips gradients with the norm `norm`, float64 [], to `max_norm`."""
    if max_norm <= 0.0:
        return torch.ones_like(norm)
    # 1e-6 as in torch.nn.utils.clip_grad_norm_.
    return torch.where(norm > max_norm, torch.full_like(norm, max_norm) / (norm + 1e-6), 1.0)
