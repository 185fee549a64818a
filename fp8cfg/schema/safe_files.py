"""Safe YAML and JSON: reads plain data of bounded size, and rejects keys that name code.

Recipes come from other people, so a file must not run code, read other files or exhaust memory.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.foreign_names import CODE_KEYS
from fp8cfg.schema.regular_file import open_regular

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_NODES = 10_000
MAX_ALIASES = 64
CONF = (Path(__file__).parents[1] / "conf").resolve()
"""The shipped `conf/`, part of the package. In a checkout it is a link to the top-level folder."""
STDIN = Path("<stdin>")
"""The path of standard input, `-` on the command line."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]{0,63}")
"""Names of presets and recipes. Without dots and slashes no name can leave the folder of its group."""


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML or JSON file with a mapping.

    Args:
        path: The file, or STDIN.

    Raises:
        ConfigError: The file is not plain data of bounded size. The message names the file.
    """
    text = read_text(path)
    # Standard input has no suffix, so its text decides.
    is_json = path.suffix == ".json" or (path == STDIN and _is_json(text))
    if is_json:
        return parse_json(text, str(path))
    return parse_yaml(text, str(path))


def default_recipe() -> str:
    """Returns the default recipe of conf/config.yaml."""
    return next(str(entry["recipe"]) for entry in primary_config()["defaults"] if "recipe" in entry)


@functools.cache
def primary_config() -> dict[str, Any]:
    """Returns the shipped conf/config.yaml. Callers must not change it."""
    return read_yaml(CONF / "config.yaml")


def read_text(path: Path) -> str:
    """Reads a text file of at most MAX_BYTES.

    Raises:
        ConfigError: It is a folder, a pipe, too large, or not UTF-8 text.
    """
    if path == STDIN:
        return plain_text(_read_stdin(sys.stdin), path)
    try:
        with open_regular(path) as file:
            # One byte more than allowed, to notice a larger file without reading it all.
            return plain_text(file.read(MAX_BYTES + 1), path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


@functools.lru_cache(1)
def _read_stdin(stream: Any) -> bytes:
    """Reads standard input. Cached, because a command may ask twice and a pipe has its bytes once."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "-: torchrun starts several processes, but only one can read standard input; use a file"
        )
    # Python sets sys.stdin to None if it is closed (fp8cfg - <&-).
    if stream is None:
        raise ConfigError("-: standard input is closed")
    return bytes(stream.buffer.read(MAX_BYTES + 1))


def _is_json(text: str) -> bool:
    """Returns whether the text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def plain_text(data: bytes, path: Path) -> str:
    """Decodes the bytes of a file, with any line endings and with or without a BOM.

    Raises:
        ConfigError: There are more than MAX_BYTES, or they are not UTF-8 text.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KB; not a configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    if "\0" in text:
        raise ConfigError(f"{path}: is not text")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_yaml(text: str, source: str, interpolations: bool = False) -> dict[str, Any]:
    """Parses YAML text with a mapping. Caches recently parsed texts.

    Args:
        text: The text.
        source: Name of the file, for errors.
        interpolations: Whether values may contain `${...}`, as in files of other projects.

    Raises:
        ConfigError: See `read_yaml`.
    """
    # Callers may change the result, and must not change the cached one.
    return copy.deepcopy(_parse_yaml(text, source, interpolations))


@functools.lru_cache(64)
def _parse_yaml(text: str, source: str, interpolations: bool) -> dict[str, Any]:
    """Parses YAML text. See `parse_yaml`."""
    if yaml.__with_libyaml__:
        # Ten times as fast. The pure Python loader has better messages for invalid YAML.
        with suppress(yaml.YAMLError):
            return _parse_with(_FastLoader, text, source, interpolations)
    return _parse_with(_Loader, text, source, interpolations)


def _parse_with(loader: Any, text: str, source: str, interpolations: bool) -> dict[str, Any]:
    """Parses YAML text with a loader of PyYAML. Invalid YAML raises YAMLError with _FastLoader."""

    def load() -> Any:
        return yaml.load(text, loader)

    try:
        _check_bounds(text, loader)
        return _load_mapping(load, source, interpolations)
    except ConfigError as error:
        raise _with_file(error, source) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if loader is not _Loader and isinstance(error, yaml.YAMLError):
            raise
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise ConfigError(f"{source}: {line}not valid YAML ({problem})") from None


def parse_json(text: str, source: str) -> dict[str, Any]:
    """Parses JSON text with a mapping. See `parse_yaml`."""

    def load() -> Any:
        return json.loads(text, object_pairs_hook=unique_keys)

    try:
        return _load_mapping(load, source)
    except ConfigError as error:
        raise _with_file(error, source) from None
    except (ValueError, RecursionError) as error:
        line = f"line {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        problem = getattr(error, "msg", type(error).__name__)
        raise ConfigError(f"{source}: {line}not valid JSON ({problem})") from None


