"""Models of finished runs: loads the weights of a checkpoint for inference or export.

`load` builds the Transformer as the run used it. `RunWeights` reads one weight at a time without a
model, so an export needs little memory. Neither loads optimizer state.
"""

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
from fp8cfg.building.first_weights import first_weight, make_adapters
from fp8cfg.building.model import prepare_model
from fp8cfg.checkpoint import job_state, manifest
from fp8cfg.checkpoint.job_state import backend_change
from fp8cfg.checkpoint.job_tensors import frozen_weight_names, refuse_other_base
from fp8cfg.checkpoint.load import Tensors, load_by_layer, open_checkpoint
from fp8cfg.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.composition.precedence import ranks_of_python_recipe, resolve_recipe
from fp8cfg.models.config import parameter_shapes
from fp8cfg.models.lora import Adapter
from fp8cfg.numerics.codecs import Codec, get_codec
from fp8cfg.numerics.formats import DTYPES
from fp8cfg.numerics.fp8_weights import weight_storage
from fp8cfg.numerics.kernels.store import store_and_record
from fp8cfg.planning.hardware import find_hardware
from fp8cfg.planning.job_plan import make_plan
from fp8cfg.planning.layer_plan import plan_layers, transformer_config
from fp8cfg.run_folder.file_names import CHECKPOINTS
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError, printable
from fp8cfg.schema.hub import chosen_tokenizer
from fp8cfg.schema.presets import precision_preset
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import resolve_state_dtypes
from fp8cfg.schema.training import Optim, Strategy


