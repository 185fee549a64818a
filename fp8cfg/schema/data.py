"""Schema node of data: the corpora that are trained on, and a mixture of them."""

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
"""The schema of a part of a mixture, which `_wrong` checks."""

SHIPPED = ("stdlib", "tiny")
"""Data that is there without a path."""

NO_ADDRESS = "data are files, not an address; download them, and write where they are"
"""Why there are no data at hf://OWNER/NAME or the like."""


class Data(Node):
    """What is trained on."""

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
    """In place of data.path several, each with its share of the samples: [{path: a, weight: 0.7}, {path: b, weight: 0.3}]. A path
    that is small for its weight is read several times. Default [] (Megatron's blend)."""
    text_key: str = Field(default="text", min_length=1)
    """Column of the text in jsonl, csv, parquet and dataset. Default text (Megatron's json-keys)."""
    tokenizer: str | None = None
    """A tokenizer.json, a folder with it, hf://OWNER/NAME, or bytes. For token files, the tokenizer that made them. Default null: the
    tokenizer of model.path or model.weights, or bytes if the recipe has no pretrained model."""
    streaming: bool = False
    """Read the rows of jsonl, csv or parquet while the run goes on, in their order, and hold none: for what does not fit into memory.
    Default false (datasets' load_dataset)."""
    eod_mask_loss: bool = False
    """Take no loss of the first token of a document, which those before it say nothing of. Default false (Megatron)."""
    reset_attention_mask: bool = False
    """Attention stays within a document: no token sees those of documents before it. Default false (Megatron)."""
    reset_position_ids: bool = False
    """Positions begin at 0 with each document of a sequence. Default false (Megatron)."""
    validation_path: str | None = None
    """What is validated on, of the same kind as data.path, of which nothing is held out then. Default null."""
    validation_fraction: float = Field(default=0.05, gt=0, lt=0.5)
    """Share of the corpus, at its end, that is held out, cut at a document where one begins nearby. Default 0.05."""

    @pydantic.field_validator("path", "tokenizer", "validation_path", mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return expand_home(value)

    @property
    def paths(self) -> dict[str, str]:
        """What is trained and validated on, by key."""
        parts = {
            f"data.mixture[{number}].path": part["path"] for number, part in enumerate(self.mixture)
        }
        found = {"data.path": self.path, "data.validation_path": self.validation_path, **parts}
        return {key: path for key, path in found.items() if path}

    @property
    def resets(self) -> bool:
        """Whether batches say which document each token is of, which the model then tells apart."""
        return self.reset_attention_mask or self.reset_position_ids

    @pydantic.field_validator("mixture", mode="after")
    @classmethod
    def _weighed(cls, value: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        lines = [
            line
            for number, part in enumerate(value)
            for line in _wrong(f"data.mixture[{number}]", part)
        ]
        if lines:
            raise ConfigError(lines)
        return tuple({"path": part["path"], "weight": part["weight"]} for part in value)


def _wrong(at: str, part: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a part of a mixture."""
    for name in [name for name in part if name not in ("path", "weight")]:
        yield (
            f"{at}.{name}: no such key; a part has path and weight, as in {{path: a, weight: 0.7}}"
        )
    if not isinstance(part.get("path"), str) or not part["path"]:
        yield f"{at}.path: needs a path, as in {{path: a, weight: 0.7}}"
    weight = part.get("weight")
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not 0 < weight < math.inf
    ):
        yield f"{at}.weight={spelled(weight)}: needs a number more than 0"
