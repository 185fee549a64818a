"""Recipe import and export: Accelerate, DeepSpeed, NeMo, Megatron-Bridge, Megatron-LM, torchtitan, torchao and
Transformer Engine. What one side says and the other cannot is returned, line by line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8cfg.composition.recipe_yaml import nested
from fp8cfg.interop import accelerate, transformer_engine
from fp8cfg.interop.accelerate import to_handler
from fp8cfg.interop.key_table import NotHere, Read, Written, flattened
from fp8cfg.interop.nemo import BRIDGE, NEMO
from fp8cfg.interop.projects import door, from_file, from_words, to_text, writer
from fp8cfg.interop.torchao import TORCHAO, confirmed, fields_of
from fp8cfg.interop.transformer_engine import to_te
from fp8cfg.interop.translation import read, write
from fp8cfg.schema.errors import ConfigError
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
    """The recipe that an object of another project means, on top of `base`, whose precision it replaces: Accelerate's handlers,
    Transformer Engine's recipes, torchao's Float8LinearConfig, NeMo's and Megatron-Bridge's plugins. It is told by the name of its
    class or of one that it derives from; nothing is imported. Raises ConfigError for any other object.
    """
    for cls in type(obj).__mro__:
        name = cls.__name__
        if name in accelerate.NAMES:
            return accelerate.from_handler(obj, base)
        if name in transformer_engine.NAMES:
            return transformer_engine.from_te(obj, base)
        if name == "Float8LinearConfig":
            return read(TORCHAO, fields_of(obj), base)
        if name in _PLUGINS:
            return read(_PLUGINS[name], _attributes(obj), base)
    raise ConfigError(
        f"{type(obj).__name__}: no object of a project that is known here; from_mapping takes keys"
        " and values"
    )


def from_mapping(project: str, data: Mapping[str, Any], base: Recipe | None = None) -> Read:
    """The recipe that keys and values of `project` (accelerate, deepspeed, nemo, bridge, megatron, torchtitan, te) mean, nested or
    by dotted keys. Raises ConfigError with a line for each value that cannot be."""
    return read(door(project).dialect, flattened(data), base)


def to_mapping(project: str, recipe: Recipe) -> Written:
    """`recipe` as keys and values of `project`, nested as its files are. Raises ConfigError for one that cannot be written."""
    writer(project)
    written = write(door(project).dialect, recipe)
    return written._replace(value=nested(written.value))


def to_torchao(recipe: Recipe) -> Written:
    """The genuine Float8LinearConfig, every field of it read back. Raises NotHere where torchao cannot be imported."""
    return confirmed(write(TORCHAO, recipe))


def _attributes(plugin: Any) -> dict[str, Any]:
    """The fields of a plugin, those of its dtype_config too, which is where NeMo keeps them."""
    own = {k: v for k, v in vars(plugin).items() if not k.startswith("_")}
    config = own.pop("dtype_config", None)
    inner = (
        {k: v for k, v in vars(config).items() if not k.startswith("_")}
        if config is not None
        else {}
    )
    return {
        k: v if isinstance(v, (bool, int, float, str, tuple, type(None))) else str(v)
        for k, v in {**inner, **own}.items()
    }
