"""Metaclass of nodes: documents and lists the keys in an interactive session.

`recipe.fp8.margin?` in IPython shows the documentation of the key. Completion after `recipe.fp8.`
lists the keys, without pydantic's methods.
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
    """A key as an attribute of its node class.

    It is a property because IPython shows the docstring of a property. For other descriptors it shows
    the docstring of the value.
    """

    hidden: ClassVar[bool] = False
    """Set while pydantic creates a node class. Otherwise pydantic takes the keys of base classes for
    defaults, and warns that a field shadows an attribute."""

    def __init__(self, name: str, doc: str) -> None:
        super().__init__(
            lambda node: self.__get__(node), lambda node, value: _assign(node, name, value)
        )
        self.name = name
        self.__doc__ = doc

    def __get__(self, node: Any, cls: type | None = None) -> Any:
        """Returns the value from the node's dictionary.

        Faster than calling the getter of a property. A plan reads millions of keys.
        """
        if node is None:
            if Key.hidden:
                raise AttributeError(self.name)
            return self
        try:
            return node.__dict__[self.name]
        except KeyError:
            # pydantic is still filling the node. AttributeError is what hasattr and copy expect.
            raise AttributeError(self.name) from None


def _assign(node: Any, name: str, value: Any) -> None:
    """Assigns a validated value, as pydantic does for a plain field."""
    type(node).__pydantic_validator__.validate_assignment(node, name, value)


class NodeType(_ModelType):
    """The metaclass of nodes. It hides pydantic's names from `dir`.

    Python's own completion lists `dir` of the class and of each base class.
    """

    def __dir__(cls) -> list[str]:
        return sorted(public_names(cls, super().__dir__()))

    if not TYPE_CHECKING:

        @property
        def __bases__(cls) -> tuple[type, ...]:
            # rlcompleter walks __bases__ and would list the methods of pydantic.BaseModel.
            bases = vars(type)["__bases__"].__get__(cls)
            return tuple(base for base in bases if isinstance(base, NodeType))


def document_keys(cls: type[BaseModel], key_of: Callable[[str], str]) -> None:
    """Adds a documented `Key` for each field of a node class.

    Args:
        cls: The node class.
        key_of: Maps the name of a field to the short name of its key.
    """
    for name, field in cls.model_fields.items():
        key = key_of(name)
        text = " ".join((field.description or "").split())
        inner_fields = getattr(field.annotation, "model_fields", None)
        if inner_fields:
            hint = f"Keys: {', '.join(inner_fields)}."
        else:
            hint = f"fp8cfg.explain(recipe, {key!r}) explains it in a recipe."
        setattr(cls, name, Key(name, f"{key}: {text}\n\n{hint}"))
    for member in vars(cls).values():
        if isinstance(member, property) and member.fget is not None:
            # IPython completes with jedi. jedi 0.20.1 evaluates the return annotation of a property
            # and fails at a Literal. Without an annotation it calls the property.
            member.fget.__annotations__.pop("return", None)


def public_names(cls: type, names: Iterable[str]) -> list[str]:
    """Selects the keys, properties and methods of nodes from `names`, without pydantic's.

    Args:
        cls: The node class.
        names: Names from `dir`.
    """
    own_names = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "pydantic":
            continue
        for name, member in vars(base).items():
            is_public = not name.startswith("_")
            if is_public and (isinstance(member, property | classmethod) or isroutine(member)):
                own_names.add(name)
    selected = []
    for name in names:
        is_special = name.startswith("__") and "pydantic" not in name
        if name in own_names or is_special:
            selected.append(name)
    return selected
