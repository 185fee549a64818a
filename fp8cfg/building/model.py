"""Builds the model of a job on its device, with FP8 layers and the planned storage dtypes.

    default   meta device -> tensor, pipeline, context parallel -> allocate and fill
                  -> FP8 layers -> storage dtypes
    FSDP2     meta device -> tensor, pipeline, context parallel -> FP8 layers -> shard
                  -> allocate and fill

With FSDP2 the model is converted and sharded on the meta device, so no rank allocates more than its
shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _NormBase

from fp8cfg.backends import registry, stored_weights
from fp8cfg.backends.any_model import linear_like
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.building.first_weights import WeightFiller, first_weights, make_adapters, zero_weights
from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.lora import Adapters
from fp8cfg.models.transformer import Transformer
from fp8cfg.numerics import Region, fp8_linears, seed_rounding
from fp8cfg.numerics.amax_update import fp8_layers, reset_state
from fp8cfg.numerics.formats import DTYPES
from fp8cfg.numerics.fsdp_weights import refresh_shards
from fp8cfg.parallel import fsdp
from fp8cfg.parallel.context import split_sequences
from fp8cfg.parallel.fsdp import start_single_rank_group
from fp8cfg.parallel.mesh import SAME_SAMPLES, connect, device_mesh, fsdp_mesh
from fp8cfg.parallel.pipeline import PipelineRank, keep_stage
from fp8cfg.parallel.process_group import world_along
from fp8cfg.parallel.tensor import TensorRank, finish_layers, split_model
from fp8cfg.planning.job_plan import Plan
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.storage import (
    Columns,
    StateDtypes,
    custom_model_columns,
    gathered,
    with_resolved_params,
)


def prepare_model(plan: Plan, loaded: bool = False) -> PreparedModel:
    """Builds the planned model on its device.

    Args:
        plan: The plan. A custom model in it is converted in place.
        loaded: Whether the caller loads a checkpoint for inference next. Then the model gets no
            initial weights, no float32 masters and no FSDP2.

    Returns:
        The model with its masters and its layout over the ranks.
    """
    if plan.custom_model is not None:
        _move_in_float32(plan.custom_model, plan.hardware.device)
        return _convert(plan.custom_model, plan, plan.gemms)
    recipe = plan.recipe
    strategy = recipe.trainer.strategy
    fill = zero_weights if loaded else first_weights(recipe)
    model = make_transformer(
        transformer_config(recipe),
        recompute=recipe.model.recompute_granularity,
        reset_attention_mask=recipe.data.reset_attention_mask,
        reset_position_ids=recipe.data.reset_position_ids,
    )
    sharded = not loaded and by_fsdp2(recipe, plan.state, plan.layout.shards, plan.choice.backend)
    mesh = None
    pipeline = None
    shard_mesh = None
    if sharded:
        start_single_rank_group(plan.hardware.device)
        mesh = device_mesh(strategy, plan.hardware.device, plan.precision.storage.shard)
        shard_mesh = fsdp_mesh(mesh)
    elif strategy.size > 1:
        mesh = device_mesh(strategy, plan.hardware.device, None)
    # Before the FP8 conversion, so that only the layers of this rank are converted.
    if mesh is not None:
        pipeline = _keep_rank_part(model, plan, mesh)
    gemms = planned_here(plan.gemms, model)
    adapters = make_adapters(recipe)
    # LoRA with shard=none or zero replicates the frozen weights: only adapters are sharded.
    if shard_mesh is None or (adapters and plan.precision.storage.shard != "fsdp"):
        prepared = _convert(model, plan, gemms, fill, adapters, shard_mesh, loaded)
    else:
        prepared = _convert_sharded(model, plan, gemms, fill, adapters, shard_mesh)
    prepared.pipeline = pipeline
    if strategy.tensor_model_parallel_size > 1:
        finish_layers(model)
    if mesh is not None:
        if plan.precision.fp8.tp_only_amax_red:
            prepared.same_samples = world_along(mesh, SAME_SAMPLES).group
        connect(mesh)
    return prepared


def make_transformer(config: TransformerConfig, **options: Any) -> Transformer:
    """Returns a float32 Transformer on the meta device, without memory.

    Args:
        config: Shapes of the model.
        options: Other arguments of `Transformer`.
    """
    with torch.device("meta"):
        return Transformer(config, **options)


def planned_here(gemms: Sequence[PlannedLinear], model: nn.Module) -> list[PlannedLinear]:
    """Filters the planned layers to those in `model`, for a pipeline stage."""
    names = {name for name, _ in model.named_modules()}
    return [linear for linear in gemms if linear.name in names]


def _move_in_float32(model: nn.Module, device: str) -> None:
    """Moves a custom model to `device` and casts its parameters to float32, as future masters."""
    model.to(device)
    # `.data` keeps the Parameter objects, so tied weights stay tied. Buffers keep their dtypes.
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def _keep_rank_part(model: Transformer, plan: Plan, mesh: DeviceMesh) -> PipelineRank | None:
    """Reduces the model to this rank's context, tensor and pipeline part, in place.

    Returns:
        This rank's place in the pipeline, None without pipeline parallelism.
    """
    strategy = plan.recipe.trainer.strategy
    if strategy.context_parallel_size > 1:
        split_sequences(model, mesh)
    if strategy.tensor_model_parallel_size > 1:
        split_model(model, TensorRank(mesh, strategy.sequence_parallel))
    if strategy.pipeline_model_parallel_size == 1:
        return None
    pipeline = PipelineRank.from_strategy(strategy, model.config.num_layers, mesh)
    keep_stage(model, pipeline)
    return pipeline


def _convert(
    model: nn.Module,
    plan: Plan,
    gemms: Sequence[PlannedLinear],
    fill: WeightFiller | None = None,
    adapters: Adapters | None = None,
    shard_mesh: DeviceMesh | None = None,
    loaded: bool = False,
) -> PreparedModel:
    """Converts a model with unsharded layers, in place. Its float32 weights become the masters.

    Args:
        model: A Transformer on the meta device, or a custom model in float32.
        plan: The plan.
        gemms: The planned layers of `model`.
        fill: Writes the initial weights of a Transformer.
        adapters: LoRA adapters. All other weights are frozen, and linear weights get the compute
            dtype.
        shard_mesh: Device mesh for FSDP2 over the adapters.
        loaded: Whether weights are loaded next. Then no float32 masters are needed.
    """
    state = plan.state
    precision = state.precision
    compute = DTYPES[precision.compute]
    backend = plan.choice.backend
    # MS-AMP keeps the weights and state of its layers in its own optimizer.
    own_state = registry.capabilities(backend).own_state
    loaded = loaded and not own_state
    region = Region()
    if adapters:
        adapters.freeze(model, [linear.name for linear in gemms], compute)
    # Still on the meta device, so float32 memory is never allocated for these weights.
    if loaded:
        stored_weights.narrow_parameters(model, state, gemms)
    if fill:
        assert isinstance(model, Transformer)
        fill(model.to_empty(device=plan.hardware.device))
    # Conv1D and 1x1 convolutions are replaced by nn.Linear, which backends can convert.
    layouts = linear_like.to_linear(model, gemms)
    # Convolutions in high precision stay convolutions.
    gemms = [linear for linear in gemms if isinstance(model.get_submodule(linear.name), nn.Linear)]
    # References to the float32 tensors. The conversion below gives the parameters new storage.
    originals = {}
    if not loaded:
        originals = _trained_parameters(model)
    columns = stored_weights.parameter_columns(model, state, gemms)
    # Our Transformer supports float32 norms and embeddings with bf16 activations. A custom model
    # may not, so its parameters outside linear layers get one dtype.
    mixes_dtypes = own_state or isinstance(model, Transformer)
    if not mixes_dtypes:
        columns = _custom_model_columns(model, state, gemms, columns)
    if precision.fp8.enabled:
        registry.backend(backend).convert(
            model,
            with_resolved_params(precision).fp8,
            gemms,
            region,
            plan.choice.product,
            compute=compute,
        )
        seed_rounding(model, plan.recipe.trainer.seed)
    stored = []
    for linear in gemms:
        in_own_state = own_state and linear.fp8
        if not in_own_state and (mixes_dtypes or f"{linear.name}.weight" in columns):
            stored.append(linear)
    stored_weights.store_weights(model, state, stored, columns, region)
    if adapters:
        adapters.attach(model, plan.recipe.trainer.seed)
        originals = _trained_parameters(model)
        columns |= dict.fromkeys(originals, state.other)
    cast_columns = dict(columns)
    if shard_mesh is not None:
        # FSDP2's shards are the masters, so they stay float32.
        for name in originals:
            cast_columns[name] = {**columns[name], "weight": "fp32", "weight_grad": "fp32"}
    stored_weights.cast_parameters(model, cast_columns)
    if mixes_dtypes and state.other["weight"] != precision.compute:
        stored_weights.cast_embeddings(model, compute)
    linear_like.attach_layouts(model, layouts)
    if shard_mesh is not None:
        assert isinstance(model, Transformer)
        fsdp.apply_fsdp(model, state, shard_mesh, DTYPES[state.other["weight_grad"]])
    # A parameter that is still float32 is its own master.
    trained = _trained_parameters(model)
    masters = {}
    for name, original in originals.items():
        if name in trained and trained[name].dtype != torch.float32:
            masters[name] = original
    return _prepared(model, plan, masters, region, columns, fsdp2=shard_mesh is not None)


def _convert_sharded(
    model: Transformer,
    plan: Plan,
    gemms: Sequence[PlannedLinear],
    fill: WeightFiller,
    adapters: Adapters | None,
    mesh: DeviceMesh,
) -> PreparedModel:
    """Converts a model on the meta device, shards it with FSDP2, then allocates and fills it.

    No rank ever allocates more than its shards. The shards are float32 masters. FSDP2 gathers them
    in low precision.

    Args:
        model: A Transformer on the meta device.
        plan: The plan.
        gemms: The planned layers of `model`.
        fill: Writes the initial weights of the shards.
        adapters: LoRA adapters. All other weights are frozen.
        mesh: Device mesh of FSDP2.
    """
    state = plan.state
    precision = state.precision
    compute = DTYPES[precision.compute]
    backend = registry.backend(plan.choice.backend)
    seed = plan.recipe.trainer.seed
    region = Region()
    if adapters:
        adapters.freeze(model, [linear.name for linear in gemms], compute)
    columns = stored_weights.parameter_columns(model, state, gemms)
    # shard=fsdp gathers a layer in each pass. Other layouts gather it once per step and keep it.
    gathered_once = precision.storage.shard != "fsdp"
    if gathered_once:
        gathers_fp8 = state.fp8_weights
        gradient_dtype = DTYPES[state.other["weight_grad"]]
    else:
        gathers_fp8 = gathered(precision, plan.choice.backend) == "fp8"
        gradient_dtype = compute
    if precision.fp8.enabled:
        # The parameters are float32 shards here. FP8 only exists in gathered weights.
        fp8 = precision.fp8.model_copy(update={"params": False})
        backend.convert(
            model,
            fp8,
            gemms,
            region,
            plan.choice.product,
            compute=compute,
            fp8_gather=gathers_fp8,
        )
    if gathered_once and not gathers_fp8 and state.linear["weight"] != state.gathered_dtype:
        stored_weights.shard_in_codec(model, state, gemms, columns, region)
    for layer in fp8_linears(model):
        layer.weight_grad_dtype = gradient_dtype
        if layer.fsdp_shard is not None:
            layer.fsdp_shard.gathered_once = gathered_once
    if state.gathered_dtype != precision.compute:
        stored_weights.store_weights(model, state, gemms, columns, region)
        stored_weights.cast_embeddings(model, compute)
    if adapters:
        adapters.attach(model, seed)
        columns |= dict.fromkeys(_trained_parameters(model), state.other)
    # After the conversion: FSDP2's gather hooks quantize as the FP8 layers are set.
    fsdp.apply_fsdp(model, state, mesh, gradient_dtype)
    fill(model.to_empty(device=plan.hardware.device))
    if adapters:
        adapters.init_weights(model, seed)
    # to_empty leaves all buffers uninitialized: scales, amax histories and GEMM records. Layers
    # without FP8 GEMMs have such buffers too, if they gather quantized weights.
    reset_state(fp8_layers(model))
    if precision.fp8.enabled:
        backend.forget_observed(model)
        seed_rounding(model, seed)
    # Scales for the first gather. A collective: all ranks are here.
    refresh_shards(fp8_linears(model))
    return _prepared(model, plan, {}, region, columns, fsdp2=True)


def _prepared(
    model: nn.Module,
    plan: Plan,
    masters: dict[str, Tensor],
    region: Region,
    columns: dict[str, Columns],
    fsdp2: bool,
) -> PreparedModel:
    return PreparedModel(
        model,
        masters,
        region,
        next(model.parameters()).device,
        plan.state,
        columns,
        shard=plan.precision.storage.shard,
        fsdp2=fsdp2,
        tensor_parallel=model.tensor_parallel if isinstance(model, Transformer) else None,
    )


def _trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters with gradients, detached, by name."""
    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter.detach()
    return trained


