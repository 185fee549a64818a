"""Python configurations of torchtitan, parsed and never run."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8cfg.interop.python_source import (
    assignment_targets,
    find_constants,
    last_name,
    list_unread_items,
    parse_literal,
    parse_python,
    position,
    resolve_constant,
    short_source,
)
from fp8cfg.interop.source_files import Source
from fp8cfg.interop.torchtitan import CONVERTERS, TRAINING_FIELDS
from fp8cfg.schema.errors import ConfigError, nearest, refuse_if, suggest

Constants = dict[str, ast.expr]
"""Names with one value, in the file or in a function."""

_CONVERTER_FIELDS = ("model_spec", "model_converters")
_FIELDS = (*_CONVERTER_FIELDS, "training")
# No other field of a configuration has such a name.
_PRECISION_NAME = re.compile("quant|convert|float8|fp8|precision")


def read_configuration(text: str, name: str = "") -> Source:
    """Reads a configuration from a Python file.

    Args:
        text: The file.
        name: Name of the function that returns the configuration. May be empty if the file has
            one configuration, in a function or in its statements.

    Raises:
        ConfigError: The function does not exist or is ambiguous, or a field is not a literal.
    """
    module = parse_python(text)
    reader = _ConfigurationReader(module)
    names = reader.configurations
    if name and name not in names:
        raise ConfigError(f"{name}: the file has no such configuration{suggest(name, names)}")
    if not name and len(names) > 1:
        listed = ", ".join(names[:12])
        if len(names) > 12:
            listed += f" and {len(names) - 12} more"
        raise ConfigError(
            f"has {len(names)} configurations; name one, as in FILE.py:{names[0]}; they are {listed}"
        )
    try:
        if names:
            configuration = reader.read_function(name or names[0])
        else:
            configuration = reader.read_statements(module.body, {})
    except RecursionError:
        raise ConfigError("nested too deeply") from None
    refuse_if(reader.fields.problems)
    if configuration is None:
        raise ConfigError("has no configuration of torchtitan, such as Trainer.Config(...)")

    # Functions that the configuration does not use are not part of the source.
    body: list[ast.stmt] = module.body
    if names:
        body = [reader.functions[function] for function in reader.results]
    tree = ast.Module(body=body, type_ignores=[])
    unread = list_unread_items(tree, reader.fields.read_positions)
    return configuration.to_source()._replace(items=tuple(unread))


@dataclass
class Configuration:
    """Fields of a Trainer.Config.

    Attributes:
        converters: Class and fields of each converter.
        training: Fields of the training node.
    """

    converters: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> Configuration:
        return Configuration(list(self.converters), dict(self.training))

    def to_source(self) -> Source:
        """Returns the settings of the key table.

        Raises:
            ConfigError: A converter has no equivalent, or two converters exclude each other.
        """
        settings: dict[str, Any] = {"training.mixed_precision_param": "bfloat16"}
        settings |= {f"training.{key}": value for key, value in self.training.items()}
        problems: list[str] = []
        remarks: list[str] = []
        for class_name, fields in self.converters:
            library = CONVERTERS.get(class_name)
            if class_name == "NVFP4LinearConverter":
                problems.append(
                    f"{class_name}: torchao's NVFP4 has no equivalent; for Transformer Engine's set"
                    " precision=bf16_nvfp4"
                )
            elif library is None:
                remarks.append(f"{class_name}: has no equivalent here")
            elif settings.get("converter", library) != library:
                problems.append("converters: float8 and mx are both on; remove one")
            else:
                settings |= {"converter": library, **fields}
        refuse_if(problems)
        return Source(settings, tuple(remarks), rejects_unknown=True)


def _is_config_call(node: ast.AST) -> bool:
    """Returns whether `node` is a call such as Trainer.Config(...)."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr == "Config"


