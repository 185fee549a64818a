"""State of a parameter in a low-bit optimizer: creation, saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.numerics.codecs import Codec, EncodedTensor
from fp8cfg.numerics.formats import StridedStart
from fp8cfg.optim.low_bit.adam_update import Slot
from fp8cfg.optim.low_bit.columns import Columns, decode_shard, first_element, local, to_sharded
from fp8cfg.optim.state_dict import Names, check_tensors

STORED = ("master", "weight", "exp_avg", "exp_avg_sq")
"""Tensors in the state of a parameter.

A master is optional. `weight` is missing if the parameter itself is the stored weight.
"""


def check_parameter(
    name: str,
    parameter: nn.Parameter,
    columns: Columns,
    has_stored_scale: bool,
    has_writer: bool,
) -> None:
    """Checks that a parameter can be optimized.

    Args:
        name: Its name.
        parameter: The parameter.
        columns: Its columns.
        has_stored_scale: Whether its bits need a scale that is stored elsewhere.
        has_writer: Whether it is written from a master.

    Raises:
        ValueError: Its dtype, memory layout or columns do not fit.
    """
    if has_writer and columns.master is None:
        raise ValueError(f"{name} is written from a master; its columns have none")
    is_float = parameter.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not has_stored_scale and not is_float:
        raise ValueError(
            f"{name} is {parameter.dtype}; parameters are float32, bfloat16 or float16"
        )
    if not parameter.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous; it is stepped through in the order of its memory"
        )


def is_stored(parameter: Tensor, weight: Codec) -> bool:
    """Returns whether the parameter itself is the stored weight."""
    return weight.scaling == "none" and weight.format.dtype == parameter.dtype


def create_state(
    parameter: Tensor,
    columns: Columns,
    value: Tensor,
    key: Tensor,
    weight: EncodedTensor | None,
    has_writer: bool,
) -> dict[str, Any]:
    """Creates the state of a parameter before its first step.

    The rounded value is written to `parameter` or `weight`, unless a writer does it.

    Args:
        parameter: The parameter.
        columns: Its columns.
        value: Its value before rounding, any float dtype.
        key: Random key for stochastic rounding.
        weight: Tensors that store the weight outside of the state, or None.
        has_writer: Whether the weight is written from the master by a function.
    """
    shape, device = parameter.shape, parameter.device
    state: dict[str, Any] = {"step": 0}
    if columns.master is not None:
        state["master"] = columns.master.zeros(shape, device)
        columns.master.store(value, state["master"], key)
        # The weight is rounded from the stored master, as in each later step.
        value = columns.master.decode(state["master"])
    if not has_writer:
        if weight is None and is_stored(parameter, columns.weight):
            weight = (parameter.detach(),)
        if weight is not None:
            columns.weight.store(value, weight, key)
        else:
            state["weight"] = columns.weight.zeros(shape, device)
            columns.weight.store(value, state["weight"], key)
            parameter.copy_(columns.weight.decode(state["weight"]))
    state["exp_avg"] = columns.exp_avg.zeros(shape, device)
    state["exp_avg_sq"] = columns.exp_avg_sq.zeros(shape, device)
    return state


def slot_of(
    parameter: Tensor,
    state: dict[str, Any],
    grad: EncodedTensor,
    encoded_weight: EncodedTensor | None,
    has_writer: bool,
) -> Slot:
    """Returns the flat tensors that a step reads and writes.

    Args:
        parameter: This rank's tensor of the parameter.
        state: Its state.
        grad: Its gradient.
        encoded_weight: Tensors that store the weight outside of the state, or None.
        has_writer: Whether a writer stores the weight from the master.
    """
    copy = None
    if encoded_weight is not None:
        weight = _flat(encoded_weight)
    elif "weight" in state:
        weight = _flat(state["weight"])
        copy = parameter.detach().view(-1)
    else:
        weight = (parameter.detach().view(-1),)
    grad_data, *grad_scale = grad
    return Slot(
        source=_flat(state["master"]) if "master" in state else weight,
        weight=weight if "master" in state and not has_writer else None,
        exp_avg=_flat(state["exp_avg"]),
        exp_avg_sq=_flat(state["exp_avg_sq"]),
        copy=copy,
        grad=_flat((grad_data.contiguous(), *grad_scale)),
    )


def _flat(stored: EncodedTensor) -> EncodedTensor:
    """Returns stored data as a flat view."""
    return (stored[0].view(-1), *stored[1:])


State = Mapping[Any, dict[str, Any]]


def collect_tensors(names: Names, state: State) -> dict[str, Tensor]:
    """Returns data as `<name>.exp_avg`, inverse scales as `<name>.exp_avg.scale_inv`, and so on.

    These are no copies. Shards are DTensors.
    """
    tensors = {}
    for parameter, name in names.items():
        for column in STORED:
            if column not in state[parameter]:
                continue
            data, *scale = state[parameter][column]
            tensors[f"{name}.{column}"] = to_sharded(data, parameter, is_data=True)
            if scale:
                scale_name = f"{name}.{column}.scale_inv"
                tensors[scale_name] = to_sharded(scale[0], parameter, is_data=False)
    return tensors


def collect_json(names: Names, state: State) -> dict[str, Any]:
    """Returns the step count and the codecs of each parameter."""
    return {
        name: {key: state[parameter][key] for key in ("step", "codecs")}
        for parameter, name in names.items()
    }


def convert_codecs(
    names: Names,
    columns: Collection[Columns],
    tensors: Mapping[str, Tensor],
    saved_entries: Mapping[str, Any],
    expected: Mapping[str, Any],
    key: Callable[[nn.Parameter, str], Tensor],
    starts: Mapping[nn.Parameter, StridedStart],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Converts saved state to the codecs of this layout.

    One layout may have blockwise moments where another has float32, because its shards would split
    blocks. A float32 weight and a float32 master are renamed to each other. Other differences stay.

    Args:
        names: Names of the parameters.
        columns: Columns of this optimizer, and of full tensors.
        tensors: Saved tensors.
        saved_entries: Saved JSON entries of the parameters.
        expected: JSON entries of this optimizer.
        key: Returns the random key of a parameter.
        starts: Positions of parameters that tensor parallelism splits.

    Returns:
        The converted tensors and JSON entries.
    """
    tensors = dict(tensors)
    entries = {}
    for name, entry in saved_entries.items():
        entries[name] = {**entry, "codecs": dict(entry["codecs"])}
    for parameter, name in names.items():
        saved_codecs = entries[name]["codecs"]
        expected_codecs = expected[name]["codecs"]
        _rename_float32_master(saved_codecs, expected_codecs)
        for column in ("exp_avg", "exp_avg_sq"):
            blockwise = _blockwise_codecs(columns, column)
            saved, target = saved_codecs.get(column), expected_codecs[column]
            data_name = f"{name}.{column}"
            scale_name = f"{data_name}.scale_inv"
            # With ZeRO other ranks have the tensors of some parameters, but all ranks the JSON.
            if saved in blockwise and target == "fp32":
                saved_codecs[column] = target
                if {data_name, scale_name} <= tensors.keys():
                    data = local(tensors[data_name])
                    first = first_element(parameter, starts.get(parameter))
                    values = decode_shard(blockwise[saved], data, tensors.pop(scale_name), first)
                    tensors[data_name] = to_sharded(values, parameter, is_data=True)
            elif saved == "fp32" and target in blockwise:
                saved_codecs[column] = target
                if data_name in tensors:
                    values = local(tensors[data_name]).float()
                    data, scale = blockwise[target].encode(values, key(parameter, column))
                    tensors[data_name] = to_sharded(data, parameter, is_data=True)
                    tensors[scale_name] = to_sharded(scale, parameter, is_data=False)
    return tensors, entries


