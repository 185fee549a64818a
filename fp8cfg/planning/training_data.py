"""Training data of a recipe in one line, and large models that would train on the default."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from fp8cfg.models.config import parameter_shapes
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema.data import SHIPPED, Data
from fp8cfg.schema.hub import BYTES, TOKENIZER, chosen_tokenizer
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import amount

LARGE = 100_000_000
"""Parameters of a model that nobody trains on bytes by accident. The tiny recipes have 3 million."""
CORPORA = {
    "stdlib": "the source of Python's standard library",
    "tiny": "a small text that fp8cfg ships",
}
"""The corpora that need no path."""


def summarize_data(recipe: Recipe) -> dict[str, Any]:
    """Returns what `recipe` trains on as plain data: the kind, its paths and the tokenizer.

    A smoke run trains on the shipped text.
    """
    data = recipe.data
    if recipe.trainer.smoke:
        data = Data(name="tiny", tokenizer=data.tokenizer)
    paths = [part["path"] for part in data.mixture]
    if data.path:
        paths.append(data.path)
    return {
        "name": data.name,
        "paths": paths,
        "weights": [part["weight"] for part in data.mixture],
        "validation_path": data.validation_path,
        "tokenizer": tokenizer_name(recipe),
    }


def data_line(recipe: Recipe) -> str:
    """Returns the `data:` line of `recipe` before its data is read."""
    data = summarize_data(recipe)
    place = ", ".join(data["paths"]) or "data.path=null"
    if data["paths"] and data["name"] != "tokens":
        place += " (rows not read)"
    return describe_data(recipe, CORPORA.get(data["name"], place))


def describe_data(recipe: Recipe, place: str) -> str:
    """Returns the `data:` line of `recipe`, whose data is `place`."""
    data = summarize_data(recipe)
    name = data["tokenizer"]
    by = f", tokenizer {name}" if name else ""
    if name and _lacks_tokenizer(name):
        by = f", no {TOKENIZER[0]} in {name}"
    return f"data: {data['name']}, {place}{by}"


def _lacks_tokenizer(name: str) -> bool:
    """Whether `name` is a folder of this machine without a tokenizer."""
    folder = Path(name).expanduser()
    return name != BYTES and folder.is_dir() and not (folder / TOKENIZER[0]).is_file()


def tokenizer_name(recipe: Recipe) -> str | None:
    """Returns the tokenizer of `recipe` by name; None if token files do not name theirs."""
    chosen = chosen_tokenizer(recipe)
    is_unknown = recipe.data.name == "tokens" and recipe.data.tokenizer is None
    return chosen if chosen or is_unknown else BYTES


def unintended_data(recipe: Recipe) -> list[str]:
    """Returns a line if a large model would train on a shipped corpus or on bytes by default.

    A smoke run is small. data.tokenizer=bytes asks for bytes.
    """
    if not _uses_default(recipe):
        return []
    data = recipe.data
    model = f"a model of {amount(_parameters(recipe))} parameters would train on"
    instead = f"(data.tokenizer={BYTES} if you mean bytes, trainer.smoke=true for a small run)"
    if data.name not in SHIPPED:
        return [f"data.tokenizer=null: {model} bytes; set data.tokenizer=FOLDER {instead}"]
    wanted = " ".join(missing_overrides(recipe))
    return [f"data={data.name}: {model} {CORPORA[data.name]}; set {wanted} {instead}"]


def missing_overrides(recipe: Recipe) -> list[str]:
    """Returns the overrides that `recipe` lacks, with PATH and FOLDER to fill in.

    Empty if `recipe` trains on the data that it has.
    """
    if not _uses_default(recipe):
        return []
    words = ["data=jsonl", "data.path=PATH"] if recipe.data.name in SHIPPED else []
    if not (recipe.data.tokenizer or recipe.model.path or recipe.model.weights):
        words.append("data.tokenizer=FOLDER")
    return words


def _uses_default(recipe: Recipe) -> bool:
    """Whether `recipe` is a large model on a shipped corpus or on bytes by default."""
    data = recipe.data
    if recipe.trainer.smoke or data.tokenizer == BYTES or data.name == "tokens":
        return False
    if data.name not in SHIPPED and chosen_tokenizer(recipe):
        return False
    return _parameters(recipe) > LARGE


def _parameters(recipe: Recipe) -> int:
    return sum(map(prod, parameter_shapes(transformer_config(recipe)).values()))
