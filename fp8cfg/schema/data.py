"""The `data` node: training and validation data, and mixtures of corpora."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.node import Node, expand_home

_PART: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["path", "weight"],
    "properties": {
        "path": {"type": "string", "minLength": 1},
        "weight": {"type": "number", "exclusiveMinimum": 0},
    },
}
"""JSON schema of a part of a mixture. `_part_problems` checks it."""

SHIPPED = ("stdlib", "tiny")
"""Corpora that need no path."""

NO_ADDRESS = "is a URL, not a local path; download the files and set their path"
"""The problem with a path such as hf://OWNER/NAME."""


class Data(Node):
    """Training and validation data."""

    home: ClassVar[str] = "data"

    name: Literal[
        "stdlib", "tiny", "text", "jsonl", "csv", "parquet", "dataset", "tokens", "chat"
    ] = "stdlib"
    """stdlib: the running Python's standard library; tiny: a small shipped corpus; at data.path: text: files; jsonl, csv, parquet,
    dataset: a column of a table; tokens: Megatron's .bin/.idx; chat: conversations, with a loss of the assistant's words alone.
    Default: the kind of the files at data.path, or stdlib if it is null."""
    path: str | None = None
    """Folder, file or pattern (shards/*.jsonl), for tokens a prefix or .idx, for dataset a folder of save_to_disk. Default null."""
    mixture: tuple[dict[str, Any], ...] = Field(default=(), json_schema_extra={"items": _PART})
    """Several paths instead of data.path, each with its share of the samples: [{path: a, weight: 0.7}, {path: b, weight: 0.3}].
    A path that is small for its weight is repeated. Default [] (Megatron's blend)."""
    text_key: str = Field(default="text", min_length=1)
    """Column of the text in jsonl, csv, parquet and dataset. Default text (Megatron's json-keys)."""
    tokenizer: str | None = None
    """A tokenizer.json, a folder with it, hf://OWNER/NAME, or bytes. For token files, the tokenizer that made them. Default null: the
    tokenizer of model.path or model.weights, or bytes if the recipe has no pretrained model."""
    streaming: bool = False
    """Read the rows of jsonl, csv or parquet in order during the run, without keeping them, for data that does not fit into
    memory. Default false (datasets' load_dataset)."""
    eod_mask_loss: bool = False
    """Mask the loss of each document's first token, which nothing before it predicts. Default false (Megatron)."""
    reset_attention_mask: bool = False
    """Attention stays within a document: no token attends to earlier documents. Default false (Megatron)."""
    reset_position_ids: bool = False
    """Positions restart at 0 at each document of a sequence. Default false (Megatron)."""
    validation_path: str | None = None
    """Validation data, of the same kind as data.path. Nothing is held out of data.path then. Default null."""
    validation_fraction: float = Field(default=0.05, gt=0, lt=0.5)
    """Share of the corpus that is held out at its end, cut at a document boundary if one is near. Default 0.05."""

    @pydantic.field_validator("path", "tokenizer", "validation_path", mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return expand_home(value)

    @property
    def paths(self) -> dict[str, str]:
        """The paths of training and validation data by key."""
        paths = {"data.path": self.path, "data.validation_path": self.validation_path}
        for number, part in enumerate(self.mixture):
            paths[f"data.mixture[{number}].path"] = part["path"]
        return {key: path for key, path in paths.items() if path}

    @property
    def resets(self) -> bool:
        """Whether the model keeps documents apart, so that batches mark the document of each token."""
        return self.reset_attention_mask or self.reset_position_ids

    @pydantic.field_validator("mixture", mode="after")
    @classmethod
    def _check_mixture(cls, value: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        parts = [{**part, "path": expand_home(part.get("path"))} for part in value]
        problems: list[str] = []
        for number, part in enumerate(parts):
            problems += _part_problems(f"data.mixture[{number}]", part)
        if problems:
            raise ConfigError(problems)
        return tuple({"path": part["path"], "weight": part["weight"]} for part in parts)


def _part_problems(key: str, part: dict[str, Any]) -> Iterator[str]:
    """Yields the problems of one part of a mixture.

    Args:
        key: Key of the part, such as data.mixture[0].
        part: Its path and weight.
    """
    example = "{path: a, weight: 0.7}"
    for name in part:
        if name not in ("path", "weight"):
            yield f"{key}.{name}: no such key; a part has path and weight, as in {example}"
    if not isinstance(part.get("path"), str) or not part["path"]:
        yield f"{key}.path: needs a path, as in {example}"
    weight: Any = part.get("weight")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 < weight < math.inf:
        yield f"{key}.weight={spelled(weight)}: must be a number above 0"
