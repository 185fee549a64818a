"""Hugging Face checkpoint folder: the shape that its config.json gives a recipe, and the family of its weights. Loads no torch."""

from __future__ import annotations

import json
import warnings
from typing import Any

from fp8cfg.config import hub
from fp8cfg.config.errors import ConfigError, PlainWarning
from fp8cfg.config.hugging_face import Family, computed, of_config
from fp8cfg.config.model import Model
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.regular_file import open_regular
from fp8cfg.config.value_text import spelled

CONFIG, FROM_HF = "config.json", "from_hf"
MAX_BYTES = 1 << 20


def config_of(folder: str, key: str) -> dict[str, Any]:
    """The config.json of a folder, here or on the hub, which `key` names. Raises ConfigError for one that is not there or cannot be
    read."""
    path = hub.local_folder(folder, key, hub.CONFIG) / CONFIG
    try:
        with open_regular(path) as file:
            said = json.loads(file.read(MAX_BYTES))
    except FileNotFoundError:
        near = (
            f"; of the hub write {key}={hub.PREFIX}{folder}"
            if folder.count("/") == 1 and folder[0] not in "/~."
            else ""
        )
        raise ConfigError(f"{key}={folder}: there is no {path}{near}") from None
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(
            f"{key}={folder}: {path} cannot be read ({getattr(e, 'strerror', None) or e})"
        ) from None
    if not isinstance(said, dict):
        raise ConfigError(f"{key}={folder}: {path} is no JSON object")
    return said


def model_in(folder: str, key: str) -> tuple[Family, Model]:
    """The family and the model of a folder. Raises ConfigError, naming `key`."""
    config = config_of(folder, key)
    try:
        family = of_config(config)
        return family, family.read(config)
    except ConfigError as e:
        raise ConfigError([f"{key}={folder}: {line}" for line in e.problems]) from None
    except (LookupError, TypeError, AttributeError, ArithmeticError) as e:
        raise ConfigError(f"{key}={folder}: {CONFIG} says what no such model has ({e})") from None


def shaped(recipe: Recipe) -> Recipe:
    """A copy of `recipe` with the shape and the weights of model.path, of the hub with the commit that these are of."""
    assert recipe.model.path is not None
    _, model = model_in(recipe.model.path, "model.path")
    made = recipe.model_copy(deep=True)
    held = hub.local_folder(recipe.model.path, "model.path", hub.CONFIG)
    made.model = model.model_copy(
        update={"path": recipe.model.path, "weights": hub.pinned(recipe.model.path, held)}
    )
    return made


def family_of_weights(model: Model) -> Family:
    """The family of the checkpoint model.weights, with a warning where its config.json says another computation than `model`."""
    assert model.weights is not None
    family, found = model_in(model.weights, "model.weights")
    theirs, ours = computed(found), computed(model)
    if differs := [
        f"model.{key}={spelled(mine)} ({CONFIG}: {spelled(theirs[key])})"
        for key, mine in ours.items()
        if mine != theirs[key]
    ]:
        warnings.warn(
            f"model.weights={model.weights}: were trained otherwise: {', '.join(differs)}",
            PlainWarning,
            stacklevel=2,
        )
    return family