def _custom_model_columns(
    model: nn.Module,
    state: StateDtypes,
    gemms: Sequence[PlannedLinear],
    columns: dict[str, Columns],
) -> dict[str, Columns]:
    """Returns the storage dtypes of a custom model's parameters, by name.

    Linear weights keep their `columns`. Other parameters get the compute dtype and float32 masters:
    the model may multiply them with activations without a cast.
    """
    # A weight shared with another module, such as an embedding, must suit that module, too.
    shared = stored_weights.shared_weights(model)
    linear_weights = {f"{linear.name}.weight" for linear in gemms}
    other_columns = custom_model_columns(state)
    batch_norm = {**other_columns, "weight": "fp32", "master_weight": "none", "weight_grad": "fp32"}
    batch_norm_names = _batch_norm_parameters(model)
    result = {}
    for name, parameter in model.named_parameters():
        if name in linear_weights and parameter not in shared:
            result[name] = columns[name]
        elif name in batch_norm_names:
            result[name] = batch_norm
        else:
            result[name] = other_columns
    return result


def _batch_norm_parameters(model: nn.Module) -> set[str]:
    """Returns the parameters of norms with running statistics. They stay in float32.

    In bf16 a running mean would stop changing after many batches. Torch requires the same dtype for
    the parameters and the running statistics.
    """
    names = set()
    for module_name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            for name, _ in module.named_parameters(recurse=False):
                names.add(f"{module_name}.{name}")
    return names
