"""Key descriptors: what an interactive session reads of a node's class, each key with its documentation, for `r.fp8.margin?`, for
`help(fp8cfg.FP8)` and for completion.

pydantic takes its fields off the class, which then has nothing to complete or to document. Values stay where pydantic keeps them,
in the node's `__dict__`, and are set by its validators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import isroutine
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelType
else:
    _ModelType = type(BaseModel)


class Key(property):
    """A key of a node, on its class: a property, because IPython shows the documentation of those alone in place of the value's."""

    hidden: ClassVar[bool] = False
    """While a class of nodes is made: pydantic would take keys of its bases as defaults, and warn of those that it has again."""

    def __init__(self, name: str, doc: str) -> None:
        super().__init__(
            lambda node: self.__get__(node), lambda node, value: _set(node, name, value)
        )
        self.name, self.__doc__ = name, doc

    def __get__(self, node: Any, cls: type | None = None) -> Any:
        """The value as pydantic keeps it, without a call of property's own: plans read millions of them."""
        if node is None:
            if Key.hidden:
                raise AttributeError(self.name)
            return self
        try:
            return node.__dict__[self.name]
        except KeyError:  # while it is made
            raise AttributeError(self.name) from None


class NodeType(_ModelType):
    """The class of nodes' classes, for completion: IPython lists `dir` of an object and of its class, and Python's own prompt
    that of each base too, down to pydantic's."""

    def __dir__(cls) -> list[str]:
        return sorted(listed(cls, super().__dir__()))

    if not TYPE_CHECKING:

        @property
        def __bases__(cls) -> tuple[type, ...]:
            return tuple(
                base for base in vars(type)["__bases__"].__get__(cls) if isinstance(base, NodeType)
            )


def describe(cls: type[BaseModel], key_of: Callable[[str], str]) -> None:
    """Give the class of a node its keys; `key_of` has the key of a field."""
    for name, field in cls.model_fields.items():
        key, text = key_of(name), " ".join((field.description or "").split())
        below = getattr(field.annotation, "model_fields", None)
        more = (
            f"Keys: {', '.join(below)}."
            if below
            else f"fp8cfg.explain(recipe, {key!r}) says what it does in a recipe."
        )
        setattr(cls, name, Key(name, f"{key}: {text}\n\n{more}"))
    for member in vars(cls).values():
        if isinstance(member, property) and member.fget is not None:
            # jedi reads the annotation of a property at run time, and fails at a Literal (seen with 0.20.1); it calls one without.
            member.fget.__annotations__.pop("return", None)


def listed(cls: type, names: Iterable[str]) -> list[str]:
    """Of `names`, those for a person: keys, properties and methods of nodes; none of pydantic's own."""
    ours = {
        name
        for base in cls.__mro__
        if base.__module__.partition(".")[0] != "pydantic"
        for name, member in vars(base).items()
        if not name.startswith("_")
        and (isinstance(member, property | classmethod) or isroutine(member))
    }
    return [
        name for name in names if name in ours or (name.startswith("__") and "pydantic" not in name)
    ]


def _set(node: Any, name: str, value: Any) -> None:
    type(node).__pydantic_validator__.validate_assignment(node, name, value)