def _rename_float32_master(saved: dict[str, str], expected: Mapping[str, str]) -> None:
    """Adds or removes a float32 master among `saved` codecs, in place, if `expected` does so.

    Under FSDP2 a float32 parameter is its own master, so one side has no entry.
    """
    if saved.get("master") is None and expected.get("master") == "fp32":
        saved["master"] = "fp32"
    elif saved.get("master") == "fp32" and expected.get("master") is None:
        del saved["master"]


def _blockwise_codecs(columns: Collection[Columns], column: str) -> dict[str, Codec]:
    """Returns the codecs of a column that have blocks, by name."""
    codecs: dict[str, Codec] = {}
    for parameter_columns in columns:
        codec = getattr(parameter_columns, column)
        if codec.block:
            codecs[str(codec)] = codec
    return codecs


def restore(
    names: Names,
    state: State,
    columns: Mapping[nn.Parameter, Columns],
    tensors: Mapping[str, Tensor],
    json: Mapping[str, Any],
) -> None:
    """Copies saved state into the optimizer.

    Parameters that are copies of a stored weight are written again.
    """
    for name, tensor in collect_tensors(names, state).items():
        local(tensor).copy_(local(tensors[name]))
    for parameter, name in names.items():
        state[parameter]["step"] = int(json[name]["step"])
        if "weight" in state[parameter]:
            parameter.copy_(columns[parameter].weight.decode(state[parameter]["weight"]))


def check_state(
    tensors: Mapping[str, Tensor],
    expected_tensors: Mapping[str, Tensor],
    entries: Mapping[str, Any],
    expected_entries: Mapping[str, Any],
) -> None:
    """Raises ValueError if saved codecs or tensors do not fit an optimizer.

    Args:
        tensors: Saved tensors.
        expected_tensors: Tensors of the optimizer.
        entries: Saved JSON entries of the same parameters.
        expected_entries: JSON entries of the optimizer.
    """
    for name, entry in expected_entries.items():
        saved, expected = entries[name]["codecs"], entry["codecs"]
        if saved != expected:
            raise ValueError(
                f"optimizer state: {name} is stored as {_format_codecs(saved)}, expected"
                f" {_format_codecs(expected)}"
            )
    check_tensors(tensors, expected_tensors)


def _format_codecs(codecs: Mapping[str, str]) -> str:
    """Formats codecs for messages."""
    return ", ".join(f"{column} {codec}" for column, codec in codecs.items())
