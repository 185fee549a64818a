"""Projects of `fp8cfg import` and `fp8cfg export`, with their readers and writers."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.composition.recipe_yaml import nested
from fp8cfg.interop import accelerate_handlers, nemo_python, shell_flags, transformer_engine
from fp8cfg.interop.accelerate import ACCELERATE
from fp8cfg.interop.deepspeed import DEEPSPEED
from fp8cfg.interop.job_keys import read_run_config
from fp8cfg.interop.key_table import KeyTable, Read, Written, format_setting, unread_remark
from fp8cfg.interop.megatron import MEGATRON, PRECISION_FLAGS
from fp8cfg.interop.nemo import BRIDGE, NEMO
from fp8cfg.interop.python_source import list_unread_besides_call
from fp8cfg.interop.recognition import describe_other_project
from fp8cfg.interop.source_files import (
    Source,
    interpolated_keys,
    join_arguments,
    parse_assignments,
    read_mapping,
    read_source_text,
    shell_reader,
    source_of_mapping,
)
from fp8cfg.interop.torchtitan import TORCHTITAN
from fp8cfg.interop.torchtitan_python import read_configuration
from fp8cfg.interop.transformer_engine import TE
from fp8cfg.interop.translation import export_recipe, import_settings, with_source
from fp8cfg.schema import __version__
from fp8cfg.schema.errors import ConfigError, refuse_if, suggest
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import apply_task, named
from fp8cfg.schema.safe_files import dump_yaml


@dataclass(frozen=True)
class Project:
    """A project with its key table, the readers of its sources, and the writer of its files.

    Attributes:
        key_table: The keys of the project.
        write_text: Returns the text of a file. None if recipes are not exported to the project.
        read_keys: Reads the content of a YAML or JSON file.
        read_text: Reads any other text, such as a script with flags.
        read_call: Imports Python with the call of a class.
        read_python: Reads one function of a Python file, by name.
        has_presets: Whether an argument can be the name of a precision preset.
        has_comments: Whether the files can have comments.
    """

    key_table: KeyTable
    write_text: Callable[[Written], str] | None = None
    read_keys: Callable[[Mapping[str, Any]], Source] = source_of_mapping
    read_text: Callable[[str], Source] | None = None
    read_call: Callable[[str, Recipe | None], Read] | None = None
    read_python: Callable[[str, str], Source] | None = None
    has_presets: bool = False
    has_comments: bool = True


def _to_yaml(written: Written) -> str:
    return dump_yaml(nested(written.value))


def _to_bridge_yaml(written: Written) -> str:
    """Returns the precision section of Megatron-Bridge's YAML file."""
    return dump_yaml({"mixed_precision": written.value})


def _to_json(written: Written) -> str:
    return json.dumps(nested(written.value), indent=2) + "\n"


def _to_shell_array(written: Written) -> str:
    """Returns a shell array with one flag in each line."""
    lines = ""
    for word in shell_flags.command_line(written.value):
        lines += f"\n    {word}" if word.startswith("--") else f" {word}"
    return f"FP8CFG_ARGS=({lines}\n)\n"


def _to_te_python(written: Written) -> str:
    return transformer_engine.to_python(written.value)


def _read_te_text(text: str) -> Source:
    settings = transformer_engine.read_recipe_text(text)
    # A printed recipe can be from a newer Transformer Engine. Its unknown fields are no errors.
    if "printed" in settings:
        return Source(settings)
    unread = list_unread_besides_call(text, transformer_engine.CLASS_NAMES)
    return Source(settings, rejects_unknown=True, items=tuple(unread))


def _reject_torchtitan_text(text: str) -> Source:
    raise ConfigError(
        "torchtitan has Python configurations since February 2026; run fp8cfg import torchtitan"
        " config_registry.py:NAME"
    )


PROJECTS = {
    "accelerate": Project(ACCELERATE, _to_yaml, read_call=accelerate_handlers.read_handler_call),
    "deepspeed": Project(DEEPSPEED, _to_json, has_comments=False),
    "nemo": Project(
        NEMO, _to_yaml, read_run_config, read_python=nemo_python.read_job, has_presets=True
    ),
    "bridge": Project(
        BRIDGE,
        _to_bridge_yaml,
        read_run_config,
        read_python=nemo_python.read_job,
        has_presets=True,
    ),
    "megatron": Project(
        MEGATRON, _to_shell_array, read_text=shell_reader(MEGATRON, PRECISION_FLAGS)
    ),
    "torchtitan": Project(
        TORCHTITAN, read_text=_reject_torchtitan_text, read_python=read_configuration
    ),
    "te": Project(TE, _to_te_python, read_text=_read_te_text),
}
"""Projects by their names on the command line."""


def find_project(name: str) -> Project:
    """Returns a project. Raises ConfigError for an unknown name."""
    if name not in PROJECTS:
        raise ConfigError(f"{name}: no such project" + suggest(name, PROJECTS))
    return PROJECTS[name]


def find_writer(name: str) -> Callable[[Written], str]:
    """Returns the writer of a project. Raises ConfigError if recipes are not exported to it."""
    write_text = find_project(name).write_text
    if write_text is None:
        raise ConfigError(
            f"export {name}: its configurations are Python that builds a model; pass a converter"
            " such as Float8LinearConverter.Config(...) to its model_registry"
        )
    return write_text


