"""Job parts: the model and the prepared model of a job. Loads torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _NormBase

from fp8cfg.backends import registry, stored_weights
from fp8cfg.backends.any_model import linear_like
from fp8cfg.backends.choice import Choice
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.backends.stored_weights import shared_weights
from fp8cfg.models import hf_checkpoint, lora, weight_init
from fp8cfg.models.config import TransformerConfig, parameter_shapes, projections
from fp8cfg.models.hf_checkpoint import Layout
from fp8cfg.models.lora import Adapters
from fp8cfg.models.transformer import Transformer
from fp8cfg.numerics import Region, fp8_linears, seed_rounding
from fp8cfg.numerics.amax_update import fp8_layers, reset_state
from fp8cfg.numerics.fsdp_weights import refresh_shards
from fp8cfg.parallel import fsdp
from fp8cfg.planning.layer_plan import adapted_projections, transformer_config
from fp8cfg.schema import hub, hugging_face
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.hugging_face import Family, family_of_weights
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.storage import (
    Columns,
    StateDtypes,
    custom_model_columns,
    gathered,
    with_resolved_params,
)

Fill = Callable[[Any], None]
"""Writes the first weights of a model, in place: of one that is split this rank's parts."""


def transformer(config: TransformerConfig, **options: Any) -> Transformer:
    """The model in float32 on the meta device: its shapes, and no memory. `options` are those of Transformer."""
    with torch.device("meta"):
        return Transformer(config, **options)


def given(model: torch.nn.Module, device: str) -> torch.nn.Module:
    """`model` itself on `device`, its floating parameters in float32."""
    model.to(device)
    for p in model.parameters():
        if p.is_floating_point() and p.dtype != torch.float32:
            p.data = p.data.float()
    return model


