"""Mixed-precision optimizer: float32 masters for low-precision parameters, as in Megatron.

    backward   p.grad, in its grad_dtype and multiplied by the loss scale
    step       float32 gradients -> unscale -> norm, finite? -> clip
               -> inner step on the masters -> hooks -> write p

A master is a float32 copy of a parameter. An update of a thousandth of a weight would round to zero
in bfloat16, but adds up in the master. A float32 parameter is its own master.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.sgd import sgd

from fp8cfg.optim.loss_scale import LossScaler, check_loss_scale
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.optim.state_dict import (
    NamedOptimizer,
    collect_json,
    collect_tensors,
    entry_after,
    from_low_bit,
    hyperparameters,
    restore,
)

if TYPE_CHECKING:
    from fp8cfg.numerics.codecs import EncodedTensor


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns two groups of named parameters, as in Megatron.

    Matrices get `weight_decay`. Vectors, such as norms and biases, get none. A tied parameter
    appears once with its first name. Frozen parameters and empty groups are left out.
    """
    trained = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    matrices = [(name, parameter) for name, parameter in trained if parameter.dim() > 1]
    vectors = [(name, parameter) for name, parameter in trained if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_masters(
    names: Mapping[nn.Parameter, str], prepared: Mapping[nn.Parameter, Tensor]
) -> dict[nn.Parameter, Tensor]:
    """Returns a float32 master for each parameter.

    Args:
        names: Names of the parameters.
        prepared: Masters from before rounding, by parameter. Without one, a float32 parameter is
            its own master, and fp16 and bf16 parameters are copied.

    Raises:
        ValueError: A prepared master has another shape or dtype or no parameter. Or an 8-bit
            parameter has none: it cannot be decoded without its scale.
    """
    num_unknown = len(prepared.keys() - names.keys())
    if num_unknown:
        raise ValueError(f"masters for {num_unknown} parameters that are not optimized")
    masters: dict[nn.Parameter, Tensor] = {}
    for parameter, name in names.items():
        if parameter in prepared:
            master = prepared[parameter]
            if master.dtype != torch.float32 or master.shape != parameter.shape:
                raise ValueError(
                    f"the master of {name} must be float32 {list(parameter.shape)}, not"
                    f" {master.dtype} {list(master.shape)}"
                )
            masters[parameter] = master.detach()
        elif parameter.dtype == torch.float32:
            masters[parameter] = parameter
        elif parameter.dtype in (torch.bfloat16, torch.float16):
            masters[parameter] = parameter.detach().float()
        else:
            raise ValueError(f"{name} is {parameter.dtype}: its float32 master must be given")
    return masters


class WriteGuard:
    """Detects writes to parameters by other code. The next optimizer step would silently undo them.

    It compares the versions of the tensors, which count in-place writes in torch.

    Args:
        names: Names of the parameters, for the error.
        since: Event after which a write is an error, for the error.
        params: Parameters to guard.
    """

    def __init__(
        self, names: Mapping[nn.Parameter, str], since: str, params: Iterable[nn.Parameter] = ()
    ) -> None:
        self._names = names
        self._since = since
        self._versions = {parameter: parameter._version for parameter in params}

    def watch(self, parameter: nn.Parameter) -> None:
        """Adds a parameter."""
        self._versions[parameter] = parameter._version

    def remember(self) -> None:
        """Records the current versions as writes of the optimizer."""
        self._versions = {parameter: parameter._version for parameter in self._versions}

    def check(self) -> None:
        """Raises RuntimeError if a parameter was written after `remember`."""
        written = [
            self._names[parameter]
            for parameter, version in self._versions.items()
            if parameter._version != version
        ]
        if written:
            raise RuntimeError(
                f"{len(written)} parameters, {written[0]} among them, were written after"
                f" {self._since}; load weights before building the optimizer, or load the"
                " optimizer's state after them"
            )


class SGD(torch.optim.SGD):
    """torch.optim.SGD(fused=True) with momentum buffers from the first step on, for DTensors too.

    Dampening is not supported.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the parameters. Does nothing if the attribute `found_inf`, float32 [], is 1."""
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            # torch allocates momentum buffers in the first step. If found_inf skips that step, they
            # stay uninitialized. Zeros give the same first step.
            momenta = []
            if group["momentum"]:
                momenta = [self._momentum(parameter) for parameter in params]
            sgd(
                [local(parameter) for parameter in params],
                [local(parameter.grad) for parameter in params],
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

    def _momentum(self, parameter: Tensor) -> Tensor:
        """Returns the momentum buffer of a parameter, zeros at first."""
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(
                parameter, memory_format=torch.preserve_format
            )
        momentum: Tensor = state["momentum_buffer"]
        return momentum


Named = Iterable[tuple[str, nn.Parameter]] | Iterable[dict[str, Any]]


class MixedPrecisionOptimizer(NamedOptimizer):
    """Keeps float32 master weights for parameters of any floating dtype, and steps `inner` on them.

    Load weights before you build it: a master is a copy of its parameter. FP8 parameters need
    `masters`, because their bits mean nothing without a scale.

    Args:
        params: Named parameters: `param_groups(model, weight_decay)` or `model.named_parameters()`.
        inner: Builds the wrapped optimizer from parameter groups of masters, as in
            `partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True)`. It reads `lr` and the other
            values in `param_groups` of this object.
        masters: Float32 weights from before the rounding to FP8, by parameter. They are taken over,
            not copied.
        writers: Stores a master into the parameter and its scale, by parameter.
        loss_scaler: The fp16 loss scale.
        clip_grad: Largest norm of the gradients. 0 clips nothing.
        owned: ZeRO: names of the parameters whose master and moments this rank keeps. A step leaves
            the others to their ranks; `on_written` then broadcasts the updated weights.

    Attributes:
        grad_norm: Norm of the gradients before clipping, float32, unscaled. Over all ranks, also if
            this rank has a part of the gradients (`sum_norms`).
        steps: Steps that were not skipped.
        deferred: Decides on the device whether a step is skipped, so that the host need not wait
            (optim/deferred_step.py).
        on_step: Called after the step of `inner` and before parameters are written.
        on_skip: Called if the gradients were not finite.
        on_written: Called after parameters are written.
    """

    def __init__(
        self,
        params: Named,
        inner: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        writers: Mapping[nn.Parameter, Callable[[Tensor], None]] | None = None,
        loss_scaler: LossScaler | None = None,
        clip_grad: float = 0.0,
        owned: Container[str] | None = None,
    ) -> None:
        super().__init__(params, {})
        self.names = {
            parameter: name
            for group in self.param_groups
            for name, parameter in named_parameters(group)
        }
        if len(set(self.names.values())) < len(self.names):
            raise ValueError("two parameters have one name, and state is kept by name")
        self._owned = owned
        owned_names = {
            parameter: name for parameter, name in self.names.items() if self.owns(parameter)
        }
        # Drops only what belongs to other ranks. Unknown parameters are errors below.
        other_parameters = self.names.keys() - owned_names.keys()
        self.writers = {
            parameter: write
            for parameter, write in (writers or {}).items()
            if parameter not in other_parameters
        }
        prepared = {
            parameter: master
            for parameter, master in (masters or {}).items()
            if parameter not in other_parameters
        }
        self.masters = make_masters(owned_names, prepared)
        # Parameters with a separate master, which is written back after each step.
        self._separate = {
            parameter: master
            for parameter, master in self.masters.items()
            if master is not parameter
        }
        if self.writers.keys() - self._separate.keys():
            raise ValueError("writers are for optimized parameters that have a master of their own")
        self.inner = inner([self._inner_group(group) for group in self.param_groups])
        self.defaults = self.inner.defaults
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(hyperparameters(inner_group))
        self.loss_scaler = loss_scaler
        self.clip_grad = clip_grad
        self.grad_norm = 0.0
        self.compiled = False  # the fused kernels of torch need no compilation
        self.steps = 0
        self.on_step: list[Callable[[], None]] = []
        self.on_skip: list[Callable[[], None]] = []
        self.on_written: list[Callable[[], None]] = []
        self.sum_norms: Callable[[Tensor], Tensor] | None = None
        self.counts = dict.fromkeys(self.names, 0)
        # Parameters of other ranks that had a gradient. See `drop_others`.
        self._dropped: set[nn.Parameter] = set()
        self._write_guard = WriteGuard(self.names, "their masters were made", self._separate)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group during construction.

        Raises:
            ValueError: The optimizer is built already. The new parameters would get no master.
        """
        if hasattr(self, "inner"):
            raise ValueError(
                "add_param_group: masters are made when the optimizer is built; set requires_grad"
                " of the parameters before fp8cfg.build"
            )
        super().add_param_group(param_group)

    def owns(self, parameter: nn.Parameter) -> bool:
        """Returns whether this rank keeps the state of `parameter` and steps it."""
        return self._owned is None or self.names[parameter] in self._owned

    @property
    def stored_grads(self) -> dict[nn.Parameter, EncodedTensor]:
        """Returns an empty dict. Only the low-bit optimizers store gradients in a codec."""
        return {}

    def drop_others(self) -> None:
        """Drops gradients of parameters that other ranks own, and remembers that they existed."""
        for parameter in self.names:
            if parameter.grad is not None and not self.owns(parameter):
                parameter.grad = None
                # Step counts must stay equal on all ranks, so the step counts these parameters too.
                self._dropped.add(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> bool:  # type: ignore[override]
        """Updates the parameters from their `.grad`.

        Float32 gradients are unscaled and clipped in place. A gradient norm that overflows float32
        counts as not finite.

        Returns:
            False if the step was skipped because gradients are not finite. Only the loss scale
            changes then.

        Raises:
            RuntimeError: Other code wrote to a parameter that has a master.
        """
        if closure is not None:
            raise TypeError("MixedPrecisionOptimizer.step takes no closure: the loss may be scaled")
        self._write_guard.check()
        norm = self._prepare_gradients()
        is_finite = self._decide(norm)
        if is_finite:
            if self.clip_grad > 0.0:
                masters = [master for master in self.masters.values() if master.grad is not None]
                clip_grads_with_norm_(masters, self.clip_grad, norm)
            for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
                inner_group.update(hyperparameters(group))
            self.count(1)
            self._step_inner()
        for hook in self.on_step if is_finite else self.on_skip:
            hook()
        for master in self._separate.values():
            master.grad = None  # frees memory that write_parameters may need
        if is_finite:
            self.write_parameters()
        self._dropped.clear()
        return is_finite

    def _decide(self, norm: Tensor) -> bool:
        """Returns whether to make this step. True if the device decides."""
        if self.deferred is not None:
            self.deferred.decide(norm, self._parameters_with_gradient())
            return True
        self.grad_norm = norm.item()
        is_finite = math.isfinite(self.grad_norm)
        if self.loss_scaler is not None:
            self.loss_scaler.update(found_inf=not is_finite)
        return is_finite

    def _parameters_with_gradient(self) -> list[nn.Parameter]:
        """Returns the parameters with a gradient on this rank or, under ZeRO, on their owner."""
        return [
            parameter
            for parameter in self.names
            if parameter.grad is not None or parameter in self._dropped
        ]

    def _step_inner(self) -> None:
        """Steps the inner optimizer. A deferred step does nothing if `skip` is true."""
        if self.deferred is not None:
            assert self.deferred.skip is not None, "the step was decided"
            # Fused kernels change nothing where found_inf is 1. torch's GradScaler sets it so, too.
            self.inner.found_inf = self.deferred.skip.float()  # type: ignore[attr-defined]
        self.inner.step()

    def count(self, by: int, stepped: Collection[nn.Parameter] | None = None) -> None:
        """Adds `by` to the step counts.

        Args:
            by: 1, or -1 to take back a step that the device skipped.
            stepped: Parameters of the step. Defaults to all parameters with a gradient.
        """
        self.steps += by
        if stepped is None:
            stepped = self._parameters_with_gradient()
        for parameter in stepped:
            self.counts[parameter] += by
            if by < 0 and not self.counts[parameter] and parameter in self.masters:
                # A first step that the device skipped has created moments all the same.
                self.inner.state.pop(self.masters[parameter], None)

    def storing(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing. The low-bit optimizers store gradients in it."""
        return nullcontext()

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns masters and moments of owned parameters by name. No copies."""
        return collect_tensors(self.names, self.masters, self.inner)

    def state_json(self) -> dict[str, Any]:
        """Returns inner optimizer, step counts and loss scale for JSON.

        The learning rate belongs to the schedule.
        """
        scale = None if self.loss_scaler is None else self.loss_scaler.state()
        json = collect_json(self.names, self.masters, self.inner)
        # With ZeRO the JSON covers parameters of other ranks too, so that it is equal on all ranks.
        entries = {}
        for parameter, name in self.names.items():
            if self.owns(parameter):
                entries[name] = json["state"][name]
            else:
                entries[name] = entry_after(self.inner, self.counts[parameter])
        return {**json, "state": entries, "steps": self.steps, "loss_scale": scale}

    def check_saved(self, json: Mapping[str, Any]) -> None:
        """Raises ValueError if saved JSON is of another kind, or only one side has a loss scale."""
        super().check_saved(from_low_bit(json))
        check_loss_scale(self.loss_scaler, json["loss_scale"])

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Restores the results of `state_tensors` and `state_json` for the owned parameters.

        Load the model's weights first. Training then continues with the same bits. State of a
        low-bit optimizer is accepted if all its codecs are float32.

        Raises:
            ValueError: Names, shapes, dtypes or the inner optimizer differ, or only one side has a
                loss scale. Nothing was changed.
        """
        json = from_low_bit(json)
        self.check_saved(json)
        restore(self.names, self.masters, self.inner, tensors, json)
        for parameter, name in self.names.items():
            entry = json["state"][name]
            # SGD has no step count. A momentum buffer shows that a parameter was stepped.
            self.counts[parameter] = int(entry.get("step", bool(entry["tensors"])))
        self.steps = int(json["steps"])
        if self.loss_scaler is not None:
            self.loss_scaler.load_state(json["loss_scale"])
        self._write_guard.remember()

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns a parameter group with the masters of this rank."""
        masters = [
            self.masters[parameter] for parameter in group["params"] if parameter in self.masters
        ]
        return {**hyperparameters(group), "params": masters}

    def _prepare_gradients(self) -> Tensor:
        """Gives every master its unscaled float32 gradient, and returns their norm."""
        # float() returns the same tensor if it is float32 already.
        gradients = {
            parameter: parameter.grad.float()
            for parameter in self.names
            if parameter.grad is not None
        }
        for parameter, master in self._separate.items():
            master.grad = gradients.get(parameter)
        if self.loss_scaler is not None and gradients:
            shards = [local(gradient) for gradient in gradients.values()]
            torch._foreach_mul_(shards, 1.0 / self.loss_scaler.scale)
        return self.norm_over_ranks(partial(self._total_norm, gradients))

    def _total_norm(
        self, gradients: Mapping[nn.Parameter, Tensor], params: Sequence[nn.Parameter]
    ) -> Tensor:
        """Returns the norm of the gradients of `params`, float32 []."""
        if self.sum_norms is None:
            norm = get_total_norm(
                [gradients[parameter] for parameter in params if parameter in gradients]
            )
            # With FSDP2 the norm is a DTensor. full_tensor() reduces it over the ranks.
            return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        device = next(iter(self.names)).device
        # ZeRO-2: each rank has some gradients. Zeros keep the order of norms equal on all ranks.
        zero = torch.zeros((), dtype=torch.float32, device=device)
        norms = []
        for parameter in params:
            norms.append(
                torch.linalg.vector_norm(gradients[parameter]) if parameter in gradients else zero
            )
        total: Tensor = torch.linalg.vector_norm(self.sum_norms(torch.stack(norms)))
        return total

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Writes every master into its parameter, then calls `on_written`."""
        plain = {
            parameter: master
            for parameter, master in self._separate.items()
            if parameter not in self.writers
        }
        if plain:
            torch._foreach_copy_([*plain], [*plain.values()])
        for parameter, write in self.writers.items():
            write(self.masters[parameter])
        for hook in self.on_written:
            hook()
        self._write_guard.remember()


def named_parameters(group: dict[str, Any]) -> Iterable[tuple[str, nn.Parameter]]:
    """Returns name and parameter pairs of a group. Raises ValueError if it has no names."""
    if "param_names" not in group:
        raise ValueError(
            "state is kept by name: pass param_groups(model, weight_decay) or"
            " model.named_parameters()"
        )
    return zip(group["param_names"], group["params"], strict=True)
