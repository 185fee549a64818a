"""Projects that recipes are imported from and exported to: the files and arguments that each is read from, and its writer."""

from __future__ import annotations

import json as json_module
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.composition.recipe_yaml import nested as tree
from fp8cfg.interop import (
    accelerate,
    nemo_python,
    shell_flags,
    source_files,
    transformer_engine,
)
from fp8cfg.interop.accelerate import ACCELERATE
from fp8cfg.interop.deepspeed import DEEPSPEED
from fp8cfg.interop.job_keys import run_config
from fp8cfg.interop.key_table import Dialect, Read, Written, not_read, shown
from fp8cfg.interop.megatron import MEGATRON, PRECISION_FLAGS
from fp8cfg.interop.nemo import BRIDGE, NEMO
from fp8cfg.interop.python_items import rest_of_call
from fp8cfg.interop.recognition import other_project
from fp8cfg.interop.torchtitan import TORCHTITAN, configuration
from fp8cfg.interop.transformer_engine import TE
from fp8cfg.interop.translation import read, where, write
from fp8cfg.schema import __version__
from fp8cfg.schema.errors import ConfigError, refuse_if, suggest
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import apply_task, named
from fp8cfg.schema.safe_files import dump_yaml


def comments(lines: Iterable[str]) -> str:
    """Each line as a comment of at most 80 columns."""
    wrapped = [
        textwrap.fill(
            " ".join(line.split()),
            80,
            initial_indent="# ",
            subsequent_indent="#   ",
            break_on_hyphens=False,
        )
        for line in lines
    ]
    return "".join(f"{line}\n" for line in wrapped)


def headed(project: str, lost: Iterable[str]) -> str:
    """The head of a file for `project`: what it cannot say stands first."""
    said = list(lost)
    return comments(
        [
            f"Exported by fp8cfg {__version__} for {project}.",
            *(["What it cannot say:"] if said else []),
            *said,
        ]
    )


def yaml(written: Written) -> str:
    """A YAML file."""
    return dump_yaml(tree(written.value))


def bridge(written: Written) -> str:
    """The section of a run's YAML file that Megatron-Bridge reads precision from."""
    return dump_yaml({"mixed_precision": written.value})


def json(written: Written) -> str:
    """A JSON file."""
    return json_module.dumps(tree(written.value), indent=2) + "\n"


def flags(written: Written) -> str:
    """An array of a shell, a flag a line."""
    words = shell_flags.line(written.value)
    lines = "".join(f"\n    {word}" if word.startswith("--") else f" {word}" for word in words)
    return f"FP8CFG_ARGS=({lines}\n)\n"


def te(written: Written) -> str:
    """Python that makes Transformer Engine's recipe."""
    return transformer_engine.python_text(written.value)


@dataclass(frozen=True)
class Door:
    """One project: its key table, how its files and arguments are read (as text, or as keys and values), and how it is written.
    `call` reads Python with one call in it, `python` one function of a file; `remarks` says whether the text has comments, for
    what it cannot say."""

    dialect: Dialect
    write: Callable[[Written], str] | None = None
    keys: Callable[[Mapping[str, Any]], source_files.Said] = source_files.nested
    text: Callable[[str], source_files.Said] | None = None
    call: Callable[[str, Recipe | None], Read] | None = None
    python: Callable[[str, str], source_files.Said] | None = None
    presets: bool = False
    remarks: bool = True


def _te_text(text: str) -> source_files.Said:
    fields = transformer_engine.from_text(text)
    if "printed" in fields:  # by a Transformer Engine that may be newer
        return source_files.Said(fields)
    rest = rest_of_call(text, transformer_engine.NAMES)
    return source_files.Said(fields, called=True, items=tuple(rest))


def no_text(text: str) -> source_files.Said:
    """Rejects whatever is no Python file."""
    raise ConfigError(
        "torchtitan has Python configs since February 2026; write: fp8cfg import torchtitan"
        " config_registry.py:NAME"
    )


DOORS = {
    "accelerate": Door(ACCELERATE, yaml, call=accelerate.from_call),
    "deepspeed": Door(DEEPSPEED, json, remarks=False),
    "nemo": Door(NEMO, yaml, run_config, python=nemo_python.settings, presets=True),
    "bridge": Door(BRIDGE, bridge, run_config, python=nemo_python.settings, presets=True),
    "megatron": Door(MEGATRON, flags, text=source_files.shell(MEGATRON, PRECISION_FLAGS)),
    "torchtitan": Door(TORCHTITAN, text=no_text, python=configuration),
    "te": Door(TE, te, text=_te_text),
}
"""Projects by the names that `fp8cfg import` and `fp8cfg export` know."""


