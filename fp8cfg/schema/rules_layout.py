"""Validation rules of the parallel layout: sizes that do not divide, and keys without effect.

Tensor-, pipeline- and context-parallel sizes are never changed for the user. Their violations have
source="layout" and no fixes. The message suggests the nearest size.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from fp8cfg.schema.backends import capabilities, ordered
from fp8cfg.schema.changed_fields import idle
from fp8cfg.schema.storage import (
    SCALED,
    StateDtypes,
    against_gathered_params,
    level,
    resolve_state_dtypes,
)
from fp8cfg.schema.training import Strategy, Trainer
from fp8cfg.schema.violation import Violation

if TYPE_CHECKING:
    from fp8cfg.schema.recipe_fields import RecipeFields

MAX_GPUS_PER_NODE = 8
"""The largest trainer.devices in a suggestion: a DGX or HGX node."""


def strategy_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Yields the violations of trainer.strategy and of the global batch.

    A smoke run shrinks the layout to its ranks, so the sizes of the recipe are not checked.
    """
    for violation in _strategy_rules(recipe):
        if violation.source != "layout" or not recipe.trainer.smoke:
            yield violation


def _strategy_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Yields the violations of trainer.strategy, also for smoke runs."""
    strategy = recipe.trainer.strategy
    tensor = strategy.tensor_model_parallel_size
    yield from _replica_size_rules(recipe)
    yield from _tensor_rules(recipe)
    yield from _pipeline_rules(recipe)
    yield from _schedule_rules(strategy)
    yield from _replicate_rules(recipe)
    # Sequence parallelism shards activations over the tensor-parallel group (arXiv 2205.05198).
    if strategy.sequence_parallel and tensor == 1:
        yield Violation(
            "trainer.strategy.sequence_parallel=true",
            "has no effect with tensor_model_parallel_size=1; set it to false",
            [("trainer.strategy.sequence_parallel", False)],
            ["trainer.strategy.tensor_model_parallel_size"],
        )
    if strategy.context_parallel_size > 1:
        yield from _context_rules(recipe)


def _world_size(trainer: Trainer) -> int:
    """Returns the number of ranks in the recipe. A launch may start another number."""
    return trainer.num_nodes * trainer.devices


def _replica_size_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rejects GPUs that are not whole model replicas, and a batch that replicas cannot share."""
    trainer, strategy = recipe.trainer, recipe.trainer.strategy
    world = _world_size(trainer)
    if world % strategy.size:
        yield Violation(
            f"trainer.num_nodes x trainer.devices = {world}",
            f"must be a multiple of tensor x pipeline x context parallel size = {strategy.size};"
            f" set {_nearest_machines(trainer)}{strategy.smaller(world)}",
            source="layout",
        )
        return
    replicas = world // strategy.size
    per_pass = trainer.micro_batch_size * replicas
    # `trainer_rules` reports a global batch too odd for even one replica.
    if trainer.global_batch_size % trainer.micro_batch_size:
        return
    if trainer.global_batch_size % per_pass:
        size = f"trainer.micro_batch_size x data-parallel size = {per_pass}"
        yield uneven_batch(recipe, replicas, size)


