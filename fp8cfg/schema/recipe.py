"""Recipe: the typed root of the configuration tree. It describes one training run."""

from __future__ import annotations

import functools
import html
import textwrap
import typing
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import pydantic
from pydantic import Field

from fp8cfg.schema.data import Data
from fp8cfg.schema.errors import ConfigError, suggest
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.keys import ALIASES, short, shown
from fp8cfg.schema.model import LoRA, Model
from fp8cfg.schema.node import Node, as_declared
from fp8cfg.schema.precision import Backend, OptLevel, Precision, Storage
from fp8cfg.schema.safe_files import CONF, read_yaml
from fp8cfg.schema.sections import in_notebook, table_html
from fp8cfg.schema.training import Checkpoint, Log, Optim, Trainer
from fp8cfg.schema.value_errors import walk

_WIDTH = 80


class Recipe(Node):
    """Describes one training run. `check()` validates the rules between keys."""

    home: ClassVar[str] = ""

    name: str = Field(default="unnamed", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Names the run folder: letters, digits, '_', '.' and '-'. Default unnamed; recipe functions set their own name."""
    model: Model = Field(default_factory=Model)
    """The model's shape."""
    lora: LoRA = Field(default_factory=LoRA)
    """Adapters over frozen weights."""
    data: Data = Field(default_factory=Data)
    """Training and validation data."""
    optim: Optim = Field(default_factory=Optim)
    """Optimizer and schedule."""
    trainer: Trainer = Field(default_factory=Trainer)
    """The training loop, and the precision in `plugins`."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Checkpoints."""
    log: Log = Field(default_factory=Log)
    """Run folder and log lines."""

    @pydantic.field_validator("data", mode="before")
    @classmethod
    def _accept_name(cls, value: Any) -> Any:
        """Accepts data="chat" for data={"name": "chat"}, as on the command line."""
        if isinstance(value, str):
            return {"name": value}
        return value

    @property
    def task(self) -> str:
        """lora, sft or pretrain. Assigning a name sets the values of that task."""
        if self.lora.enabled:
            return "lora"
        return "sft" if self.data.name == "chat" else "pretrain"

    @task.setter
    def task(self, name: str) -> None:
        # The registry's apply_task keeps smaller sizes of a recipe. An assignment sets every value.
        for node, values in read_task(name).items():
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
        # A level in place of a node, as a name of a preset in place of a precision.
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
        # Short names are properties, and pydantic rejects them as extra fields. They come last, so
        # that Recipe(trainer=..., fp8=...) changes the new trainer.
        by_short_name = {name: values.pop(name) for name in ALIASES if name in values}
        super().__init__(**values)
        for name, value in by_short_name.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return _text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return _html(self)

    def diff(self, other: Recipe) -> Differences:
        """Returns the keys in which `other` differs, with both values, in the order of the schema.

        Raises:
            ConfigError: `other` is not a recipe.
        """
        if not isinstance(other, Recipe):
            advice = "compose(['recipe=llama_8b']) returns one"
            if isinstance(getattr(other, "recipe", None), Recipe):
                advice = "pass job.recipe"
            raise ConfigError(f"diff: expected a Recipe, got {type(other).__name__}; {advice}")
        return differences(self, other)

    def check(self) -> None:
        """Raises ConfigError with one line for each rule between keys that this recipe breaks.

        It does not compare patterns such as fp8.exclude with layer names. `fp8cfg.plan` and
        `fp8cfg.build` do, because a custom model has layers of its own.
        """
        from fp8cfg.schema import rules

        rules.check(as_declared(self, Recipe))


@functools.cache
def fields() -> dict[str, Any]:
    """Returns pydantic's FieldInfo of every key and node, by full name."""
    return dict(walk(Recipe))


@functools.cache
def short_keys() -> frozenset[str]:
    """Returns the short names of all keys."""
    return frozenset(short(key) for key in fields())


@functools.cache
def read_task(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns the values of a task by node, from conf/task/. Callers must not change them.

    Raises:
        ConfigError: The task is unknown.
    """
    folder = CONF / "task"
    tasks = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in tasks:
        hint = suggest(str(name), tasks) or f"; choose from {', '.join(tasks)}"
        raise ConfigError(f"task={name}: no such task{hint}")
    return read_yaml(folder / f"{name}.yaml")


# A message about an unknown key of a node suggests keys of the whole tree.
Node.root = Recipe


class Leaf(NamedTuple):
    """A key with a value, not a node.

    Attributes:
        key: Short name.
        value: Value in the recipe.
        default: Default of the schema.
    """

    key: str
    value: Any
    default: Any

    @property
    def is_default(self) -> bool:
        """Whether the key has its default value."""
        return bool(self.value == self.default)


class Differences(dict[str, tuple[Any, Any]]):
    """Both values of each key in which two recipes differ, by short name. Prints one line per key."""

    def __repr__(self) -> str:
        if not self:
            return "no difference"
        return "\n".join(f"{key}: {shown(a)} -> {shown(b)}" for key, (a, b) in self.items())

    def _repr_html_(self) -> str:
        if not self:
            return in_notebook("no difference")
        rows = [[key, shown(a), shown(b)] for key, (a, b) in self.items()]
        return in_notebook(table_html(["key", "first", "second"], rows))


def leaves(recipe: Node) -> list[Leaf]:
    """Lists all keys of `recipe` except nodes, in the order of the schema."""
    result = []
    for key, field in walk(type(recipe)):
        default = field.get_default(call_default_factory=True)
        if not isinstance(default, Node):
            result.append(Leaf(short(key), attrgetter(key)(recipe), default))
    return result


def differences(a: Node, b: Node) -> Differences:
    """Returns the keys in which two recipes differ, in the order of the schema."""
    # Both are recipes, so their leaves are the same keys in the same order.
    different = Differences()
    for first, second in zip(leaves(a), leaves(b), strict=True):
        if first.value != second.value:
            different[first.key] = (first.value, second.value)
    return different


def _text(recipe: Recipe) -> str:
    """Formats the recipe in 80 columns: changed keys first, one paragraph per node."""
    shown_leaves = [leaf for leaf in leaves(recipe) if leaf.key != "name"]
    changed = [leaf for leaf in shown_leaves if not leaf.is_default]
    default_leaves = [leaf for leaf in shown_leaves if leaf.is_default]
    lines = [f"Recipe {recipe.name}", *_paragraphs(changed), "at their defaults"]
    return "\n".join([*lines, *_paragraphs(default_leaves)])


def _paragraphs(leaves: list[Leaf]) -> Iterator[str]:
    """Yields one paragraph per node, such as `  fp8: enabled=true, margin=1`."""
    by_node: dict[str, list[str]] = {}
    for leaf in leaves:
        node, _, name = leaf.key.rpartition(".")
        by_node.setdefault(node, []).append(f"{name}={shown(leaf.value)}")
    for node, values in by_node.items():
        yield textwrap.fill(
            ", ".join(values),
            _WIDTH,
            initial_indent=f"  {node}: " if node else "  ",
            subsequent_indent="    ",
            # Paths and names must stay whole, so that they can be copied.
            break_long_words=False,
            break_on_hyphens=False,
        )


def _html(recipe: Recipe) -> str:
    """Formats the recipe for a notebook: a table of changed keys, and a folded table of the rest."""
    changed, default_rows = [], []
    for leaf in leaves(recipe):
        if leaf.is_default:
            default_rows.append([leaf.key, shown(leaf.value)])
        else:
            changed.append([leaf.key, shown(leaf.value), shown(leaf.default)])
    return in_notebook(
        f"<b>Recipe {html.escape(recipe.name)}</b>"
        f"{table_html(['key', 'value', 'default'], changed)}"
        f"<details><summary>at their defaults</summary>{table_html([], default_rows)}</details>"
    )