def from_file(name: str, path: Path, base: Recipe | None = None) -> Read:
    """Imports a file of another project.

    Args:
        name: Name of the project.
        path: The file. FILE.py:NAME is one function of a file, if the project has such files.
        base: The recipe for all other values. Its precision is replaced.

    Raises:
        ConfigError: The file cannot be imported. Each line begins with the file.
    """
    project = find_project(name)
    path, function = _split_function(project, path)
    try:
        return _import_file(name, project, path, function, base)
    except ConfigError as error:
        raise with_source(str(path), error) from None


def _import_file(
    name: str, project: Project, path: Path, function: str, base: Recipe | None
) -> Read:
    if path.suffix == ".py" and project.read_call:
        return project.read_call(read_source_text(path), base)
    if path.suffix == ".py" and project.read_python:
        return _import_source(project, project.read_python(read_source_text(path), function), base)
    if project.read_text:
        return _import_source(project, project.read_text(read_source_text(path)), base)
    if path.suffix == ".py":
        raise ConfigError(
            f"is a Python file; {project.key_table.name} is imported from YAML or JSON"
        )
    data = read_mapping(path)
    problem = describe_other_project(name, data)
    if problem:
        raise ConfigError(problem.replace("FILE", str(path)))
    return _import_source(project, project.read_keys(data), base)


def _split_function(project: Project, path: Path) -> tuple[Path, str]:
    """Splits FILE.py:NAME if the project's Python files are read by function."""
    if not project.read_python or ".py:" not in path.name:
        return path, ""
    file_name, _, function = path.name.partition(":")
    return path.with_name(file_name), function


def recipe_of_file(name: str, path: Path) -> str | None:
    """Returns the fp8cfg recipe behind a file of the project, or None.

    A NeMo file with `llm.llama3_8b.pretrain_recipe()` builds on llama3_8b.
    """
    project = find_project(name)
    path, function = _split_function(project, path)
    if not project.read_python or path.suffix != ".py":
        return None
    try:
        return project.read_python(read_source_text(path), function).recipe
    except ConfigError as error:
        raise with_source(str(path), error) from None


def from_words(name: str, words: Sequence[str], base: Recipe | None = None) -> Read:
    """Imports arguments of another project.

    Args:
        name: Name of the project.
        words: Flags, key=value, a call, or the name of a preset.
        base: The recipe for all other values. Its precision is replaced.

    Raises:
        ConfigError: The arguments cannot be imported. This includes unknown keys, because the
            project rejects them too.
    """
    project = find_project(name)
    if project.has_presets and len(words) == 1 and "=" not in words[0]:
        return _import_source(project, Source({}, preset=words[0]), base)
    # A shell may have split the call at its spaces.
    if project.read_call and "(" in words[0]:
        return project.read_call(join_arguments(words), base)
    if project.read_text:
        source = project.read_text(join_arguments(words))
    else:
        source = Source(parse_assignments(words))
    is_printed = "printed" in source.settings
    return _import_source(project, source._replace(rejects_unknown=not is_printed), base)


def _import_source(project: Project, source: Source, base: Recipe | None) -> Read:
    """Imports a source. All other parts of it get a remark."""
    table = project.key_table
    if base is None and source.recipe is not None:
        base = named(source.recipe)
    if source.task is not None:
        base = (base or Recipe()).model_copy(deep=True)
        apply_task(base, source.task)
        base.lora = base.lora.merged(dict(source.lora))
    refuse_if(
        [
            f"{format_setting(key, source.settings[key])}: interpolations are not supported here;"
            " write the value"
            for key in interpolated_keys(source.settings)
            if table.has_entry(key)
        ]
    )
    # A source that builds on a recipe changes single sizes of its layout.
    keeps_layout = source.recipe is not None
    imported = import_settings(table, source.settings, base, source.preset, keeps_layout)
    if source.rejects_unknown:
        refuse_if(imported.unknown)
    if source.preset is None and not any(table.has_entry(key) for key in source.settings):
        typos = [line for line in imported.unknown if "did you mean" in line]
        problem = f"has no precision key of {table.name}, such as {table.entries[0].key}"
        raise ConfigError(typos or problem)
    lost = (*imported.lost, *source.remarks, *unread_remark(source.unread_items))
    return imported._replace(lost=lost)


def to_text(name: str, recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """Exports a recipe as the text of a file.

    Args:
        name: Name of the project.
        recipe: The recipe.

    Returns:
        The text, and a remark on each key that is not in it. If the files of the project can have
        comments, the text has the remarks too.

    Raises:
        ConfigError: The recipe cannot be exported to the project.
    """
    project = find_project(name)
    write_text = find_writer(name)
    written = export_recipe(project.key_table, recipe)
    text = write_text(written)
    if project.has_comments:
        header = [f"Exported by fp8cfg {__version__} for {project.key_table.name}."]
        if written.lost:
            header += ["Settings without an equivalent:", *written.lost]
        text = comments(header) + text
    return text, written.lost


def comments(lines: Iterable[str]) -> str:
    """Returns each line as a comment, wrapped at 80 columns."""
    text = ""
    for line in lines:
        text += textwrap.fill(
            " ".join(line.split()),
            80,
            initial_indent="# ",
            subsequent_indent="#   ",
            break_on_hyphens=False,
        )
        text += "\n"
    return text