def _tensor_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rejects a tensor-parallel size that does not divide the attention heads."""
    model, strategy = recipe.model, recipe.trainer.strategy
    tensor = strategy.tensor_model_parallel_size
    if model.num_attention_heads % tensor:
        # Tensor parallelism shards query groups, the MLP and the vocabulary, so the suggestion must
        # divide them all. Query groups divide the heads, so the heads need no term here.
        common = gcd(model.num_query_groups, model.ffn_hidden_size, model.vocab_size)
        world = _world_size(recipe.trainer)
        yield Violation(
            f"trainer.strategy.tensor_model_parallel_size={tensor}",
            f"must divide model.num_attention_heads={model.num_attention_heads}; nearest is"
            f" {_nearest_divisor(common, tensor, world, strategy.size // tensor)}",
            source="layout",
        )


def _pipeline_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rejects pipelines with uneven stages, or with chunks without layers."""
    strategy, num_layers = recipe.trainer.strategy, recipe.model.num_layers
    stages = strategy.pipeline_model_parallel_size
    virtual = "virtual_pipeline_model_parallel_size"
    key = "trainer.strategy.pipeline_model_parallel_size"
    nearest = _nearest_divisor(
        num_layers, stages, _world_size(recipe.trainer), strategy.size // stages
    )
    # Without virtual stages all stages have the same number of layers. Chunks of virtual stages may
    # differ in size, but none may be empty.
    if strategy.virtual_pipeline_model_parallel_size is None:
        if num_layers % stages:
            yield Violation(
                f"{key}={stages}",
                f"must divide model.num_layers={num_layers}; nearest is {nearest}",
                source="layout",
            )
    elif stages == 1:
        yield Violation(
            f"trainer.strategy.{virtual}",
            "has no effect with pipeline_model_parallel_size=1; set it to null",
        )
    elif num_layers < stages * strategy.chunks:
        # Prefer fewer chunks for the same GPUs. One chunk is spelled null.
        most_chunks = num_layers // stages
        if most_chunks > 1:
            fewer = f"{virtual}={most_chunks}"
        elif nearest == stages:
            fewer = f"{virtual}=null"
        else:
            fewer = f"{nearest} with {virtual}=null"
        yield Violation(
            f"{key}={stages}",
            f"needs at least one layer in each of {stages * strategy.chunks} chunks, but"
            f" model.num_layers={num_layers}; nearest is {fewer}",
            source="layout",
        )


def _schedule_rules(strategy: Strategy) -> Iterator[Violation]:
    """Rejects a pipeline schedule that does not fit the number of chunks on each GPU.

    1F1B runs one chunk per GPU, interleaved 1F1B several (Megatron-LM, arXiv 2104.04473).
    """
    key, schedule = "trainer.strategy.pipeline_schedule", strategy.pipeline_schedule
    virtual = "virtual_pipeline_model_parallel_size"
    if strategy.pipeline_model_parallel_size == 1:
        if schedule != "auto":
            yield from idle(
                strategy,
                ("pipeline_schedule",),
                " with pipeline_model_parallel_size=1; set it to auto",
                strategy.key(virtual),
                strategy.key("pipeline_model_parallel_size"),
            )
    elif schedule == "1f1b" and strategy.chunks > 1:
        yield Violation(
            f"{key}=1f1b",
            f"runs one chunk on each GPU, but {virtual}={strategy.chunks}; set it to"
            f" interleaved_1f1b, or set {virtual}=null",
            [(key, "auto")],
            [strategy.key(virtual)],
        )
    elif schedule == "interleaved_1f1b" and strategy.chunks == 1:
        yield Violation(
            f"{key}=interleaved_1f1b",
            f"needs several chunks on each GPU; set {strategy.key(virtual)}=2",
            [(key, "auto")],
            [strategy.key(virtual)],
        )


