"""Recognition of files of other projects, by the keys that only they have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Signature(NamedTuple):
    """Top-level keys of a project's files: all of `every` and one of `some`."""

    project: str
    every: frozenset[str]
    some: frozenset[str]
    verb: str | None = None
    """Name of the project in `fp8cfg import`; None if its files are not imported."""


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


SIGNATURES = (
    Signature(
        "Accelerate",
        _keys("mixed_precision"),
        _keys("compute_environment distributed_type num_processes fp8_config"),
        "accelerate",
    ),
    Signature(
        "DeepSpeed",
        frozenset(),
        _keys("zero_optimization train_micro_batch_size_per_gpu msamp"),
        "deepspeed",
    ),
    Signature(
        "axolotl", _keys("base_model"), _keys("sequence_len datasets adapter micro_batch_size")
    ),
    Signature(
        "LLaMA-Factory", _keys("model_name_or_path"), _keys("finetuning_type stage cutoff_len")
    ),
    Signature(
        "TRL or transformers",
        _keys("model_name_or_path"),
        _keys("per_device_train_batch_size dataset_name output_dir"),
    ),
    Signature("ms-swift", _keys("model dataset"), _keys("train_type tuner_type torch_dtype")),
    Signature("nanotron", _keys("parallelism tokens"), _keys("model optimizer")),
    Signature("NeMo 1", _keys("exp_manager"), _keys("model trainer"), "nemo"),
    Signature(
        "Megatron-Bridge",
        _keys("train model"),
        _keys("optimizer scheduler mixed_precision"),
        "bridge",
    ),
)
COMMANDS = {
    r"accelerate\s+launch": ("Accelerate", "accelerate"),
    r"deepspeed": ("DeepSpeed", "deepspeed"),
    r"nemo\s+llm": ("NeMo", "nemo"),
    r"axolotl\s+\w+": ("axolotl", None),
    r"llamafactory-cli\s+\w+": ("LLaMA-Factory", None),
    r"trl\s+\w+": ("TRL", None),
    r"swift\s+(?:sft|pt|rlhf)": ("ms-swift", None),
    r"tune\s+run": ("torchtune", None),
}
SWIFT = re.compile(r"^\s*(?:\w+=\S+\s+)*megatron\s+(sft|pt|rlhf)\b", re.MULTILINE)
"""ms-swift's trainer, which takes flags with the names of Megatron-LM's."""


def other_project(verb: str, data: Mapping[str, Any]) -> str:
    """Returns the line on a file of another project than `verb`; empty if it may be of that one."""
    matches = [
        each for each in SIGNATURES if each.every <= data.keys() and not each.some.isdisjoint(data)
    ]
    if not matches or any(each.verb == verb for each in matches):
        return ""
    return _line(matches[0].project, matches[0].verb, "configuration file")


def other_command(text: str) -> str:
    """Returns the line on a script that starts another project's trainer; empty for others."""
    for pattern, (project, verb) in COMMANDS.items():
        if re.search(rf"^\s*(?:\w+=\S+\s+)*{pattern}\b", text, re.MULTILINE):
            return _line(project, verb, "command")
    return ""


def _line(project: str, verb: str | None, kind: str) -> str:
    if verb is None:
        return (
            f"is a {kind} of {project}, which is not imported; write its values as keys of a recipe"
            " (fp8cfg explain KEY)"
        )
    return f"is a {kind} of {project}; write: fp8cfg import {verb} FILE"
