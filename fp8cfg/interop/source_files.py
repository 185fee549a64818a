"""Source files of other projects, read as data of bounded size: nothing in them is executed."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8cfg.interop import shell_flags
from fp8cfg.interop.key_table import Dialect, flattened
from fp8cfg.interop.recognition import SWIFT, other_command
from fp8cfg.schema.errors import ConfigError, nearest, refuse_if
from fp8cfg.schema.safe_files import parse_yaml, plain, read_text, unique_keys


def call_in(
    text: str, names: tuple[str, ...], kind: str, only: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The values by name of the one call in `text` of a class in `names`, which stands under `class`; those in `only`, where it has
    any. Raises ConfigError where there is none (with the names that are near to that of a `kind` of class), or more than one, and
    for each value that is no literal."""
    try:
        every = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"not Python; expected a call such as {names[0]}(margin=1)") from None
    calls = [node for node in every if last(node.func) in names]
    if not calls:
        refuse_if(
            [
                f"{called}: not a {kind}; did you mean {near!r}?"
                for node in every
                if (near := nearest(called := last(node.func), names))
            ]
        )
    if len(calls) != 1:
        raise ConfigError(f"{len(calls)} calls; expected one of {', '.join(names)}")
    spread = [word.value for word in calls[0].keywords if not word.arg]
    problems = [
        f"{last(calls[0].func)}(**{text}): {text} is not read; give its values by name"
        for text in (ast.unparse(value)[:40] for value in spread)
    ]
    problems += [f"{last(calls[0].func)}: give its values by name"] if calls[0].args else []
    values: dict[str, Any] = {"class": last(calls[0].func)}
    for word in [w for w in calls[0].keywords if not only or w.arg in only] if not problems else ():
        if word.arg in values:
            problems.append(f"{word.arg}: stands twice")
        try:
            values[str(word.arg)] = literal(word.value)
        except ValueError:
            problems.append(f"{word.arg}: expected a literal, not {ast.unparse(word.value)[:40]}")
    refuse_if(problems)
    return values


