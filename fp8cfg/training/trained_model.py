"""Model of a run: the Transformer with the weights of the newest checkpoint that verifies, without the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.backends import registry
from fp8cfg.backends.autocast import autocast
from fp8cfg.backends.choice import Choice
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.saved_weights import Weight, saved_scaling, saved_shape, saved_weight
from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.building.first_weights import first_weight, make_adapters
from fp8cfg.building.model import prepared_model
from fp8cfg.checkpoint import job_state, manifest
from fp8cfg.checkpoint.job_state import backend_change
from fp8cfg.checkpoint.job_tensors import frozen_weight_names, refuse_other_base
from fp8cfg.checkpoint.load import Tensors, load_by_layer, open_checkpoint
from fp8cfg.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.composition.precedence import ranks_of_python_recipe, resolve_recipe
from fp8cfg.models.config import parameter_shapes
from fp8cfg.models.lora import Adapter
from fp8cfg.numerics.codecs import Codec, get_codec
from fp8cfg.numerics.fp8_weights import weight_storage
from fp8cfg.numerics.kernels.store import store_and_record
from fp8cfg.planning.hardware import find_hardware
from fp8cfg.planning.job_plan import make_plan
from fp8cfg.planning.layer_plan import plan_layers, transformer_config
from fp8cfg.run_folder.run_folder import CHECKPOINTS, RunFolder
from fp8cfg.schema.errors import ConfigError, printable
from fp8cfg.schema.hub import chosen_tokenizer
from fp8cfg.schema.presets import precision_preset
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import resolve_state_dtypes
from fp8cfg.schema.training import Optim, Strategy


def newest(
    path: Path, say: Callable[[str], None], step: int | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the state of the run folder `path` after `step` steps, by default the newest. Checkpoints that do not verify
    are passed over, and said. Raises RunFolderError, NoUsableCheckpoint, and ConfigError for a step of which there is none.
    """
    with RunFolder.open(path, lock=False) as folder:
        folder.check_format()
        root = folder.files.folder(CHECKPOINTS)
        there = manifest.list_steps(root)
        if there and step is not None and step not in {saved for saved, _ in there}:
            steps = ", ".join(str(saved) for saved in sorted({saved for saved, _ in there}))
            raise ConfigError(f"{folder.path}: has no checkpoint of step {step}; there are {steps}")
        for saved, name in there:
            if step is not None and saved != step:
                continue
            try:
                loaded = open_checkpoint(root, name)
                job_state.check_saved_state(*loaded)
                return loaded
            except DamagedCheckpoint as e:
                say(manifest.skip_message(printable(str(e))))
        if there:
            raise manifest.no_usable_checkpoint(root)
        raise ConfigError(f"{folder.path}: has no checkpoint yet")


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
        return autocast(registry.backend(self.choice.backend), self.model, True, "")


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
    recipe.data.tokenizer = recipe.data.tokenizer or chosen_tokenizer(recipe)
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
    run_plan = make_plan(recipe, hardware)
    choice = run_plan.choice
    if other := backend_change(state, recipe, choice.backend):
        say(other)
    whole = not recipe.lora.enabled  # beside adapters a checkpoint has no others
    prepared = prepared_model(run_plan, loaded=whole)
    refuse_other_base(recipe, state.get("base"))
    try:
        load_by_layer(prepared.model, tensors, frozen_weight_names(recipe, prepared.model))
    except (RuntimeError, ValueError, KeyError) as e:
        raise ConfigError(
            f"{path}: its weights do not fit this precision: {str(e).splitlines()[0]}"
        ) from None
    return RunModel(
        recipe,
        prepared.model.eval(),
        run_plan.gemms,
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
    settled = resolve_recipe(recipe, ranks_of_python_recipe(recipe), change_harmless=False)
    for line in replace(settled, remarks=()).notes:  # remarks are on training
        say(f"{name}: {line.removeprefix('note: ')}")
    recipe = settled.recipe
    recipe.check()
    hardware = find_hardware(recipe.trainer.accelerator)
    run_plan = make_plan(recipe, hardware)
    prepared = prepared_model(run_plan, loaded=True)
    prepared.model.load_state_dict(found.model.state_dict())
    return replace(
        found,
        recipe=recipe,
        model=prepared.model.eval(),
        plan=run_plan.gemms,
        choice=run_plan.choice,
    )


def _without_gradients(recipe: Recipe) -> None:
    """Leave out what is of training alone: statistics, optimizer, and the format of gradients where no GPU multiplies it: forward,
    hybrid is E4M3."""
    recipe.log.fp8_stats_every_n_steps, recipe.optim = 0, Optim(warmup_steps=0)
    multiplied = SCALINGS[recipe.fp8.scaling].multiplied
    if recipe.fp8.format == "hybrid" and "hybrid" not in multiplied:
        recipe.fp8.format = "e4m3"


ROWS_AT_A_TIME = 512
"""Rows that are quantized at once: whole tiles of every scaling."""


class RunWeights:
    """The weights of the run folder `path`: `recipe` is its recipe, not sharded, `plan` what its linear layers do, `adapted` those
    that have adapters, and `step` how many steps it has done. Raises as `run_checkpoint.newest`, and ConfigError for weights of
    another model than the recipe's."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        tensors, state = newest(path, say)
        self.recipe, self.step = Recipe(**state["recipe"]), int(state["step"])
        self.recipe.storage.shard, self.recipe.lora.weights = "none", None
        trained = state.get("backend") or ""  # none in checkpoints of earlier versions
        self.plan, self._path = (
            plan_layers(self.recipe, trained if registry.exists(trained) else None),
            path,
        )
        self._state = resolve_state_dtypes(self.recipe.precision)
        self._runs_fp8 = {p.name: p.fp8 for p in self.plan}
        self._scaling = saved_scaling(self.recipe.precision)
        self._model: Any = tensors["model"]
        self._fp8 = tensors.get("fp8", {})
        self._adapters = make_adapters(self.recipe)
        self.adapted = sorted({p.module for p in self._adapters.found}) if self._adapters else []
        if self._adapters:
            refuse_other_base(self.recipe, state.get("base"))
        self._first = first_weight(self.recipe) if self._adapters else None
        self._check()

    def read(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The parameter that the Transformer calls `name`, whole, on the CPU, with what its adapters add: in float32 where it is
        decoded or something is added; and the scale [] that multiplies it, where it is held in E4M3 under one.
        """
        module = name.removesuffix(".weight")
        weight, *beside = saved_weight(
            name, self._model, self._fp8, self._scaling
        ) or self._narrowed(name)
        assert weight is not None, "scales have codes"
        scale = beside[0] if beside and weight.dtype == torch.float8_e4m3fn else None
        if beside:
            weight = weight_storage((weight, *beside), self._codec()).values(torch.float32)
        if module not in self.adapted:
            return weight, scale if scale is not None and scale.numel() == 1 else None
        weight = weight.float()
        self.adapter(module).merge_into(weight)
        return weight, None

    def adapter(self, module: str) -> Adapter:
        """The adapters beside the layer `module`, which has some, in the dtype of the run."""
        assert self._adapters, "it has some"
        made, dtype = (
            self._adapters.of(module, "meta"),
            DTYPES[self._state.other["weight"]],
        )
        made.load_state_dict(
            {name: self._model[f"{module}.lora.{name}"].to(dtype) for name in made.state_dict()},
            assign=True,
        )
        return made

    def _narrowed(self, name: str) -> Weight:
        """A weight that the checkpoint has without a scale, or not at all, as the run stores it."""
        precision, module = self.recipe.precision, name.removesuffix(".weight")
        linear, runs_fp8 = module in self._runs_fp8, self._runs_fp8.get(module, False)
        column, scales = (
            self._state.of_parameter(linear, runs_fp8)["weight"],
            self._scaling.fresh_state().get("fp8_scale"),
        )
        if self._first:
            weight = self._first(name)
            weight = (
                weight.to(DTYPES[precision.compute]) if linear else weight
            )  # models.lora.Adapters.freeze
        else:
            weight, scales = self._model[name], self._fp8.get(f"{module}.fp8_scale", scales)
        if column in DTYPES:
            return (weight.to(DTYPES[column]),)
        if (
            not self._first and weight.itemsize == 2
        ):  # as the run's backend held it, who may have had fewer layers in FP8
            return (weight,)
        held, weight = self._codec(), weight.float()
        return held.encode(weight) if held else self._quantized(weight, scales)

    def _quantized(self, weight: Tensor, scale: Tensor | None) -> Weight:
        """Quantizes a weight as training would, block scaling some rows at a time.

        The temporaries of a whole matrix are several times its size, and an export promises to need about two matrices.
        """
        layout = self._scaling.layout
        if layout.block <= 0 or layout.two_levels:
            return store_and_record(weight, self._scaling, scale, None, None)
        parts = [
            store_and_record(rows, self._scaling, scale, None, None)
            for rows in weight.split(ROWS_AT_A_TIME)
        ]
        return tuple(
            None if tensors[0] is None else torch.cat(tensors)
            for tensors in zip(*parts, strict=True)
        )

    def _codec(self) -> Codec | None:
        """That of weights with a scale; None where they are operands of FP8 products."""
        return None if self._state.fp8_weights else get_codec(self._state.linear["weight"])

    def _check(self) -> None:
        """Raise ConfigError where the checkpoint has other weights than the recipe's model."""
        config = transformer_config(self.recipe)
        wanted = {} if self._first else dict(parameter_shapes(config))
        for module in self.adapted:
            of_layer = self._adapters.of(module, "meta").state_dict()  # type: ignore[union-attr]
            wanted |= {f"{module}.lora.{name}": tuple(t.shape) for name, t in of_layer.items()}
        tied = {"output_layer.weight"} if config.tie_embeddings else set[str]()
        saved = {
            name: saved_shape(name, self._model, self._fp8)
            for name in self._model
            if name not in tied
        }
        if wrong := [name for name in {**wanted, **saved} if wanted.get(name) != saved.get(name)]:
            raise ConfigError(
                f"{self._path}: has other weights than the Transformer of its recipe, {wrong[0]}"
                " among them; a model of your own is saved by its own library, after"
                " fp8cfg.convert_back(model)"
            )
