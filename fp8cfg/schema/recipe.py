"""Recipe: the typed root of the configuration tree, which describes one training run."""

from __future__ import annotations

import functools
import html
import textwrap
import typing
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import pydantic
from pydantic import Field

from fp8cfg.schema.data import Data
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.keys import ALIASES, short, shown
from fp8cfg.schema.model import LoRA, Model
from fp8cfg.schema.node import Node, as_declared
from fp8cfg.schema.precision import Backend, OptLevel, Precision, Storage
from fp8cfg.schema.safe_files import CONF, read_yaml
from fp8cfg.schema.training import Checkpoint, Log, Optim, Trainer
from fp8cfg.schema.value_errors import walk

_WIDTH = 80


class Leaf(NamedTuple):
    """A key, by its short name, its value and its default."""

    key: str
    value: Any
    default: Any


class Differences(dict[str, tuple[Any, Any]]):
    """The keys in which two recipes differ, by their short names, each with both values; printed a line each."""

    def __repr__(self) -> str:
        return (
            "\n".join(f"{key}: {shown(a)} -> {shown(b)}" for key, (a, b) in self.items())
            or "no difference"
        )


def leaves(recipe: Node) -> list[Leaf]:
    """Every key of `recipe` that is no node."""
    return [
        Leaf(short(key), attrgetter(key)(recipe), default)
        for key, info in walk(type(recipe))
        if not isinstance(default := info.get_default(call_default_factory=True), Node)
    ]


def differences(a: Node, b: Node) -> Differences:
    """What differs between `a` and `b`, in the order of the schema."""
    return Differences(
        {
            x.key: (x.value, y.value)
            for x, y in zip(leaves(a), leaves(b), strict=True)
            if x.value != y.value
        }
    )


def text(name: str, recipe: Node) -> str:
    """The recipe in lines of 80 columns, a paragraph a node: what differs from the defaults, and the rest."""
    found = [x for x in leaves(recipe) if x.key != "name"]
    apart, rest = (
        [x for x in found if x.value != x.default],
        [x for x in found if x.value == x.default],
    )
    return "\n".join([f"Recipe {name}", *_nodes(apart), "at their defaults", *_nodes(rest)])


def page(name: str, recipe: Node) -> str:
    """The recipe as HTML: a table of what differs from the defaults, and the rest to be opened."""
    found = leaves(recipe)
    apart = [_row(x.key, x.value, x.default) for x in found if x.value != x.default]
    rest = [_row(x.key, x.value) for x in found if x.value == x.default]
    return (
        f"<b>Recipe {html.escape(name)}</b>"
        f"<table><tr><th>key</th><th>value</th><th>default</th></tr>{''.join(apart)}</table>"
        f"<details><summary>at their defaults</summary><table>{''.join(rest)}</table></details>"
    )