def prepared_model(
    model: torch.nn.Module,
    state: StateDtypes,
    plan: Sequence[PlannedLinear],
    choice: Choice,
    seed: int,
    device: str = "",
    fill: Fill | None = None,
    adapters: Adapters | None = None,
    fsdp_mesh: DeviceMesh | None = None,
    loaded: bool = False,
) -> PreparedModel:
    """`model` (float32) with its linear layers in FP8 as planned and its parameters as the storage columns say; the float32
    originals become the optimizer's masters, so that no second copy is made. One on the meta device gets memory on `device`, and
    its weights by `fill`: with an `fsdp_mesh` no more than this rank's shards. Under `adapters` all of that is frozen, without
    masters; weights of linear layers are filled in the compute dtype then, and FSDP2 shards adapters only unless shard=fsdp.
    One that is `loaded` next, and not trained, has no float32 originals.

    Where storage leaves embeddings and norms in float32, that goes for our Transformer, which multiplies them with activations of
    another dtype. Of a model that is not ours nothing tells which parameters can be: all but the weights of linear layers get the
    compute dtype there, over float32 masters. Under a backend with an optimizer of its own they stay in float32.
    """
    region = Region()
    precision = state.precision
    if fsdp_mesh is not None and not (adapters and precision.storage.shard != "fsdp"):
        assert isinstance(model, Transformer) and fill, "builder.lower refuses others"
        return _fully_sharded(
            model, state, plan, choice, region, seed, device, fill, adapters, fsdp_mesh
        )
    if adapters:
        adapters.freeze(model, [p.name for p in plan], stored_weights.DTYPES[precision.compute])
    own = registry.capabilities(choice.backend).own_state
    if loaded := loaded and not own:
        stored_weights.narrow(model, state, plan)
    if fill:
        fill(model.to_empty(device=device))
    shells = linear_like.to_linear(model, plan)
    plan = [
        p for p in plan if isinstance(model.get_submodule(p.name), torch.nn.Linear)
    ]  # not convolutions in high precision
    originals = {} if loaded else _trained(model)
    columns = stored_weights.parameter_columns(model, state, plan)
    mixed = own or isinstance(model, Transformer)
    if not mixed:
        columns = _in_compute_dtype(model, state, plan, columns)
    if precision.fp8.enabled:
        registry.backend(choice.backend).convert(
            model,
            with_resolved_params(precision).fp8,
            plan,
            region,
            choice.product,
            compute=stored_weights.DTYPES[precision.compute],
        )
        seed_rounding(model, seed)
    held = [p for p in plan if not (own and p.fp8) and (mixed or f"{p.name}.weight" in columns)]
    stored_weights.hold(model, state, held, columns, region)
    if adapters:
        adapters.attach(model, seed)
        originals = _trained(model)
        columns |= dict.fromkeys(originals, state.other)
    exact = (
        {name: {**columns[name], "weight": "fp32", "weight_grad": "fp32"} for name in originals}
        if fsdp_mesh is not None
        else {}
    )  # of shards
    stored_weights.cast_parameters(model, {**columns, **exact})
    if mixed and state.other["weight"] != precision.compute:
        stored_weights.embed_in(model, stored_weights.DTYPES[precision.compute])
    linear_like.attach(model, shells)
    if fsdp_mesh is not None:
        assert isinstance(model, Transformer)
        fsdp.apply_fsdp(model, state, fsdp_mesh, stored_weights.DTYPES[state.other["weight_grad"]])
    narrow = {name for name, p in _trained(model).items() if p.dtype != torch.float32}
    masters = {n: t for n, t in originals.items() if n in narrow}
    return PreparedModel(
        model,
        masters,
        region,
        next(model.parameters()).device,
        state,
        columns,
        shard=precision.storage.shard,
        fsdp2=fsdp_mesh is not None,
        tensor_parallel=model.tensor_parallel if isinstance(model, Transformer) else None,
    )


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def _fully_sharded(
    model: Transformer,
    state: StateDtypes,
    plan: Sequence[PlannedLinear],
    choice: Choice,
    region: Region,
    seed: int,
    device: str,
    fill: Fill,
    adapters: Adapters | None,
    mesh: DeviceMesh,
) -> PreparedModel:
    """`model`, on the meta device, with its linear layers in FP8 as planned, split over `mesh` by FSDP2, which casts what it
    gathers; then it gets memory and weights, so that no rank ever has more than its parts. Under `adapters` these are trained and
    all else is frozen, weights of linear layers in the compute dtype."""
    precision = state.precision
    if adapters:
        adapters.freeze(model, [p.name for p in plan], stored_weights.DTYPES[precision.compute])
    columns = stored_weights.parameter_columns(model, state, plan)
    backend, whole = registry.backend(choice.backend), precision.storage.shard != "fsdp"
    in_fp8 = state.fp8_weights if whole else gathered(precision, choice.backend) == "fp8"
    gradient = stored_weights.DTYPES[state.other["weight_grad"] if whole else precision.compute]
    if precision.fp8.enabled:
        fp8 = precision.fp8.model_copy(update={"params": False})  # of layers; a shard is float32
        backend.convert(
            model,
            fp8,
            plan,
            region,
            choice.product,
            compute=stored_weights.DTYPES[precision.compute],
            fp8_gather=in_fp8,
        )
    if whole and not in_fp8 and state.linear["weight"] != state.gathered_dtype:
        stored_weights.shard_in_codec(model, state, plan, columns, region)
    for layer in fp8_linears(model):
        layer.weight_grad_dtype = gradient
        if layer.fsdp_shard is not None:
            layer.fsdp_shard.gathered_once = whole
    if state.gathered_dtype != precision.compute:
        stored_weights.hold(model, state, plan, columns, region)
        stored_weights.embed_in(model, stored_weights.DTYPES[precision.compute])
    if adapters:
        adapters.attach(model, seed)
        columns |= dict.fromkeys(_trained(model), state.other)
    fsdp.apply_fsdp(model, state, mesh, gradient)
    fill(model.to_empty(device=device))
    if adapters:
        adapters.fill(model, seed)
    reset_state(fp8_layers(model))  # weights are gathered by such layers without FP8 products too
    if precision.fp8.enabled:
        backend.forget_observed(model)
        seed_rounding(model, seed)
    refresh_shards(fp8_linears(model))
    return PreparedModel(
        model,
        {},
        region,
        next(model.parameters()).device,
        state,
        columns,
        shard=precision.storage.shard,
        fsdp2=True,
        tensor_parallel=model.tensor_parallel,
    )


