"""Model of a run: the Transformer with the weights of the newest checkpoint that verifies, without the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from fp8cfg.backends import backend_registry
from fp8cfg.backends.autocast_context import autocast
from fp8cfg.backends.backend_choice import Choice
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.builder import planned, prepared_model
from fp8cfg.composition import giving_way
from fp8cfg.composition.authors import of_object
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.presets import precision_preset
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.training_nodes import Optim, Strategy
from fp8cfg.report.machine import find_hardware
from fp8cfg.scalings import SCALINGS
from fp8cfg.training.checkpoint.frozen_weights import left_out, refuse_other
from fp8cfg.training.checkpoint.load_by_layer import load_by_layer
from fp8cfg.training.checkpoint.saved_state import another_multiplies
from fp8cfg.training.run_checkpoint import newest


@dataclass(frozen=True)
class RunModel:
    """`model` computes as in the run, after `step` steps; `plan` is what its linear layers do; `tokenizer_sha256` is of the file
    that made its tokens, None where there was none."""

    recipe: Recipe
    model: nn.Module
    plan: Sequence[PlannedLinear]
    choice: Choice
    step: int
    tokenizer_sha256: str | None = None

    def autocast(self) -> AbstractContextManager[None]:
        """The context inside which FP8 layers multiply in FP8, as `Job.autocast`."""
        return autocast(backend_registry.backend(self.choice.backend), self.model, True, "")


def load(
    path: Path,
    say: Callable[[str], None],
    change: Callable[[Recipe], None] | None = None,
    step: int | None = None,
) -> RunModel:
    """The model of the run folder `path`, after `step` steps, by default the newest. Checkpoints that do not verify are passed
    over, and said; `change` may edit the recipe: precision and accelerator, not shape. Raises RunFolderError, NoUsableCheckpoint,
    and ConfigError for a precision that the weights do not fit, or a step of which there is no checkpoint.
    """
    tensors, state = newest(path, say, step)
    recipe = Recipe(**state["recipe"])
    recipe.model.path = recipe.lora.weights = None
    if not recipe.lora.enabled:
        recipe.model.weights = None  # they are those of the checkpoint
    recipe.trainer.strategy = Strategy()  # on one rank, whatever the run had
    recipe.trainer.num_nodes = recipe.trainer.devices = 1
    if recipe.storage.shard != "none":
        recipe.storage.shard = "none"
    if change:
        change(recipe)
    _without_gradients(recipe)
    hardware = find_hardware(recipe.trainer.accelerator)
    recipe.check()
    plans, choice = planned(recipe, hardware)
    if other := another_multiplies(state, recipe, choice.backend):
        say(other)
    whole = not recipe.lora.enabled  # beside adapters a checkpoint has no others
    prepared = prepared_model(recipe, None, hardware.device, plans, choice, loaded=whole)
    refuse_other(recipe, state.get("base"))
    try:
        load_by_layer(prepared.model, tensors, left_out(recipe, prepared.model))
    except (RuntimeError, ValueError, KeyError) as e:
        raise ConfigError(
            f"{path}: its weights do not fit this precision: {str(e).splitlines()[0]}"
        ) from None
    return RunModel(
        recipe,
        prepared.model.eval(),
        plans,
        choice,
        int(state["step"]),
        state["data"].get("tokenizer_sha256"),
    )


def in_precision(found: RunModel, name: str, say: Callable[[str], None]) -> RunModel:
    """The model of a run in another precision, that of the preset `name`, with the weights that it computes with in its own; those
    of layers held in FP8 are what FP8 says. What of the preset gives way to a small model is said. Raises ConfigError for a
    precision in which it cannot be."""
    recipe = found.recipe.model_copy(deep=True)
    recipe.trainer.plugins = precision_preset(name)
    recipe.storage.shard = "none"
    _without_gradients(recipe)
    settled = giving_way.settled(recipe, of_object(recipe), tacitly=False)
    for line in replace(settled, remarks=()).notes:  # remarks are on training
        say(f"{name}: {line.removeprefix('note: ')}")
    recipe = settled.recipe
    recipe.check()
    hardware = find_hardware(recipe.trainer.accelerator)
    plans, choice = planned(recipe, hardware)
    prepared = prepared_model(recipe, None, hardware.device, plans, choice, loaded=True)
    prepared.model.load_state_dict(found.model.state_dict())
    return replace(found, recipe=recipe, model=prepared.model.eval(), plan=plans, choice=choice)


def _without_gradients(recipe: Recipe) -> None:
    """Leave out what is of training alone: statistics, optimizer, and the format of gradients where no GPU multiplies it: forward,
    hybrid is E4M3."""
    recipe.log.fp8_stats_every_n_steps, recipe.optim = 0, Optim(warmup_steps=0)
    multiplied = SCALINGS[recipe.fp8.scaling].multiplied
    if recipe.fp8.format == "hybrid" and "hybrid" not in multiplied:
        recipe.fp8.format = "e4m3"
