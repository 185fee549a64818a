"""NeMo's Python, read as data: the precision plugin of a script, as a call of a preset function, of a plugin's class, or a name;
and the task of a finetune_recipe."""

from __future__ import annotations

import ast

from fp8cfg.config.errors import ConfigError
from fp8cfg.config.presets import FUNCTIONS
from fp8cfg.interop.megatron import nemo_finetune
from fp8cfg.interop.python_calls import call_in, last
from fp8cfg.interop.source_files import Said

_CLASSES = ("MegatronMixedPrecision", "MegatronFSDPMixedPrecision")


def precision(text: str, function: str = "") -> Said:
    """What `text`, which is not run, says of precision; of `function` alone where one is named. Fields that are set on the plugin
    afterwards, or given to the trainer with it, are said with the line that does it here. Raises ConfigError where it says
    none, or several."""
    try:
        tree: ast.AST = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise ConfigError(f"not Python ({e})") from None
    if function:
        tree = _function(tree, function)
    asked = nemo_finetune.task(tree)
    values, left = nemo_finetune.lora(tree) if asked == "lora" else ({}, ())
    presets = dict.fromkeys(filter(None, (_preset(node) for node in ast.walk(tree))))
    objects = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _class(node)]
    if asked and not presets and not objects:
        presets = {"bf16_mixed": None}  # of default_finetune_trainer
    if len(presets) + len(objects) != 1:
        found = [*presets, *(_class(node) for node in objects)]
        several = (
            f"says {len(found)} precisions, {', '.join(found)}; name the function that has the one,"
            " as FILE.py:NAME"
        )
        raise ConfigError(
            several if found else "says no precision, such as plugins=bf16_with_fp8_mixed()"
        )
    beside = [*_later(tree), *_with_plugins(tree)]
    later = left + tuple(
        f"{line}: not read; give it as a word, as in fp8.margin=1" for line in beside
    )
    if presets:
        return Said({}, later, preset=next(iter(presets)), task=asked, lora=values)
    call = ast.unparse(objects[0]).replace(
        f"Config({_class(objects[0])}, ", f"{_class(objects[0])}("
    )
    fields = call_in(call[call.index(_class(objects[0])) :], _CLASSES, "plugin of NeMo")
    return Said(
        {k: v for k, v in fields.items() if k != "class"},
        later,
        task=asked,
        lora=values,
        called=True,
    )


def _preset(node: ast.AST) -> str:
    """The preset that `node` calls or names as a plugin."""
    if isinstance(node, ast.Call) and last(node.func) in FUNCTIONS:
        return last(node.func)
    value = node.value if isinstance(node, ast.keyword) and node.arg == "plugins" else None
    if isinstance(node, ast.Assign) and any(last(target) == "plugins" for target in node.targets):
        value = node.value
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _class(node: ast.Call) -> str:
    """The plugin's class that `node` calls, or configures as run.Config does."""
    names = [
        last(node.func),
        *([last(node.args[0])] if node.args and last(node.func) in ("Config", "Partial") else []),
    ]
    return next((name for name in names if name in _CLASSES), "")


def _later(tree: ast.AST) -> list[str]:
    """The statements that set a field of the plugin."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and last(target.value) == "plugins"
    ]


def _with_plugins(tree: ast.AST) -> list[str]:
    """What a trainer is given with `plugins` that may be FP8's: fields by its names, and mappings, of which nothing is known."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and any(k.arg == "plugins" for k in node.keywords)
    ]
    return [
        ast.unparse(k)
        for call in calls
        for k in call.keywords
        if k.arg is None or k.arg.startswith("fp8")
    ]


def _function(tree: ast.AST, name: str) -> ast.AST:
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    if not found:
        raise ConfigError(f"{name}: no such function in it")
    return found[0]
