"""Parallel layout: the layers, the share of each matrix and the part of the sequence that one rank has under trainer.strategy."""

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


def quantizes_once(recipe: Recipe, state: StateDtypes, shard: str, microbatches: int) -> bool:
    """Whether the native backend quantizes a weight once for all passes of a step over so many microbatches, and keeps it until the
    last. It does where there are several passes, and weights stay for them. `shard` is storage.shard, resolved; under fsdp the
    weights of a layer are gathered for each pass and let go. Weights in a codec are there to take few bytes, and nothing is kept of
    them; weights that are stored as products read them are quantized already, and their transpose is kept where
    fp8.keep_transpose_cache says so, which a single backward pass makes once anyway.
    """
    p = recipe.precision
    stored = state.linear["weight"]
    several = microbatches > 1 or (recipe.model.recompute_granularity == "full" and stored != "fp8")
    return p.fp8.enabled and several and shard != "fsdp" and stored in ("fp8", p.compute)


def machines(ranks: int) -> tuple[int, int]:
    """Nodes, and GPUs of each: eight, or as many below that as divide `ranks`."""
    devices = next(n for n in range(8, 0, -1) if ranks % n == 0)
    return ranks // devices, devices


def placed(recipe: Recipe, nodes: int, devices: int) -> Recipe:
    """`recipe` on so many nodes with so many GPUs each; its batch stays, whether or not they divide it."""
    trainer = recipe.trainer.model_copy(update={"num_nodes": nodes, "devices": devices})
    return recipe.model_copy(update={"trainer": trainer})


