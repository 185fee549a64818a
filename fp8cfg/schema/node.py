"""Node: the base class of the schema on pydantic.

Command line, YAML and Python build the same nodes, so they share validation and error messages.
"""

from __future__ import annotations

import copy
import math
import os
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import pydantic

from fp8cfg.schema import foreign_names
from fp8cfg.schema.errors import ConfigError, NoSuchKey, refuse_if
from fp8cfg.schema.keys import full, preset_keys, short, written
from fp8cfg.schema.node_type import Key, NodeType, document_keys, public_names
from fp8cfg.schema.units import in_unit
from fp8cfg.schema.value_errors import options, problems, shown_value, unknown_key, unknown_keys

N = TypeVar("N", bound="Node")
_IMMUTABLE = frozenset({str, int, float, bool, type(None), frozenset})
LARGEST = 2**63 - 1
"""The largest integer: sizes of tensors and files have 64 bits. Products of several sizes still fit
in a float."""


class Node(pydantic.BaseModel, metaclass=NodeType):
    """A node of the recipe tree.

    Unknown keys, wrong types and values out of bounds raise ConfigError at construction and at
    assignment. Numbers and strings are not converted into each other, but options match without
    case, a whole float counts as an integer, NumPy's numbers as Python's, a list as a tuple, and
    any mapping as a node. A node that is assigned is copied, so no two recipes share one.
    """

    model_config = pydantic.ConfigDict(
        extra="forbid",
        strict=True,
        validate_assignment=True,
        validate_default=False,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
    home: ClassVar[str] = ""
    """Where the node is in the recipe, by its short name."""
    units: ClassVar[Mapping[str, str]] = {}
    """Unit of the fields that take a text such as `10m`: seconds or bytes."""
    root: ClassVar[type[Node] | None] = None
    """The class at the top of the tree, Recipe, as soon as it is defined."""

    def __init_subclass__(cls, **options: Any) -> None:
        # pydantic would take the Key properties of a base class for defaults of its fields.
        Key.hidden = True
        super().__init_subclass__(**options)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        Key.hidden = False
        document_keys(cls, cls.key)

    @classmethod
    def key(cls, field: str) -> str:
        """Returns the short name of the key of `field`: `fp8.margin`, `opt_level`."""
        return short(full(f"{cls.home}.{field}" if cls.home else field))

    def __dir__(self) -> list[str]:
        return sorted(public_names(type(self), super().__dir__()))

    def __init__(self, /, **values: Any) -> None:
        # pydantic is strict and would reject OmegaConf's containers and NumPy's numbers.
        values = {name: _plain_value(value) for name, value in values.items()}
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise ConfigError(problems(type(self), error)) from None

    def _assign(self, name: str, value: Any) -> None:
        """Assigns a field or a short name. Raises ConfigError as the constructor."""
        cls = type(self)
        is_field = name in cls.model_fields
        attribute = getattr(cls, name, None)
        # Short names such as recipe.fp8 are properties. Without a setter a property is derived from
        # other keys, such as optim.end_lr.
        if isinstance(attribute, property) and not is_field:
            if attribute.fset is None:
                raise ConfigError(foreign_names.unknown(self.key(name), ()))
            return object.__setattr__(self, name, value)

        value = _plain_value(value)
        old_value = getattr(self, name, None)
        # A mapping merges into the old node, as on the command line and in YAML.
        if isinstance(old_value, Node) and isinstance(value, dict):
            value = old_value.merged(value)
        # pydantic accepts unknown names with a leading underscore as private attributes.
        if not is_field:
            raise ConfigError(unknown_keys(cls, name, value))
        # Read before the assignment: pydantic replaces the dictionary that has the record.
        names_of_preset = preset_keys(self)
        try:
            super().__setattr__(name, value)
        except pydantic.ValidationError as error:
            raise ConfigError(problems(cls, error)) from None
        written(self, name, names_of_preset)

    def __delattr__(self, name: str) -> None:
        """Always raises ConfigError, with the default as advice."""
        cls = type(self)
        field = cls.model_fields.get(name)
        if field is None and not isinstance(getattr(cls, name, None), property):
            raise ConfigError(unknown_key(cls, name))
        advice = ""
        if field is not None and not field.is_required():
            default = field.get_default(call_default_factory=True)
            if not isinstance(default, Node):
                advice = f"; set {self.key(name)}={shown_value(default)}, its default"
        raise ConfigError(
            f"{self.key(name)}: a key always has a value and cannot be deleted{advice}"
        )

    # Hidden from type checkers. With a __getattr__ they would accept every attribute.
    if not TYPE_CHECKING:
        __setattr__ = _assign

        def __getattr__(self, name: str) -> Any:
            # copy, pickle and IPython look up private names, and expect a plain AttributeError.
            if name.startswith("_"):
                return super().__getattr__(name)
            raise NoSuchKey(unknown_key(type(self), name))

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Returns a deep copy. Immutable values are shared.

        pydantic's own method passes every leaf through copy.deepcopy, which is slow.
        """
        new = super().__copy__()
        for name, value in vars(new).items():
            if type(value) not in _IMMUTABLE:
                vars(new)[name] = copy.deepcopy(value, memo)
        return new

    def merged(self, changes: dict[str, Any]) -> Self:
        """Returns a copy with `changes` assigned. Mappings merge into nodes.

        Raises:
            ConfigError: See `model_copy`.
        """
        return self.model_copy(update=changes)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy, with the values of `update` validated and assigned.

        pydantic's own method does not validate `update`.

        Args:
            update: New values by field or short name. They make the copy deep, so that no change
                reaches the original.
            deep: Whether nodes are copied too.

        Raises:
            ConfigError: It lists the problems of all values.
        """
        update = update or {}
        new = super().model_copy(deep=deep or bool(update))
        lines: list[str] = []
        for key, value in update.items():
            try:
                setattr(new, key, value)
            except ConfigError as error:
                lines += error.problems
        refuse_if(lines)
        return new

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _normalize(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Converts the few values that users write in another type, before strict validation."""
        name = info.field_name or ""
        annotation = cls.model_fields[name].annotation
        if isinstance(value, int | float):
            return _normalize_number(cls.key(name), annotation, value)
        if isinstance(value, Node):
            # pydantic accepts a subclass, but it would not compare equal to the declared class.
            if isinstance(annotation, type) and isinstance(value, annotation):
                return as_declared(value, annotation)
            return value
        if isinstance(value, str) and name in cls.units:
            return in_unit(value, cls.units[name])
        if isinstance(value, list | tuple):
            return tuple(_canonical_option(item, annotation) for item in value)
        return _canonical_option(value, annotation)


def _canonical_option(value: Any, annotation: Any) -> Any:
    """Returns the option that `value` spells in any case, such as BF16 or rmsnorm.

    Returns other values as they are.
    """
    if not isinstance(value, str):
        return value
    by_lower_case = {option.lower(): option for option in options(annotation)}
    return by_lower_case.get(value.lower(), value)


def _normalize_number(key: str, annotation: Any, value: float) -> float:
    """Converts a whole float, such as 1e3 in YAML, to an integer if the key takes integers.

    Args:
        key: Short name of the key, for the error.
        annotation: Type of the field, such as `int | None`.
        value: An integer, a bool or a float.

    Raises:
        ConfigError: The number is larger than LARGEST.
    """
    takes_integer = int in (annotation, *typing.get_args(annotation))
    is_whole = isinstance(value, int) or takes_integer
    if is_whole and LARGEST < abs(value) < math.inf:
        raise ConfigError(f"{key}: the number has too many digits")
    if takes_integer and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _plain_value(value: Any) -> Any:
    """Copies nodes and converts containers and NumPy's numbers to Python's types.

    OmegaConf, for one, has its own mapping and sequence types.

    Raises:
        ConfigError: A key of a mapping is not a string.
    """
    if isinstance(value, Node):
        return value.model_copy(deep=True)
    # By name, so that the schema does not import NumPy.
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{shown_value(value)}: key {key!r} is not a name")
        return {key: _plain_value(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain_value(inner) for inner in value]
    return value


def as_declared(node: N, declared: type[N]) -> N:
    """Converts a node of a subclass to the class `declared`.

    Raises:
        ConfigError: The subclass adds a field, which nothing would read.
    """
    cls = type(node)
    if cls is declared:
        return node
    for name in cls.model_fields:
        if name not in declared.model_fields:
            raise ConfigError(
                f"{declared.key(name)}: nothing reads this field of {cls.__name__}; remove it from"
                " the class"
            )
    return declared(**{name: getattr(node, name) for name in declared.model_fields})


def expand_home(value: Any) -> Any:
    """Returns a path as text, with `~` replaced by the user's home folder.

    Returns other values as they are. Validation rejects them later.
    """
    # The shell expands `~` only at the start of a word, not in log.dir=~/runs.
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return os.path.expanduser(value)
    return value
