"""Model of a run: the Transformer with the weights of the newest checkpoint that verifies, without the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fp8cfg.backends.backend_choice import Choice
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.builder import planned, prepared_model
from fp8cfg.config.errors import ConfigError, printable
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.training_nodes import Strategy
from fp8cfg.report.machine import find_hardware
from fp8cfg.training.checkpoint import checkpoint, saved_state, step_folders
from fp8cfg.training.checkpoint.job_tensors import of_this_rank
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.training.run_folder import CHECKPOINTS, RunFolder


@dataclass(frozen=True)
class RunModel:
    """`model` computes as in the run, after `step` steps; `plan` is what its linear layers do."""

    recipe: Recipe
    model: nn.Module
    plan: Sequence[PlannedLinear]
    choice: Choice
    step: int


def load(path: Path, say: Callable[[str], None], change: Callable[[Recipe], None] | None = None) -> RunModel:
    """The model of the run folder `path`. Checkpoints that do not verify are passed over, and said; `change` may edit the recipe:
    precision, not shape. Raises RunFolderError, NoUsableCheckpoint, and ConfigError for a precision that the weights do not fit."""
    with RunFolder.open(path, lock=False) as folder:
        tensors, state = _newest(folder, say)
    recipe = Recipe(**state["recipe"])
    recipe.model.path = recipe.model.weights = None  # its weights are those of the checkpoint
    recipe.trainer.strategy = Strategy()  # on one rank, whatever the run had
    if recipe.storage.shard != "none":
        recipe.storage.shard = "none"
    if change:
        change(recipe)
    hardware = find_hardware(recipe.trainer.accelerator)
    recipe.check()
    plans, choice = planned(recipe, hardware)
    prepared = prepared_model(recipe, None, hardware.device, plans, choice)
    try:
        prepared.model.load_state_dict({**tensors["model"], **of_this_rank(tensors.get("fp8", {}))})
    except (RuntimeError, ValueError, KeyError) as e:
        raise ConfigError(f"{path}: its weights do not fit this precision: {str(e).splitlines()[0]}") from None
    return RunModel(recipe, prepared.model.eval(), plans, choice, int(state["step"]))


def _newest(folder: RunFolder, say: Callable[[str], None]) -> tuple[checkpoint.Tensors, dict[str, Any]]:
    root = folder.files.folder(CHECKPOINTS)
    for _, name in step_folders.steps(root):
        try:
            loaded = checkpoint.load_named(root, name)
            saved_state.check(*loaded)
            return loaded
        except DamagedCheckpoint as e:
            say(step_folders.passed_over(printable(str(e))))
    if step_folders.steps(root):
        raise step_folders.none_usable(root)
    raise ConfigError(f"{folder.path}: has no checkpoint yet")
