"""Import and export of recipes: Accelerate, DeepSpeed, NeMo, Megatron-Bridge, Megatron-LM,
torchtitan, torchao and Transformer Engine.

Each function also returns remarks on settings without an equivalent on the other side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8cfg.composition.recipe_yaml import nested
from fp8cfg.interop import accelerate_handlers, transformer_engine
from fp8cfg.interop.accelerate_handlers import to_handler
from fp8cfg.interop.key_table import NotHere, Read, UnknownObject, Written, flatten_keys
from fp8cfg.interop.nemo import BRIDGE, NEMO
from fp8cfg.interop.projects import find_project, find_writer, from_file, from_words, to_text
from fp8cfg.interop.torchao import TORCHAO, make_verified_config, read_config_fields
from fp8cfg.interop.transformer_engine import to_te
from fp8cfg.interop.translation import export_recipe, import_settings
from fp8cfg.schema.recipe import Recipe

__all__ = [
    "NotHere",
    "Read",
    "Written",
    "from_file",
    "from_mapping",
    "from_object",
    "from_words",
    "to_handler",
    "to_mapping",
    "to_te",
    "to_text",
    "to_torchao",
]
_PLUGINS = {"MegatronMixedPrecision": NEMO, "DtypeConfig": NEMO, "MixedPrecisionConfig": BRIDGE}


def from_object(obj: Any, base: Recipe | None = None) -> Read:
    """Imports an object of another project into a recipe.

    Supports Accelerate's handlers, Transformer Engine's recipes, torchao's Float8LinearConfig, and
    the precision plugins of NeMo and Megatron-Bridge. The names of the object's class and its
    base classes decide, so no other library is imported.

    Args:
        obj: The object.
        base: The recipe for all other values. Its precision is replaced. The default recipe by
            default.

    Returns:
        The recipe, not checked yet, with remarks.

    Raises:
        UnknownObject: The object is of another class.
        ConfigError: A field is invalid.
    """
    for cls in type(obj).__mro__:
        name = cls.__name__
        if name in accelerate_handlers.CLASS_NAMES:
            return accelerate_handlers.from_handler(obj, base)
        if name in transformer_engine.CLASS_NAMES:
            return transformer_engine.from_te(obj, base)
        if name == "Float8LinearConfig":
            return import_settings(TORCHAO, read_config_fields(obj), base)
        if name in _PLUGINS:
            return import_settings(_PLUGINS[name], _read_plugin_fields(obj), base)
    raise UnknownObject(
        f"{type(obj).__name__}: is not a known class of another project; pass keys and values to"
        " from_mapping"
    )


def from_mapping(project: str, data: Mapping[str, Any], base: Recipe | None = None) -> Read:
    """Imports keys and values of another project into a recipe.

    Args:
        project: "accelerate", "deepspeed", "nemo", "bridge", "megatron", "torchtitan" or "te".
        data: Values by key, nested or with dotted keys.
        base: See `from_object`.

    Returns:
        The recipe, not checked yet, with remarks.

    Raises:
        ConfigError: With one line for each invalid value.
    """
    return import_settings(find_project(project).key_table, flatten_keys(data), base)


def to_mapping(project: str, recipe: Recipe) -> Written:
    """Exports a recipe as keys and values of another project, nested as in its files.

    Args:
        project: See `from_mapping`.
        recipe: The recipe.

    Raises:
        ConfigError: The project cannot express the recipe.
    """
    find_writer(project)  # raises for projects without an export
    written = export_recipe(find_project(project).key_table, recipe)
    return written._replace(value=nested(written.value))


def to_torchao(recipe: Recipe) -> Written:
    """Exports a recipe as torchao's Float8LinearConfig, and compares all of its fields.

    Raises:
        ConfigError: torchao cannot express the recipe, or changed a field.
        NotHere: torchao is not installed.
    """
    return make_verified_config(export_recipe(TORCHAO, recipe))


def _read_plugin_fields(plugin: Any) -> dict[str, Any]:
    """Returns the public fields of a plugin. NeMo has most of them in its dtype_config."""
    fields = {**vars(plugin)}
    dtype_config = fields.pop("dtype_config", None)
    if dtype_config is not None:
        fields = {**vars(dtype_config), **fields}
    settings: dict[str, Any] = {}
    for name, value in fields.items():
        if name.startswith("_"):
            continue
        is_plain = value is None or isinstance(value, (bool, int, float, str, tuple))
        settings[name] = value if is_plain else str(value)  # a torch.dtype, for example
    return settings