def _replicate_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of hybrid sharding (HSDP): each group of ranks has all shards of FSDP2."""
    precision, strategy = recipe.precision, recipe.trainer.strategy
    groups = strategy.data_parallel_replicate_size
    key, world = "trainer.strategy.data_parallel_replicate_size", _world_size(recipe.trainer)
    state = resolve_state_dtypes(precision)
    # Any number of ranks above one tells whether this state is sharded at all.
    if state.sharding(2) == "none":
        zero1 = "" if level(precision) else "set storage.shard=zero1, or "
        reason = f"; {zero1}remove it"
        if precision.storage.shard == "auto":
            reason = ", which shards nothing here; remove it"
        yield from idle(
            strategy,
            ("data_parallel_replicate_size",),
            f" with storage.shard={precision.storage.shard}{reason}",
            "storage.shard",
        )
        return
    if groups == 1:
        return
    # Only FSDP2 has a mesh with a replicate dimension. Whole-tensor ZeRO does not support groups.
    backends = ordered()
    if precision.backend != "auto":
        backends = (precision.backend,)
    if not any(by_fsdp2(recipe, state, 2, backend) for backend in backends):
        yield Violation(
            f"{key}={groups}",
            "needs FSDP2, but this recipe shards whole tensors; set it to 1",
            [(key, 1)],
            [
                "storage.shard",
                "backend",
                "opt_level",
                "storage.weight",
                "storage.master_weight",
                "storage.weight_grad",
                "storage.comm",
                "storage.rounding",
            ],
        )
    elif world % strategy.size == 0:
        data_parallel = world // strategy.size
        # Context-parallel ranks have the same weights, so FSDP2 shards over them too.
        ranks_with_same_weights = data_parallel * strategy.context_parallel_size
        if data_parallel % groups:
            nearest = gcd(data_parallel, groups)
            yield Violation(
                f"{key}={groups}",
                f"does not divide the data-parallel size {data_parallel}; nearest is {nearest}",
                [(key, nearest)],
                ["trainer.num_nodes", "trainer.devices"],
            )
        elif ranks_with_same_weights == groups:
            yield Violation(
                f"{key}={groups}",
                "leaves one rank per group, so nothing is sharded; set storage.shard=none, or set"
                " it to 1",
                [(key, 1)],
                ["trainer.num_nodes", "trainer.devices"],
            )


def _context_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of context parallelism, which shards each sequence over ranks."""
    length, ranks = recipe.model.seq_length, recipe.trainer.strategy.context_parallel_size
    key = "trainer.strategy.context_parallel_size"
    # Each rank gets two chunks of a sequence, one from each end. Causal attention costs more
    # towards the end, and the pair balances it.
    if length % (2 * ranks):
        yield Violation(
            f"model.seq_length={length}",
            f"must be a multiple of 2 x context_parallel_size = {2 * ranks}; nearest is"
            f" {nearest_multiple(length, 2 * ranks)}",
            source="layout",
        )
    if recipe.fp8.enabled and recipe.fp8.dot_product_attention:
        yield Violation(
            "fp8.dot_product_attention=true",
            f"FP8 attention needs whole sequences, but {key}={ranks} splits them; set it to false",
            [("fp8.dot_product_attention", False)],
            [key],
        )
    for name in ("reset_attention_mask", "reset_position_ids"):
        if getattr(recipe.data, name):
            yield Violation(
                f"data.{name}=true",
                f"document boundaries need whole sequences, but {key}={ranks} splits them;"
                " set it to false",
                [(f"data.{name}", False)],
                [key],
            )
    interval = recipe.log.fp8_stats_every_n_steps
    if interval:
        yield Violation(
            f"log.fp8_stats_every_n_steps={interval}",
            f"needs whole sequences on one rank, but {key}={ranks} splits them; remove it",
            [("log.fp8_stats_every_n_steps", 0)],
            [key],
        )


