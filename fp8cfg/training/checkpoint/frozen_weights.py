"""Frozen weights: what a checkpoint of adapters leaves out, and the reference that stands there instead.

The base of a LoRA run is the folder of model.weights, or what trainer.seed draws, and never changes: a checkpoint has adapters,
optimizer and FP8 state, with the folder and the sha256 of its weights, from which a resumed run makes the same base again.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fp8cfg.config import hub
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS
from fp8cfg.numerics.stored_form import stored_state_dict


def left_out(recipe: Recipe, model: nn.Module) -> set[str]:
    """The names, in the stored form of the state of `model`, of weights that `recipe` freezes, and of their scales."""
    if not recipe.lora.enabled:
        return set()
    frozen = {
        name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad
    }
    layers = [name.removesuffix(".weight") for name in frozen if name.endswith(".weight")]
    return frozen | {f"{name}.{buffer}" for name in layers for buffer in WEIGHT_BUFFERS}


def completed(recipe: Recipe, model: nn.Module, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """`saved`, with what it leaves out as `model`, which is built, has it."""
    names = left_out(recipe, model)
    return (
        {**{k: t for k, t in stored_state_dict(model).items() if k in names}, **saved}
        if names
        else saved
    )


def reference(recipe: Recipe) -> dict[str, Any] | None:
    """The base of the adapters of `recipe`: the folder of its weights and their sha256, null where they are drawn; None without
    adapters."""
    if not recipe.lora.enabled:
        return None
    folder = recipe.model.weights
    return {
        "weights": folder,
        "sha256": (
            digest(hub.local_folder(folder, "model.weights", hub.WEIGHTS)) if folder else None
        ),
    }


def refuse_other(recipe: Recipe, base: dict[str, Any] | None) -> None:
    """Raise ConfigError where the base of `recipe` is not the one that a checkpoint refers to."""
    if base is None or not recipe.lora.enabled:
        return
    if reference(recipe)["sha256"] == base["sha256"]:  # type: ignore[index]
        return
    was = (
        f"those of {base['weights']}, sha256 {base['sha256'][:12]}"
        if base["sha256"]
        else "weights that trainer.seed draws"
    )
    raise ConfigError(
        f"model.weights={recipe.model.weights}: the adapters of this run stand over {was}; name a"
        " folder with these"
    )


def digest(folder: Path) -> str:
    """The sha256 over the names and contents of the safetensors files of `folder`, once for each state that they are in."""
    files = sorted(folder.glob("*.safetensors"))
    return _digest(
        tuple((str(file), (at := file.stat()).st_size, at.st_mtime_ns) for file in files)
    )


@functools.cache
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    found = hashlib.sha256()
    for name, size, _ in files:
        found.update(f"{Path(name).name} {size}\n".encode())
        with open(name, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
