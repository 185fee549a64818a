"""Files and commands of other projects than the one that is to be imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fp8cfg.schema.foreign_files import matching

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
    matches = matching(data)
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