def uneven_batch(recipe: RecipeFields, replicas: int, size: str) -> Violation:
    """Returns the violation of a global batch that does not divide over `replicas`.

    Args:
        recipe: The recipe.
        replicas: Number of model replicas that share the batch.
        size: Name and value of the required divisor, for the message.
    """
    trainer = recipe.trainer
    batch = trainer.global_batch_size
    nearest = nearest_multiple(batch, trainer.micro_batch_size * replicas)
    fixes = [("trainer.global_batch_size", nearest)]
    if batch % replicas == 0:
        # A smaller microbatch keeps the result, another global batch changes it. So the microbatch
        # is the first fix.
        micro_batch_size = trainer.micro_batch_size
        while (batch // replicas) % micro_batch_size:
            micro_batch_size -= 1
        fixes.insert(0, ("trainer.micro_batch_size", micro_batch_size))
    return Violation(
        f"trainer.global_batch_size={batch}",
        f"not a multiple of {size}; nearest is {nearest}",
        fixes,
        [
            "trainer.global_batch_size",
            "trainer.micro_batch_size",
            "trainer.num_nodes",
            "trainer.devices",
        ],
    )


def nearest_multiple(value: int, divisor: int) -> int:
    """Returns the multiple of `divisor` nearest to `value`, at least `divisor`."""
    return max(divisor, round(value / divisor) * divisor)


def _nearest_machines(trainer: Trainer) -> str:
    """Returns a setting for which the GPUs are whole replicas.

    The setting is trainer.devices, or trainer.num_nodes if a replica is larger than a node.
    """
    # num_nodes x devices must be a multiple of size, so devices a multiple of step.
    size = trainer.strategy.size
    step = size // gcd(size, trainer.num_nodes)
    max_devices = MAX_GPUS_PER_NODE // step * step
    devices = min(nearest_multiple(trainer.devices, step), max_devices)
    if devices:
        return f"trainer.devices={devices}"
    return f"trainer.num_nodes={size // gcd(size, trainer.devices)}"


def _nearest_divisor(number: int, value: int, world: int, other_sizes: int) -> int:
    """Returns the divisor of `number` nearest to `value`.

    Prefers divisors for which `world` ranks are whole replicas.

    Args:
        number: The dividend, such as model.num_layers.
        value: The size in the recipe.
        world: Number of ranks.
        other_sizes: Product of the other parallel sizes.
    """
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    fitting = [size for size in divisors if world % (size * other_sizes) == 0]
    return min(fitting or divisors, key=lambda size: abs(size - value))


def by_fsdp2(recipe: RecipeFields, state: StateDtypes, ranks: int, backend: str) -> bool:
    """Returns whether FSDP2 shards the parameters of the recipe's Transformer.

    Otherwise every rank stores whole tensors, and one rank keeps the optimizer state of each tensor.

    Args:
        recipe: The recipe.
        state: Storage dtypes of the recipe.
        ranks: Number of ranks with the same parameters.
        backend: The backend of the FP8 layers.
    """
    shard = state.sharding(ranks)
    if shard == "fsdp" or ranks == 1:
        return shard == "fsdp"
    replicated = recipe.trainer.strategy.data_parallel_replicate_size > 1
    # HSDP all-reduces over groups in the dtype of the accumulated gradient. A wider storage.comm
    # would be ignored there.
    sends_wider = state.other["weight_grad"] not in (state.other["comm"], "fp32")
    if replicated and sends_wider:
        return False
    return _can_gather_stored_weights(recipe, state, backend)


def _can_gather_stored_weights(recipe: RecipeFields, state: StateDtypes, backend: str) -> bool:
    """Returns whether FSDP2 can gather weights in their storage dtypes."""
    fp8 = recipe.precision.fp8
    backend_capabilities = capabilities(backend)
    # Every level has weights or masters with one scale per tensor. FSDP2's shards are float32.
    if level(recipe.precision) or not backend_capabilities.fully_shards:
        return False
    # The shards are the masters, so masters must be float32 too.
    if state.low_bit and not state.float32_masters:
        return False
    # FSDP2's reduce-scatter sums plain dtypes, without scales.
    if state.linear["comm"] in SCALED or state.other["comm"] in SCALED:
        return False
    # Only adapters are sharded, in float32. The frozen weights stay whole on each rank.
    if recipe.lora.enabled:
        return True
    gathers_params = backend_capabilities.fp8_gather == "params"
    # Native layers gather both matrices of a weight if fprop and dgrad read different ones. Other
    # backends gather only one.
    if state.fp8_weights:
        if not gathers_params and against_gathered_params(fp8, backend):
            return False
        return backend_capabilities.zero_fp8_weights
    if state.linear["weight"] == state.other["weight"]:
        return True
    # Linear weights in another dtype than the rest are gathered as stored, by FSDP2's all-gather
    # extension (numerics/fsdp_weights.py). Native FP8 layers and plain layers support it, but not
    # under tensor parallelism.
    tensor = recipe.trainer.strategy.tensor_model_parallel_size
    return tensor == 1 and (not fp8.enabled or gathers_params)
