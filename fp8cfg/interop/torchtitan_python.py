"""torchtitan's Python configurations, read as data: the converters and dtypes of one function of a config_registry.py.

Since February 2026 (pytorch/torchtitan#2386) configurations are functions that return a Trainer.Config, often that of another
function with some fields assigned. Statements are followed one after the other; nothing is executed or imported.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8cfg.config.errors import ConfigError, refuse_if, suggest
from fp8cfg.interop.python_calls import last, literal
from fp8cfg.interop.source_files import Said

_CONVERTERS = {"Float8LinearConverter": "quantize.linear.float8", "MXLinearConverter": "quantize.linear.mx",
               "MXFP8LinearConverter": "quantize.linear.mx", "MXFP8Converter": "quantize.linear.mx"}
_NOT_HERE = ("NVFP4LinearConverter",)
_TRAINING = ("dtype", "mixed_precision_param", "mixed_precision_reduce")
_IGNORED = ("model_compile_enabled",)
_RELEVANT = ("model_spec", "model_converters", "training")


@dataclass
class _Settings:
    """What a configuration says about precision, so far."""

    converters: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> _Settings:
        return _Settings(list(self.converters), dict(self.training))


def configuration(text: str, name: str = "") -> Said:
    """What the function `name` says, or the only one of the file; of a file without functions its statements. Raises ConfigError,
    with a line for each thing of it that is no literal, where there is no such function or `name` is wanting."""
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
        shown = ", ".join(found[:12]) + (f" and {len(found) - 12} others" if len(found) > 12 else "")
        raise ConfigError(f"has {len(found)} configurations; name one, as in FILE.py:{found[0]}; they are {shown}")
    try:
        settings = reader.function(name or found[0]) if found else reader.body(module.body, {})
    except RecursionError:
        raise ConfigError("nested too deeply") from None
    refuse_if(reader.problems or ([] if settings else ["no configuration of torchtitan's, which is a Trainer.Config(...)"]))
    assert settings is not None
    return _said(settings)


def _said(settings: _Settings) -> Said:
    """The settings by the keys of the table."""
    named = [_CONVERTERS[name] for name, _ in settings.converters if name in _CONVERTERS]
    data: dict[str, Any] = {"training.mixed_precision_param": "bfloat16"}
    data |= {f"training.{key}": value for key, value in settings.training.items()}
    if named:
        data["model.converters"] = named
    for name, values in settings.converters:
        if name in _CONVERTERS:
            data |= {f"{_CONVERTERS[name]}.{key}": value for key, value in values.items()}
    refuse_if([f"{name}: NVFP4 of torchao has no counterpart; precision=bf16_nvfp4 is Transformer Engine's"
               for name, _ in settings.converters if name in _NOT_HERE])
    return Said(data, tuple(f"{name}: has no counterpart here" for name, _ in settings.converters if name not in _CONVERTERS))


class _Reader:
    def __init__(self, module: ast.Module) -> None:
        self.functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        self.constants = _constants(module.body)
        self.problems: list[str] = []
        self.made: dict[str, _Settings | None] = {}
        self.open: list[str] = []

    @functools.cached_property
    def configurations(self) -> list[str]:
        """The functions that return a configuration."""
        return [name for name, node in self.functions.items()
                if not name.startswith("_") and (_annotated(node) or any(_is_config(each) for each in ast.walk(node)))]

    def function(self, name: str) -> _Settings | None:
        """What a function of the file returns; each is read once."""
        if name in self.made:
            return self.made[name]
        if name in self.open:
            raise ConfigError(f"{name}: calls itself")
        self.open.append(name)
        node = self.functions[name]
        self.made[name] = self.body(node.body, _constants(node.body))
        self.open.pop()
        return self.made[name]

    def body(self, statements: Sequence[ast.stmt], names: dict[str, ast.expr]) -> _Settings | None:
        """The configuration that statements make, one after the other."""
        made: dict[str, _Settings] = {}
        final: _Settings | None = None
        for node in statements:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name) and (settings := self.settings(node.value, names, made)):
                        final = made[target.id] = settings
                    elif isinstance(target, ast.Attribute):
                        self.assign(target, node.value, names, made)
            elif isinstance(node, ast.Return) and node.value:
                settings = self.settings(node.value, names, made)
                if settings is None:
                    self.refuse(node, f"{_short(node.value)}: not read; expected a configuration of this file")
                return settings or final
            elif isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)) and any(map(_relevant, ast.walk(node))):
                self.refuse(node, f"{_short(node).splitlines()[0]} what stands below is not decided here; write it without")
        return final

    def settings(self, node: ast.expr, names: dict[str, ast.expr], made: dict[str, _Settings]) -> _Settings | None:
        """The configuration that an expression is; None for one that is none."""
        if isinstance(node, ast.Name):
            return made.get(node.id)
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Name):
            if node.func.id in self.configurations:
                return made_there.copy() if (made_there := self.function(node.func.id)) else None
            return None
        if not _is_config(node) or last(node.func.value) != "Trainer":  # type: ignore[attr-defined]
            return None
        found = _Settings()
        for word in node.keywords:
            if word.arg is None:
                self.refuse(node, f"**{_short(word.value)}: not read; write its fields out")
            elif word.arg in _RELEVANT:
                self.field(found, word.arg, word.value, names)
        return found

    def assign(self, target: ast.Attribute, value: ast.expr, names: dict[str, ast.expr], made: dict[str, _Settings]) -> None:
        """A statement such as config.model_spec = model_registry(...)."""
        parts = ast.unparse(target).split(".")
        if parts[1] not in _RELEVANT:
            return
        if parts[0] not in made:
            self.refuse(target, f"{parts[0]}: what it is is not in this file")
        elif len(parts) == 2:
            self.field(made[parts[0]], parts[1], value, names)
        elif parts[1] == "training" and parts[2] in _TRAINING:
            self.take(made[parts[0]].training, parts[2], value, names)

    def field(self, settings: _Settings, name: str, value: ast.expr, names: dict[str, ast.expr]) -> None:
        """One field of a configuration."""
        value = _resolved(value, {**self.constants, **names})
        if name == "training" and isinstance(value, ast.Call):
            settings.training = {}
            for word in value.keywords:
                if word.arg in _TRAINING:
                    self.take(settings.training, str(word.arg), word.value, names)
                elif word.arg is None:
                    self.refuse(value, f"**{_short(word.value)}: not read; write its fields out")
        elif name != "training":
            settings.converters = self.converters(value, names)

    def converters(self, value: ast.expr, names: dict[str, ast.expr]) -> list[tuple[str, dict[str, Any]]]:
        """The converters in a call of model_registry or ModelConvertersContainer.Config."""
        words = value.keywords if isinstance(value, ast.Call) else []
        given = next((word.value for word in words if word.arg == "converters"), None)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in self.functions:
            self.refuse(value, f"{value.func.id}(): not read; write model_registry(...) with its converters")
        if given is None:
            return []
        listed = _resolved(given, {**self.constants, **names})
        if not isinstance(listed, (ast.List, ast.Tuple)):
            self.refuse(given, f"converters: expected a list, not {_short(given)}")
            return []
        usual = "tensorwise" if last(getattr(value.func, "value", value)) == "ModelConvertersContainer" else "rowwise"  # type: ignore[attr-defined]
        found = []
        for each in listed.elts:
            each = _resolved(each, {**self.constants, **names})
            if not _is_config(each):
                self.refuse(each, f"converters: expected calls such as Float8LinearConverter.Config(), not {_short(each)}")
                continue
            found.append(self.converter(each, usual, names))  # type: ignore[arg-type]
        return found

    def converter(self, call: ast.Call, usual: str, names: dict[str, ast.expr]) -> tuple[str, dict[str, Any]]:
        """A converter's class and its fields. `usual` is Float8LinearConverter's recipe_name where none is given: rowwise since it
        is one of model_registry's converters (#3127), tensorwise before."""
        name = last(call.func.value)  # type: ignore[attr-defined]
        values: dict[str, Any] = {"recipe_name": usual} if name == "Float8LinearConverter" else {}
        if name.startswith("MXFP8"):  # which have fqns instead, and convert the output layer too
            values["filter_fqns"] = []
        for word in call.keywords if name in _CONVERTERS else ():
            if word.arg is None:
                self.refuse(call, f"{name}.Config(**{_short(word.value)}): not read; write its fields out")
            elif word.arg not in _IGNORED:
                self.take(values, word.arg, word.value, names)
        return name, values

    def take(self, into: dict[str, Any], key: str, value: ast.expr, names: dict[str, ast.expr]) -> None:
        """Put a literal into a table; None is as if it were not given."""
        try:
            made = literal(_resolved(value, {**self.constants, **names}))
        except ValueError:
            return self.refuse(value, f"{key}: expected a literal, not {_short(value)}")
        if made is not None:
            into[key] = made

    def refuse(self, node: ast.AST, line: str) -> None:
        self.problems.append(f"line {getattr(node, 'lineno', 1)}: {line}")


def _constants(statements: Sequence[ast.stmt]) -> dict[str, ast.expr]:
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
    return {name: value for name, value in found.items() if name not in twice and not (
        isinstance(value, ast.Name) and isinstance(value.ctx, ast.Store))}


def _resolved(node: ast.expr, names: dict[str, ast.expr]) -> ast.expr:
    """What a name stands for, as far as it is assigned once."""
    for _ in range(16):
        if not isinstance(node, ast.Name) or node.id not in names:
            break
        node = names[node.id]
    return node


def _is_config(node: ast.AST) -> bool:
    """Whether `node` is a call such as Trainer.Config(...)."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "Config"


def _annotated(node: ast.FunctionDef) -> bool:
    return isinstance(node.returns, ast.Attribute) and node.returns.attr == "Config"


def _relevant(node: ast.AST) -> bool:
    """Whether a node has to do with precision."""
    test: Callable[[str], bool] = lambda name: name in (*_RELEVANT[:2], *_TRAINING) or name.endswith("Converter")  # noqa: E731
    return (isinstance(node, ast.Attribute) and test(node.attr)) or (isinstance(node, ast.Name) and test(node.id))


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 40 else text[:37] + "..."
