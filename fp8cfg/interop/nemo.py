"""NeMo MegatronMixedPrecision plugin and Megatron-Bridge MixedPrecisionConfig: fields, and presets by name."""

from __future__ import annotations

import ast
from typing import Any

from fp8cfg.interop.key_table import (
    Dialect,
    Entry,
    Unsaid,
    Values,
    is_on,
    one_of,
    read_only,
    switch,
)
from fp8cfg.interop.megatron import (
    DOUBTS,
    DYNAMIC,
    OFF,
    REDUCED,
    REUSE,
    UNSAID,
    WGRAD,
    WHY,
    fields,
    loss_scaling,
    reduction,
    refuse,
    refuse_both,
    what_is_on,
)
from fp8cfg.interop.source_files import Said, call_in, last
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.presets import FUNCTIONS

_PRECISIONS = {
    "bf16-mixed": "bf16",
    "bf16": "bf16",
    "fp16-mixed": "fp16",
    "fp16": "fp16",
    "16-mixed": "fp16",
    "16": "fp16",
    "fp32": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "bf16-true": "bf16",
    "16-true": "fp16",
}
_WORDS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32"}


def compute_of(theirs: Values) -> str:
    """The compute dtype that `theirs` has, by its name or by switches; fp32 where all are off."""
    named = _PRECISIONS.get(str(theirs.get("precision")).lower())
    return named or next((dtype for dtype in ("bf16", "fp16") if is_on(theirs.get(dtype))), "fp32")


def _prepare(theirs: dict[str, Any]) -> list[str]:
    lines = what_is_on(theirs, (0, 0))
    if theirs.get("precision") in OFF and compute_of(theirs) == "fp32":
        theirs["fp32"] = True
    reduction(theirs, compute_of(theirs))
    refuse_both(theirs, _PRECISIONS.get(str(theirs.get("precision")).lower()))
    return lines


_SPELLINGS = {
    "fp8_param": "fp8_param_gather",
    "fp8_params": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
}
_SHARED = (*fields(), WGRAD, REDUCED, REUSE)
_DEFAULTS = {
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "grad_reduce_in_fp32": True,
}
_SWITCHES = tuple(switch(dtype, "precision.compute", dtype) for dtype in ("fp32", "fp16", "bf16"))
NEMO = Dialect(
    "NeMo",
    (
        *(read_only(e.theirs, e.read) for e in _SWITCHES),
        Entry(
            "precision",
            lambda value: {} if value in OFF else {"precision.compute": one_of(value, _PRECISIONS)},
            lambda ours: _WORDS[ours["precision.compute"]],
        ),
        *_SHARED,
        *loss_scaling("fp16_"),
    ),
    {**_SPELLINGS, **{k: f"fp16_{k}" for k in ("loss_scale", *DYNAMIC)}},
    _DEFAULTS,
    {**UNSAID, "device": Unsaid("trainer.accelerator says it", ("cuda",))},
    _prepare,
    refuse,
    why=WHY,
    doubts=DOUBTS,
)
BRIDGE = Dialect(
    "Megatron-Bridge",
    (*_SWITCHES, *_SHARED, *loss_scaling()),
    _SPELLINGS,
    {**_DEFAULTS, "fp8_recipe": "tensorwise"},
    UNSAID,
    _prepare,
    refuse,
    why=WHY,
    doubts=DOUBTS,
)

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
    asked = task(tree)
    values, left = lora(tree) if asked == "lora" else ({}, ())
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
