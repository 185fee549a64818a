"""AdamW and Adam whose weights, masters, gradients and moments are stored in fewer than 32 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8cfg.numerics.codecs import Codec, Stored
from fp8cfg.numerics.stochastic_rounding import random_key
from fp8cfg.optim.low_bit import tensor_groups as pieces
from fp8cfg.optim.low_bit.adam_step import Columns, hyper
from fp8cfg.optim.low_bit.rows import Rows, rows_of
from fp8cfg.optim.low_bit.state import STORED, check_parameter, check_state, collect_tensors, fresh_state, slot_of
from fp8cfg.optim.low_bit.tensor_groups import Work, adam_step
from fp8cfg.optim.mixed_precision import Named, named_parameters
from fp8cfg.optim.named_state import NamedOptimizer

FLOAT32 = Columns()
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")


class LowBitOptimizer(NamedOptimizer):
    """What LowBitAdamW and LowBitAdam share. `params` are named: `param_groups(model, weight_decay)` or
    `model.named_parameters()`. Each group has its `columns`, the codecs of its parameters.

    A parameter whose dtype is that of an unscaled weight codec is the stored weight; so is the first tensor of what `held`
    gives: the tensors that a weight with a scale is kept in, outside of the optimizer, asked for at each use since a model may
    be moved. Parameters of `writers` have a master, and
    that function stores its value in them. Any other parameter is a working copy of the stored weight, in its own dtype,
    rewritten by each step. `originals` are values from before the parameters were rounded; weights and masters start from them.
    State is made here: load weights first, build this afterwards.

    Gradients are expected finite; infinities and NaN reach the moments and stay. Under a `grad` codec, `store_grads` moves
    `.grad` into `stored_grads`, and a step does so with what is left; once a step has read them, those of the next backward pass
    take their place. Of the parameters that are not `owned`, by name, no state
    is kept, and a step leaves them to the rank that owns them. A step reads gradients times `grad_factor`. `seed` is that of
    stochastic rounding. `compiled` runs torch.compile on the step: the same bits on a CPU.
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
        held: Mapping[nn.Parameter, Callable[[], Stored]] | None = None,
        writers: Mapping[nn.Parameter, Callable[[Tensor], None]] | None = None,
        owned: Container[str] | None = None,
        seed: int = 0,
        compiled: bool = False,
    ) -> None:
        self.names: dict[nn.Parameter, str] = {}
        self.stored_grads: dict[nn.Parameter, Stored] = {}
        self.seed, self.compiled, self.grad_factor = seed, compiled, 1.0
        self._spent = False
        self._versions: dict[nn.Parameter, int] = {}  # of those whose value is kept elsewhere
        self._together: dict[int, tuple[list[Rows], list[nn.Parameter]]] = {}
        self._rows_of: dict[nn.Parameter, Rows] = {}
        self.held, self.writers = dict(held or {}), dict(writers or {})
        self._owned = owned
        self._originals = originals or {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "columns": columns})
        self._originals = {}

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add named parameters with their hyperparameters, and make their state. Raises ValueError for hyperparameters out of
        their range, a name that is taken, and parameters that cannot be worked on."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_hyperparameters(group)
        for name, p in named_parameters(group):
            if name in self.names.values():
                raise ValueError(f"two parameters are named {name}, and state is kept by name")
            kept_apart = p in self.held or p in self.writers
            check_parameter(name, p, group["columns"], kept_apart, p in self.writers)
            self.names[p] = name
            held = self._held(p)
            value = self._originals.get(p, group["columns"].weight.decode(held) if held else p.detach())
            weight = () if p in self.writers else held
            state = fresh_state(p, group["columns"], value, self._key(p, "start"), weight)
            codecs = {column: str(getattr(group["columns"], column)) for column in STORED if column in state}
            self.state[p] = {**(state if self.owns(p) else {}), "step": 0, "codecs": codecs}
            if self.state[p].keys() & {"master", "weight"}:
                self._versions[p] = p._version
        self._remember_versions()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Raises RuntimeError if someone else has written to a parameter
        whose value is kept elsewhere: the step would silently undo that."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_versions()
        self.store_grads()
        self._update()
        self.write_parameters()
        self._spent = True
        return loss

    def owns(self, p: nn.Parameter) -> bool:
        """Whether this optimizer keeps the state of `p` and steps it."""
        return self._owned is None or self.names[p] in self._owned

    def _update(self) -> None:
        for index, group in enumerate(self.param_groups):
            adam_step(group["columns"], self.decoupled, self._works(index, group), self.compiled)

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Store the masters of `writers` in their parameters, as each step does."""
        columns = self._columns() if self.writers else {}
        for p, write in ((p, write) for p, write in self.writers.items() if self.owns(p)):
            master = columns[p].master
            assert master is not None, "checked when it was added"
            write(master.decode(self.state[p]["master"]))
        self._remember_versions()

    def store_grads(self) -> None:
        """Move each `.grad` whose columns have a `grad` codec into `stored_grads`. Raises RuntimeError where there already is
        one: gradients are summed first, and rounded once."""
        for group in self.param_groups:
            for p in group["params"] if group["columns"].grad else ():
                if p.grad is not None:
                    self._store_grad(p, group["columns"].grad)

    @torch.no_grad()
    def _store_grad(self, p: nn.Parameter, codec: Codec, add: bool = False) -> None:
        assert p.grad is not None, "asked by the caller"
        self._forget_spent()
        if p in self.stored_grads and not add:
            raise RuntimeError(f"the gradient of {self.names[p]} was stored before a backward pass; zero_grad comes first")
        if p in self.stored_grads:
            p.grad += codec.decode(self.stored_grads[p])
        rows = self._rows_of.get(p)
        stored = rows.gradient(p, codec) if rows else codec.zeros(p.shape, p.device)
        codec.store(p.grad, stored, self._key(p, "grad"))
        self.stored_grads[p], p.grad = stored, None

    def _forget_spent(self) -> None:
        """Forget stored gradients that a step has read: a Trainer calls the model's zero_grad, which does not know of them."""
        if self._spent:
            self._forget_stored()

    def _forget_stored(self) -> None:
        self._spent = False
        self.stored_grads.clear()
        for rows in self._rows_of.values():
            rows.forget_gradients()

    @contextmanager
    def storing(self, add: bool = False) -> Iterator[None]:
        """A context for the last backward pass before a step: gradients that have a codec are stored as soon as they are there,
        so that they are never all there in more bits. With `add` for every backward pass: to what is stored they are added, and
        their sum is rounded again."""
        codecs = {p: group["columns"].grad for group in self.param_groups for p in group["params"] if group["columns"].grad}
        here: set[nn.Parameter] = set()  # reentrant checkpointing of a shared layer brings a gradient in parts

        def store(p: Tensor) -> None:
            assert isinstance(p, nn.Parameter), "hooks are those of parameters"
            self._store_grad(p, codecs[p], add or p in here)
            here.add(p)

        handles = [p.register_post_accumulate_grad_hook(store) for p in codecs]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, the stored ones too."""
        self._forget_stored()
        super().zero_grad(set_to_none)

    def state_tensors(self) -> dict[str, Tensor]:
        """The state itself, no copies: `<parameter>.exp_avg`, `<parameter>.exp_avg.scale_inv`, and so on for exp_avg_sq, the
        master, and the weight where the parameter is a working copy of it."""
        return collect_tensors(self.names, self.state)

    def state_json(self) -> dict[str, Any]:
        """The rest of the state, for JSON: class, seed, step counts, codecs. The learning rate is a schedule's."""
        state = {name: {k: self.state[p][k] for k in ("step", "codecs")} for p, name in self.names.items()}
        return {"optimizer": type(self).__name__, "seed": self.seed, "state": state}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Copy in what `state_tensors` and `state_json` gave, of them what is owned. Training then goes on to the same bits.

        Parameters that are the stored weight are the model's state: load them first. Raises ValueError, before anything is
        changed, for another optimizer, missing and unexpected names, other shapes, dtypes and codecs.
        """
        mine = self.state_tensors()
        elsewhere = {f"{name}." for p, name in self.names.items() if not self.owns(p)}
        tensors = {k: t for k, t in tensors.items() if k in mine or not any(k.startswith(prefix) for prefix in elsewhere)}
        check_state(tensors, mine, json, self.state_json())
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        self.seed = int(json["seed"])
        for p, columns in self._columns().items():
            self.state[p]["step"] = int(json["state"][self.names[p]]["step"])
            if "weight" in self.state[p]:
                p.copy_(columns.weight.decode(self.state[p]["weight"]))
        self._remember_versions()

    def _works(self, index: int, group: dict[str, Any]) -> Iterator[Work]:
        """The steps of the parameters that have a gradient; counts them. Under `compiled` small ones of one shape together."""
        stochastic = any(codec is not None and codec.rounding == "stochastic" for codec in group["columns"].written)
        hypers: dict[Any, Tensor] = {}

        def hyper_of(p: nn.Parameter, step: int) -> Tensor:
            if (at := (step, p.device)) not in hypers:
                hypers[at] = hyper(**_hyperparameters(group), decoupled=self.decoupled, step=step, device=p.device,
                                   grad_factor=self.grad_factor)
            return hypers[at]

        alone = group["params"]
        if self.compiled:
            rows, alone = self._rows(index, group)
            for some in rows:
                grads = [grad for p in some.params if (grad := self._gradient(p)) is not None]
                steps = {one["step"] for one in some.states}
                if len(steps) > 1 or len(grads) < len(some.params):
                    alone = [*alone, *some.params]
                    continue
                for one in some.states:
                    one["step"] += 1
                key = torch.stack([self._key(p, "step") for p in some.params]) if stochastic else None
                yield some.work(hyper_of(some.params[0], steps.pop() + 1), key, grads, self._weights(some.params))
        works = []  # made at once: each step pushes out of the processor's cache what Python needs for the next one
        for p in alone:
            if (grad := self._gradient(p)) is not None:
                state = self.state[p]
                state["step"] += 1
                if self.owns(p):
                    slot = slot_of(p, state, grad, self._held(p), p in self.writers)
                    works.append(Work(slot, hyper_of(p, state["step"]), self._key(p, "step") if stochastic else None))
        yield from works

    def _gradient(self, p: nn.Parameter) -> Stored | None:
        return self.stored_grads.get(p) if (grad := p.grad) is None else (grad,)

    def _weights(self, params: list[nn.Parameter]) -> list[Stored] | None:
        return None if params[0] in self.writers else [self._held(p) or (p,) for p in params]

    def _rows(self, index: int, group: dict[str, Any]) -> tuple[list[Rows], list[nn.Parameter]]:
        """The rows of a group, made before its first compiled step, and the parameters in none."""
        if index not in self._together:
            columns = group["columns"]
            owned = [p for p in group["params"] if columns.block == 1 and self.owns(p)]
            most = pieces.AT_ONCE if columns.per_tensor else math.inf
            rows = list(rows_of(owned, self.state, lambda p: (p in self.held, p in self.writers), most))
            self._rows_of |= {p: some for some in rows for p in some.params}
            self._together[index] = rows, [p for p in group["params"] if p not in self._rows_of]
        return self._together[index]

    def _held(self, p: nn.Parameter) -> Stored | None:
        return self.held[p]() if p in self.held else None

    def _key(self, p: nn.Parameter, what: str) -> Tensor:
        return random_key(self.seed, self.names[p], what, self.state[p].get("step", 0)).to(p.device)

    def _columns(self) -> dict[nn.Parameter, Columns]:
        return {p: group["columns"] for group in self.param_groups for p in group["params"]}

    def _remember_versions(self) -> None:
        self._versions = {p: p._version for p in self._versions}

    def _check_versions(self) -> None:
        written = [self.names[p] for p, version in self._versions.items() if p._version != version]
        if written:
            raise RuntimeError(
                f"{len(written)} parameters, {written[0]} among them, were written after the optimizer had stored their values; "
                "load weights before building the optimizer, or load the optimizer's state after them"
            )


class LowBitAdamW(LowBitOptimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    decoupled = True


class LowBitAdam(LowBitOptimizer):
    """Adam with L2 regularization: the decay is part of the gradient, and so of the moments."""

    decoupled = False


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in HYPERPARAMETERS}


def _check_hyperparameters(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0.0:
            raise ValueError(f"{name}={group[name]} must not be negative")
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"betas={tuple(group['betas'])} must lie in [0, 1)")
