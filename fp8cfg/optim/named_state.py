"""Named optimizer state: base class with state by parameter name, tensors for safetensors and the rest for JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from fp8cfg.optim import one_shard
from fp8cfg.optim.deferred_step import DeferredSteps

NO_HYPERPARAMETERS = ("params", "param_names", "columns")
"""What stands in a parameter group beside its hyperparameters."""


class FP8State(Protocol):
    """Who has the FP8 state of a model: a Job."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None: ...


def carried(state: FP8State | None) -> dict[str, Any]:
    """The entry of an optimizer's state dict for FP8 state; none where there is none."""
    fp8 = {} if state is None else state.state_dict()
    return {"fp8": fp8} if fp8 else {}


class NamedOptimizer(torch.optim.Optimizer):
    """Base class of optimizers whose state is keyed by parameter name; `state_dict` therefore differs from torch's layout, which
    is keyed by position.

    A job's optimizer carries the FP8 state of its model too (`fp8_state`): Trainer, Accelerate and Fabric save model and optimizer
    alone, and the model's `state_dict` has none.
    """

    names: dict[nn.Parameter, str]
    fp8_state: FP8State | None = None
    _owned: Container[str] | None = None
    sharded: bool = False
    """Whether FSDP2 has split every parameter, and with it the state, over data-parallel ranks."""
    one_shard: Callable[[], None] | None = None
    """Where FSDP2 has one shard of each parameter on every rank: called once a state dict has written these."""
    masters_of: Collection[str] = ()
    """Names of parameters that are their own masters under FSDP2, and that a rank alone has masters of."""
    split: Collection[Any] = ()
    """Parameters of which other ranks have other parts."""
    sum_split: Callable[[Tensor], Tensor] | None = None
    """Adds up a number over the ranks that have these parts."""
    can_defer: bool = False
    """Whether the device can decide whether a step is skipped."""
    deferred: DeferredSteps | None = None
    sum_stages: Callable[[Tensor], Tensor] | None = None
    """Adds up a number over the ranks that have other layers of the model, where there are some."""
    uncounted: Collection[Tensor] = ()
    """Parameters that one of those ranks has too, and counts."""

    def norm_over_ranks(self, norm_of: Callable[[Sequence[nn.Parameter]], Tensor]) -> Tensor:
        """The norm of the gradients of the whole model, from `norm_of`, that of some parameters as far as this rank has them."""
        if self.sum_stages is None:
            return self._norm_of_parts(norm_of, list(self.names))
        here = self._norm_of_parts(
            norm_of, [p for p in self.names if not any(p is other for other in self.uncounted)]
        )
        return self.sum_stages(here.double().square()).sqrt().float()

    def _norm_of_parts(
        self, norm_of: Callable[[Sequence[nn.Parameter]], Tensor], params: Sequence[nn.Parameter]
    ) -> Tensor:
        """The norm of the gradients of `params`, of all parts of those that are split."""
        if self.sum_split is None:
            return norm_of(params)
        split, whole = ([p for p in params if (p in self.split) == part] for part in (True, False))
        return (self.sum_split(norm_of(split).square()) + norm_of(whole).square()).sqrt()

    @abstractmethod
    def state_tensors(self) -> dict[str, Tensor]:
        """The state itself, no copies, by `<parameter>.<what>`."""

    @abstractmethod
    def state_json(self) -> dict[str, Any]:
        """The rest of the state, for JSON. The learning rate is a schedule's."""

    @abstractmethod
    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Restore the results of `state_tensors` and `state_json`. Raises ValueError, before anything is changed, where they do
        not fit.
        """

    def state_dict(self) -> dict[str, Any]:
        """`state_tensors`, `state_json` and the hyperparameters of the groups, and the FP8 state of a job's model. Raises
        RuntimeError where the state is split over ranks, of which none has it whole."""
        if self.split:
            raise RuntimeError(
                "the optimizer's state is that of this rank's parts of matrices"
                " (tensor_model_parallel_size); save checkpoints by fp8cfg.fit, which puts them"
                " together"
            )
        if self.sum_stages is not None:
            raise RuntimeError(
                "the optimizer's state is that of this rank's layers"
                " (pipeline_model_parallel_size); save checkpoints by fp8cfg.fit, which puts them"
                " together"
            )
        if self._owned is not None or self.sharded:
            raise RuntimeError(
                "the optimizer's state is split over the ranks (storage.shard); save checkpoints by"
                " fp8cfg.fit, or write storage.shard=none"
            )
        groups, tensors = (
            [hyperparameters(group) for group in self.param_groups],
            self.state_tensors(),
        )
        if self.one_shard is not None:
            tensors = one_shard.plain(tensors, self.names, self.masters_of)
        return {"tensors": tensors, "json": self.state_json(), "param_groups": groups} | carried(
            self.fp8_state
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`, for a model whose weights are loaded; raises ValueError as `load_state` does, and for
        another number of groups or other FP8 layers, or what is no such state dict."""
        _expect_state_dict(state_dict)
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"optimizer state: {len(groups)} parameter groups, expected"
                f" {len(self.param_groups)}"
            )
        if self.one_shard is not None:
            tensors, masters = one_shard.shards(state_dict["tensors"], self.names)
            self.load_state(tensors, state_dict["json"])
            one_shard.write(masters)
            self._load_fp8(state_dict)  # scales and amaxes of these
            self.one_shard()
        else:
            self._load_fp8(
                state_dict
            )  # first: what it writes into weights is no write of someone else
            self.load_state(state_dict["tensors"], state_dict["json"])
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(saved)

    def _load_fp8(self, state_dict: Mapping[str, Any]) -> None:
        if self.fp8_state is not None and "fp8" in state_dict:
            self.fp8_state.load_state_dict(state_dict["fp8"])

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an optimizer cannot be copied or pickled, it belongs to one model; save its"
            " state_dict() or build another"
        )


def _expect_state_dict(state_dict: Any) -> None:
    """Raise ValueError for what is no state dict of a NamedOptimizer."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"optimizer state: expected what state_dict() gives, not {type(state_dict).__name__}"
        )
    if lacks := [key for key in ("param_groups", "tensors", "json") if key not in state_dict]:
        torchs = (
            "; it is keyed by position, as torch's optimizers have it, and this one by names"
            if "state" in state_dict
            else ""
        )
        raise ValueError(f"optimizer state: has no {', '.join(lacks)}{torchs}")
    groups = state_dict["param_groups"]
    if not isinstance(groups, Sequence) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError("optimizer state: param_groups is no list of groups")
    for key in ("tensors", "json", "fp8"):
        if not isinstance(state_dict.get(key, {}), Mapping):
            raise ValueError(
                f"optimizer state: {key} is no table, but {type(state_dict[key]).__name__}"
            )


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a parameter group."""
    return {key: value for key, value in group.items() if key not in NO_HYPERPARAMETERS}