class _FieldReader:
    """Reads the fields of configurations.

    Attributes:
        constants: Constants of the file.
        functions: Names of the functions in the file.
        problems: An error for each field without a literal.
        read_positions: Positions of the values so far.
    """

    def __init__(self, constants: Constants, functions: frozenset[str]) -> None:
        self.constants = constants
        self.functions = functions
        self.problems: list[str] = []
        self.read_positions: set[tuple[int, int]] = set()

    def resolve(self, node: ast.expr, constants: Constants) -> ast.expr:
        """Resolves a constant of the file or, with `constants`, of the function."""
        return resolve_constant(node, {**self.constants, **constants})

    def read_field(
        self, configuration: Configuration, name: str, value: ast.expr, constants: Constants
    ) -> None:
        """Reads a field of a Trainer.Config into `configuration`."""
        value = self.resolve(value, constants)
        if name != "training":
            configuration.converters = self.read_converters(value, constants)
            return
        if not isinstance(value, ast.Call):
            return
        configuration.training = {}
        for keyword in value.keywords:
            if keyword.arg is None:
                source = short_source(keyword.value)
                self.add_problem(value, f"**{source}: not read; write the fields")
            elif keyword.arg in TRAINING_FIELDS:
                self.read_literal(configuration.training, keyword.arg, keyword.value, constants)

    def read_converters(
        self, value: ast.expr, constants: Constants
    ) -> list[tuple[str, dict[str, Any]]]:
        """Returns the converters of model_registry(...) or ModelConvertersContainer.Config(...)."""
        if not isinstance(value, ast.Call):
            return []
        if isinstance(value.func, ast.Name) and value.func.id in self.functions:
            self.add_problem(
                value,
                f"{value.func.id}(): not read; write model_registry(...) with its converters",
            )
        argument: ast.expr | None = None
        for keyword in value.keywords:
            if keyword.arg == "converters":
                argument = keyword.value
        if argument is None:
            return []
        elements = self.resolve(argument, constants)
        if not isinstance(elements, (ast.List, ast.Tuple)):
            self.add_problem(argument, f"converters: expected a list, not {short_source(argument)}")
            return []
        # Float8LinearConverter's default recipe became rowwise when the converters moved from
        # ModelConvertersContainer to model_registry (pytorch/torchtitan#3127).
        container = value.func
        if isinstance(container, ast.Attribute):
            container = container.value
        default_recipe = "rowwise"
        if last_name(container) == "ModelConvertersContainer":
            default_recipe = "tensorwise"
        converters = []
        for element in elements.elts:
            call = self.resolve(element, constants)
            if isinstance(call, ast.Call) and _is_config_call(call):
                converters.append(self.read_converter(call, default_recipe, constants))
            else:
                self.add_problem(
                    call,
                    "converters: expected calls such as Float8LinearConverter.Config(), not"
                    f" {short_source(call)}",
                )
        return converters

    def read_converter(
        self, call: ast.Call, default_recipe: str, constants: Constants
    ) -> tuple[str, dict[str, Any]]:
        """Returns the class of a converter and its fields.

        Args:
            call: The call of its Config.
            default_recipe: Default of Float8LinearConverter's recipe_name.
            constants: Constants of the function.
        """
        assert isinstance(call.func, ast.Attribute)  # a call such as CLASS.Config(...)
        class_name = last_name(call.func.value)
        self.read_positions.add(position(call))
        fields: dict[str, Any] = {}
        if class_name == "Float8LinearConverter":
            fields["recipe_name"] = default_recipe
        # The MXFP8 converters have fqns instead, and convert the output layer too.
        if class_name.startswith("MXFP8"):
            fields["filter_fqns"] = []
        if class_name not in CONVERTERS:
            return class_name, fields
        for keyword in call.keywords:
            if keyword.arg is None:
                source = short_source(keyword.value)
                self.add_problem(
                    call, f"{class_name}.Config(**{source}): not read; write the fields"
                )
            elif keyword.arg != "model_compile_enabled":  # has no effect on the values
                self.read_literal(fields, keyword.arg, keyword.value, constants)
        return class_name, fields

    def read_literal(
        self, fields: dict[str, Any], key: str, value: ast.expr, constants: Constants
    ) -> None:
        """Reads a literal into `fields`. None is the same as a missing field."""
        self.read_positions.add(position(value))
        try:
            literal = parse_literal(self.resolve(value, constants))
        except ValueError:
            self.add_problem(value, f"{key}: expected a literal, not {short_source(value)}")
            return
        if literal is not None:
            fields[key] = literal

    def add_problem(self, node: ast.AST, problem: str) -> None:
        self.problems.append(f"line {getattr(node, 'lineno', 1)}: {problem}")