def last(node: ast.expr) -> str:
    """The last name of a dotted one; empty for any other expression."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def literal(node: ast.expr) -> Any:
    """A literal, or the last name of a member of an enumeration called Format."""
    if isinstance(node, ast.Attribute) and last(node.value) == "Format":
        return node.attr
    return ast.literal_eval(node)


def short(node: ast.AST) -> str:
    """The source of a node, short enough for a line that names it."""
    text = ast.unparse(node)
    return text if len(text) <= 40 else text[:37] + "..."


def constants(statements: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Names that are assigned once, with what is assigned."""
    found: dict[str, ast.expr] = {}
    twice: set[str] = set()
    for node in (each for statement in statements for each in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            twice |= {node.id} & found.keys()
            found.setdefault(node.id, node)
    for node in statements:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = node.value
    return {
        name: value
        for name, value in found.items()
        if name not in twice
        and not (isinstance(value, ast.Name) and isinstance(value.ctx, ast.Store))
    }


def resolved(node: ast.expr, names: dict[str, ast.expr]) -> ast.expr:
    """What a name stands for, as far as it is assigned once."""
    for _ in range(16):
        if not isinstance(node, ast.Name) or node.id not in names:
            break
        node = names[node.id]
    return node


_CODE = re.compile(r"(^\s*(?:- +)?|[{,]\s*)_(target|partial|args|call)_(?=\s*:)", re.MULTILINE)


class Said(NamedTuple):
    """What a source says: a flat table, with a line on each thing that is left out of it, and on each key that looks like a typing
    error; or the name of a preset. `task` is what it is trained for, and `lora` has values of that node. `called` says that its
    keys are words of a call, of which the project itself takes no unknown one. `recipe` is the recipe of this package that the source
    builds on. `items` names everything in the source, and `read` the items that were read."""

    data: dict[str, Any]
    lost: tuple[str, ...] = ()
    preset: str | None = None
    unknown: tuple[str, ...] = ()
    task: str | None = None
    lora: Mapping[str, Any] = MappingProxyType({})
    called: bool = False
    recipe: str | None = None
    items: tuple[str, ...] = ()
    read: frozenset[str] = frozenset()

    @property
    def unread(self) -> list[str]:
        """Names of the items of the source that no key of `data` stands for, each once."""
        return list(dict.fromkeys(item for item in self.items if item not in self.read))


def text_of(path: Path) -> str:
    """The text of a file. Raises ConfigError as `read_text` does, and for an empty one."""
    text = read_text(path)
    if not text.strip():
        raise ConfigError(f"{path}: is empty")
    return text


def mapping(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML or JSON file, by its ending."""
    text, data = text_of(path), None
    try:
        if path.suffix == ".json":
            data = json.loads(text, object_pairs_hook=unique_keys)
        else:
            data = parse_yaml(_CODE.sub(r"\1their_\2", text), str(path), interpolations=True)
            return _resolved_references(data, flattened(data))
    except json.JSONDecodeError as e:
        raise ConfigError(f"{path}: line {e.lineno}: not valid JSON ({e.msg})") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(f"{path}: a number has more digits than can be read") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values, got {type(data).__name__}")
    checked: dict[str, Any] = plain(data, str(path), interpolations=True)
    return checked


_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_][\w.]*)\}")


def _resolved_references(
    data: Mapping[str, Any], values: Mapping[str, Any], section: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns `data` with OmegaConf's references to other keys of the file replaced by their values.

    `${a.b}` counts from the top, `${.b}` from the section. Others, such as `${multiply:4,2}`, stay.
    """
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            value = _resolved_references(value, values, (*section, key))
        for _ in range(8):  # a reference to a reference
            match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if not match:
                break
            dots = len(match[1])
            home = section[: len(section) + 1 - dots] if dots else ()
            value = values.get(".".join((*home, match[2])), value)
        out[key] = value
    return out


def interpolated(data: Mapping[str, Any]) -> list[str]:
    """Returns the keys of `data` whose value only OmegaConf can compute."""
    return [key for key, value in data.items() if isinstance(value, str) and "${" in value]


def pairs(words: Sequence[str]) -> dict[str, Any]:
    """Words of the form key=value."""
    wrong = [f"{word}: expected key=value" for word in words if "=" not in word]
    if wrong:
        raise ConfigError(wrong)
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def nested(data: Mapping[str, Any]) -> Said:
    """A file's keys by dotted names. All of them are for the table, which has a line on each that it does not know."""
    return Said(flattened(data))


def shell(dialect: Dialect, precision: frozenset[str]) -> Callable[[str], Said]:
    """Returns the reader of a script with flags of `dialect`, of which `precision` are certain."""

    def read(text: str) -> Said:
        flags, remarks = shell_flags.read_flags(text, dialect, precision)
        known = shell_flags.known_flags(dialect, flags)
        if not known:
            line = f"no flag of {dialect.name} that is known here, such as --fp8-format hybrid"
            raise ConfigError([*remarks, other_command(text) or line])
        if match := SWIFT.search(text):
            remarks.append(
                f"megatron {match[1]}: is ms-swift's, whose flags are Megatron-LM's; it computes in bf16"
                " and takes the shape from --model, here model.path"
            )
            if "fp16" not in flags:
                known["--bf16"] = True
        items = tuple(map(shell_flags.dashed, flags))
        return Said(known, tuple(remarks), items=items, read=frozenset(known))

    return read


def joined(words: Sequence[str]) -> str:
    """Words as the text of a command line; one that names a variable still does."""
    return (
        words[0]
        if len(words) == 1
        else " ".join(
            word if "$" in word and not set(word) & set(" \t\n'\"\\") else shlex.quote(word)
            for word in words
        )
    )
