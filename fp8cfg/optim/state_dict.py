"""Named optimizer state: tensors by parameter name for safetensors, and the rest as JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Container, Mapping, Sequence, Set
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from fp8cfg.optim.deferred_step import DeferredSteps
from fp8cfg.optim.low_bit import columns

Names = Mapping[nn.Parameter, str]
Masters = Mapping[nn.Parameter, Tensor]


def collect_tensors(
    names: Names, masters: Masters, inner: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Returns masters and moments by names such as `<parameter>.master`. No copies."""
    tensors = _separate_masters(names, masters)
    for parameter, master in masters.items():
        for key in _tensor_keys(inner, master):
            tensors[f"{names[parameter]}.{key}"] = inner.state[master][key]
    return tensors


def collect_json(names: Names, masters: Masters, inner: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the class of the inner optimizer, and step count and tensor names by parameter."""
    state: dict[str, dict[str, Any]] = {}
    for parameter, master in masters.items():
        state[names[parameter]] = {"tensors": _tensor_keys(inner, master)}
        if "step" in inner.state.get(master, {}):
            state[names[parameter]]["step"] = int(inner.state[master]["step"])
    return {"optimizer": type(inner).__name__, "state": state}


def restore(
    names: Names,
    masters: Masters,
    inner: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    json: Mapping[str, Any],
) -> None:
    """Copies saved state into masters and the inner optimizer.

    Args:
        names: Names of all parameters.
        masters: Masters by parameter, possibly only of this rank's parameters.
        inner: The inner optimizer.
        tensors: Saved result of `collect_tensors`.
        json: Saved result of `collect_json`, from an optimizer of the same class (`check_json`).

    Raises:
        ValueError: The state does not fit. Nothing was changed.
    """
    master_of = {names[parameter]: master for parameter, master in masters.items()}
    # With ZeRO a checkpoint has the state of all ranks. Drop the state of other ranks.
    other_prefixes = tuple(f"{name}." for name in json["state"].keys() - master_of.keys())
    tensors = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(other_prefixes)
    }
    # Everything is checked before the first copy, so that an error leaves the optimizer unchanged.
    separate_masters = _separate_masters(names, masters)
    expected = dict(separate_masters)
    for name, master in master_of.items():
        for key in json["state"][name]["tensors"]:
            expected[f"{name}.{key}"] = master  # moments have the shape and dtype of the master
    check_tensors(tensors, expected)

    for name, master in separate_masters.items():
        master.copy_(tensors[name])
    inner.state.clear()
    for name, master in master_of.items():
        entry = json["state"][name]
        state = {}
        for key in entry["tensors"]:
            state[key] = tensors[f"{name}.{key}"].to(master.device, copy=True)
        if "step" in entry:
            state["step"] = _step_tensor(inner, master, entry["step"])
        if state:
            inner.state[master] = state


def moments(inner: torch.optim.Optimizer) -> list[str]:
    """Returns the names of the moments of torch's SGD, Adam or AdamW."""
    if isinstance(inner, torch.optim.SGD):
        if inner.defaults["momentum"] == 0:
            return []
        return ["momentum_buffer"]
    return ["exp_avg", "exp_avg_sq"]


def entry_after(inner: torch.optim.Optimizer, count: int) -> dict[str, Any]:
    """Returns the entry of `collect_json` for a parameter after `count` steps, on any rank."""
    if not count:
        return {"tensors": []}
    entry: dict[str, Any] = {"tensors": moments(inner)}
    if not isinstance(inner, torch.optim.SGD):  # torch's SGD counts no steps
        entry["step"] = count
    return entry


def from_low_bit(json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts the JSON of a float32 low-bit optimizer to the JSON of torch's Adam.

    Their tensors are the same. Older versions used it for ZeRO. Other JSON is returned unchanged.
    """
    prefix = "LowBitTraining"
    optimizer = str(json.get("optimizer", ""))
    if not optimizer.startswith(prefix):
        return json
    entries = {}
    for name, entry in json.get("state", {}).items():
        if set(entry["codecs"].values()) - {"fp32"}:
            return json
        entries[name] = {"tensors": ["exp_avg", "exp_avg_sq"], "step": entry["step"]}
    converted = {**json, "optimizer": optimizer.removeprefix(prefix), "state": entries}
    converted.pop("seed", None)
    return converted


def _separate_masters(names: Names, masters: Masters) -> dict[str, Tensor]:
    """Returns the masters of parameters that are not float32 themselves, by name."""
    return {
        f"{names[parameter]}.master": master
        for parameter, master in masters.items()
        if master is not parameter
    }


def _tensor_keys(inner: torch.optim.Optimizer, master: Tensor) -> list[str]:
    """Returns the names of a parameter's moments in the inner optimizer."""
    state = inner.state.get(master, {})
    return sorted(key for key, value in state.items() if key != "step" and value is not None)


def _step_tensor(inner: torch.optim.Optimizer, master: Tensor, step: int) -> Tensor:
    """Returns a step count as the inner optimizer stores it."""
    # Fused and capturable kernels read the count on the device. Others keep it on the CPU.
    group = next(
        group
        for group in inner.param_groups
        if any(master is parameter for parameter in group["params"])
    )
    device = torch.device("cpu")
    if group.get("fused") or group.get("capturable"):
        device = master.device
    return torch.tensor(float(step), dtype=torch.float32, device=device)


def check_json(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises ValueError if the saved JSON is of another optimizer or of other parameters."""
    if "optimizer" in saved and saved["optimizer"] != expected["optimizer"]:
        raise ValueError(
            f"the saved state is of {saved['optimizer']}, this optimizer is {expected['optimizer']}"
        )
    if saved.keys() != expected.keys():
        raise ValueError(
            f"optimizer state: the JSON has {sorted(saved)}, expected {sorted(expected)}"
        )
    check_names("parameters", saved["state"].keys(), expected["state"].keys())


def check_names(kind: str, saved: Set[str], expected: Set[str]) -> None:
    """Raises ValueError if names of parameters or tensors are missing or unexpected."""
    for problem, names in (("missing", expected - saved), ("unexpected", saved - expected)):
        if names:
            examples = ", ".join(sorted(names)[:4])
            raise ValueError(
                f"optimizer state: {len(names)} {kind} {problem}, among them {examples}"
            )


def check_tensors(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises ValueError if tensors differ in name, shape or dtype from the expected ones."""
    check_names("tensors", saved.keys(), expected.keys())
    for name, like in expected.items():
        tensor = saved[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"optimizer state: {name} is {tensor.dtype} {list(tensor.shape)}, expected"
                f" {like.dtype} {list(like.shape)}"
            )


NO_HYPERPARAMETERS = ("params", "param_names", "columns")
"""Keys of a parameter group that are no hyperparameters."""


class FP8State(Protocol):
    """Protocol: an object with the FP8 state of a model, such as a Job."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None: ...


def fp8_entry(fp8_state: FP8State | None) -> dict[str, Any]:
    """Returns the FP8 entry of an optimizer's state dict, empty without FP8 state."""
    if fp8_state is None:
        return {}
    tensors = fp8_state.state_dict()
    return {"fp8": tensors} if tensors else {}


class NamedOptimizer(torch.optim.Optimizer):
    """Base class of optimizers with state by parameter name.

    torch keys optimizer state by position, so `state_dict` differs from its layout. A job's
    optimizer also saves the FP8 state of its model (`fp8_state`). Trainer, Accelerate and Fabric
    save only model and optimizer, and the model's `state_dict` has no FP8 state.
    """

    names: dict[nn.Parameter, str]
    fp8_state: FP8State | None = None
    _owned: Container[str] | None = None
    sharded: bool = False
    """Whether FSDP2 shards every parameter and its state over data-parallel ranks."""
    one_shard: Callable[[], None] | None = None
    """Called after a state dict has written parameters, if FSDP2 has one shard on every rank."""
    masters_of: Collection[str] = ()
    """Names of parameters with a master that under FSDP2 is the parameter itself."""
    split: Collection[Any] = ()
    """Parameters that tensor-parallel ranks split."""
    sum_split: Callable[[Tensor], Tensor] | None = None
    """Sums a number over the ranks that split parameters."""
    can_defer: bool = False
    """Whether the device can decide to skip a step."""
    deferred: DeferredSteps | None = None
    sum_stages: Callable[[Tensor], Tensor] | None = None
    """Sums a number over pipeline stages, if there are any."""
    uncounted: Collection[Tensor] = ()
    """Parameters that another stage has too, and counts in norms: a tied embedding."""

    def norm_over_ranks(self, norm_of: Callable[[Sequence[nn.Parameter]], Tensor]) -> Tensor:
        """Returns the gradient norm of the whole model, float32 [].

        Args:
            norm_of: Returns the norm of this rank's gradients of some parameters.
        """
        if self.sum_stages is None:
            return self._norm_of_parts(norm_of, list(self.names))
        uncounted = {id(parameter) for parameter in self.uncounted}
        norm = self._norm_of_parts(
            norm_of, [parameter for parameter in self.names if id(parameter) not in uncounted]
        )
        # Squares of float32 norms can overflow float32, so stages are summed in float64.
        return self.sum_stages(norm.double().square()).sqrt().float()

    def _norm_of_parts(
        self, norm_of: Callable[[Sequence[nn.Parameter]], Tensor], params: Sequence[nn.Parameter]
    ) -> Tensor:
        """Returns the norm over tensor-parallel ranks.

        Split parameters are summed over the ranks. Replicated parameters count once.
        """
        if self.sum_split is None:
            return norm_of(params)
        split = [parameter for parameter in params if parameter in self.split]
        replicated = [parameter for parameter in params if parameter not in self.split]
        split_square = self.sum_split(norm_of(split).square())
        return (split_square + norm_of(replicated).square()).sqrt()

    @abstractmethod
    def state_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the state by names such as `<parameter>.exp_avg`. No copies."""

    @abstractmethod
    def state_json(self) -> dict[str, Any]:
        """Returns the rest of the state for JSON, without the learning rate of the schedule."""

    def check_saved(self, json: Mapping[str, Any]) -> None:
        """Raises ValueError if the result of `state_json` is from an optimizer of another kind."""
        check_json(json, self.state_json())

    @abstractmethod
    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Restores the results of `state_tensors` and `state_json`.

        Raises:
            ValueError: The state does not fit. Nothing was changed.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors, JSON state, hyperparameters and the FP8 state of a job's model.

        Raises:
            RuntimeError: Ranks have different parts of the state. Use `fp8cfg.fit` to save
                checkpoints.
        """
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
                " fp8cfg.fit, or set storage.shard=none"
            )
        tensors = self.state_tensors()
        if self.one_shard is not None:
            tensors = columns.to_plain_state(tensors, self.names, self.masters_of)
        state = {
            "tensors": tensors,
            "json": self.state_json(),
            "param_groups": [hyperparameters(group) for group in self.param_groups],
        }
        return state | fp8_entry(self.fp8_state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the result of `state_dict`. Load the model's weights first.

        Raises:
            ValueError: It is no such state dict, has another number of groups, or belongs to
                another optimizer or other FP8 layers.
        """
        _expect_state_dict(state_dict)
        # First, because loading FP8 state may write weights.
        self.check_saved(state_dict["json"])
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"optimizer state: {len(groups)} parameter groups, expected"
                f" {len(self.param_groups)}"
            )
        if self.one_shard is not None:
            tensors, masters = columns.from_plain_state(state_dict["tensors"], self.names)
            self.load_state(tensors, state_dict["json"])
            columns.write_parameters(masters)
            self._load_fp8(state_dict)  # scales and amaxes of these
            self.one_shard()
        else:
            # FP8 state may write weights. load_state then records these writes as its own.
            self._load_fp8(state_dict)
            self.load_state(state_dict["tensors"], state_dict["json"])
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(saved)

    def _load_fp8(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the FP8 state of the job's model, if both have it."""
        if self.fp8_state is not None and "fp8" in state_dict:
            self.fp8_state.load_state_dict(state_dict["fp8"])

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an optimizer cannot be copied or pickled, it belongs to one model; save its"
            " state_dict() or build another"
        )


def _expect_state_dict(state_dict: Any) -> None:
    """Raises ValueError if it is no state dict of a NamedOptimizer."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"optimizer state: expected what state_dict() gives, not {type(state_dict).__name__}"
        )
    missing = [key for key in ("param_groups", "tensors", "json") if key not in state_dict]
    if missing:
        line = f"optimizer state: has no {', '.join(missing)}"
        if "state" in state_dict:
            line += (
                "; it is keyed by position, as torch's optimizers have it, and this one by names"
            )
        raise ValueError(line)
    groups = state_dict["param_groups"]
    if not isinstance(groups, Sequence) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError("optimizer state: param_groups is no list of groups")
    for key in ("tensors", "json", "fp8"):
        if not isinstance(state_dict.get(key, {}), Mapping):
            raise ValueError(
                f"optimizer state: {key} is no table, but {type(state_dict[key]).__name__}"
            )


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of a parameter group."""
    return {key: value for key, value in group.items() if key not in NO_HYPERPARAMETERS}
