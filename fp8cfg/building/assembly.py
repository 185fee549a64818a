"""Job assembly: the model of a recipe, its optimizer and its schedule on this machine, once all of it is checked. Loads torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.building import model as job_parts
from fp8cfg.building.model import adapters, first_weights, zeros
from fp8cfg.models.transformer import Transformer
from fp8cfg.parallel.context import split_sequences
from fp8cfg.parallel.fsdp import start_single_rank_group
from fp8cfg.parallel.mesh import SAME_SAMPLES, connect, device_mesh, fsdp_mesh
from fp8cfg.parallel.pipeline import PipelineRank, keep_stage
from fp8cfg.parallel.process_group import world_along
from fp8cfg.parallel.tensor import finish_layers, split_model, tensor_rank
from fp8cfg.planning.job_plan import Plan
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema.hugging_face import family_of_weights
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.training import Strategy


def prepared_model(plan: Plan, loaded: bool = False) -> PreparedModel:
    """The model of `plan`, or the given `model`, with its layers as planned and its first weights; with none, and no float32
    originals, where it is `loaded` next.
    """
    recipe, choice, device = plan.recipe, plan.choice, plan.hardware.device
    seed = recipe.trainer.seed
    if plan.custom_model is not None:
        return job_parts.prepared_model(
            job_parts.given(plan.custom_model, device), plan.state, plan.gemms, choice, seed
        )
    config, m = transformer_config(recipe), recipe.model
    fill = (
        zeros
        if loaded
        else first_weights(config, seed, m.weights, family_of_weights(m) if m.weights else None)
    )
    empty = job_parts.transformer(
        config,
        recompute=m.recompute_granularity,
        reset_attention_mask=recipe.data.reset_attention_mask,
        reset_position_ids=recipe.data.reset_position_ids,
    )
    strategy = recipe.trainer.strategy
    fsdp2 = not loaded and by_fsdp2(recipe, plan.state, plan.layout.shards, choice.backend)
    mesh = _mesh(strategy, device, plan.precision.storage.shard if fsdp2 else None)
    pipeline = _keep_part(empty, strategy, device, mesh) if mesh is not None else None
    prepared = job_parts.prepared_model(
        empty,
        plan.state,
        planned_here(plan.gemms, empty),
        choice,
        seed,
        device,
        fill,
        adapters(recipe),
        fsdp_mesh(mesh) if mesh is not None and fsdp2 else None,
        loaded,
    )
    prepared.pipeline = pipeline
    if strategy.tensor_model_parallel_size > 1:
        finish_layers(empty)
    if mesh is not None:
        if plan.precision.fp8.tp_only_amax_red:
            prepared.same_samples = world_along(mesh, SAME_SAMPLES).group
        connect(mesh)
    return prepared


def _mesh(strategy: Strategy, device: str, shard: str | None) -> DeviceMesh | None:
    """The device mesh of a model that is split, or that FSDP2 shards as `shard` asks for."""
    if shard is not None:
        start_single_rank_group(device)
    elif strategy.size == 1:
        return None
    return device_mesh(strategy, device, shard)


def _keep_part(
    model: Transformer, strategy: Strategy, device: str, mesh: DeviceMesh
) -> PipelineRank | None:
    """Let `model`, which is on the meta device, keep what this rank computes: its layers, its parts of matrices and its tokens.
    Returns its place in the pipeline, if there is one."""
    pipeline = None
    if strategy.context_parallel_size > 1:
        split_sequences(model, mesh)
    if strategy.tensor_model_parallel_size > 1:
        split_model(model, tensor_rank(strategy, device, mesh))
    if strategy.pipeline_model_parallel_size > 1:
        pipeline = PipelineRank.from_strategy(strategy, model.config.num_layers, mesh)
        keep_stage(model, pipeline)
    return pipeline


def planned_here(plans: Sequence[PlannedLinear], model: nn.Module) -> list[PlannedLinear]:
    """Of `plans` those of layers that `model` has, which may be a pipeline stage."""
    there = {name for name, _ in model.named_modules()}
    return [planned for planned in plans if planned.name in there]
