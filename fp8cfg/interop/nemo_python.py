"""Python of NeMo 2 and Megatron-Bridge, which is read and not run: recipe functions and plugins."""

from __future__ import annotations

import ast
import re
from typing import Any

from fp8cfg.interop.job_keys import job
from fp8cfg.interop.python_items import (
    Item,
    ItemReader,
    class_of,
    function_named,
    parsed,
)
from fp8cfg.interop.source_files import Said, last
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.presets import FUNCTIONS
from fp8cfg.schema.recipe_registry import recipes

PLUGINS = ("MegatronMixedPrecision", "MegatronFSDPMixedPrecision", "MixedPrecisionConfig")
PLUGIN = "trainer.plugins"
_PLUGIN_KEYS = (PLUGIN, "mixed_precision")
_CLASSES = {
    **dict.fromkeys(PLUGINS, PLUGIN),
    "Trainer": "trainer",
    "MegatronStrategy": "trainer.strategy",
    "DistributedDataParallelConfig": "trainer.strategy.ddp",
    "MockDataModule": "data",
    "PreTrainingDataModule": "data",
    "OptimizerConfig": "optim.config",
    "CosineAnnealingScheduler": "optim.lr_scheduler",
    "GPTConfig": "model.config",
    "LoRA": "peft",
    "TrainingConfig": "train",
    "SchedulerConfig": "scheduler",
    "GPTDatasetConfig": "dataset",
    "MockGPTDatasetConfig": "dataset",
}
"""Sections of the classes that have one wherever they are constructed."""
_FACTORY = re.compile(
    r"(?:.*\.)?(\w+)\.(?:pretrain|finetune)_recipe|(?:.*\.)?(\w+?)_(?:pretrain|finetune|sft|peft)_config"
)
_MODEL_CLASS = re.compile(r"(?:.*\.)?([A-Z][A-Za-z]+?)(\d*)(?:Config|ModelProvider)(\d+)([BM])")
_LORA = {"dim": "rank", "alpha": "alpha", "dropout": "dropout", "target_modules": "targets"}
_ENTRY_POINTS = ("pretrain", "finetune", "train")


def settings(text: str, function: str = "") -> Said:
    """What `text`, which is not run, says of a job; of `function` alone if one is named.

    Raises:
        ConfigError: It has no precision or several, or a precision field that is no literal.
    """
    tree: ast.AST = parsed(text)
    if function:
        tree = function_named(tree, function)  # type: ignore[arg-type]
    return _Reader(tree).said()


