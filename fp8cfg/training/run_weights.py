"""Weights of a run: those of its newest checkpoint as its model has them on one rank, read and decoded one at a time.

No model is built: no more than one weight is in memory, none is drawn in vain, and no GPU is asked for. What a checkpoint has is
what the run stores, but for float32 shards of FSDP2, which one rank stores as `storage.weight` says, and for the frozen weights
beside adapters, which are those of model.weights, or drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8cfg.backends import backend_registry
from fp8cfg.backends.saved_weights import Weight, saved_scaling, saved_shape, saved_weight
from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import columns_of, fp8_weights, others, resolved
from fp8cfg.job_weights import adapters, first_weight
from fp8cfg.layer_plan import plan, transformer_config
from fp8cfg.models.lora import Adapter
from fp8cfg.models.shapes import parameter_shapes
from fp8cfg.numerics.codecs import Codec, codec
from fp8cfg.numerics.fused_store import store_recorded
from fp8cfg.numerics.weight_access import decoded
from fp8cfg.training.checkpoint.frozen_weights import refuse_other
from fp8cfg.training.run_checkpoint import newest


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
            plan(self.recipe, trained if backend_registry.exists(trained) else None),
            path,
        )
        self._runs_fp8 = {p.name: p.fp8 for p in self.plan}
        self._scaling = saved_scaling(self.recipe.precision)
        self._model: Any = tensors["model"]
        self._fp8 = tensors.get("fp8", {})
        self._adapters = adapters(self.recipe)
        self.adapted = sorted({p.module for p in self._adapters.found}) if self._adapters else []
        if self._adapters:
            refuse_other(self.recipe, state.get("base"))
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
            weight = decoded((weight, *beside), self._codec(), torch.float32)
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
            DTYPES[others(self.recipe.precision)["weight"]],
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
            columns_of(precision, linear, runs_fp8)["weight"],
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
        return (
            held.encode(weight)
            if held
            else store_recorded(weight, self._scaling, scales, None, None)
        )

    def _codec(self) -> Codec | None:
        """That of weights with a scale; None where they are operands of FP8 products."""
        return (
            None
            if fp8_weights(self.recipe.precision)
            else codec(resolved(self.recipe.precision)["weight"])
        )

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