def _with_file(error: ConfigError, source: str) -> ConfigError:
    """Returns the error with the name of the file at the start of each line, once."""
    lines = []
    for line in error.problems:
        if not line.startswith(source):
            line = f"{source}: {line}"
        lines.append(line)
    return ConfigError(lines)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object. Raises ConfigError for a duplicate key: json would keep the last one."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ConfigError(f"duplicate key {name!r}")
        values[name] = value
    return values


def _load_mapping(
    load: Callable[[], Any], source: str, interpolations: bool = False
) -> dict[str, Any]:
    """Loads a mapping and checks it with `plain`.

    Args:
        load: Parses the text.
        source: Name of the file, for errors.
        interpolations: See `parse_yaml`.

    Raises:
        ConfigError: It is no mapping, or `plain` rejects it.
    """
    data = plain(load(), source, interpolations=interpolations)
    # An empty file is an empty mapping.
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected keys and values, got {type(data).__name__}")
    return data


def _check_bounds(text: str, loader: Any) -> None:
    """Raises ConfigError for YAML that is nested too deep or too large."""
    # Counts parser events, before anything is built. 166 bytes of aliases to aliases take minutes to
    # build.
    depth = nodes = aliases = 0
    for event in yaml.parse(text, loader):
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
        if isinstance(event, yaml.AliasEvent):
            aliases += 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH or nodes > MAX_NODES or aliases > MAX_ALIASES:
            raise ConfigError(
                f"nested deeper than {MAX_DEPTH}, or more than {MAX_NODES} values or {MAX_ALIASES}"
                " aliases"
            )


def plain(data: Any, source: str, key: str = "", interpolations: bool = False) -> Any:
    """Returns a checked copy of parsed data.

    Args:
        data: The data. Each use of an alias counts as new values.
        source: Name of the file, for errors.
        key: Prefix of the keys, for errors.
        interpolations: Whether values may contain `${...}`.

    Raises:
        ConfigError: A key names code, a value has an interpolation, or there are too many values.
    """
    budget = MAX_NODES

    def copy_value(value: Any, prefix: str) -> Any:
        nonlocal budget
        budget -= 1
        if budget < 0:
            raise ConfigError(f"{source}: more than {MAX_NODES} values")
        if isinstance(value, dict):
            for name in value:
                # Hydra and Fiddle would call the value of such a key. Dotted names count too.
                if str(name).rsplit(".", 1)[-1] in CODE_KEYS:
                    raise ConfigError(
                        f"{source}: {prefix}{name}: a recipe cannot name code to run; values name"
                        " things by registry key, as in optim.name=adamw"
                    )
            return {name: copy_value(inner, f"{prefix}{name}.") for name, inner in value.items()}
        if isinstance(value, list):
            return [copy_value(inner, prefix) for inner in value]
        # OmegaConf resolves ${oc.env:NAME}, which would copy an environment variable into a run.
        if isinstance(value, str) and "${" in value and not interpolations:
            raise ConfigError(
                f"{source}: {prefix.rstrip('.')}: interpolation ({value}) is not accepted; write the"
                " value"
            )
        return value

    return copy_value(data, key)


def dump_yaml(data: dict[str, Any]) -> str:
    """Formats `data` as YAML text. `parse_yaml` reads it back equal."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def dump_value(value: Any) -> str:
    """Formats one value as YAML in one line: 1, "on", [a, b]."""
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=math.inf
    )
    # PyYAML ends a document with dots if it is a plain value.
    return str(text).removesuffix("\n").removesuffix("\n...")


class _UniqueKeys(yaml.constructor.SafeConstructor):
    """Reads YAML without duplicate keys, and with the scalars of YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping. Raises ConfigError for a duplicate key, and for a key that is no string."""
        keys = set[str]()
        for key_node, _ in node.value:
            # `<<: *base` may come several times, and its keys may be overridden.
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"line {line}: key {key!r} is not a name")
            if key in keys:
                raise ConfigError(f"line {line}: duplicate key {key!r}")
            keys.add(key)
        return super().construct_mapping(node, deep)


class _Loader(_UniqueKeys, yaml.SafeLoader):
    """The loader in Python."""


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type, such as "on" or "1e3"."""


_SCALARS_OF_YAML_1_2 = {
    # kind: pattern, and the characters that a value can begin with
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    "float": (
        r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    "merge": ("<<", "<"),
}
"""PyYAML reads YAML 1.1, in which `on` is true, 012 is ten and 1:30 is ninety."""


def _scalar_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Returns the tags and patterns of scalars by first character, in PyYAML's form."""
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, (pattern, first_characters) in _SCALARS_OF_YAML_1_2.items():
        resolver = (f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$"))
        for character in first_characters:
            resolvers.setdefault(character, []).append(resolver)
    return resolvers


_Loader.yaml_implicit_resolvers = _scalar_resolvers()
if yaml.__with_libyaml__:

    class _FastLoader(_UniqueKeys, yaml.CSafeLoader):
        """The loader in C."""

    _FastLoader.yaml_implicit_resolvers = _scalar_resolvers()
_Dumper.yaml_implicit_resolvers = {
    character: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(character, []),
        *_scalar_resolvers().get(character, []),
    ]
    for character in {*yaml.SafeDumper.yaml_implicit_resolvers, *_scalar_resolvers()}
}
