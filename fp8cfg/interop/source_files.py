"""Sources of an import: files and arguments of another project. Nothing in them is executed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8cfg.interop import shell_flags
from fp8cfg.interop.key_table import KeyTable, flatten_keys
from fp8cfg.interop.recognition import SWIFT_COMMAND, describe_other_command
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.safe_files import parse_yaml, plain, read_text, unique_keys


class Source(NamedTuple):
    """Content of a file or of arguments.

    Attributes:
        settings: Settings by key, as the project's key table knows them.
        remarks: Remarks on other parts of the source.
        preset: Name of the precision preset below the settings.
        task: Task of the source, such as "lora".
        lora: Values of the recipe's lora node.
        rejects_unknown: Whether an unknown key is an error, because the project rejects it too. In
            a file it may belong to another version.
        recipe: Name of the fp8cfg recipe behind the source.
        items: Everything in the source, as text.
        read_items: The items in `settings` and the other attributes.
    """

    settings: dict[str, Any]
    remarks: tuple[str, ...] = ()
    preset: str | None = None
    task: str | None = None
    lora: Mapping[str, Any] = MappingProxyType({})
    rejects_unknown: bool = False
    recipe: str | None = None
    items: tuple[str, ...] = ()
    read_items: frozenset[str] = frozenset()

    @property
    def unread_items(self) -> list[str]:
        items = dict.fromkeys(self.items)
        return [item for item in items if item not in self.read_items]


def read_source_text(path: Path) -> str:
    """Returns the text of a file. Raises ConfigError as `read_text` does, and for an empty file."""
    text = read_text(path)
    # Otherwise an empty YAML file would be a job without settings.
    if not text.strip():
        raise ConfigError(f"{path}: is empty")
    return text


# YAML and JSON.

# `parse_yaml` rejects keys such as _target_, which make Hydra run code. Here they are only data.
_HYDRA_KEY = re.compile(r"(^\s*(?:- +)?|[{,]\s*)_(target|partial|args|call)_(?=\s*:)", re.MULTILINE)
_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_][\w.]*)\}")


def read_mapping(path: Path) -> dict[str, Any]:
    """Returns the content of a YAML file, or of a JSON file by its suffix.

    In YAML, `_target_` becomes `their_target`, and references to other keys are replaced.
    """
    text = read_source_text(path)
    try:
        if path.suffix == ".json":
            data = json.loads(text, object_pairs_hook=unique_keys)
        else:
            text = _HYDRA_KEY.sub(r"\1their_\2", text)
            yaml_data = parse_yaml(text, str(path), interpolations=True)
            return _resolve_references(yaml_data, flatten_keys(yaml_data))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except ConfigError:
        raise
    except ValueError:  # Python's limit for the digits of an integer
        raise ConfigError(f"{path}: a number has too many digits") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values, got {type(data).__name__}")
    checked: dict[str, Any] = plain(data, str(path), interpolations=True)
    return checked


def _resolve_references(
    data: Mapping[str, Any], values: Mapping[str, Any], section: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Replaces OmegaConf's references to other keys of the file by their values.

    Args:
        data: The section. Other interpolations in it, such as `${multiply:4,2}`, stay.
        values: Values of the file by dotted key. `${a.b}` refers to the key a.b, and `${.b}` to
            the key b of the section.
        section: Path of the section.
    """
    resolved: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            value = _resolve_references(value, values, (*section, key))
        for _ in range(8):  # a reference to a reference, possibly in a cycle
            match = None
            if isinstance(value, str):
                match = _REFERENCE.fullmatch(value)
            if match is None:
                break
            num_dots = len(match[1])
            start: tuple[str, ...] = ()
            if num_dots:
                start = section[: len(section) + 1 - num_dots]  # each further dot is one level up
            value = values.get(".".join((*start, match[2])), value)
        resolved[key] = value
    return resolved


def interpolated_keys(settings: Mapping[str, Any]) -> list[str]:
    """Returns the keys with interpolations for OmegaConf."""
    return [key for key, value in settings.items() if isinstance(value, str) and "${" in value]


def source_of_mapping(data: Mapping[str, Any]) -> Source:
    """Returns the source of a file without keys beyond the key table."""
    return Source(flatten_keys(data))


# Arguments and scripts.


def parse_assignments(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the values of key=value arguments. Raises ConfigError for others."""
    problems = [f"{argument}: expected key=value" for argument in arguments if "=" not in argument]
    if problems:
        raise ConfigError(problems)
    settings: dict[str, Any] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        settings[key] = value
    return settings


def shell_reader(table: KeyTable, precision_flags: frozenset[str]) -> Callable[[str], Source]:
    """Returns a reader of shell scripts and commands with flags.

    Args:
        table: Key table of the flags.
        precision_flags: Flags for which a condition in the script is an error.
    """

    def read_script(text: str) -> Source:
        flags, remarks = shell_flags.read_flags(text, table, precision_flags)
        settings = shell_flags.known_flags(table, flags)
        if not settings:
            problem = f"has no known flag of {table.name}, such as --fp8-format hybrid"
            raise ConfigError([*remarks, describe_other_command(text) or problem])
        swift_command = SWIFT_COMMAND.search(text)
        if swift_command:
            remarks.append(
                f"megatron {swift_command[1]}: ms-swift's command, with Megatron-LM's flags;"
                " computes in bf16, and takes the shape from --model, here model.path"
            )
            if "fp16" not in flags:
                settings["--bf16"] = True
        items = tuple(shell_flags.dashed(name) for name in flags)
        return Source(settings, tuple(remarks), items=items, read_items=frozenset(settings))

    return read_script


def join_arguments(arguments: Sequence[str]) -> str:
    """Returns arguments as a command line. A single argument is one already."""
    if len(arguments) == 1:
        return arguments[0]
    return " ".join(_quote(argument) for argument in arguments)


def _quote(argument: str) -> str:
    # Quotes would hide a variable from the parser of scripts.
    is_variable = "$" in argument and not set(argument) & set(" \t\n'\"\\")
    return argument if is_variable else shlex.quote(argument)