def open_newest_checkpoint(
    path: Path, say: Callable[[str], None], step: int | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """Opens a checkpoint of a run: the newest valid one, or the one of a step.

    Args:
        path: Run folder. It is not locked, so the run may still be training.
        say: Called with a message for each damaged checkpoint. These are skipped.
        step: Number of optimizer steps of the checkpoint. None takes the newest.

    Returns:
        Tensors and JSON state of the checkpoint.

    Raises:
        RunFolderError: `path` is not a run folder.
        NoUsableCheckpoint: All checkpoints are damaged.
        ConfigError: The run has no checkpoint, or none of `step`.
    """
    with RunFolder.open(path, lock=False) as folder:
        folder.check_format()
        root = folder.files.folder(CHECKPOINTS)
        checkpoints = manifest.list_steps(root)
        if not checkpoints:
            raise ConfigError(f"{folder.path}: has no checkpoint yet")
        saved_steps = sorted({saved for saved, _ in checkpoints})
        if step is not None and step not in saved_steps:
            steps = ", ".join(map(str, saved_steps))
            raise ConfigError(f"{folder.path}: has no checkpoint of step {step}; there are {steps}")
        for saved, name in checkpoints:
            if step is not None and saved != step:
                continue
            try:
                tensors, state = open_checkpoint(root, name)
                job_state.check_saved_state(tensors, state)
                return tensors, state
            except DamagedCheckpoint as error:
                say(manifest.skip_message(printable(str(error))))
        raise manifest.no_usable_checkpoint(root)


@dataclass(frozen=True)
class RunModel:
    """A model in evaluation mode, with the weights and the precision of a run.

    Attributes:
        recipe: Recipe of the run, changed to one rank.
        model: The Transformer.
        plan: Precision of each linear layer.
        choice: Backend of the FP8 layers.
        step: Optimizer steps of the checkpoint.
        tokenizer_sha256: Hash of the tokenizer file. None without such a file.
    """

    recipe: Recipe
    model: nn.Module
    plan: Sequence[PlannedLinear]
    choice: Choice
    step: int
    tokenizer_sha256: str | None = None

    def autocast(self) -> AbstractContextManager[None]:
        """Returns a context in which FP8 layers run in FP8, as `Job.autocast` does."""
        return autocast(registry.backend(self.choice.backend), self.model, True, "")


def load(
    path: Path,
    say: Callable[[str], None],
    change: Callable[[Recipe], None] | None = None,
    step: int | None = None,
) -> RunModel:
    """Loads the model of a run on one device.

    Args:
        path: Run folder.
        say: Called with a message for each skipped checkpoint.
        change: Edits the recipe before the model is built. It may change the precision and the
            accelerator, but no shapes.
        step: Number of optimizer steps of the checkpoint. None takes the newest.

    Raises:
        RunFolderError: `path` is not a run folder.
        NoUsableCheckpoint: All checkpoints are damaged.
        ConfigError: The weights do not fit the precision, or the run has no such checkpoint.
    """
    tensors, state = open_newest_checkpoint(path, say, step)
    recipe = Recipe(**state["recipe"])
    # `chosen_tokenizer` reads model.path and model.weights, so it runs before these are reset.
    recipe.data.tokenizer = recipe.data.tokenizer or chosen_tokenizer(recipe)
    recipe.model.path = recipe.lora.weights = None
    # A checkpoint of LoRA has adapters only. Its frozen weights come from model.weights.
    if not recipe.lora.enabled:
        recipe.model.weights = None
    # A checkpoint has whole tensors. One rank can load the checkpoint of any layout.
    recipe.trainer.strategy = Strategy()
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
    note = backend_change(state, recipe, choice.backend)
    if note:
        say(note)
    # With LoRA the frozen weights are filled here, since the load only replaces the adapters.
    has_all_weights = not recipe.lora.enabled
    prepared = prepare_model(run_plan, loaded=has_all_weights)
    refuse_other_base(recipe, state.get("base"))
    try:
        load_by_layer(prepared.model, tensors, frozen_weight_names(recipe, prepared.model))
    except (RuntimeError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path}: its weights do not fit this precision: {reason}") from None
    return RunModel(
        recipe,
        prepared.model.eval(),
        run_plan.gemms,
        choice,
        int(state["step"]),
        state["data"].get("tokenizer_sha256"),
    )


def in_precision(run: RunModel, name: str, say: Callable[[str], None]) -> RunModel:
    """Rebuilds a run's model in the precision of a preset, with the same weights.

    Weights that the run stores in FP8 keep their FP8 values.

    Args:
        run: Model of the run.
        name: Name of the precision preset.
        say: Called with a note for each setting of the preset that the model does not support.

    Raises:
        ConfigError: The model cannot run in this precision.
    """
    recipe = run.recipe.model_copy(deep=True)
    recipe.trainer.plugins = precision_preset(name)
    recipe.storage.shard = "none"
    _without_gradients(recipe)
    resolved = resolve_recipe(recipe, ranks_of_python_recipe(recipe), change_harmless=False)
    for line in replace(resolved, remarks=()).notes:  # remarks are about training only
        say(f"{name}: {line.removeprefix('note: ')}")
    recipe = resolved.recipe
    recipe.check()
    hardware = find_hardware(recipe.trainer.accelerator)
    run_plan = make_plan(recipe, hardware)
    prepared = prepare_model(run_plan, loaded=True)
    prepared.model.load_state_dict(run.model.state_dict())
    return replace(
        run,
        recipe=recipe,
        model=prepared.model.eval(),
        plan=run_plan.gemms,
        choice=run_plan.choice,
    )


def _without_gradients(recipe: Recipe) -> None:
    """Resets settings of training that could make the recipe invalid for inference."""
    recipe.log.fp8_stats_every_n_steps = 0
    recipe.optim = Optim(warmup_steps=0)
    # hybrid uses E4M3 in the forward pass and E5M2 for gradients. Some scalings have no GEMM with
    # E5M2 operands, and inference has no gradients.
    multiplied = SCALINGS[recipe.fp8.scaling].multiplied
    if recipe.fp8.format == "hybrid" and "hybrid" not in multiplied:
        recipe.fp8.format = "e4m3"


ROWS_AT_A_TIME = 512
"""Rows quantized at a time, a multiple of the tile height of all scalings."""


class RunWeights:
    """Weights of a run, read one at a time from its newest valid checkpoint.

    Attributes:
        recipe: Recipe of the run, without sharding.
        plan: Precision of each linear layer.
        adapted: Names of the layers with LoRA adapters, sorted.
        step: Optimizer steps of the checkpoint.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        """Opens the checkpoint and compares its shapes with the recipe.

        Args:
            path: Run folder.
            say: Called with a message for each skipped checkpoint.

        Raises:
            RunFolderError: `path` is not a run folder.
            NoUsableCheckpoint: All checkpoints are damaged.
            ConfigError: The checkpoint has the weights of another model.
        """
        tensors, state = open_newest_checkpoint(path, say)
        self._path = path
        self.step = int(state["step"])
        self.recipe = Recipe(**state["recipe"])
        self.recipe.storage.shard = "none"
        self.recipe.lora.weights = None
        backend = state.get("backend")  # missing in checkpoints of earlier versions
        if backend and not registry.exists(backend):
            backend = None
        self.plan = plan_layers(self.recipe, backend or None)
        self._runs_fp8 = {layer.name: layer.fp8 for layer in self.plan}
        self._state = resolve_state_dtypes(self.recipe.precision)
        self._scaling = saved_scaling(self.recipe.precision)
        self._model: Any = tensors["model"]
        self._fp8 = tensors.get("fp8", {})
        self._adapters = make_adapters(self.recipe)
        self.adapted: list[str] = []
        self._frozen_weight: Callable[[str], Tensor] | None = None
        if self._adapters:
            # The checkpoint has the adapters only.
            refuse_other_base(self.recipe, state.get("base"))
            self.adapted = sorted({layer.module for layer in self._adapters.projections})
            self._frozen_weight = first_weight(self.recipe)
        self._check_shapes()

    def read(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Reads a parameter on the CPU, with its LoRA adapters merged.

        Args:
            name: Name of the parameter in the Transformer.

        Returns:
            The weight: float32 if it was stored with scales or has adapters, and otherwise in its
            stored dtype. With it the scale [] of an E4M3 weight with one scale per tensor, or None.
            The weight is scaled already.
        """
        module = name.removesuffix(".weight")
        stored = saved_weight(name, self._model, self._fp8, self._scaling)
        if not stored:
            stored = self._convert_as_stored(name)
        weight, *scales = stored
        assert weight is not None, "scales have codes"
        scale = None
        if scales:
            if weight.dtype == torch.float8_e4m3fn:
                scale = scales[0]
            weight = weight_storage((weight, *scales), self._codec()).values(torch.float32)
        if module in self.adapted:
            weight = weight.float()
            self.adapter(module).merge_into(weight)
            return weight, None
        if scale is not None and scale.numel() > 1:
            scale = None  # block scaling; an export quantizes anew
        return weight, scale

    def adapter(self, module: str) -> Adapter:
        """Returns the adapters of a layer from `adapted`, in the dtype of the run."""
        assert self._adapters, "it has some"
        adapter = self._adapters.build(module, "meta")
        dtype = DTYPES[self._state.other["weight"]]
        tensors = {}
        for name in adapter.state_dict():
            tensors[name] = self._model[f"{module}.lora.{name}"].to(dtype)
        adapter.load_state_dict(tensors, assign=True)
        return adapter

    def _convert_as_stored(self, name: str) -> Weight:
        """Converts a weight without scales to the dtype or codec in which the run stores it.

        The checkpoint has a float32 master or a 16-bit weight. It has no frozen weights of LoRA, so
        these are read or drawn again.
        """
        module = name.removesuffix(".weight")
        is_linear = module in self._runs_fp8
        runs_fp8 = self._runs_fp8.get(module, False)
        stored_dtype = self._state.of_parameter(is_linear, runs_fp8)["weight"]
        scales = self._scaling.fresh_state().get("fp8_scale")
        if self._frozen_weight:
            weight = self._frozen_weight(name)
            if is_linear:
                # Training rounds them to the compute dtype: see Adapters.freeze.
                weight = weight.to(DTYPES[self.recipe.precision.compute])
        else:
            weight = self._model[name]
            scales = self._fp8.get(f"{module}.fp8_scale", scales)
        if stored_dtype in DTYPES:
            return (weight.to(DTYPES[stored_dtype]),)
        # The run stored this weight in 16 bits. Its backend may have had fewer FP8 layers than this
        # machine's plan.
        if not self._frozen_weight and weight.itemsize == 2:
            return (weight,)
        codec = self._codec()
        if codec is None:
            return self._quantize(weight.float(), scales)
        return codec.encode(weight.float())

    def _quantize(self, weight: Tensor, scale: Tensor | None) -> Weight:
        """Quantizes a weight as training would, block scaling some rows at a time.

        The temporaries of a whole matrix take several times its size. An export should need the
        memory of about two matrices.
        """
        layout = self._scaling.layout
        if layout.block <= 0 or layout.two_levels:
            return store_and_record(weight, self._scaling, scale, None, None)
        parts = []
        for rows in weight.split(ROWS_AT_A_TIME):
            parts.append(store_and_record(rows, self._scaling, scale, None, None))
        fields: list[Tensor | None] = []
        for tensors in zip(*parts, strict=True):
            # A scaling has all rows of a field, such as its scales, or none.
            fields.append(None if tensors[0] is None else torch.cat(tensors))
        return tuple(fields)

    def _codec(self) -> Codec | None:
        """Returns the codec of linear weights. None if they are stored as FP8 GEMM operands."""
        if self._state.fp8_weights:
            return None
        return get_codec(self._state.linear["weight"])

    def _check_shapes(self) -> None:
        """Raises ConfigError if names or shapes differ from the recipe's model."""
        config = transformer_config(self.recipe)
        expected: dict[str, tuple[int, ...]] = {}
        if self._adapters:
            for module in self.adapted:
                for name, tensor in self._adapters.build(module, "meta").state_dict().items():
                    expected[f"{module}.lora.{name}"] = tuple(tensor.shape)
        else:
            expected |= parameter_shapes(config)
        saved = {name: saved_shape(name, self._model, self._fp8) for name in self._model}
        if config.tie_embeddings:
            saved.pop("output_layer.weight", None)  # some checkpoints have the tied weight twice
        different = [
            name for name in {**expected, **saved} if expected.get(name) != saved.get(name)
        ]
        if different:
            raise ConfigError(
                f"{self._path}: weights such as {different[0]} do not belong to its recipe's"
                " Transformer;"
                " save a custom model with its own library, after fp8cfg.convert_back(model)"
            )
