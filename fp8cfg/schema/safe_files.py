"""Safe reading of YAML and JSON, and writing of YAML: plain data of bounded size, no code; anything else is one clear error."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.foreign_names import CODE_KEYS
from fp8cfg.schema.regular_file import open_regular

MAX_BYTES, MAX_DEPTH, MAX_NODES, MAX_ALIASES = 256 * 1024, 32, 10_000, 64
CONF = (Path(__file__).parents[1] / "conf").resolve()
"""The shipped `conf/`: inside the package when installed; in a checkout a link there, to the folder beside it."""

STDIN = Path("<stdin>")
"""What stands for standard input where a file's path is wanted."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]{0,63}")
"""What a preset or recipe may be called; also keeps a group choice inside its folder."""


class _Loader(yaml.SafeLoader):
    """YAML without duplicate keys, and with the scalars of YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for stands in [k for k, _ in node.value if k.tag != "tag:yaml.org,2002:merge"]:
            key, line = self.construct_object(stands, deep=True), stands.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"line {line}: key {key!r} is not a name")
            if key in seen:
                raise ConfigError(f"line {line}: key {key!r} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """The scalars of YAML 1.2: in 1.1 `on` is true, 012 is ten and 1:30 is ninety."""
    tag = "tag:yaml.org,2002:"
    kinds = {
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
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, (pattern, first) in kinds.items():
        for letter in first:
            found.setdefault(letter, []).append((tag + kind, re.compile(f"^(?:{pattern})$")))
    return found


class _Dumper(yaml.SafeDumper):
    """Quotes whatever another reader, of YAML 1.1 or 1.2, would take for something else than a string."""


_Loader.yaml_implicit_resolvers = _resolvers()
_Dumper.yaml_implicit_resolvers = {
    letter: yaml.SafeDumper.yaml_implicit_resolvers.get(letter, []) + _resolvers().get(letter, [])
    for letter in {*yaml.SafeDumper.yaml_implicit_resolvers, *_resolvers()}
}


def dump_yaml(data: dict[str, Any]) -> str:
    """`data` as YAML text that `parse_yaml` reads back equal."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def default_recipe() -> str:
    """The recipe that conf/config.yaml composes where none is chosen."""
    return next(str(entry["recipe"]) for entry in primary_config()["defaults"] if "recipe" in entry)


@functools.cache
def primary_config() -> dict[str, Any]:
    """conf/config.yaml, which is shipped: read once, and not to be changed."""
    return read_yaml(CONF / "config.yaml")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file `path`, or in a JSON file. Raises ConfigError, naming the file, for anything that is not plain,
    bounded data."""
    text = read_text(path)
    is_json = path.suffix == ".json" or (path == STDIN and _is_json(text))
    return (parse_json if is_json else parse_yaml)(text, str(path))


def read_text(path: Path) -> str:
    """The text of the file `path`. Raises ConfigError, naming it, for a folder, a large file, and what is no text."""
    if path == STDIN:
        return plain_text(_standard_input(sys.stdin), path)
    try:
        with open_regular(path) as file:
            return plain_text(file.read(MAX_BYTES + 1), path)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror})") from None


@functools.lru_cache(1)
def _standard_input(stream: Any) -> bytes:
    """What the process was given on standard input, which can be read once."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "-: torchrun starts several processes, and one alone can read standard input; write a"
            " file"
        )
    if stream is None:
        raise ConfigError("-: standard input is closed")
    return bytes(stream.buffer.read(MAX_BYTES + 1))


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def plain_text(data: bytes, path: Path) -> str:
    """The bytes of the file `path` as text. Raises ConfigError, naming it, where they are too many or no text."""
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KB; not a configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    if "\0" in text:
        raise ConfigError(f"{path}: is not text")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_yaml(text: str, where: str, interpolations: bool = False) -> dict[str, Any]:
    """As `read_yaml`, from text; `where` names it in errors. What was parsed lately is not parsed again. `interpolations` leaves
    `${...}` as it stands, for files of other projects."""
    return copy.deepcopy(_parsed(text, where, interpolations))


@functools.lru_cache(64)
def _parsed(text: str, where: str, interpolations: bool) -> dict[str, Any]:
    try:
        _bounded(text)
        return _mapping(lambda: yaml.load(text, _Loader), where, interpolations)
    except ConfigError as e:
        raise ConfigError(
            [p if p.startswith(where) else f"{where}: {p}" for p in e.problems]
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        mark = getattr(e, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(
            f"{where}: {line}not valid YAML ({getattr(e, 'problem', None) or type(e).__name__})"
        ) from None


def parse_json(text: str, where: str) -> dict[str, Any]:
    """As `parse_yaml`, from JSON."""
    try:
        return _mapping(lambda: json.loads(text, object_pairs_hook=_once), where)
    except ConfigError as e:
        raise ConfigError(
            [p if p.startswith(where) else f"{where}: {p}" for p in e.problems]
        ) from None
    except (ValueError, RecursionError) as e:
        line = f"line {e.lineno}: " if isinstance(e, json.JSONDecodeError) else ""
        raise ConfigError(
            f"{where}: {line}not valid JSON ({getattr(e, 'msg', type(e).__name__)})"
        ) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ConfigError(
            f"key {next(name for name in names if names.count(name) > 1)!r} stands twice"
        )
    return found


def _mapping(load: Callable[[], Any], where: str, interpolations: bool = False) -> dict[str, Any]:
    data = plain(load(), where, interpolations=interpolations)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected keys and values, got {type(data).__name__}")
    return data


def _bounded(text: str) -> None:
    """Count before anything is built: an alias bomb is 166 bytes of text and minutes of building."""
    depth = nodes = aliases = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        nodes += isinstance(event, yaml.NodeEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > MAX_DEPTH or nodes > MAX_NODES or aliases > MAX_ALIASES:
            raise ConfigError(
                f"nested deeper than {MAX_DEPTH}, or more than {MAX_NODES} values or {MAX_ALIASES}"
                " aliases"
            )


def plain(data: Any, where: str, key: str = "", interpolations: bool = False) -> Any:
    """`data` again, if it names no code and holds no interpolation, unless `interpolations` are accepted; aliases unfolded count
    against the size bound."""
    budget = [MAX_NODES]

    def walk(value: Any, at: str) -> Any:
        budget[0] -= 1
        if budget[0] < 0:
            raise ConfigError(f"{where}: more than {MAX_NODES} values")
        if isinstance(value, dict):
            for k in value:
                if str(k).rsplit(".", 1)[-1] in CODE_KEYS:
                    raise ConfigError(
                        f"{where}: {at}{k}: a recipe cannot name code to run; values name things by"
                        " registry key, as in optim.name=adamw"
                    )
            return {k: walk(v, f"{at}{k}.") for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, at) for v in value]
        if isinstance(value, str) and "${" in value and not interpolations:
            raise ConfigError(
                f"{where}: {at.rstrip('.')}: interpolation ({value}) is not accepted; write the"
                " value"
            )
        return value

    return walk(data, key)
