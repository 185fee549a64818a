"""Schema base class on pydantic: the same validation and the same error text for the CLI, YAML and Python."""

from __future__ import annotations

import copy
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import isroutine
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import pydantic
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fp8cfg.schema import foreign_names
from fp8cfg.schema.errors import ConfigError, NoSuchKey, refuse_if, suggest
from fp8cfg.schema.keys import full, preset_keys, short, spelled, written
from fp8cfg.schema.units import EXAMPLES, in_unit

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


_ON, _OFF = ("yes", "on", "1", "y", "enabled"), ("no", "off", "0", "n", "disabled")
_NUMBER, _UNIT = (
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"),
    re.compile(r"(\d+\.?\d*) ?([kKmMgGbB])"),
)
THOUSANDS = re.compile(r"\d{1,3}([,_]\d{3})+")
"""A number as it is printed, or typed in Python: 50,257 and 50_257."""
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "model_type": "a mapping of keys",
    "dict_type": "a mapping, as in {path: a, weight: 0.7}",
}


def walk(cls: type[Node], at: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key below the node class `cls`, nodes included, by its full name from there, with pydantic's FieldInfo."""
    for name, info in cls.model_fields.items():
        yield at + name, info
        if isinstance(info.annotation, type) and issubclass(info.annotation, pydantic.BaseModel):
            yield from walk(info.annotation, f"{at}{name}.")  # type: ignore[arg-type]


def options(annotation: Any) -> list[str]:
    """The string options of a Literal, also inside a union; an empty list for other annotations."""
    if typing.get_origin(annotation) is typing.Literal:
        return [o for o in typing.get_args(annotation) if isinstance(o, str)]
    return [o for a in typing.get_args(annotation) for o in options(a)]


def problems(cls: type[Node], error: pydantic.ValidationError) -> list[str]:
    """One line for each thing that pydantic found, those of nested nodes included."""
    lines: list[str] = []
    for e in error.errors(include_url=False):
        cause = e.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            lines += cause.problems
        elif e["type"] in ("extra_forbidden", "no_such_attribute"):
            lines += unknown_keys(cls, str(e["loc"][0]), e["input"])
        else:
            lines.append(_line(cls, e))
    return list(dict.fromkeys(lines))


def _line(cls: type[Node], e: Any) -> str:
    field, given, ctx = str(e["loc"][0]), e["input"], e.get("ctx", {})
    at = f"{cls.key(field)}={shown_value(given)}"
    if e["type"] == "literal_error" or options(cls.model_fields[field].annotation):
        ours = foreign_names.meant(cls.key(field), given)
        if ours and " " in ours:  # another key has a part in it
            return f"{at}: not an option; write {cls.key(field)}={ours}"
        near = (
            f"; did you mean {ours!r}?"
            if ours
            else suggest(str(given), options(cls.model_fields[field].annotation))
        )
        return f"{at}: not an option{near}"
    for bound, words in (
        ("ge", "at least"),
        ("gt", "more than"),
        ("le", "at most"),
        ("lt", "less than"),
    ):
        if bound in ctx:
            return (
                f"{at}: must be {words} {ctx[bound]:{'d' if isinstance(ctx[bound], int) else 'g'}}"
            )
    if e["type"] in ("too_short", "too_long", "missing") and isinstance(given, tuple):
        return (
            f"{at}: expected {len(typing.get_args(cls.model_fields[field].annotation))} values, got"
            f" {len(given)}"
        )
    if e["type"] == "string_too_short":
        return f"{at}: needs a name"
    if e["type"] == "string_pattern_mismatch":
        return f"{at}: letters, digits, '_', '.' and '-' alone, at most 64 of them"
    if given == "":
        return f"{at}: needs a value"
    expected = _EXPECTED.get(e["type"])
    got = {"NoneType": "null", "tuple": "a list"}.get(type(given).__name__, type(given).__name__)
    texts = cls.model_fields[field].annotation == tuple[str, ...]
    instead = (
        _instead(cls.key(field), e["type"], given) if texts or e["type"] != "tuple_type" else ""
    )
    if field in cls.units and isinstance(given, str):
        instead = f"; write {cls.units[field]}, or {EXAMPLES[cls.units[field]]}"
    if e["type"] == "model_type":
        if (
            isinstance(given, tuple)
            and len(given) == 1
            and isinstance(given[0], pydantic.BaseModel)
        ):
            return f"{cls.key(field)}: expected one, got a list; write it without the list"
        node: Any = cls.model_fields[field].annotation
        instead = _node_instead(cls.key(field), node, given)
    return f"{at}: expected {expected}, got {got}{instead}" if expected else f"{at}: {e['msg']}"


def _instead(key: str, kind: str, given: Any) -> str:
    """What to write in place of a value of another type, where that is plain."""
    if kind == "tuple_type":
        if not isinstance(given, str):
            return ""
        items = [item.strip(" '\"") for item in given.strip("[] ").split(",")]
        return f'; write "{key}={items}"'
    if kind == "bool_type":
        word = str(given).lower()
        if word in ("true", "false"):
            return "; write it without quotes"
        return (
            f"; write {key}={'true' if word in _ON else 'false'}" if word in (*_ON, *_OFF) else ""
        )
    if kind == "string_type" and isinstance(given, float):
        return "; put it in quotes"  # a float has lost the text that it was written as
    if kind == "string_type" and isinstance(given, int):
        return f"; write '{key}=\"{spelled(given)}\"'"
    if kind == "string_type" and key == "data.path" and isinstance(given, tuple):
        return several_files(given)
    if kind not in ("int_type", "float_type"):
        return ""
    listed = False
    while isinstance(given, tuple) and len(given) == 1:
        given, listed = given[0], True
    if listed:
        return f"; write {key}={given}" if type(given) in (int, float) else ""
    if not isinstance(given, str):
        return ""
    if _NUMBER.fullmatch(given):
        plain = re.sub(r"(?<![\d.])0+(?=\d)", "", given)
        return f"; write {key}={plain}" if plain != given else "; write it without quotes"
    if THOUSANDS.fullmatch(given):
        return f"; write it out, as {re.sub('[,_]', '', given)}"
    if unit := _UNIT.fullmatch(given):
        powers = {"k": 1, "m": 2, "g": 3, "b": 3}[unit[2].lower()]
        return (
            f"; write it out, as {float(unit[1]) * 1000**powers:.0f} or"
            f" {float(unit[1]) * 1024**powers:.0f}"
        )
    return ""


def several_files(paths: Sequence[Any]) -> str:
    """What to write in place of several paths for data.path."""
    parts = ", ".join(f"{{path: {path}, weight: 1}}" for path in paths)
    return f"; write 'data.mixture=[{parts}]'"


def _node_instead(key: str, node: type[Node], given: Any) -> str:
    """What to write in place of a `given` value that is no node and no mapping."""
    if key == "precision":
        ours = foreign_names.meant(key, given)
        return (
            f"; did you mean {ours!r}?"
            if ours
            else f"; write {given.__name__}()"
            if callable(given)
            else ""
        )
    if isinstance(given, (str, bool)) or _all_keys(node, given):
        return example(full(key), node, given)
    return ""


def _all_keys(node: type[Node], value: Any) -> bool:
    """Whether `value` is a list with a value for each key of `node`, as Accelerate's override_linear_precision is."""
    return isinstance(value, (list, tuple)) and len(value) == len(node.model_fields)


def example(key: str, node: type[Node], value: Any) -> str:
    """The key of `node` that takes `value`: its switch for true and false, or the one of which it is an option; else its first.
    For a list with a value for each key all of them."""
    if _all_keys(node, value):
        keys = ", ".join(
            f"{leaf}: {str(each).lower()}"
            for leaf, each in zip(node.model_fields, value, strict=True)
        )
        return f"; write '{short(key)}={{{keys}}}'"
    if isinstance(value, bool) and "enabled" in node.model_fields:
        return f"; write {short(key)}.enabled={str(value).lower()}"
    taken = (
        leaf
        for leaf, field in node.model_fields.items()
        if str(value).lower() in options(field.annotation)
    )
    if leaf := next(taken, None):
        return f"; write {short(key)}.{leaf}={str(value).lower()}"
    if "enabled" in node.model_fields:
        enabled = "false" if str(value).lower() in ("0", "off", "no", "none") else "true"
        return f"; write {short(key)}.enabled={enabled}"
    defaults = (
        (leaf, field.get_default(call_default_factory=True))
        for leaf, field in node.model_fields.items()
    )
    leaf, default = next(
        (leaf, default)
        for leaf, default in defaults
        if isinstance(default, (bool, int, float, str))
    )
    return f", as in {short(key)}.{leaf}={spelled(default)}"


def unknown_key(cls: type[Node], field: str) -> str:
    return foreign_names.unknown(cls.key(field), _known(cls))


def unknown_keys(cls: type[Node], field: str, value: Any) -> list[str]:
    """The lines of a `field` that does not exist, or of the keys in its `value`."""
    if isinstance(value, Mapping):
        return foreign_names.unknown_lines(cls.key(field), _known(cls), value)
    return [unknown_key(cls, field)]


def _known(cls: type[Node]) -> frozenset[str]:
    """Short keys of the whole tree: a key in the wrong node finds its own."""
    return frozenset(short(key) for key, _ in walk(cls.root or cls))


def shown_value(value: Any) -> str:
    try:
        text = spelled(value)
    except ValueError:  # Python writes no whole number of more than 4300 digits
        text = "a number of many digits"
    return text if len(text) <= 60 else text[:57] + "..."


N = TypeVar("N", bound="Node")
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
    units: ClassVar[Mapping[str, str]] = {}
    """Unit of the fields that take a text such as `10m`: seconds or bytes."""
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
            raise ConfigError(unknown_keys(type(self), name, value))
        of_preset = preset_keys(self)
        try:
            super().__setattr__(name, value)
        except pydantic.ValidationError as e:
            raise ConfigError(problems(type(self), e)) from None
        written(self, name, of_preset)

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

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Nodes, and what else could change, anew; leaves are shared: pydantic would take each of them through copy.deepcopy."""
        new = super().__copy__()
        for name, value in vars(new).items():
            if type(value) not in _PLAIN:
                vars(new)[name] = copy.deepcopy(value, memo)
        return new

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
            if unit := cls.units.get(info.field_name or ""):
                return in_unit(value, unit)
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


def expand_home(value: Any) -> Any:
    """Returns a path as text, with `~` replaced by the user's home folder; other values as they are."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return os.path.expanduser(value) if isinstance(value, str) else value
