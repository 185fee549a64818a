"""torchtitan's Python configurations, read as data: the converters and dtypes of one function of a config_registry.py.

Since February 2026 (pytorch/torchtitan#2386) configurations are functions that return a Trainer.Config, often that of another
function with some fields assigned. Statements are followed one after the other; nothing is executed or imported.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence

from fp8cfg.config.errors import ConfigError, nearest, refuse_if, suggest
from fp8cfg.interop.python_calls import last, short
from fp8cfg.interop.python_constants import constants
from fp8cfg.interop.source_files import Said
from fp8cfg.interop.torchtitan.python_fields import TRAINING, FieldReader, Settings, is_config

_RELEVANT = ("model_spec", "model_converters", "training")
_PRECISION = re.compile("quant|convert|float8|fp8|precision")
"""Parts of names that no other field of a configuration has."""


def configuration(text: str, name: str = "") -> Said:
    """What the function `name` says, or the only one of the file; of a file without functions its statements. Raises ConfigError,
    with a line for each thing of it that is no literal, where there is no such function or `name` is wanting.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        at = f"line {e.lineno}: " if isinstance(e, SyntaxError) and e.lineno else ""
        raise ConfigError(f"{at}not Python") from None
    reader = _Reader(module)
    found = reader.configurations
    if name and name not in found:
        raise ConfigError(f"{name}: no such configuration in it{suggest(name, found)}")
    if not name and len(found) > 1:
        shown = ", ".join(found[:12]) + (
            f" and {len(found) - 12} others" if len(found) > 12 else ""
        )
        raise ConfigError(
            f"has {len(found)} configurations; name one, as in FILE.py:{found[0]}; they are {shown}"
        )
    try:
        settings = reader.function(name or found[0]) if found else reader.body(module.body, {})
    except RecursionError:
        raise ConfigError("nested too deeply") from None
    refuse_if(
        reader.fields.problems
        or (
            [] if settings else ["no configuration of torchtitan's, which is a Trainer.Config(...)"]
        )
    )
    assert settings is not None
    return settings.by_key()


class _Reader:
    def __init__(self, module: ast.Module) -> None:
        self.functions = {
            node.name: node for node in module.body if isinstance(node, ast.FunctionDef)
        }
        self.fields = FieldReader(constants(module.body), frozenset(self.functions))
        self.made: dict[str, Settings | None] = {}
        self.open: list[str] = []

    @functools.cached_property
    def configurations(self) -> list[str]:
        """The functions that return a configuration."""
        return [
            name
            for name, node in self.functions.items()
            if not name.startswith("_")
            and (_annotated(node) or any(is_config(each) for each in ast.walk(node)))
        ]

    def function(self, name: str) -> Settings | None:
        """What a function of the file returns; each is read once."""
        if name in self.made:
            return self.made[name]
        if name in self.open:
            raise ConfigError(f"{name}: calls itself")
        self.open.append(name)
        node = self.functions[name]
        self.made[name] = self.body(node.body, constants(node.body))
        self.open.pop()
        return self.made[name]

    def body(self, statements: Sequence[ast.stmt], names: dict[str, ast.expr]) -> Settings | None:
        """The configuration that statements make, one after the other."""
        made: dict[str, Settings] = {}
        final: Settings | None = None
        for node in statements:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name) and (
                        settings := self.settings(node.value, names, made)
                    ):
                        final = made[target.id] = settings
                    elif isinstance(target, ast.Attribute):
                        self.assign(target, node.value, names, made)
            elif isinstance(node, ast.Return) and node.value:
                settings = self.settings(node.value, names, made)
                if settings is None:
                    self.fields.refuse(
                        node,
                        f"{short(node.value)}: not read; expected a configuration of this file",
                    )
                return settings or final
            elif isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)) and any(
                map(_relevant, ast.walk(node))
            ):
                self.fields.refuse(
                    node,
                    f"{short(node).splitlines()[0]} what stands below is not decided here; write it"
                    " without",
                )
        return final

    def settings(
        self, node: ast.expr, names: dict[str, ast.expr], made: dict[str, Settings]
    ) -> Settings | None:
        """The configuration that an expression is; None for one that is none."""
        if isinstance(node, ast.Name):
            return made.get(node.id)
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Name):
            if node.func.id in self.configurations:
                return made_there.copy() if (made_there := self.function(node.func.id)) else None
            return None
        if not is_config(node) or last(node.func.value) != "Trainer":  # type: ignore[attr-defined]
            return None
        found = Settings()
        for word in node.keywords:
            if word.arg is None:
                self.fields.refuse(node, f"**{short(word.value)}: not read; write its fields out")
            elif word.arg in _RELEVANT:
                self.fields.field(found, word.arg, word.value, names)
            else:
                self.other(word.arg, word)
        return found

    def assign(
        self,
        target: ast.Attribute,
        value: ast.expr,
        names: dict[str, ast.expr],
        made: dict[str, Settings],
    ) -> None:
        """A statement such as config.model_spec = model_registry(...)."""
        parts = ast.unparse(target).split(".")
        if parts[1] not in _RELEVANT:
            return self.other(parts[1], target, value)
        if parts[0] not in made:
            self.fields.refuse(target, f"{parts[0]}: what it is is not in this file")
        elif len(parts) == 2:
            self.fields.field(made[parts[0]], parts[1], value, names)
        elif parts[1] == "training" and parts[2] in TRAINING:
            self.fields.take(made[parts[0]].training, parts[2], value, names)

    def other(self, name: str, *nodes: ast.AST) -> None:
        """A field that is not about precision, unless its name or what it is given says that it is."""
        names = (node.id for each in nodes for node in ast.walk(each) if isinstance(node, ast.Name))
        if _PRECISION.search(name) or any(each.endswith("Converter") for each in names):
            near = f"; did you mean {near!r}?" if (near := nearest(name, _RELEVANT)) else ""
            self.fields.refuse(nodes[0], f"{name}: no field of a configuration that is read{near}")


def _annotated(node: ast.FunctionDef) -> bool:
    return isinstance(node.returns, ast.Attribute) and node.returns.attr == "Config"


def _relevant(node: ast.AST) -> bool:
    """Whether a node has to do with precision."""

    def test(name: str) -> bool:
        return name in (*_RELEVANT[:2], *TRAINING) or name.endswith("Converter")

    return (isinstance(node, ast.Attribute) and test(node.attr)) or (
        isinstance(node, ast.Name) and test(node.id)
    )
