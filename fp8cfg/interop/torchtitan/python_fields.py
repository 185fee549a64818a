"""Fields of a torchtitan configuration in Python that are about precision: converters, and dtypes of training."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from fp8cfg.config.errors import refuse_if
from fp8cfg.interop.python_calls import last, literal, short
from fp8cfg.interop.python_constants import resolved
from fp8cfg.interop.source_files import Said

CONVERTERS = {
    "Float8LinearConverter": "quantize.linear.float8",
    "MXLinearConverter": "quantize.linear.mx",
    "MXFP8LinearConverter": "quantize.linear.mx",
    "MXFP8Converter": "quantize.linear.mx",
}
_NOT_HERE = ("NVFP4LinearConverter",)
TRAINING = ("dtype", "mixed_precision_param", "mixed_precision_reduce")
_IGNORED = ("model_compile_enabled",)


@dataclass
class Settings:
    """What a configuration says about precision, so far."""

    converters: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> Settings:
        return Settings(list(self.converters), dict(self.training))

    def by_key(self) -> Said:
        """The settings by the keys of the table. Raises ConfigError for converters that nothing here stands for."""
        named = [CONVERTERS[name] for name, _ in self.converters if name in CONVERTERS]
        data: dict[str, Any] = {"training.mixed_precision_param": "bfloat16"}
        data |= {f"training.{key}": value for key, value in self.training.items()}
        if named:
            data["model.converters"] = named
        for name, values in self.converters:
            if name in CONVERTERS:
                data |= {f"{CONVERTERS[name]}.{key}": value for key, value in values.items()}
        refuse_if(
            [
                f"{name}: NVFP4 of torchao has no counterpart; precision=bf16_nvfp4 is Transformer"
                " Engine's"
                for name, _ in self.converters
                if name in _NOT_HERE
            ]
        )
        lost = tuple(
            f"{name}: has no counterpart here"
            for name, _ in self.converters
            if name not in CONVERTERS
        )
        return Said(data, lost, called=True)


def is_config(node: ast.AST) -> bool:
    """Whether `node` is a call such as Trainer.Config(...)."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "Config"
    )


class FieldReader:
    """Reads fields, and notes a problem for each thing that is no literal.

    `constants` and `functions` are the file's; `names`, of each method, are constants of the function at hand.
    """

    def __init__(self, constants: dict[str, ast.expr], functions: frozenset[str]) -> None:
        self.constants, self.functions = constants, functions
        self.problems: list[str] = []

    def field(
        self, settings: Settings, name: str, value: ast.expr, names: dict[str, ast.expr]
    ) -> None:
        """One field of a configuration."""
        value = resolved(value, {**self.constants, **names})
        if name == "training" and isinstance(value, ast.Call):
            settings.training = {}
            for word in value.keywords:
                if word.arg in TRAINING:
                    self.take(settings.training, str(word.arg), word.value, names)
                elif word.arg is None:
                    self.refuse(value, f"**{short(word.value)}: not read; write its fields out")
        elif name != "training":
            settings.converters = self.converters(value, names)

    def converters(
        self, value: ast.expr, names: dict[str, ast.expr]
    ) -> list[tuple[str, dict[str, Any]]]:
        """The converters in a call of model_registry or ModelConvertersContainer.Config."""
        words = value.keywords if isinstance(value, ast.Call) else []
        given = next((word.value for word in words if word.arg == "converters"), None)
        if (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
            and value.func.id in self.functions
        ):
            self.refuse(
                value, f"{value.func.id}(): not read; write model_registry(...) with its converters"
            )
        if given is None:
            return []
        listed = resolved(given, {**self.constants, **names})
        if not isinstance(listed, (ast.List, ast.Tuple)):
            self.refuse(given, f"converters: expected a list, not {short(given)}")
            return []
        function: Any = value.func  # type: ignore[attr-defined]
        owner = last(getattr(function, "value", value))
        usual = "tensorwise" if owner == "ModelConvertersContainer" else "rowwise"
        found = []
        for each in listed.elts:
            each = resolved(each, {**self.constants, **names})
            if not is_config(each):
                self.refuse(
                    each,
                    "converters: expected calls such as Float8LinearConverter.Config(), not"
                    f" {short(each)}",
                )
                continue
            found.append(self.converter(each, usual, names))  # type: ignore[arg-type]
        return found

    def converter(
        self, call: ast.Call, usual: str, names: dict[str, ast.expr]
    ) -> tuple[str, dict[str, Any]]:
        """A converter's class and its fields. `usual` is Float8LinearConverter's recipe_name where none is given: rowwise since it
        is one of model_registry's converters (#3127), tensorwise before."""
        name = last(call.func.value)  # type: ignore[attr-defined]
        values: dict[str, Any] = {"recipe_name": usual} if name == "Float8LinearConverter" else {}
        if name.startswith("MXFP8"):  # which have fqns instead, and convert the output layer too
            values["filter_fqns"] = []
        for word in call.keywords if name in CONVERTERS else ():
            if word.arg is None:
                self.refuse(
                    call, f"{name}.Config(**{short(word.value)}): not read; write its fields out"
                )
            elif word.arg not in _IGNORED:
                self.take(values, word.arg, word.value, names)
        return name, values

    def take(
        self, into: dict[str, Any], key: str, value: ast.expr, names: dict[str, ast.expr]
    ) -> None:
        """Put a literal into a table; None is as if it were not given."""
        try:
            made = literal(resolved(value, {**self.constants, **names}))
        except ValueError:
            return self.refuse(value, f"{key}: expected a literal, not {short(value)}")
        if made is not None:
            into[key] = made

    def refuse(self, node: ast.AST, line: str) -> None:
        """Note a line about what stands at `node`."""
        self.problems.append(f"line {getattr(node, 'lineno', 1)}: {line}")
