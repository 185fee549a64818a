"""Projects that recipes are imported from and exported to: the files and arguments that each is read from, and its writer."""

from __future__ import annotations

import json as json_module
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.composition.recipe_yaml import nested as tree
from fp8cfg.interop import accelerate, nemo, shell_flags, source_files, transformer_engine
from fp8cfg.interop.accelerate import ACCELERATE
from fp8cfg.interop.deepspeed import DEEPSPEED
from fp8cfg.interop.key_table import Dialect, Read, Written
from fp8cfg.interop.megatron import MEGATRON, PRECISION_FLAGS
from fp8cfg.interop.nemo import BRIDGE, NEMO
from fp8cfg.interop.torchtitan import TORCHTITAN, configuration
from fp8cfg.interop.transformer_engine import TE
from fp8cfg.interop.translation import read, where, write
from fp8cfg.schema import __version__
from fp8cfg.schema.errors import ConfigError, refuse_if, suggest
from fp8cfg.schema.presets import precision_preset
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import apply_task
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
    found = transformer_engine.from_text(text)
    return source_files.Said(
        found, called="printed" not in found
    )  # by a Transformer Engine that may be newer


def no_text(text: str) -> source_files.Said:
    """Rejects whatever is no Python file."""
    raise ConfigError(
        "torchtitan has Python configs since February 2026; write: fp8cfg import torchtitan"
        " config_registry.py:NAME"
    )


DOORS = {
    "accelerate": Door(ACCELERATE, yaml, call=accelerate.from_call),
    "deepspeed": Door(DEEPSPEED, json, remarks=False),
    "nemo": Door(NEMO, yaml, source_files.plugin, python=nemo.precision, presets=True),
    "bridge": Door(BRIDGE, bridge, source_files.plugin, python=nemo.precision, presets=True),
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
        apply_task(base, said.task)
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
    project = door(name)
    write_file = writer(name)
    written = write(project.dialect, recipe)
    head = headed(project.dialect.name, written.lost) if project.remarks else ""
    return head + write_file(written), written.lost
