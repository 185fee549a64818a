"""Precision presets: functions, most of them named as in NeMo and Megatron-Bridge, that read the files under `conf/precision/`.

Values and names stand in those files and nowhere else; a function returns one as a typed object.
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
    """The preset functions that the files of `folder` name, each in a line `# Python: NAME, NAME`: function -> file, without its
    ending. Raises ConfigError where two files have one."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.yaml")):
        header = _HEADER.search(file.read_text(encoding="utf-8"))
        for name in header[1].split(", ") if header else ():
            if other := found.get(name):
                raise ConfigError(f"{file}: {name} is the name of {other}.yaml already")
            found[name] = file.stem
    return found


FUNCTIONS = functions(CONF / "precision")
"""Preset function -> file under conf/precision/; of a file with several the first is the one that an export writes."""


class PresetFunction(Protocol):
    """A precision preset: returns its file's values as a fresh Precision, with those of `changes` replaced, nested keys by
    mappings, as in `bf16_with_fp8_mixed(fp8={"margin": 1})`. Raises ConfigError as assignment does.
    """

    def __call__(self, **changes: Any) -> Precision: ...


def choices() -> list[str]:
    """The short names of the shipped presets, sorted."""
    return sorted(p.stem for p in (CONF / "precision").glob("*.yaml"))


def stem(name: str) -> str:
    """The file under conf/precision/ that a preset function, or NeMo's hyphenated spelling of one, names; `name` itself else."""
    spelled = name.replace("-", "_").lower()
    return FUNCTIONS.get(spelled, spelled)


def precision_preset(name: str) -> Precision:
    """The preset `name` as a fresh object: a file's short name, a function's name, or NeMo's hyphenated spelling.

    Raises ConfigError with the nearest name where there is none.
    """
    known = choices()
    if stem(name) not in known:
        ours = foreign_names.meant("precision", name)
        near = (
            f"; did you mean {ours!r}?"
            if ours
            else suggest(name, [*known, *FUNCTIONS]) or "; fp8cfg list precision has them"
        )
        raise ConfigError(f"precision={name}: no such precision preset{near}")
    preset = Precision(**read_yaml(CONF / "precision" / f"{stem(name)}.yaml"))
    record(preset.fp8, type(preset.fp8).model_fields)
    return preset


def built_config(value: Any) -> Any:
    """Builds a Fiddle Config of a preset, such as `fdl.Config(fp8cfg.bf16_with_fp8_mixed)`; returns other values as they are."""
    if "fiddle" not in type(value).__module__.split("."):
        return value
    import fiddle as fdl  # inside: few recipes need it

    return fdl.build(value)


def _function(name: str, stem: str) -> PresetFunction:
    def preset(**changes: Any) -> Precision:
        return precision_preset(stem).merged(changes)

    preset.__name__ = preset.__qualname__ = name
    preset.__doc__ = (
        f"The precision preset conf/precision/{stem}.yaml as a fresh Precision; keyword arguments"
        " replace keys."
    )
    return preset


PRESETS: dict[str, PresetFunction] = {
    name: _function(name, stem) for name, stem in FUNCTIONS.items()
}
"""Preset functions by name; each is importable from fp8cfg."""
