"""Schema base class on pydantic: the same validation and the same error text for the CLI, YAML and Python."""

from __future__ import annotations

import copy
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import pydantic

from fp8cfg.config import foreign_names
from fp8cfg.config.errors import ConfigError, NoSuchKey, refuse_if
from fp8cfg.config.key_descriptors import Key, NodeType, describe, listed
from fp8cfg.config.key_names import full, short
from fp8cfg.config.preset_keys import preset_keys, written
from fp8cfg.config.validation_errors import options, problems, shown_value, unknown_key

N = TypeVar("N", bound="Node")
WATCH: ContextVar[Callable[[Node, Iterable[str], Node | None], None] | None] = ContextVar(
    "WATCH", default=None
)
"""Where it is set, called after a node is built or changed, with the fields that were given, and after one is copied, with
its original."""
_PLAIN = frozenset({str, int, float, bool, type(None), frozenset})
LARGEST = 2**63 - 1
"""Of whole numbers: what tensors and files count by. Sizes that are made of several stay within a float."""


class Node(pydantic.BaseModel, metaclass=NodeType):
    """A node of the recipe tree. Unknown keys, wrong types and values out of bounds raise ConfigError at once,
    at construction and at assignment alike. Numbers and strings are not converted into one another; options are
    matched without case, a whole float is an integer, NumPy's numbers are Python's, a list is a tuple, and any mapping does
    for a node. A node that is given becomes a copy: no two recipes share one.
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
    """Where the node stands in the recipe, by its short name."""
    root: ClassVar[type[Node] | None] = None
    """The class at the top of the tree, once it is defined: Recipe."""

    def __init_subclass__(cls, **options: Any) -> None:
        Key.hidden = True
        super().__init_subclass__(**options)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        Key.hidden = False
        describe(cls, cls.key)

    def __dir__(self) -> list[str]:
        return sorted(listed(type(self), super().__dir__()))

    def __init__(self, /, **values: Any) -> None:
        values = {name: _own(value) for name, value in values.items()}
        try:
            super().__init__(**values)
        except pydantic.ValidationError as e:
            raise ConfigError(problems(type(self), e)) from None
        _watched(self, values)

    def _assign(self, name: str, value: Any) -> None:
        kind = getattr(type(self), name, None)
        if isinstance(kind, property) and name not in type(self).model_fields:
            if kind.fset is None:
                raise ConfigError(foreign_names.unknown(self.key(name), ()))
            return object.__setattr__(self, name, value)
        node, value = getattr(self, name, None), _own(value)
        if isinstance(node, Node) and isinstance(
            value, dict
        ):  # as at the other doors, a mapping merges
            value = node.merged(value)
        if (
            name not in type(self).model_fields
        ):  # pydantic would take a name that begins with an underscore
            raise ConfigError(unknown_key(type(self), name))
        of_preset = preset_keys(self)
        try:
            super().__setattr__(name, value)
        except pydantic.ValidationError as e:
            raise ConfigError(problems(type(self), e)) from None
        written(self, name, of_preset)
        _watched(self, (name,))

    def __delattr__(self, name: str) -> None:
        field, short_name = (
            type(self).model_fields.get(name),
            isinstance(getattr(type(self), name, None), property),
        )
        if field is None and not short_name:
            raise ConfigError(unknown_key(type(self), name))
        default = field.get_default(call_default_factory=True) if field else None
        plain = field and not (field.is_required() or isinstance(default, Node))
        write = f"; write {self.key(name)}={shown_value(default)}, its default" if plain else ""
        raise ConfigError(
            f"{self.key(name)}: a key always has a value and cannot be deleted{write}"
        )

    if (
        not TYPE_CHECKING
    ):  # to a type checker a class with __setattr__ or __getattr__ has every attribute
        __setattr__ = _assign

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                return super().__getattr__(name)
            raise NoSuchKey(unknown_key(type(self), name))

    def __copy__(self) -> Self:
        return _watched(super().__copy__(), (), self)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Nodes, and what else could change, anew; leaves are shared: pydantic would take each of them through copy.deepcopy."""
        new = super().__copy__()
        for name, value in vars(new).items():
            if type(value) not in _PLAIN:
                vars(new)[name] = copy.deepcopy(value, memo)
        return _watched(new, (), self)

    def merged(self, changes: dict[str, Any]) -> Self:
        """A copy with `changes`, nested mappings key by key. Raises ConfigError as assignment does."""
        return self.model_copy(update=changes)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with the keys of `update` assigned, and so checked; deep where there are any, so that none reaches the
        original. Raises ConfigError with every problem."""
        new, problems = super().model_copy(deep=deep or bool(update)), list[str]()
        for key, value in (update or {}).items():
            try:
                setattr(new, key, value)
            except ConfigError as e:
                problems += e.problems
        refuse_if(problems)
        return new

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _lenient(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        whole = isinstance(value, int) or (
            isinstance(value, float) and int in (annotation, *typing.get_args(annotation))
        )
        if whole and LARGEST < abs(value) < math.inf:
            raise ConfigError(
                f"{cls.key(info.field_name or '')}: a number of more digits than any key takes"
            )
        if (
            isinstance(value, Node)
            and isinstance(annotation, type)
            and isinstance(value, annotation)
        ):
            return as_declared(value, annotation)
        if isinstance(value, str):
            return {o.lower(): o for o in options(annotation)}.get(value.lower(), value)
        if (
            isinstance(value, float)
            and value.is_integer()
            and int in (annotation, *typing.get_args(annotation))
        ):
            return int(value)
        return tuple(value) if isinstance(value, list) else value

    @classmethod
    def key(cls, field: str) -> str:
        """The dotted key of `field`, by its short name: `fp8.margin`, `opt_level`."""
        return short(full(f"{cls.home}.{field}" if cls.home else field))


def _own(value: Any) -> Any:
    """A copy of a node; any mapping as a dictionary and any sequence as a list, such as OmegaConf's; NumPy's numbers and arrays as
    Python's; anything else itself."""
    if isinstance(value, Node):
        return value.model_copy(deep=True)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _own(inner) for key, inner in value.items()}
    return (
        [_own(inner) for inner in value]
        if isinstance(value, Sequence) and not isinstance(value, str | bytes)
        else value
    )


def as_declared(node: N, declared: type[N]) -> N:
    """`node`, as one of `declared` where its class is one below it. Raises ConfigError where that has fields that nothing reads."""
    cls = type(node)
    if more := [name for name in cls.model_fields if name not in declared.model_fields]:
        raise ConfigError(
            f"{declared.key(more[0])}: a field of {cls.__name__} alone, which nothing reads; drop"
            " it from that class"
        )
    return (
        node
        if cls is declared
        else declared(**{name: getattr(node, name) for name in declared.model_fields})
    )


def _watched(node: N, given: Iterable[str], copied: Node | None = None) -> N:
    watch = WATCH.get()
    if watch:
        watch(node, given, copied)
    return node