class _Reader:
    def __init__(self, tree: ast.AST) -> None:
        self.tree = tree
        self.reader = ItemReader(tree, self.section)
        self.read: set[str] = set()
        self.values: dict[str, Any] = {}
        self.texts: dict[str, list[str]] = {}
        self.lora: dict[str, Any] = {}
        self.problems: list[str] = []

    def section(self, name: str) -> str | None:
        """The section of a class or recipe function."""
        if factory_of(name):
            return ""
        leaf = name.rpartition(".")[2]
        if leaf in _ENTRY_POINTS:
            return ""
        return "model.config" if model_of(name) else _CLASSES.get(leaf)

    def said(self) -> Said:
        roots, models = self.sources()
        task = self.task()
        preset, objects = self.precision()
        for item in self.reader.items:
            self.take(item, roots, task)
        refuse_if(self.problems)
        plugin = PLUGIN if preset is not None or objects else None
        said = job(self.values, plugin)
        for path, texts in self.texts.items():
            if path in said.read:
                self.read.update(texts)
        items = tuple(item.text for item in self.reader.items)
        known = [name for name in models if name in recipes()]
        return said._replace(
            lost=tuple(
                f"{name}: no recipe of this model here; recipe=NAME gives its shape"
                for name in models
                if name not in known
            ),
            items=items,
            read=frozenset(self.read),
            preset=preset,
            task=task,
            lora=self.lora,
            called=bool(objects),
            recipe=known[0] if known else None,
        )

    def sources(self) -> tuple[list[str], list[str]]:
        """Variables that a recipe function made, and the models of the file.

        Raises:
            ConfigError: The file has several models.
        """
        roots: list[str] = []
        names: list[str] = []
        for variable, calls in self.reader.calls.items():
            if any(factory_of(class_of(call)[0]) for call in calls):
                roots.append(variable)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                name = class_of(node)[0]
                names += filter(None, [factory_of(name) or model_of(name)])
        models = list(dict.fromkeys(names))
        if len(models) > 1:
            raise ConfigError(
                f"has {len(models)} models, {', '.join(models)}; name the function that has the one,"
                " as FILE.py:NAME"
            )
        return roots, models

    def task(self) -> str | None:
        """The task of a finetune_recipe, LoRA's unless peft_scheme says otherwise."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call):
                continue
            if not class_of(node)[0].endswith("finetune_recipe"):
                continue
            schemes = [ast.unparse(k.value) for k in node.keywords if k.arg == "peft_scheme"]
            scheme = schemes[0].strip("'").lower() if schemes else "lora"
            if scheme not in ("lora", "none"):
                raise ConfigError(
                    f"peft_scheme={scheme}: not in this version; give the task as a word, task=lora"
                    " or task=sft"
                )
            return "sft" if scheme == "none" else "lora"
        return None

    def precision(self) -> tuple[str | None, int]:
        """The preset, and the number of plugin objects.

        Raises:
            ConfigError: There is none, or more than one.
        """
        nodes = list(ast.walk(self.tree))
        presets = list(dict.fromkeys(filter(None, map(_preset, nodes))))
        calls = [class_of(node)[0] for node in nodes if isinstance(node, ast.Call)]
        objects = [name for call in calls if (name := call.rpartition(".")[2]) in PLUGINS]
        if any(map(factory_of, calls)) and not presets and not objects:
            presets = ["bf16_mixed"]  # of NeMo's and Bridge's recipe functions
        if len(presets) + len(objects) == 1:
            return (presets[0] if presets else None), len(objects)
        if presets or objects:
            raise ConfigError(
                f"says {len(presets) + len(objects)} precisions,"
                f" {', '.join([*presets, *objects])}; name the function that has the one, as"
                " FILE.py:NAME"
            )
        raise ConfigError("says no precision, such as plugins=bf16_with_fp8_mixed()")

    def take(self, item: Item, roots: list[str], task: str | None) -> None:
        """Puts an item into the values of the job, if its value is a literal."""
        path = item.path
        root, _, rest = path.partition(".")
        if root in roots:
            path = rest
        for plugin in _PLUGIN_KEYS:
            if path == plugin or path.endswith(".plugins") or path == "plugins":
                self.read.add(item.text)  # which `precision` has seen
                return
            path = path.replace(f"{plugin}.", f"{PLUGIN}.", 1) if path.startswith(plugin) else path
        if not item.is_certain or item.value is None:
            return
        if isinstance(item.value, ast.Call):
            name = class_of(item.value)[0]
            model = factory_of(name) or model_of(name)
            if model in recipes() or _is_plain(name) or name in self.reader.functions:
                self.read.add(item.text)
            return
        try:
            value = ast.literal_eval(self.reader.resolved(item.value))
        except ValueError:
            if path.startswith(f"{PLUGIN}."):
                key = path.removeprefix(f"{PLUGIN}.")
                source = ast.unparse(item.value)[:40]
                self.problems.append(f"{key}: expected a literal, not {source}")
            return
        section, _, leaf = path.rpartition(".")
        if path == "peft_scheme":
            self.read.add(item.text)
        elif section == "peft" and task == "lora" and leaf in _LORA:
            self.lora[_LORA[leaf]] = value
            self.read.add(item.text)
        else:
            self.values[path] = value
            self.texts.setdefault(path, []).append(item.text)


def factory_of(name: str) -> str:
    """The model of a recipe function such as llm.llama3_8b.pretrain_recipe; empty for others."""
    match = _FACTORY.fullmatch(name)
    return (match[1] or match[2]) if match else ""


def model_of(name: str) -> str:
    """The model of a class such as Llama3Config8B or Llama31ModelProvider70B."""
    match = _MODEL_CLASS.fullmatch(name)
    if not match:
        return ""
    family, version, size, unit = match.groups()
    return f"{family.lower()}{version}_{size}{unit.lower()}"


def _is_plain(name: str) -> bool:
    """Whether a call without keywords constructs something that says nothing."""
    return name.rpartition(".")[2] in _CLASSES


def _preset(node: ast.AST) -> str:
    """The preset that `node` calls or names as a plugin."""
    if isinstance(node, ast.Call) and class_of(node)[0].rpartition(".")[2] in FUNCTIONS:
        return class_of(node)[0].rpartition(".")[2]
    value = None
    if isinstance(node, ast.keyword) and node.arg in ("plugins", "mixed_precision"):
        value = node.value
    if isinstance(node, ast.Assign):
        targets = [last(target) for target in node.targets]
        value = node.value if {"plugins", "mixed_precision"} & set(targets) else None
    is_name = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return str(value.value) if is_name else ""  # type: ignore[union-attr]
