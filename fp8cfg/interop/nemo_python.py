"""Python of NeMo 2 and Megatron-Bridge, parsed and never run: recipe functions and plugins."""

from __future__ import annotations

import ast
import re
from typing import Any

from fp8cfg.interop.job_keys import select_job_keys
from fp8cfg.interop.python_source import (
    Item,
    ItemReader,
    find_function,
    last_name,
    parse_constructor,
    parse_python,
    resolve_constant,
    short_source,
)
from fp8cfg.interop.source_files import Source
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.presets import FUNCTIONS
from fp8cfg.schema.recipe_registry import recipes

PLUGINS = ("MegatronMixedPrecision", "MegatronFSDPMixedPrecision", "MixedPrecisionConfig")
PLUGIN_SECTION = "trainer.plugins"
_PLUGIN_PATHS = (PLUGIN_SECTION, "mixed_precision")
# Sections of classes, independent of the variable or keyword that an object is assigned to.
_CLASS_SECTIONS = {
    **dict.fromkeys(PLUGINS, PLUGIN_SECTION),
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
# Names such as llm.llama3_8b.pretrain_recipe and llama3_8b_pretrain_config.
_RECIPE_FUNCTION = re.compile(
    r"(?:.*\.)?(\w+)\.(?:pretrain|finetune)_recipe"
    r"|(?:.*\.)?(\w+?)_(?:pretrain|finetune|sft|peft)_config"
)
# Names such as Llama3Config8B and Llama31ModelProvider70B.
_MODEL_CLASS = re.compile(r"(?:.*\.)?([A-Z][A-Za-z]+?)(\d*)(?:Config|ModelProvider)(\d+)([BM])")
_LORA_KEYS = {"dim": "rank", "alpha": "alpha", "dropout": "dropout", "target_modules": "targets"}
_ENTRY_POINTS = ("pretrain", "finetune", "train")


def read_job(text: str, function: str = "") -> Source:
    """Reads a Python file with a job.

    Args:
        text: The file.
        function: Name of the function to read. Empty for the full file.

    Raises:
        ConfigError: There is no precision plugin or more than one, there are several models, or a
            field of the plugin is not a literal.
    """
    tree: ast.AST = parse_python(text)
    if function:
        tree = find_function(tree, function)  # type: ignore[arg-type]
    return _JobReader(tree).read()


class _JobReader:
    """Reads a syntax tree.

    Attributes:
        item_reader: The settings of the tree by path.
        settings: Settings of the job by path.
        item_texts: Texts of the items behind these settings, by path.
        read_items: Texts of all other items that were read.
        lora: Values of the recipe's lora node.
        problems: Errors.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.tree = tree
        self.item_reader = ItemReader(tree, _find_section)
        self.settings: dict[str, Any] = {}
        self.item_texts: dict[str, list[str]] = {}
        self.read_items: set[str] = set()
        self.lora: dict[str, Any] = {}
        self.problems: list[str] = []

    def read(self) -> Source:
        models = self.find_models()
        job_variables = self.find_job_variables()
        task = self.find_task()
        preset, has_plugin = self.find_precision()
        for item in self.item_reader.items:
            self.read_item(item, job_variables, task)
        refuse_if(self.problems)
        section = PLUGIN_SECTION if preset is not None or has_plugin else None
        source = select_job_keys(self.settings, section)
        for path, texts in self.item_texts.items():
            if path in source.read_items:
                self.read_items.update(texts)
        known_models = [model for model in models if model in recipes()]
        remarks = [
            f"{model}: fp8cfg has no recipe of this model; set recipe=NAME for another shape"
            for model in models
            if model not in known_models
        ]
        return source._replace(
            remarks=tuple(remarks),
            items=tuple(item.text for item in self.item_reader.items),
            read_items=frozenset(self.read_items),
            preset=preset,
            task=task,
            lora=self.lora,
            rejects_unknown=has_plugin,
            recipe=known_models[0] if known_models else None,
        )

    def find_models(self) -> list[str]:
        """Returns the model of the file, if any. Raises ConfigError for several models."""
        models: list[str] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                model = _find_model(parse_constructor(node)[0])
                if model and model not in models:
                    models.append(model)
        if len(models) > 1:
            raise ConfigError(
                f"has {len(models)} models, {', '.join(models)}; add the name of a function with"
                " one model, as in FILE.py:NAME"
            )
        return models

    def find_job_variables(self) -> list[str]:
        """Returns the variables with the job of a recipe function."""
        return [
            variable
            for variable, calls in self.item_reader.calls.items()
            if any(_model_of_function(parse_constructor(call)[0]) for call in calls)
        ]

    def find_task(self) -> str | None:
        """Returns "lora" or "sft" for a finetune_recipe. Its default is LoRA."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call):
                continue
            if not parse_constructor(node)[0].endswith("finetune_recipe"):
                continue
            scheme = "lora"
            for keyword in node.keywords:
                if keyword.arg == "peft_scheme":
                    scheme = ast.unparse(keyword.value).strip("'").lower()
            if scheme not in ("lora", "none"):
                raise ConfigError(f"peft_scheme={scheme}: not supported; set task=lora or task=sft")
            # Full fine-tuning has no PEFT scheme.
            return "sft" if scheme == "none" else "lora"
        return None

    def find_precision(self) -> tuple[str | None, bool]:
        """Returns the preset, or None with True for the object of a plugin.

        Raises:
            ConfigError: There is no precision, or more than one.
        """
        presets: list[str] = []
        plugins: list[str] = []
        has_recipe_function = False
        for node in ast.walk(self.tree):
            preset = _find_preset(node)
            if preset and preset not in presets:
                presets.append(preset)
            if isinstance(node, ast.Call):
                name = parse_constructor(node)[0]
                has_recipe_function = has_recipe_function or bool(_model_of_function(name))
                class_name = name.rpartition(".")[2]
                if class_name in PLUGINS:
                    plugins.append(class_name)
        if has_recipe_function and not presets and not plugins:
            presets = ["bf16_mixed"]  # the default of NeMo's and Bridge's recipe functions
        precisions = [*presets, *plugins]
        if not precisions:
            raise ConfigError("has no precision, such as plugins=bf16_with_fp8_mixed()")
        if len(precisions) > 1:
            raise ConfigError(
                f"has {len(precisions)} precisions, {', '.join(precisions)}; add the name of a"
                " function with one precision, as in FILE.py:NAME"
            )
        return (presets[0] if presets else None), bool(plugins)

    def read_item(self, item: Item, job_variables: list[str], task: str | None) -> None:
        """Adds an item to the settings, if its value is a literal and certain."""
        path = item.path
        variable, _, below = path.partition(".")
        if variable in job_variables:
            path = below
        if path in (*_PLUGIN_PATHS, "plugins") or path.endswith(".plugins"):
            self.read_items.add(item.text)  # by `find_precision`
            return
        for plugin_path in _PLUGIN_PATHS:
            if path.startswith(f"{plugin_path}."):
                path = f"{PLUGIN_SECTION}.{path.removeprefix(f'{plugin_path}.')}"
        if not item.is_certain or item.value is None:
            return
        if isinstance(item.value, ast.Call):
            name = parse_constructor(item.value)[0]
            # Without arguments, these calls set nothing beyond the model and its recipe.
            is_default = name.rpartition(".")[2] in _CLASS_SECTIONS
            is_function = name in self.item_reader.functions
            if _find_model(name) in recipes() or is_default or is_function:
                self.read_items.add(item.text)
            return
        value_node = resolve_constant(item.value, self.item_reader.constants)
        try:
            value = ast.literal_eval(value_node)
        except ValueError:
            if path.startswith(f"{PLUGIN_SECTION}."):
                key = path.removeprefix(f"{PLUGIN_SECTION}.")
                source = short_source(item.value)
                self.problems.append(f"{key}: expected a literal, not {source}")
            return
        section, _, leaf = path.rpartition(".")
        if path == "peft_scheme":
            self.read_items.add(item.text)
        elif section == "peft" and task == "lora" and leaf in _LORA_KEYS:
            self.lora[_LORA_KEYS[leaf]] = value
            self.read_items.add(item.text)
        else:
            self.settings[path] = value
            self.item_texts.setdefault(path, []).append(item.text)


def _find_section(name: str) -> str | None:
    """Returns the section of a class or function, "" for the job itself, None for others."""
    leaf = name.rpartition(".")[2]
    if _model_of_function(name) or leaf in _ENTRY_POINTS:
        return ""
    if _model_of_class(name):
        return "model.config"
    return _CLASS_SECTIONS.get(leaf)


def _find_model(name: str) -> str:
    """Returns the model of a recipe function or of a model's class, "" for others."""
    return _model_of_function(name) or _model_of_class(name)


def _model_of_function(name: str) -> str:
    match = _RECIPE_FUNCTION.fullmatch(name)
    if match is None:
        return ""
    return match[1] or match[2]


def _model_of_class(name: str) -> str:
    match = _MODEL_CLASS.fullmatch(name)
    if match is None:
        return ""
    family, version, size, unit = match.groups()
    return f"{family.lower()}{version}_{size}{unit.lower()}"


def _find_preset(node: ast.AST) -> str:
    """Returns the preset of a call such as bf16_with_fp8_mixed(), or of a plugin's name, or ""."""
    if isinstance(node, ast.Call):
        function = parse_constructor(node)[0].rpartition(".")[2]
        return function if function in FUNCTIONS else ""
    value: ast.expr | None = None
    if isinstance(node, ast.keyword) and node.arg in ("plugins", "mixed_precision"):
        value = node.value
    if isinstance(node, ast.Assign):
        targets = {last_name(target) for target in node.targets}
        if targets & {"plugins", "mixed_precision"}:
            value = node.value
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    return ""