class _ConfigurationReader:
    """Follows the functions of a file to their configurations.

    Attributes:
        functions: Functions of the file.
        fields: Reader of the fields.
        results: Result of each function so far.
        open_functions: Functions on the call stack, to detect recursion.
    """

    def __init__(self, module: ast.Module) -> None:
        self.functions = {
            node.name: node for node in module.body if isinstance(node, ast.FunctionDef)
        }
        self.fields = _FieldReader(find_constants(module.body), frozenset(self.functions))
        self.results: dict[str, Configuration | None] = {}
        self.open_functions: list[str] = []

    @functools.cached_property
    def configurations(self) -> list[str]:
        """Names of the public functions with a configuration as their result."""
        return [
            name
            for name, node in self.functions.items()
            if not name.startswith("_") and _returns_config(node)
        ]

    def read_function(self, name: str) -> Configuration | None:
        """Returns the result of a function, None if it is no configuration."""
        if name in self.results:
            return self.results[name]
        if name in self.open_functions:
            raise ConfigError(f"{name}: calls itself")
        self.open_functions.append(name)
        body = self.functions[name].body
        self.results[name] = self.read_statements(body, find_constants(body))
        self.open_functions.pop()
        return self.results[name]

    def read_statements(
        self, statements: Sequence[ast.stmt], constants: Constants
    ) -> Configuration | None:
        """Returns the configuration that statements return or, without a return, assign last."""
        variables: dict[str, Configuration] = {}
        last_assigned: Configuration | None = None
        for node in statements:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
                for target in assignment_targets(node):
                    if isinstance(target, ast.Name):
                        configuration = self.read_expression(node.value, constants, variables)
                        if configuration is not None:
                            variables[target.id] = configuration
                            last_assigned = configuration
                    elif isinstance(target, ast.Attribute):
                        self.assign_field(target, node.value, constants, variables)
            elif isinstance(node, ast.Return) and node.value:
                configuration = self.read_expression(node.value, constants, variables)
                if configuration is None:
                    self.fields.add_problem(
                        node,
                        f"{short_source(node.value)}: not read; return a configuration of this file",
                    )
                return configuration or last_assigned
            elif _is_block(node) and any(_is_about_precision(child) for child in ast.walk(node)):
                first_line = ast.unparse(node).splitlines()[0][:40]
                self.fields.add_problem(
                    node, f"{first_line} is not evaluated; write the fields without it"
                )
        return last_assigned

    def read_expression(
        self, node: ast.expr, constants: Constants, variables: dict[str, Configuration]
    ) -> Configuration | None:
        """Returns the configuration of an expression, None if it is something else."""
        if isinstance(node, ast.Name):
            return variables.get(node.id)
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Name):
            if node.func.id not in self.configurations:
                return None
            # A copy: the caller may change fields of it.
            configuration = self.read_function(node.func.id)
            return None if configuration is None else configuration.copy()
        if not isinstance(node.func, ast.Attribute) or not _is_config_call(node):
            return None
        if last_name(node.func.value) != "Trainer":
            return None
        configuration = Configuration()
        for keyword in node.keywords:
            if keyword.arg is None:
                source = short_source(keyword.value)
                self.fields.add_problem(node, f"**{source}: not read; write the fields")
            elif keyword.arg in _FIELDS:
                self.fields.read_field(configuration, keyword.arg, keyword.value, constants)
            else:
                self.check_other_field(keyword.arg, keyword)
        return configuration

    def assign_field(
        self,
        target: ast.Attribute,
        value: ast.expr,
        constants: Constants,
        variables: dict[str, Configuration],
    ) -> None:
        """Executes a statement such as config.model_spec = model_registry(...)."""
        variable, field_name, *path = ast.unparse(target).split(".")
        if field_name not in _FIELDS:
            self.check_other_field(field_name, target, value)
        elif variable not in variables:
            self.fields.add_problem(target, f"{variable}: is not defined in this file")
        elif not path:
            self.fields.read_field(variables[variable], field_name, value, constants)
        elif field_name == "training" and path[0] in TRAINING_FIELDS:
            training = variables[variable].training
            self.fields.read_literal(training, path[0], value, constants)

    def check_other_field(self, name: str, *nodes: ast.AST) -> None:
        """Adds a problem if the name of a field, or a class in it, is about precision."""
        names = []
        for node in nodes:
            names += [child.id for child in ast.walk(node) if isinstance(child, ast.Name)]
        has_converter = any(each.endswith("Converter") for each in names)
        if not _PRECISION_NAME.search(name) and not has_converter:
            return
        suggestion = nearest(name, _FIELDS)
        hint = f"; did you mean {suggestion!r}?" if suggestion else ""
        self.fields.add_problem(nodes[0], f"{name}: no known field of a configuration{hint}")


def _returns_config(node: ast.FunctionDef) -> bool:
    # The annotation `-> Trainer.Config` also counts if another function builds the configuration.
    if isinstance(node.returns, ast.Attribute) and node.returns.attr == "Config":
        return True
    return any(_is_config_call(child) for child in ast.walk(node))


def _is_block(node: ast.AST) -> bool:
    return isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try))


def _is_about_precision(node: ast.AST) -> bool:
    name = ""
    if isinstance(node, ast.Attribute):
        name = node.attr
    elif isinstance(node, ast.Name):
        name = node.id
    return name in (*_CONVERTER_FIELDS, *TRAINING_FIELDS) or name.endswith("Converter")