@dataclass(frozen=True)
class Part:
    """One rank's part. `state` are the storage dtypes. `layers` are indices, in so many `chunks`; `tensor` ranks share each matrix, `context` each sequence, `data`
    hold the same part. `in_flight` microbatches have their activations kept at once, counted in passes through all of `layers`.
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
        """The ranks over which storage.shard splits state, those that have the same parameters: data-parallel and context ranks, of
        one of `groups` groups."""
        return self.data * self.context // self.groups

    @property
    def shard(self) -> str:
        """storage.shard over these ranks, with auto resolved."""
        return self.state.precision.storage.shard


def whole(recipe: Recipe, ranks: int = 1) -> Part:
    """The part that each of `ranks` ranks has of all layers: of matrices and sequences too, where these are whole replicas."""
    s = recipe.trainer.strategy
    tensor, context, pipeline = (
        s.tensor_model_parallel_size,
        s.context_parallel_size,
        s.pipeline_model_parallel_size,
    )
    if ranks % s.size:
        pipeline = 1
    if ranks % (tensor * context):
        tensor, context = 1, 1 if ranks % context else context
    part = Part(
        "every rank",
        range(recipe.model.num_layers),
        resolve_state_dtypes(recipe.precision),
        tensor=tensor,
        context=context,
        data=(data := ranks // (tensor * context * pipeline)),
        sequence_parallel=s.sequence_parallel and tensor > 1,
        groups=s.data_parallel_replicate_size if data % s.data_parallel_replicate_size == 0 else 1,
    )
    return replace(part, state=part.state.with_sharding(part.shards))


def stage_parts(recipe: Recipe, ranks: int) -> list[Part]:
    """The part of each pipeline stage on `ranks` ranks; one, of all layers, where there is no pipeline, or they are no whole
    replicas."""
    s, t = recipe.trainer.strategy, recipe.trainer
    stages, chunks, every = s.pipeline_model_parallel_size, s.chunks, whole(recipe, ranks)
    if stages == 1 or ranks % s.size:
        return [every]
    microbatches = max(1, t.global_batch_size // (t.micro_batch_size * every.data))
    held = stage_layers(recipe.model.num_layers, stages, chunks)
    names = {0: "first stage", stages - 1: "last stage"}
    return [
        replace(
            every,
            name=names.get(i, "middle stage"),
            layers=layers,
            embedding=i == 0,
            output=i == stages - 1,
            chunks=chunks,
            in_flight=min(microbatches, _in_flight(i, stages, chunks)),
        )
        for i, layers in enumerate(held)
    ]


def shards(recipe: Recipe, ranks: int) -> int:
    """Of `ranks` ranks those that have the same parameters as one of them, over which storage.shard splits state."""
    return whole(recipe, ranks).shards


def limits(recipe: Recipe, ranks: int) -> list[Violation]:
    """A violation for each reason why training has no such parallel layout for what `recipe` stores, sends and multiplies on `ranks`."""
    return [
        *layout_limits.limits(recipe, ranks),
        *layout_limits.pipeline_limits(recipe, ranks),
        *layout_limits.state_limits(recipe, ranks),
    ]


def refused(recipe: Recipe, ranks: int, given: bool = False) -> list[Violation]:
    """A violation for each way in which `recipe` splits a model replica over ranks that training does not have, or not on so many
    `ranks`; or, of a model that is `given`, not at all."""
    s = recipe.trainer.strategy
    pp, tp, cp = (
        s.pipeline_model_parallel_size,
        s.tensor_model_parallel_size,
        s.context_parallel_size,
    )
    lines = [] if given else limits(recipe, ranks)
    keys = {
        "tensor_model_parallel_size": (tp, "each matrix", "matrices"),
        "context_parallel_size": (cp, "a sequence", "sequences"),
        "pipeline_model_parallel_size": (pp, "the layers", "layers"),
    }
    for name, (size, what, those) in keys.items():
        here = f"{ranks} ranks are" if ranks > 1 else "1 rank is"
        if size > 1 and given:
            lines.append(
                Violation(
                    f"{s.key(name)}={size}",
                    f"splits the {those} of a recipe's Transformer, not those of"
                    " a model of your own; write 1",
                    source="layout",
                )
            )
        elif ranks % size:
            lines.append(
                Violation(
                    f"{s.key(name)}={size}",
                    f"so many ranks share {what}, and {here} no multiple of it;"
                    f" start {-(-ranks // size) * size}, or write {gcd(size, ranks)}",
                    source="layout",
                )
            )
    groups, data = s.data_parallel_replicate_size, ranks // s.size
    if groups > 1 and given:
        lines.append(
            Violation(
                f"{s.key('data_parallel_replicate_size')}={groups}",
                "is of FSDP2, which shards a"
                " recipe's Transformer, not a model of your own; write 1",
                source="layout",
            )
        )
    elif groups > 1 and not lines and not ranks % s.size and (data % groups or data * cp == groups):
        lines.append(
            Violation(
                f"{s.key('data_parallel_replicate_size')}={groups}",
                f"{ranks} ranks are no {groups}"
                f" groups of several ranks each; start {2 * groups * s.size}, or write 1",
                source="layout",
            )
        )
    if not given and not any(ranks % size for size in (tp, cp, pp)) and ranks % s.size:
        split = {
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "pipeline_model_parallel_size": pp,
        }
        (first, size), *others = [(name, n) for name, n in split.items() if n > 1]
        beside = " and ".join(f"{name}={n}" for name, n in others)
        lines.append(
            Violation(
                f"{s.key(first)}={size}",
                f"with {beside} a replica is {s.size} ranks, "
                f"and {ranks} are no multiple of it; start {-(-ranks // s.size) * s.size}",
                source="layout",
            )
        )
    return lines


def parts(recipe: Recipe, world: int) -> list[Part]:
    """The parts that differ: first, middle and last pipeline stage, or one where there is no pipeline.

    Raises ConfigError where `world` ranks are no whole number of replicas, or the batch does not divide over them.
    """
    s, t = recipe.trainer.strategy, recipe.trainer
    many = f"{world} GPU{'s' * (world > 1)}"
    if world % s.size:
        near = max(1, round(world / s.size)) * s.size
        raise ConfigError(
            f"{many}: not a multiple of tensor x pipeline x context parallel = {s.size}; "
            f"nearest is {near} (--gpus {near}){s.smaller(world, t.global_batch_size // t.micro_batch_size)}"
        )
    refuse_if([f"{many}: {line}" for line in uneven_batch(recipe, world)])
    return parts_that_differ(recipe, world)


def uneven_batch(recipe: Recipe, ranks: int) -> list[str]:
    """The line that refuses a global batch which so many ranks, whole replicas, cannot share."""
    s, t = recipe.trainer.strategy, recipe.trainer
    per_step = t.micro_batch_size * (ranks // s.size)
    if t.global_batch_size % per_step == 0:
        return []
    near = max(1, round(t.global_batch_size / per_step)) * per_step
    return [
        f"trainer.global_batch_size={t.global_batch_size} is not a multiple of"
        f" trainer.micro_batch_size x data-parallel size = {per_step}; nearest is {near}"
    ]


def shared_by(recipe: Recipe, most: int) -> int:
    """The most ranks, `most` or fewer, that train `recipe`: whole replicas, over which its global batch divides; 0 without any."""
    t, replica = recipe.trainer, recipe.trainer.strategy.size
    replicas = min(most // replica, t.global_batch_size // t.micro_batch_size)
    return next(
        (
            n * replica
            for n in range(replicas, 0, -1)
            if t.global_batch_size % (t.micro_batch_size * n) == 0
            and not refused(recipe, n * replica)
        ),
        0,
    )


def microbatches(recipe: Recipe, part: Part) -> int:
    """Backward passes of one step on each rank."""
    t = recipe.trainer
    return max(1, t.global_batch_size // (t.micro_batch_size * part.data))


def summed_at_the_end(recipe: Recipe, part: Part) -> bool:
    """Whether FSDP2 sums the gradients of several backward passes in the last one, before which all are whole."""
    return part.shard in ("none", "zero1") and microbatches(recipe, part) > 1


def shard_degree(recipe: Recipe, part: Part) -> int:
    """Shard degree: the ranks over which FSDP2 splits each tensor; 1 under storage.shard=none, which leaves it whole on each."""
    return 1 if part.shard == "none" else part.shards


def keeps_weights(recipe: Recipe, part: Part, backend: str) -> bool:
    """Whether layers of `backend` keep weights that they quantized for all passes of a step."""
    shard = part.shard
    return capabilities(backend).weight_workspace and quantizes_once(
        recipe, part.state, shard, microbatches(recipe, part)
    )


def parts_that_differ(recipe: Recipe, ranks: int) -> list[Part]:
    """The parts of the first, a middle and the last pipeline stage, or the one that all ranks have."""
    every = stage_parts(recipe, ranks)
    return [every[i] for i in sorted({0, min(1, len(every) - 1), len(every) - 1})]


COLUMN, ROW = (
    ("linear_qkv", "linear_fc1", "embedding", "output_layer"),
    (
        "linear_proj",
        "linear_fc2",
    ),
)
"""Modules whose weights tensor parallelism splits by rows, with their biases, and by columns."""


def split_dimension(recipe: Recipe, name: str) -> int | None:
    """The dimension of the parameter `name` that tensor parallelism splits; None of one that every rank has whole."""
    layer, _, adapter = name.partition(".lora.")
    if adapter:
        column = layer.rpartition(".")[2] in COLUMN
        return int(not column) if name.endswith("lora_B" if column else "lora_A") else None
    module = name.split(".")[-2]
    if module in COLUMN or (
        recipe.model.qk_layernorm == "hidden" and module in ("q_layernorm", "k_layernorm")
    ):
        return 0
    return 1 if module in ROW and name.endswith(".weight") else None


def local_shapes(
    recipe: Recipe,
    part: Part,
    layers: Sequence[int] | None = None,
    of: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by name that a rank of `part` has before storage.shard splits it, or of so many of its `layers`
    alone; `of` gives whole shapes, by default those of all weights. A tied output layer on its own pipeline stage holds a copy of the embedding."""
    here = set(part.layers if layers is None else layers)
    tied = recipe.model.share_embeddings_and_output_weights and part.output

    def there(name: str) -> bool:
        first, _, rest = name.partition(".")
        if first == "layers":
            return int(rest.partition(".")[0]) in here
        return layers is None and (
            part.embedding or (tied and first == "embedding")
            if "embedding" in first
            else part.output
        )

    def local(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        split = split_dimension(recipe, name) if part.tensor > 1 else None
        return (
            shape
            if split is None
            else tuple(-(-n // part.tensor) if dim == split else n for dim, n in enumerate(shape))
        )

    if of is None:
        of = parameter_shapes(transformer_config(recipe))
    return {name: local(name, shape) for name, shape in of.items() if there(name)}


def vectors(recipe: Recipe, part: Part) -> int:
    """Elements of one layer's norms and biases on a rank of `part`. What goes with split outputs is split too."""
    return sum(
        prod(shape)
        for shape in local_shapes(recipe, part, part.layers[:1]).values()
        if len(shape) == 1
    )


def _in_flight(stage: int, stages: int, chunks: int) -> float:
    """Passes through a stage whose activations are kept at once: 1F1B, interleaved with more than one chunk (arXiv 2104.04473;
    Megatron's schedules.py, num_warmup_microbatches)."""
    if chunks == 1:
        return stages - stage
    return ((stages - stage - 1) * 2 + (chunks - 1) * stages + 1) / chunks
