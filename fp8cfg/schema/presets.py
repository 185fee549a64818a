"""Precision presets: functions that return the files under `conf/precision/` as typed objects.

The files have all values and names. Most functions are named as in NeMo and Megatron-Bridge.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from fp8cfg.schema import foreign_names
from fp8cfg.schema.errors import ConfigError, suggest
from fp8cfg.schema.keys import record
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.safe_files import CONF, read_yaml

_HEADER = re.compile(r"^# Python: (.+)$", re.MULTILINE)


def functions(folder: Path) -> dict[str, str]:
    """Returns the preset functions of the files in `folder`, from their lines `# Python: NAME, NAME`.

    Returns:
        The file, without its ending, by the name of the function.

    Raises:
        ConfigError: Two files have the same name.
    """
    files: dict[str, str] = {}
    for file in sorted(folder.glob("*.yaml")):
        header = _HEADER.search(file.read_text(encoding="utf-8"))
        if header is None:
            continue
        for name in header[1].split(", "):
            if name in files:
                raise ConfigError(f"{file}: {name} is already the name of {files[name]}.yaml")
            files[name] = file.stem
    return files


FUNCTIONS = functions(CONF / "precision")
"""Files under conf/precision/ by preset function. An export writes the first function of a file."""


class PresetFunction(Protocol):
    """A precision preset. It returns a new Precision with the values of its file.

    `changes` replace keys, and mappings change nested keys:
    `bf16_with_fp8_mixed(fp8={"margin": 1})`. Raises ConfigError as an assignment.
    """

    def __call__(self, **changes: Any) -> Precision: ...


def choices() -> list[str]:
    """Returns the short names of the shipped presets, sorted."""
    return sorted(file.stem for file in (CONF / "precision").glob("*.yaml"))


def stem(name: str) -> str:
    """Returns the file under conf/precision/ for a preset function or NeMo's hyphenated spelling.

    Returns any other name in lower case with underscores.
    """
    normalized = name.replace("-", "_").lower()
    return FUNCTIONS.get(normalized, normalized)


def precision_preset(name: str) -> Precision:
    """Returns a new object of a preset.

    Args:
        name: The name of its file or its function, or NeMo's hyphenated spelling.

    Raises:
        ConfigError: It is unknown. The message has the nearest name.
    """
    known = choices()
    if stem(name) not in known:
        ours = foreign_names.meant("precision", name)
        if ours:
            hint = f"; did you mean {ours!r}?"
        else:
            hint = suggest(name, [*known, *FUNCTIONS]) or "; see fp8cfg list precision"
        raise ConfigError(f"precision={name}: no such precision preset{hint}")
    preset = Precision(**read_yaml(CONF / "precision" / f"{stem(name)}.yaml"))
    record(preset.fp8, type(preset.fp8).model_fields)
    return preset


def built_config(value: Any) -> Any:
    """Builds a Fiddle Config of a preset, such as `fdl.Config(fp8cfg.bf16_with_fp8_mixed)`.

    Returns other values as they are.
    """
    if "fiddle" not in type(value).__module__.split("."):
        return value
    import fiddle as fdl  # slow to import, and few recipes need it

    return fdl.build(value)


def _preset_function(name: str, stem: str) -> PresetFunction:
    """Returns the function `name` for the file conf/precision/STEM.yaml."""

    def preset(**changes: Any) -> Precision:
        return precision_preset(stem).merged(changes)

    preset.__name__ = preset.__qualname__ = name
    preset.__doc__ = (
        f"The precision preset conf/precision/{stem}.yaml as a fresh Precision; keyword arguments"
        " replace keys."
    )
    return preset


PRESETS: dict[str, PresetFunction] = {
    name: _preset_function(name, stem) for name, stem in FUNCTIONS.items()
}
"""Preset functions by name. Each can be imported from fp8cfg."""
