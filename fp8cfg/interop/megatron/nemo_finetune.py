"""NeMo's fine-tuning, read as data: `finetune_recipe(peft_scheme=...)` is a task, and fields set on `recipe.peft` are LoRA's."""

from __future__ import annotations

import ast
from typing import Any

from fp8cfg.config.errors import ConfigError
from fp8cfg.interop.python_calls import last

_FIELDS = {"dim": "rank", "alpha": "alpha", "dropout": "dropout", "target_modules": "targets"}
_LEFT = "not read; give it as a word, as in lora.targets=[q_proj,v_proj]"


def task(tree: ast.AST) -> str | None:
    """The task of a call of finetune_recipe, which is LoRA's where it leaves peft_scheme out; None without one. Raises ConfigError
    for a scheme that is not in this version."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last(node.func) == "finetune_recipe":
            given = next(
                (ast.unparse(k.value) for k in node.keywords if k.arg == "peft_scheme"), "'lora'"
            )
            scheme = given.strip("'").lower()
            if scheme not in ("lora", "none"):
                raise ConfigError(
                    f"peft_scheme={scheme}: not in this version; give the task as a word, task=lora"
                    " or task=sft"
                )
            return "sft" if scheme == "none" else "lora"
    return None


def lora(tree: ast.AST) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Values of the `lora` node that statements set on `peft`, and a line on each of the others."""
    found, left = dict[str, Any](), list[str]()
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if not (isinstance(target, ast.Attribute) and last(target.value) == "peft"):
                continue
            try:
                value = ast.literal_eval(node.value)  # type: ignore[attr-defined]
                found[_FIELDS[target.attr]] = value
            except (KeyError, ValueError):
                left.append(f"{ast.unparse(node)}: {_LEFT}")
    return found, tuple(left)