def door(name: str) -> Door:
    """The project `name`. Raises ConfigError with the nearest where there is none."""
    if name not in DOORS:
        raise ConfigError(f"{name}: no such project" + suggest(name, DOORS))
    return DOORS[name]


def writer(name: str) -> Callable[[Written], str]:
    """Returns what writes the files of a project. Raises ConfigError if recipes are not exported to it."""
    write_file = door(name).write
    if write_file is None:
        raise ConfigError(
            f"export {name}: its configs are Python that builds a model; pass a converter such as"
            " Float8LinearConverter.Config(...) to its model_registry"
        )
    return write_file


def from_file(name: str, path: Path, base: Recipe | None = None) -> Read:
    """The recipe in a file of the project `name`, on top of `base`; FILE.py:NAME is one function of a file. Raises ConfigError,
    naming the file."""
    found = door(name)
    path, function = _function_in(found, path)
    try:
        if found.call and path.suffix == ".py":
            return found.call(source_files.text_of(path), base)
        if found.python and path.suffix == ".py":
            return _read(found, found.python(source_files.text_of(path), function), base)
        if not found.text and path.suffix == ".py":
            raise ConfigError(
                f"is Python, which {found.dialect.name} is not read from; expected YAML or JSON"
            )
        if found.text:
            return _read(found, found.text(source_files.text_of(path)), base)
        data = source_files.mapping(path)
        if other := other_project(name, data):
            raise ConfigError(other.replace("FILE", str(path)))
        return _read(found, found.keys(data), base)
    except ConfigError as e:
        raise where(str(path), e) from None


def _function_in(found: Door, path: Path) -> tuple[Path, str]:
    """Splits FILE.py:NAME, if the project's Python is read by functions."""
    if not found.python or ".py:" not in path.name:
        return path, ""
    file, _, function = path.name.partition(":")
    return path.with_name(file), function


def recipe_of_file(name: str, path: Path) -> str | None:
    """The recipe of this package that a file of the project `name` builds on, as
    `llm.llama3_8b.pretrain_recipe()` does; None if it names none."""
    found = door(name)
    path, function = _function_in(found, path)
    if not found.python or path.suffix != ".py":
        return None
    try:
        return found.python(source_files.text_of(path), function).recipe
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
    """The recipe of what was read. Everything else in the source has a line that names it."""
    name = said.recipe if base is None else None
    if name is not None:
        base = named(name)
    if said.task is not None:
        base = (base or Recipe()).model_copy(deep=True)
        apply_task(base, said.task)
        base.lora = base.lora.merged(dict(said.lora))
    _refuse_interpolations(found, said)
    # A source that builds on a recipe changes single sizes of its layout.
    keeps_layout = said.recipe is not None
    back = read(found.dialect, said.data, base, said.preset, keeps_layout)
    refuse_if(back.unknown if said.called else ())
    if said.preset is None and not any(map(found.dialect.knows, said.data)):
        none = (
            f"has no key that {found.dialect.name} says precision by, such as"
            f" {found.dialect.entries[0].theirs}"
        )
        raise ConfigError(
            [line for line in (*said.unknown, *back.unknown) if "did you mean" in line] or none
        )
    lost = (*back.lost, *said.lost, *not_read(said.unread))
    return Read(back.recipe, lost, (*back.unknown, *said.unknown))


def _refuse_interpolations(found: Door, said: source_files.Said) -> None:
    """Raises ConfigError for keys that are read and whose values only OmegaConf can compute."""
    refuse_if(
        [
            f"{shown(key, said.data[key])}: interpolation is not accepted here; write the value"
            for key in source_files.interpolated(said.data)
            if found.dialect.knows(key)
        ]
    )


def to_text(name: str, recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """`recipe` as the text of the project `name`, with a line on each key that it cannot say; these stand in the text as
    comments where it has any. Raises ConfigError for a recipe that cannot be written there."""
    project = door(name)
    write_file = writer(name)
    written = write(project.dialect, recipe)
    head = headed(project.dialect.name, written.lost) if project.remarks else ""
    return head + write_file(written), written.lost
