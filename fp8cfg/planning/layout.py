"""Parallel layout: layers, matrix shards and sequence shards of each rank.

trainer.strategy splits a model replica over tensor-, pipeline- and context-parallel ranks. The
remaining ranks are data parallel. `Part` describes one rank. All planned memory and traffic is per
part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from fp8cfg.models.config import parameter_shapes, stage_layers
from fp8cfg.planning import layout_limits
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.storage import StateDtypes, resolve_state_dtypes
from fp8cfg.schema.violation import Violation


@dataclass(frozen=True)
class Part:
    """Layers and shards of one rank.

    Attributes:
        name: Name in the plan, such as "first stage".
        layers: Numbers of its Transformer layers.
        state: The storage dtypes.
        embedding: Whether it has the embedding.
        output: Whether it has the final norm and the output layer.
        tensor: Number of tensor-parallel ranks.
        context: Number of context-parallel ranks.
        data: Number of data-parallel ranks, over all replica groups.
        sequence_parallel: Whether norms and the residual stream are split by tokens over
            tensor-parallel ranks.
        chunks: Chunks of consecutive layers. Interleaved pipeline stages have several.
        groups: Number of replica groups (HSDP). State is sharded inside a group.
        in_flight: Microbatches with live activations. A fraction counts part of the chunks.
    """

    name: str
    layers: Sequence[int]
    state: StateDtypes
    embedding: bool = True
    output: bool = True
    tensor: int = 1
    context: int = 1
    data: int = 1
    sequence_parallel: bool = False
    chunks: int = 1
    groups: int = 1
    in_flight: float = 1.0

    @property
    def shards(self) -> int:
        """Number of ranks that shard state, in one replica group."""
        # Context-parallel ranks have the same parameters, so they shard state too.
        return self.data * self.context // self.groups

    @property
    def shard(self) -> str:
        """Value of storage.shard on these ranks, with auto resolved."""
        return self.state.precision.storage.shard


# Parts of a recipe.


def rank_part(recipe: Recipe, ranks: int = 1) -> Part:
    """Returns the part of a rank, with all layers.

    Args:
        recipe: The recipe.
        ranks: Number of ranks. An axis of the layout counts as 1 if it does not divide them.
    """
    strategy = recipe.trainer.strategy
    tensor = strategy.tensor_model_parallel_size
    context = strategy.context_parallel_size
    pipeline = strategy.pipeline_model_parallel_size
    if ranks % strategy.size:
        pipeline = 1
    if ranks % (tensor * context):
        tensor = 1
        if ranks % context:
            context = 1
    data = ranks // (tensor * context * pipeline)
    groups = strategy.data_parallel_replicate_size
    if data % groups:
        groups = 1
    part = Part(
        "every rank",
        range(recipe.model.num_layers),
        resolve_state_dtypes(recipe.precision),
        tensor=tensor,
        context=context,
        data=data,
        sequence_parallel=strategy.sequence_parallel and tensor > 1,
        groups=groups,
    )
    # storage.shard=auto depends on the number of shards.
    return replace(part, state=part.state.with_sharding(part.shards))


def stage_parts(recipe: Recipe, ranks: int) -> list[Part]:
    """Returns the part of each pipeline stage.

    Without a pipeline, or if the ranks do not form whole replicas, this is one part with all
    layers.
    """
    trainer, strategy = recipe.trainer, recipe.trainer.strategy
    stages, chunks = strategy.pipeline_model_parallel_size, strategy.chunks
    all_layers = rank_part(recipe, ranks)
    if stages == 1 or ranks % strategy.size:
        return [all_layers]
    per_pass = trainer.micro_batch_size * all_layers.data
    count = max(1, trainer.global_batch_size // per_pass)
    names = {0: "first stage", stages - 1: "last stage"}
    stage_numbers = stage_layers(recipe.model.num_layers, stages, chunks)
    parts = []
    for stage, layers in enumerate(stage_numbers):
        part = replace(
            all_layers,
            name=names.get(stage, "middle stage"),
            layers=layers,
            embedding=stage == 0,
            output=stage == stages - 1,
            chunks=chunks,
            in_flight=min(count, _in_flight(stage, stages, chunks)),
        )
        parts.append(part)
    return parts


def _in_flight(stage: int, stages: int, chunks: int) -> float:
    """Returns the number of microbatches with live activations on a stage under 1F1B."""
    # Several chunks are interleaved (arXiv 2104.04473; Megatron's schedules.py,
    # num_warmup_microbatches). A warmup pass goes through one chunk only.
    if chunks == 1:
        return stages - stage
    warmup = (stages - stage - 1) * 2 + (chunks - 1) * stages
    return (warmup + 1) / chunks


def distinct_parts(recipe: Recipe, ranks: int) -> list[Part]:
    """Returns the parts of the first, second and last stage, or one part without a pipeline."""
    # Of the middle stages, the second stage has the most microbatches in flight.
    parts = stage_parts(recipe, ranks)
    last = len(parts) - 1
    return [parts[stage] for stage in sorted({0, min(1, last), last})]


def checked_parts(recipe: Recipe, world: int) -> list[Part]:
    """Returns `distinct_parts` for the user's number of GPUs.

    Raises:
        ConfigError: The GPUs do not form whole replicas, or do not divide the global batch.
    """
    trainer, strategy = recipe.trainer, recipe.trainer.strategy
    gpus = f"{world} GPU{'s' * (world > 1)}"
    if world % strategy.size:
        nearest = max(1, round(world / strategy.size)) * strategy.size
        samples = trainer.global_batch_size // trainer.micro_batch_size
        raise ConfigError(
            f"{gpus}: must be a multiple of tensor x pipeline x context parallel size ="
            f" {strategy.size}; nearest is {nearest} (--gpus"
            f" {nearest}){strategy.smaller(world, samples)}"
        )
    refuse_if([f"{gpus}: {line}" for line in uneven_batch(recipe, world)])
    return distinct_parts(recipe, world)


def split_into_nodes(ranks: int) -> tuple[int, int]:
    """Returns nodes and GPUs per node: 8 GPUs, or the next smaller divisor of the ranks."""
    devices = next(n for n in range(8, 0, -1) if ranks % n == 0)
    return ranks // devices, devices


def place_on_gpus(recipe: Recipe, nodes: int, devices: int) -> Recipe:
    """Returns a copy for other nodes and GPUs per node, with the same global batch."""
    trainer = recipe.trainer.model_copy(update={"num_nodes": nodes, "devices": devices})
    return recipe.model_copy(update={"trainer": trainer})


# Layouts that training does not support.


def limit_violations(recipe: Recipe, ranks: int) -> list[Violation]:
    """Returns the settings of a recipe that training does not support with its layout."""
    return [
        *layout_limits.tensor_limits(recipe, ranks),
        *layout_limits.pipeline_limits(recipe, ranks),
        *layout_limits.state_limits(recipe, ranks),
    ]


def layout_violations(recipe: Recipe, ranks: int, is_custom_model: bool = False) -> list[Violation]:
    """Returns the reasons why the layout does not fit these ranks.

    Args:
        recipe: The recipe.
        ranks: Number of ranks of the run.
        is_custom_model: Whether the model is a custom model. It only supports data parallelism.
    """
    if is_custom_model:
        return _custom_model_violations(recipe)
    strategy = recipe.trainer.strategy
    tensor = strategy.tensor_model_parallel_size
    context = strategy.context_parallel_size
    pipeline = strategy.pipeline_model_parallel_size
    sizes = {
        "tensor_model_parallel_size": tensor,
        "context_parallel_size": context,
        "pipeline_model_parallel_size": pipeline,
    }
    violations = limit_violations(recipe, ranks)
    for name, size in sizes.items():
        if ranks % size:
            message = f"needs a multiple of {size} ranks, got {ranks}; launch"
            message += f" {_next_multiple(ranks, size)} ranks or set it to {gcd(size, ranks)}"
            violations.append(_violation(f"{strategy.key(name)}={size}", message))
    replica = strategy.size
    groups = strategy.data_parallel_replicate_size
    if groups > 1 and not violations and not ranks % replica:
        data = ranks // replica
        # A group of one rank would shard nothing. Context ranks shard state too.
        if data % groups or data * context == groups:
            message = f"{ranks} ranks do not form {groups} groups of several ranks each; launch"
            message += f" {2 * groups * replica} ranks or set it to 1"
            setting = f"{strategy.key('data_parallel_replicate_size')}={groups}"
            violations.append(_violation(setting, message))
    # Each size divides the ranks, but their product does not.
    if ranks % replica and not any(ranks % size for size in sizes.values()):
        (first, size), *remaining = [(name, size) for name, size in sizes.items() if size > 1]
        other_sizes = " and ".join(f"{name}={size}" for name, size in remaining)
        message = f"with {other_sizes} needs a multiple of {replica} ranks, got {ranks};"
        message += f" launch {_next_multiple(ranks, replica)} ranks"
        violations.append(_violation(f"{strategy.key(first)}={size}", message))
    return violations


def _custom_model_violations(recipe: Recipe) -> list[Violation]:
    """Returns a violation for each axis of model parallelism."""
    strategy = recipe.trainer.strategy
    names = {
        "tensor_model_parallel_size": "matrices",
        "context_parallel_size": "sequences",
        "pipeline_model_parallel_size": "layers",
    }
    violations = []
    for name, split in names.items():
        size = getattr(strategy, name)
        if size > 1:
            message = (
                f"splits {split} of a recipe's Transformer, not of a custom model; set it to 1"
            )
            violations.append(_violation(f"{strategy.key(name)}={size}", message))
    groups = strategy.data_parallel_replicate_size
    if groups > 1:
        setting = f"{strategy.key('data_parallel_replicate_size')}={groups}"
        message = "needs FSDP2, which shards a recipe's Transformer, not a custom model;"
        violations.append(_violation(setting, f"{message} set it to 1"))
    return violations


def _violation(setting: str, message: str) -> Violation:
    """Returns a violation with source "layout". Other numbers of ranks may fix it."""
    return Violation(setting, message, source="layout")


def _next_multiple(ranks: int, size: int) -> int:
    """Rounds ranks up to a multiple of `size`."""
    return -(-ranks // size) * size


def uneven_batch(recipe: Recipe, ranks: int) -> list[str]:
    """Returns an error line if the replicas on these ranks do not divide the global batch."""
    trainer, strategy = recipe.trainer, recipe.trainer.strategy
    per_step = trainer.micro_batch_size * (ranks // strategy.size)
    if trainer.global_batch_size % per_step == 0:
        return []
    nearest = max(1, round(trainer.global_batch_size / per_step)) * per_step
    return [
        f"trainer.global_batch_size={trainer.global_batch_size} is not a multiple of"
        f" trainer.micro_batch_size x data-parallel size = {per_step}; nearest is {nearest}"
    ]


def largest_rank_count(recipe: Recipe, most: int) -> int:
    """Returns the largest number of ranks to train the recipe with its layout, 0 if none.

    Args:
        recipe: The recipe.
        most: Upper bound.
    """
    trainer, replica = recipe.trainer, recipe.trainer.strategy.size
    replicas = min(most // replica, trainer.global_batch_size // trainer.micro_batch_size)
    for count in range(replicas, 0, -1):
        divides_batch = trainer.global_batch_size % (trainer.micro_batch_size * count) == 0
        if divides_batch and not layout_violations(recipe, count * replica):
            return count * replica
    return 0


# Backward passes and shards of a step.


def microbatches(recipe: Recipe, part: Part) -> int:
    """Returns the number of microbatches of a step on each rank."""
    trainer = recipe.trainer
    return max(1, trainer.global_batch_size // (trainer.micro_batch_size * part.data))


def reduces_once(recipe: Recipe, part: Part) -> bool:
    """Whether FSDP2 reduces gradients only in the last of several backward passes."""
    # Until then each rank accumulates unsharded gradients (set_requires_gradient_sync(False)).
    return part.shard in ("none", "zero1") and microbatches(recipe, part) > 1


def shard_degree(recipe: Recipe, part: Part) -> int:
    """Returns the number of FSDP2 shards of each tensor."""
    return 1 if part.shard == "none" else part.shards


def keeps_quantized_weights(recipe: Recipe, part: Part, backend: str) -> bool:
    """Whether the backend keeps quantized weights for all microbatches of a step."""
    if not capabilities(backend).weight_workspace:
        return False
    return quantizes_weights_once(recipe, part.state, part.shard, microbatches(recipe, part))


def quantizes_weights_once(
    recipe: Recipe, state: StateDtypes, shard: str, microbatches: int
) -> bool:
    """Whether the native backend quantizes a weight once per step.

    Args:
        recipe: The recipe.
        state: The storage dtypes.
        shard: Resolved value of storage.shard.
        microbatches: Number of microbatches of a step.
    """
    precision = recipe.precision
    if not precision.fp8.enabled or shard == "fsdp":
        return False  # fsdp gathers a layer's weights for each pass and frees them
    stored = state.linear["weight"]
    if stored not in ("fp8", precision.compute):
        return False  # the weight is in a low-bit dtype to save memory
    # An FP8 weight is quantized already. Its transpose is cached instead (keep_transpose_cache),
    # which a single backward pass computes once anyway. Full recomputation repeats fprop.
    repeats_fprop = recipe.model.recompute_granularity == "full" and stored != "fp8"
    return microbatches > 1 or repeats_fprop


# Parameters of a part.

# Column-parallel modules split weights along dimension 0, and biases. Row-parallel modules split
# weights along dimension 1. The embedding is split by vocabulary.
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1", "embedding", "output_layer")
ROW_PARALLEL = ("linear_proj", "linear_fc2")


def split_dimension(recipe: Recipe, name: str) -> int | None:
    """Returns the tensor-parallel dimension of a parameter, None if it is replicated."""
    layer, _, adapter = name.partition(".lora.")
    if adapter:
        # Of an update B A, only the factor next to the split dimension of the weight is split.
        is_column_parallel = layer.rpartition(".")[2] in COLUMN_PARALLEL
        if is_column_parallel and name.endswith("lora_B"):
            return 0
        if not is_column_parallel and name.endswith("lora_A"):
            return 1
        return None
    module = name.split(".")[-2]
    if module in COLUMN_PARALLEL:
        return 0
    if module in ("q_layernorm", "k_layernorm") and recipe.model.qk_layernorm == "hidden":
        return 0  # one norm over all heads
    if module in ROW_PARALLEL and name.endswith(".weight"):
        return 1
    return None


def local_shapes(
    recipe: Recipe,
    part: Part,
    layers: Sequence[int] | None = None,
    full_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a part's parameters after tensor parallelism, before storage.shard.

    Args:
        recipe: The recipe.
        part: The part.
        layers: Numbers of layers, to return only their parameters. Defaults to the whole part.
        full_shapes: Full shapes by name. Defaults to all parameters of the model.
    """
    # A tied output layer on another pipeline stage has a copy of the embedding.
    is_tied = recipe.model.share_embeddings_and_output_weights and part.output
    numbers = set(part.layers)
    if layers is not None:
        numbers = set(layers)
    if full_shapes is None:
        full_shapes = parameter_shapes(transformer_config(recipe))
    shapes = {}
    for name, shape in full_shapes.items():
        first, _, suffix = name.partition(".")
        if first == "layers":
            is_local = int(suffix.partition(".")[0]) in numbers
        elif layers is not None:
            is_local = False
        elif "embedding" in first:
            is_local = part.embedding or (is_tied and first == "embedding")
        else:
            is_local = part.output
        if is_local:
            shapes[name] = _local_shape(recipe, part, name, shape)
    return shapes


def _local_shape(recipe: Recipe, part: Part, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the largest tensor-parallel shard."""
    if part.tensor == 1:
        return shape
    dimension = split_dimension(recipe, name)
    if dimension is None:
        return shape
    local = list(shape)
    local[dimension] = -(-shape[dimension] // part.tensor)
    return tuple(local)


def vectors(recipe: Recipe, part: Part) -> int:
    """Returns the elements of one layer's norms and biases on a tensor-parallel rank."""
    # All layers have equally many.
    shapes = local_shapes(recipe, part, part.layers[:1])
    return sum(prod(shape) for shape in shapes.values() if len(shape) == 1)