def _nodes(found: list[Leaf]) -> Iterator[str]:
    """A paragraph for each node that has keys in `found`."""
    by_node: dict[str, list[str]] = {}
    for node, name, value in ((*x.key.rpartition(".")[::2], x.value) for x in found):
        by_node.setdefault(node, []).append(f"{name}={shown(value)}")
    for node, values in by_node.items():
        head = f"  {node}: " if node else "  "
        yield textwrap.fill(
            ", ".join(values),
            _WIDTH,
            initial_indent=head,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _row(*cells: Any) -> str:
    return f"<tr>{''.join(f'<td>{html.escape(shown(cell))}</td>' for cell in cells)}</tr>"


class Recipe(Node):
    """Everything about one training run. `check()` holds the rules between keys."""

    home: ClassVar[str] = ""

    name: str = Field(default="unnamed", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Names the run folder: letters, digits, '_', '.' and '-'. Default unnamed; recipe functions give their own name."""
    model: Model = Field(default_factory=Model)
    """The model's shape."""
    lora: LoRA = Field(default_factory=LoRA)
    """Adapters over frozen weights."""
    data: Data = Field(default_factory=Data)
    """What is trained on."""
    optim: Optim = Field(default_factory=Optim)
    """Optimizer and schedule."""
    trainer: Trainer = Field(default_factory=Trainer)
    """The loop, and in `plugins` the precision."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Checkpoints."""
    log: Log = Field(default_factory=Log)
    """Run folder and printed lines."""

    @pydantic.field_validator("data", mode="before")
    @classmethod
    def _source(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def task(self) -> str:
        """What the recipe trains: lora, sft or pretrain. Assigning a name sets the values of that task preset."""
        if self.lora.enabled:
            return "lora"
        return "sft" if self.data.name == "chat" else "pretrain"

    @task.setter
    def task(self, name: str) -> None:
        folder = CONF / "task"
        names = sorted(file.stem for file in folder.glob("*.yaml"))
        if name not in names:
            raise ConfigError(f"task={name}: no such task; choose from {', '.join(names)}")
        for node, values in read_yaml(folder / f"{name}.yaml").items():
            setattr(self, node, values)

    @property
    def precision(self) -> Precision:
        """`trainer.plugins`, by its short name."""
        return self.trainer.plugins

    @precision.setter
    def precision(self, value: Precision | str | dict[str, Any]) -> None:
        self.trainer.plugins = value  # type: ignore[assignment]

    @property
    def fp8(self) -> FP8:
        """`trainer.plugins.fp8`, by its short name."""
        return self.trainer.plugins.fp8

    @fp8.setter
    def fp8(self, value: FP8 | dict[str, Any]) -> None:
        self.trainer.plugins.fp8 = value  # type: ignore[assignment]

    @property
    def storage(self) -> Storage:
        """`trainer.plugins.storage`, by its short name."""
        return self.trainer.plugins.storage

    @storage.setter
    def storage(self, value: Storage | dict[str, Any] | OptLevel) -> None:
        levels = typing.get_args(OptLevel)
        if isinstance(value, str) and value.upper() in levels:
            self.opt_level = value
        else:
            self.trainer.plugins.storage = value  # type: ignore[assignment]

    @property
    def backend(self) -> Backend:
        """`trainer.plugins.backend`, by its short name."""
        return self.trainer.plugins.backend

    @backend.setter
    def backend(self, value: Backend) -> None:
        self.trainer.plugins.backend = value

    @property
    def opt_level(self) -> OptLevel | None:
        """`trainer.plugins.opt_level`, by its short name."""
        return self.trainer.plugins.opt_level

    @opt_level.setter
    def opt_level(self, value: OptLevel | None) -> None:
        self.trainer.plugins.opt_level = value

    def __init__(self, /, **values: Any) -> None:
        short_names = {k: values.pop(k) for k in ALIASES if k in values}
        super().__init__(**values)
        for name, value in short_names.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return text(self.name, self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return page(self.name, self)

    def diff(self, other: Recipe) -> Differences:
        """The keys, by their short names, in which `other` differs, each with both values, in the order of the schema. Raises
        ConfigError for what is no recipe."""
        if not isinstance(other, Recipe):
            of_job = isinstance(getattr(other, "recipe", None), Recipe)
            cure = "write job.recipe" if of_job else "compose(['recipe=llama_8b']) gives one"
            raise ConfigError(f"diff: expected a Recipe, got {type(other).__name__}; {cure}")
        return differences(self, other)

    def check(self) -> None:
        """Raises ConfigError with every rule between keys that this recipe breaks, one line each.

        Patterns such as fp8.exclude are compared with layer names in `fp8cfg.plan` and `fp8cfg.build`: the recipe may be for a model
        of your own, whose layers have other names.
        """
        from fp8cfg.schema import rules

        rules.check(as_declared(self, Recipe))


@functools.cache
def fields() -> dict[str, Any]:
    """Every key of the schema by its full name, nodes included, with its pydantic FieldInfo."""
    return dict(walk(Recipe))


@functools.cache
def short_keys() -> frozenset[str]:
    """Every key of the schema by its short name."""
    return frozenset(short(k) for k in fields())


Node.root = Recipe
