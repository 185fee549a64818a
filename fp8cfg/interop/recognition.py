"""Recognition of files and commands of other projects than the imported one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fp8cfg.schema.foreign_files import matching

# Pattern of a command -> project, and its name in `fp8cfg import`, None without an importer.
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
_ENVIRONMENT = r"^\s*(?:\w+=\S+\s+)*"  # CUDA_VISIBLE_DEVICES=0 and the like, before a command
SWIFT_COMMAND = re.compile(rf"{_ENVIRONMENT}megatron\s+(sft|pt|rlhf)\b", re.MULTILINE)
"""ms-swift's trainer. Its flags have the names of Megatron-LM's flags."""


def describe_other_project(name: str, data: Mapping[str, Any]) -> str:
    """Returns the error for a file of another project, "" if it may be a file of `name`."""
    # Projects share keys, so a file can match several of them.
    matches = matching(data)
    if not matches or any(signature.verb == name for signature in matches):
        return ""
    return _describe(matches[0].project, matches[0].verb, "configuration file")


def describe_other_command(text: str) -> str:
    """Returns the error for a script with another project's trainer, "" for others."""
    for pattern, (project, name) in COMMANDS.items():
        if re.search(rf"{_ENVIRONMENT}{pattern}\b", text, re.MULTILINE):
            return _describe(project, name, "command")
    return ""


def _describe(project: str, name: str | None, kind: str) -> str:
    if name is None:
        return (
            f"is a {kind} of {project}, which cannot be imported; set the keys of a recipe instead"
            " (fp8cfg explain KEY)"
        )
    return f"is a {kind} of {project}; run fp8cfg import {name} FILE"
