"""Projects that recipes are imported from and exported to: the files and arguments that each is read from, and its writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.config import tasks
from fp8cfg.config.errors import ConfigError, refuse_if, suggest
from fp8cfg.config.presets import precision_preset
from fp8cfg.config.recipe import Recipe
from fp8cfg.interop import file_writers, source_files
from fp8cfg.interop.accelerate import handlers
from fp8cfg.interop.accelerate.config_file import ACCELERATE
from fp8cfg.interop.deepspeed import DEEPSPEED
from fp8cfg.interop.key_table import Dialect, Read, Written
from fp8cfg.interop.megatron import nemo_python
from fp8cfg.interop.megatron.nemo import BRIDGE, NEMO
from fp8cfg.interop.megatron.precision_flags import MEGATRON
from fp8cfg.interop.te import objects as te_objects
from fp8cfg.interop.te.recipe import TE
from fp8cfg.interop.torchtitan.python_configs import configuration
from fp8cfg.interop.torchtitan.sections import SECTIONS, TORCHTITAN
from fp8cfg.interop.translation import read, where, write


@dataclass(frozen=True)
class Door:
    """One project: its key table, how its files and arguments are read (as text, or as keys and values), and how it is written.
    `call` reads Python with one call in it, `python` one function of a file; `remarks` says whether the text has comments, for
    what it cannot say."""

    dialect: Dialect
    write: Callable[[Written], str]
    keys: Callable[[Mapping[str, Any]], source_files.Said] = source_files.nested
    text: Callable[[str], source_files.Said] | None = None
    call: Callable[[str, Recipe | None], Read] | None = None
    python: Callable[[str, str], source_files.Said] | None = None
    presets: bool = False
    remarks: bool = True


def _te_text(text: str) -> source_files.Said:
    found = te_objects.from_text(text)
    return source_files.Said(
        found, called="printed" not in found
    )  # by a Transformer Engine that may be newer


DOORS = {
    "accelerate": Door(ACCELERATE, file_writers.yaml, call=handlers.from_call),
    "deepspeed": Door(DEEPSPEED, file_writers.json, remarks=False),
    "nemo": Door(
        NEMO, file_writers.yaml, source_files.plugin, python=nemo_python.precision, presets=True
    ),
    "bridge": Door(
        BRIDGE, file_writers.bridge, source_files.plugin, python=nemo_python.precision, presets=True
    ),
    "megatron": Door(MEGATRON, file_writers.flags, text=source_files.shell(MEGATRON)),
    "torchtitan": Door(
        TORCHTITAN,
        file_writers.toml,
        source_files.sections(SECTIONS, TORCHTITAN),
        python=configuration,
    ),
    "te": Door(TE, file_writers.te, text=_te_text),
}
"""Projects by the names that `fp8cfg import` and `fp8cfg export` know."""


def door(name: str) -> Door:
    """The project `name`. Raises ConfigError with the nearest where there is none."""
    if name not in DOORS:
        raise ConfigError(f"{name}: no such project" + suggest(name, DOORS))
    return DOORS[name]


def from_file(name: str, path: Path, base: Recipe | None = None) -> Read:
    """The recipe in a file of the project `name`, on top of `base`; FILE.py:NAME is one function of a file. Raises ConfigError,
    naming the file."""
    found = door(name)
    if found.python and ".py:" in path.name:
        path, function = path.with_name(path.name.partition(":")[0]), path.name.partition(":")[2]
    else:
        function = ""
    try:
        if found.call and path.suffix == ".py":
            return found.call(source_files.text_of(path), base)
        if found.python and path.suffix == ".py":
            return _read(found, found.python(source_files.text_of(path), function), base)
        if not found.text and path.suffix == ".py":
            raise ConfigError(
                f"is Python, which {found.dialect.name} is not read from; expected YAML or JSON"
            )
        said = (
            found.text(source_files.text_of(path))
            if found.text
            else found.keys(source_files.mapping(path))
        )
        return _read(found, said, base)
    except ConfigError as e:
        raise where(str(path), e) from None


def from_words(name: str, words: Sequence[str], base: Recipe | None = None) -> Read:
    """The recipe in words of the project `name`: flags, key=value, a call, or the name of a preset. Raises ConfigError for what is
    none, and for an unknown key, which the project would refuse too."""
    found = door(name)
    if found.presets and len(words) == 1 and "=" not in words[0]:
        return _read(found, source_files.Said({}, preset=words[0]), base)
    if found.call and "(" in words[0]:
        return found.call(source_files.joined(words), base)
    said = (
        found.text(source_files.joined(words))
        if found.text
        else source_files.Said(source_files.pairs(words))
    )
    return _read(found, said._replace(called="printed" not in said.data), base)


def _read(found: Door, said: source_files.Said, base: Recipe | None) -> Read:
    if said.task is not None:
        base = (base or Recipe()).model_copy(deep=True)
        tasks.apply(base, said.task)
        base.lora = base.lora.merged(dict(said.lora))
    if said.preset is not None:
        recipe = (base or Recipe()).model_copy(deep=True)
        recipe.precision = precision_preset(said.preset)
        return Read(recipe, said.lost, ())
    back = read(found.dialect, said.data, base)
    refuse_if(back.unknown if said.called else ())
    if not any(map(found.dialect.knows, said.data)):
        none = (
            f"has no key that {found.dialect.name} says precision by, such as"
            f" {found.dialect.entries[0].theirs}"
        )
        raise ConfigError(
            [line for line in (*said.unknown, *back.unknown) if "did you mean" in line] or none
        )
    return back._replace(lost=(*back.lost, *said.lost), unknown=(*back.unknown, *said.unknown))


def to_text(name: str, recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """`recipe` as the text of the project `name`, with a line on each key that it cannot say; these stand in the text as
    comments where it has any. Raises ConfigError for a recipe that cannot be written there."""
    found = door(name)
    written = write(found.dialect, recipe)
    return (
        file_writers.headed(found.dialect.name, written.lost) if found.remarks else ""
    ) + found.write(written), written.lost
