"""Recipe: the typed root of the configuration tree, which describes one training run."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from pydantic import Field

from fp8cfg.config import recipe_text
from fp8cfg.config.data import Data
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.fp8 import FP8
from fp8cfg.config.key_names import ALIASES, short
from fp8cfg.config.lora import LoRA
from fp8cfg.config.model import Model
from fp8cfg.config.node import Node, as_declared
from fp8cfg.config.precision import Backend, OptLevel, Precision, Storage
from fp8cfg.config.training_nodes import Checkpoint, Log, Optim, Trainer
from fp8cfg.config.validation_errors import walk


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
    def storage(self, value: Storage | dict[str, Any]) -> None:
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
        return recipe_text.text(self.name, self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return recipe_text.page(self.name, self)

    def diff(self, other: Recipe) -> recipe_text.Differences:
        """The keys, by their short names, in which `other` differs, each with both values, in the order of the schema. Raises
        ConfigError for what is no recipe."""
        if not isinstance(other, Recipe):
            of_job = isinstance(getattr(other, "recipe", None), Recipe)
            cure = "write job.recipe" if of_job else "compose(['recipe=llama_8b']) gives one"
            raise ConfigError(f"diff: expected a Recipe, got {type(other).__name__}; {cure}")
        return recipe_text.differences(self, other)

    def check(self) -> None:
        """Raise ConfigError with every rule between keys that this recipe breaks, one line each."""
        from fp8cfg.config import rules

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