def _in_compute_dtype(
    model: torch.nn.Module,
    state: StateDtypes,
    plan: Sequence[PlannedLinear],
    columns: dict[str, Columns],
) -> dict[str, Columns]:
    """`columns` of a model that is not ours."""
    shared, linear = shared_weights(model), {f"{planned.name}.weight" for planned in plan}
    apart, norms = custom_model_columns(state), _running_norms(model)
    exact = {**apart, "weight": "fp32", "master_weight": "none", "weight_grad": "fp32"}
    return {
        name: (
            columns[name]
            if name in linear and p not in shared
            else exact
            if name in norms
            else apart
        )
        for name, p in model.named_parameters()
    }


def _running_norms(model: torch.nn.Module) -> set[str]:
    """Names of the parameters of norms with running statistics (BatchNorm). These stay in float32, for a mean over thousands of
    batches would stand still in bf16, and torch wants the parameters in their dtype."""
    return {
        f"{name}.{own}"
        for name, norm in model.named_modules()
        if isinstance(norm, _NormBase) and norm.running_mean is not None
        for own, _ in norm.named_parameters(recurse=False)
    }


def first_weights(
    config: TransformerConfig, seed: int, weights: str | None = None, family: Family | None = None
) -> Callable[[Any], None]:
    """The weights that a Transformer of `config` starts with: drawn from `seed`, or read from the folder `weights`, here or on the
    hub, as `family` lays them out. What is returned raises ConfigError for a folder without weights of this model.
    """
    if weights is None or family is None:
        return partial(_drawn, seed)
    return partial(
        _read,
        config,
        hub.local_folder(weights, "model.weights", hub.HUB_WEIGHTS),
        weights,
        hf_layout(family),
    )


def zeros(model: Transformer) -> None:
    """Fill weights that a load overwrites at once: what memory has by chance may be no number, and would be quantized."""
    for p in model.parameters():
        p.data.zero_()


def first_weight(recipe: Recipe) -> Callable[[str], Tensor]:
    """What gives a parameter of the Transformer of `recipe` by name as `first_weights` would have it, whole, on the CPU: drawn in
    float32, or read from model.weights in the dtype that it has there. Raises ConfigError as they do.
    """
    config, seed, named = transformer_config(recipe), recipe.trainer.seed, recipe.model.weights

    def drawn(name: str) -> Tensor:
        out = torch.empty(parameter_shapes(config)[name], dtype=torch.float32)
        weight_init.fill_first(out, name, config, seed)
        return out

    if named is None:
        return drawn
    family = family_of_weights(recipe.model)
    folder = hub.local_folder(named, "model.weights", hub.HUB_WEIGHTS)
    with _as_config_error(named):
        one = hf_checkpoint.reader(config, folder, hf_layout(family))

    def read(name: str) -> Tensor:
        with _as_config_error(named):
            return one(name)

    return read


def hf_layout(family: Family) -> Layout:
    """How `family` lays out its weights at Hugging Face."""
    return hf_checkpoint.Layout(
        family.names, family.conv1d, family.model.layernorm_zero_centered_gamma
    )


def _drawn(seed: int, model: Transformer) -> None:
    model.init_weights(seed)


def _read(
    config: TransformerConfig, folder: Path, named: str, layout: Layout, model: Transformer
) -> None:
    with _as_config_error(named):
        hf_checkpoint.load(model, config, folder, layout)


@contextmanager
def _as_config_error(weights: str) -> Iterator[None]:
    """Around the reading of model.weights, where `weights` is what the user wrote."""
    try:
        yield
    except ValueError as e:
        raise ConfigError(f"model.weights={weights}: {e}") from None


def adapters(recipe: Recipe) -> Adapters | None:
    """The adapters of `recipe`; None without lora.enabled. Raises ConfigError for a folder of lora.weights that does not fit."""
    if not recipe.lora.enabled:
        return None
    node, config, found = recipe.lora, transformer_config(recipe), adapted_projections(recipe)
    first = None
    if node.weights:
        family = hugging_face.family_of_model(recipe.model)
        folder = hub.local_folder(node.weights, "lora.weights", hub.HUB_WEIGHTS)
        try:
            first = lora.read(folder, found, family.names, node.rank, node.alpha)
        except ValueError as e:
            raise ConfigError(f"lora.weights={node.weights}: {e}") from None
    return lora.Adapters(
        found,
        projections(config),
        config.num_query_groups,
        node.rank,
        node.alpha,
        node.dropout,
        first,
    )
