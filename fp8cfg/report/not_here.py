"""Needs of a recipe that this version, this machine or its disks do not meet: remarks, for it may be meant to run elsewhere."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from fp8cfg.backends import backend_registry
from fp8cfg.config.hub import PREFIX
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.rules import missing_data
from fp8cfg.report.memory.layout import limits

BYTES = 256
"""Tokens of text without a tokenizer, but for the end mark."""
GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU that NVIDIA's driver has, by which they are counted without loading torch."""


def lines(recipe: Recipe, config_dir: str | None = None) -> list[str]:
    """A line for each need of `recipe`, composed with the presets of `config_dir`, that is not met here."""
    return [
        *_layout(recipe),
        *_backend(recipe),
        *_gpus(recipe),
        *_paths(recipe),
        *_presets(config_dir),
    ]


def _layout(recipe: Recipe) -> list[str]:
    """Parallel layouts that are planned and exported, and not trained."""
    ranks = recipe.trainer.num_nodes * recipe.trainer.devices
    return limits(recipe, ranks)


def _backend(recipe: Recipe) -> list[str]:
    name = recipe.precision.backend
    if name == "auto" or not recipe.fp8.enabled or not backend_registry.exists(name):
        return []
    rules = backend_registry.rules(name)
    why = rules.unavailable()
    return [f"backend={name}: {why}; {rules.instead(recipe.precision)} runs here"] if why else []


def _gpus(recipe: Recipe) -> list[str]:
    t, there = recipe.trainer, _count()
    if t.accelerator == "cuda" and not there:
        return ["trainer.accelerator=cuda: this machine has no NVIDIA GPU"]
    if t.accelerator == "cpu" or t.devices <= max(1, there):
        return []
    meant = f"{t.num_nodes} x {t.devices} GPUs" if t.num_nodes > 1 else f"{t.devices} GPUs"
    return [
        f"trainer.devices={t.devices}: meant for {meant}, this machine has {there or 'none'};"
        " fp8cfg plan needs none"
    ]


def _count() -> int:
    try:
        return sum(1 for _ in GPUS.iterdir())
    except OSError:
        return 0


def _paths(recipe: Recipe) -> list[str]:
    d, found = recipe.data, list(missing_data(recipe))
    found += [
        f"{key}={path}: {line}" for key, path in d.paths.items() if (line := _absent(d.name, path))
    ]
    named = {
        "data.tokenizer": d.tokenizer,
        "model.weights": recipe.model.weights,
        "lora.weights": recipe.lora.weights,
    }
    if d.tokenizer is None and d.name != "tokens" and (rows := recipe.model.vocab_size) <= BYTES:
        found.append(
            f"model.vocab_size={rows}: has no row for each byte and the end mark, which"
            f" data={d.name} has without data.tokenizer; write {BYTES + 16} or more"
        )
    found += [
        f"{key}={path}: no such file or folder here"
        for key, path in named.items()
        if path and not path.startswith(PREFIX) and not Path(path).expanduser().exists()
    ]
    key, folder = (
        ("log.folder", recipe.log.folder) if recipe.log.folder else ("log.dir", recipe.log.dir)
    )
    above = Path(folder).absolute()
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        found.append(f"{key}={folder}: {above} is no folder")
    elif not os.access(above, os.W_OK | os.X_OK):
        found.append(f"{key}={folder}: {above} cannot be written")
    return found


def _absent(source: str, path: str) -> str:
    """What is not here of the data at `path`; empty where it is."""
    if source != "tokens":
        return (
            ""
            if Path(path).exists() or any(glob.iglob(path, recursive=True))
            else "no such file or folder here"
        )
    prefix = path.removesuffix(".idx").removesuffix(".bin")
    missing = [name for end in (".bin", ".idx") if not Path(name := prefix + end).is_file()]
    return f"no file {' and '.join(missing)} here" if missing else ""


def _presets(config_dir: str | None) -> list[str]:
    if config_dir is None or next(Path(config_dir).glob("*/**/*.yaml"), None):
        return []
    return [
        f"--config-dir {config_dir}: has no GROUP/NAME.yaml, such as precision/mine.yaml, and so no"
        " presets"
    ]
