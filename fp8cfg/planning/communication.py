"""Communication of a step: bytes sent by one rank, by axis of the layout and by content.

Totals per axis are within 2 % of the bytes of torch's collectives. Amaxes, scales, losses and norms
are a few bytes per tensor or token and are left out.

Collectives count as ring algorithms, as in training (parallel/process_group.py). With N ranks each
sends:

    all-reduce        2 (N - 1) / N of the data
    all-gather        N - 1 times a rank's shard
    reduce-scatter    N - 1 times a rank's shard
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.models.config import linear_layers
from fp8cfg.planning.gemm_memory import ELEMENT_BYTES, fp8_weight_extra_bytes
from fp8cfg.planning.layer_plan import adapted_projections, transformer_config
from fp8cfg.planning.layout import (
    Part,
    local_shapes,
    microbatches,
    shard_degree,
    split_dimension,
)
from fp8cfg.planning.linear_memory import input_shard_bytes, keeps_input, keeps_input_shard
from fp8cfg.planning.peak_memory import part_linears
from fp8cfg.planning.state_shards import (
    fsdp_group,
    parameter_columns,
    rank_loads,
    shard_elements,
    shard_rows,
    trained_shapes,
    zero_owners,
)
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.storage import gathered

if TYPE_CHECKING:
    from fp8cfg.parallel.process_group import Kind  # loads torch


@dataclass(frozen=True)
class Sent:
    """Messages of a rank with the same axis and content.

    Attributes:
        axis: Name of the axis of the layout, such as "tensor" or "data x context".
        content: Content of the messages, such as "gradients".
        bytes: Bytes of all messages.
        messages: Number of messages.
    """

    axis: str
    content: Kind
    bytes: int
    messages: int = 1

    def times(self, count: int) -> Sent:
        """Returns the messages repeated `count` times."""
        return replace(self, bytes=self.bytes * count, messages=self.messages * count)


class Axis(NamedTuple):
    """Process group of a collective: name of its axis and number of ranks."""

    name: str
    ranks: int

    def all_reduce(self, content: Kind, data: float, count: int = 1) -> Iterator[Sent]:
        """Yields `count` all-reduces of `data` bytes."""
        yield from self._sent(content, 2 * (self.ranks - 1) * data / self.ranks, count)

    def all_gather(self, content: Kind, shard: float, count: int = 1) -> Iterator[Sent]:
        """Yields `count` all-gathers of `shard` bytes from each rank."""
        yield from self._sent(content, (self.ranks - 1) * shard, count)

    def reduce_scatter(self, content: Kind, shard: float, count: int = 1) -> Iterator[Sent]:
        """Yields `count` reduce-scatters. Each rank keeps `shard` bytes of the sum."""
        # On a ring it sends as much as an all-gather.
        yield from self.all_gather(content, shard, count)

    def send(self, content: Kind, data: float, count: int = 1) -> Iterator[Sent]:
        """Yields `count` point-to-point messages of `data` bytes."""
        yield from self._sent(content, data, count)

    def _sent(self, content: Kind, message_bytes: float, count: int) -> Iterator[Sent]:
        """Yields the messages, none on a single rank."""
        if self.ranks > 1 and count:
            yield Sent(self.name, content, int(message_bytes) * count, count)


def step_traffic(recipe: Recipe, part: Part, backend: str, rank: int | None = None) -> list[Sent]:
    """Returns the messages of a rank in one optimizer step, by axis and content.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        backend: Name of the backend of the FP8 layers.
        rank: Number among the ranks with the same parameters. Defaults to the one with the most
            bytes.
    """
    passes = microbatches(recipe, part)
    linears = part_linears(recipe, part)
    sent = [
        *_data_parallel(recipe, part, linears, backend, rank),
        *_tied_embedding(recipe, part, backend),
        *_adapter_gradients(recipe, part, backend),
    ]
    for entry in pass_traffic(recipe, part, recipe.trainer.micro_batch_size):
        sent.append(entry.times(passes))
    return merge_traffic(sent)


def merge_traffic(sent: Iterable[Sent]) -> list[Sent]:
    """Sums entries with the same axis and content."""
    sums: dict[tuple[str, str], Sent] = {}
    for entry in sent:
        key = entry.axis, entry.content
        if key in sums:
            total = sums[key]
            entry = replace(
                entry,
                bytes=total.bytes + entry.bytes,
                messages=total.messages + entry.messages,
            )
        sums[key] = entry
    return list(sums.values())


def pass_traffic(recipe: Recipe, part: Part, samples: int) -> Iterator[Sent]:
    """Yields the messages of a forward and a backward pass.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        samples: Sequences of the microbatch.
    """
    yield from _activations(recipe, part, samples)
    yield from _keys_and_values(recipe, part, samples)
    yield from _stage_outputs(recipe, part, samples)


# Activations.


def _activations(recipe: Recipe, part: Part, samples: int) -> Iterator[Sent]:
    """Yields the collectives of tensor parallelism."""
    # The forward pass sums the outputs of attention, MLP and embedding. The backward pass sums
    # the gradients of their inputs and of the output layer's input. Each sum is an all-reduce.
    # With sequence parallelism it is a reduce-scatter, and the other pass has an all-gather.
    axis = Axis("tensor", part.tensor)
    layers = len(part.layers)
    backward = _backward_passes(recipe, part)
    # A recomputed layer stops before its last sum, because backward does not need it.
    recomputed = backward.recomputed_layers
    compute_bytes = _compute_bytes(recipe)
    stream = _tokens(recipe, part, samples) * recipe.model.hidden_size * compute_bytes
    sums = 2 * layers + part.embedding + backward.inputs + recomputed
    if not part.sequence_parallel:
        yield from axis.all_reduce("activations", stream, sums)
        return
    shard = stream // part.tensor
    gathers = 2 * layers + part.output + backward.outputs + 2 * recomputed
    gathers += _recomputed_gathers(recipe, part)
    yield from axis.all_gather("activations", shard, gathers)
    yield from axis.reduce_scatter("activations", shard, sums)
    # FP8 layers keep a rank's tokens of their gathered input and gather them again for wgrad.
    inputs = 0
    for linear in part_linears(recipe, part):
        inputs += keeps_input_shard(recipe, part, linear)
    kept_shard = shard // compute_bytes * input_shard_bytes(recipe)
    yield from axis.all_gather("activations", kept_shard, inputs)


class _BackwardPasses(NamedTuple):
    """Numbers of modules with gradients. With LoRA, modules before the first adapter have none.

    Attributes:
        recomputed_layers: Transformer layers with a second forward pass (full recomputation).
        attention: Attention modules.
        inputs: Inputs of attention, MLP and output layer.
        outputs: Outputs of attention, MLP and embedding.
    """

    recomputed_layers: int
    attention: int
    inputs: int
    outputs: int


def _backward_passes(recipe: Recipe, part: Part) -> _BackwardPasses:
    """Counts the modules with gradients."""
    # Linear layers are numbered in the order of the forward pass, four per Transformer layer:
    # linear_qkv, linear_proj, linear_fc1, linear_fc2, and last the output layer. Backward stops at
    # the first trained layer: a module's output has a gradient if the first trained layer is in the
    # module or before it. Its input has one if the first trained layer is before it.
    first_trained = _first_trained(recipe)
    recomputes_layers = recipe.model.recompute_granularity == "full"
    recomputed_layers = attention = inputs = outputs = 0
    for layer in part.layers:
        qkv, proj, fc1, fc2 = range(4 * layer, 4 * layer + 4)
        if recomputes_layers:
            recomputed_layers += first_trained <= fc2
        attention += first_trained <= qkv
        inputs += (first_trained < qkv) + (first_trained < fc1)
        outputs += (first_trained <= proj) + (first_trained <= fc2)
    inputs += part.output and first_trained < 4 * recipe.model.num_layers
    outputs += part.embedding and first_trained < 0
    return _BackwardPasses(recomputed_layers, attention, inputs, outputs)


def _first_trained(recipe: Recipe) -> int:
    """Returns the number of the linear layer with the first adapter, -1 without LoRA."""
    if not recipe.lora.enabled:
        return -1
    names = [linear.name for linear in linear_layers(transformer_config(recipe))]
    return names.index(adapted_projections(recipe)[0].module)


def _recomputed_gathers(recipe: Recipe, part: Part) -> int:
    """Counts the inputs gathered again for wgrad because of selective recomputation."""
    # Without a norm before it, a layer's input is the residual stream and is not recomputed.
    model = recipe.model
    if model.recompute_granularity != "selective" or model.layernorm_placement == "post":
        return 0
    count = 0
    for linear in part_linears(recipe, part):
        if not linear.name.endswith(("linear_qkv", "linear_fc1")) or "wgrad" in linear.left_out:
            continue
        keeps_quantized = linear.gemms[2] and not keeps_input(recipe, linear)
        if not keeps_quantized and not keeps_input_shard(recipe, part, linear):
            count += 1
    return count


def _keys_and_values(recipe: Recipe, part: Part, samples: int) -> Iterator[Sent]:
    """Yields gathers of keys and values over context ranks, and the sums of their gradients."""
    # A recomputed layer gathers again. Layers before the first adapter have no gradients.
    axis = Axis("context", part.context)
    backward = _backward_passes(recipe, part)
    channels = 2 * (recipe.model.num_query_groups // part.tensor) * recipe.model.head_dim
    shard = _tokens(recipe, part, samples) * channels * _compute_bytes(recipe)
    yield from axis.all_gather(
        "keys and values", shard, len(part.layers) + backward.recomputed_layers
    )
    yield from axis.reduce_scatter("keys and values", shard, backward.attention)


def _stage_outputs(recipe: Recipe, part: Part, samples: int) -> Iterator[Sent]:
    """Yields messages between pipeline stages: outputs of chunks and gradients of their inputs."""
    axis = Axis("pipeline", recipe.trainer.strategy.pipeline_model_parallel_size)
    tokens = _tokens(recipe, part, samples)
    if part.sequence_parallel:
        tokens //= part.tensor
    data = tokens * recipe.model.hidden_size * _compute_bytes(recipe)
    # The first chunk of the model sends no gradient, the last one no output.
    yield from axis.send("stage outputs", data, 2 * part.chunks - part.embedding - part.output)


def _tokens(recipe: Recipe, part: Part, samples: int) -> int:
    """Tokens of a context-parallel rank."""
    return samples * recipe.model.seq_length // part.context


def _compute_bytes(recipe: Recipe) -> int:
    return int(ELEMENT_BYTES[recipe.precision.compute])


# Gradients and weights.


def _data_parallel(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str, rank: int | None
) -> Iterator[Sent]:
    """Yields gradients and weights sent to ranks with the same parameters."""
    if by_fsdp2(recipe, part.state, part.shards, backend):
        yield from _fully_sharded(recipe, part, linears, backend)
        return
    axis = _same_parameters(part)
    shapes = trained_shapes(recipe, part)
    columns = parameter_columns(part.state, linears, shapes)
    gradients: dict[str, float] = {}
    for name, shape in shapes.items():
        gradients[name] = prod(shape) * ELEMENT_BYTES[columns[name]["comm"]]
    if part.shard in ("none", "zero1"):
        # MS-AMP sums FP8 in two hops, which send as much as an all-reduce.
        yield from axis.all_reduce("gradients", sum(gradients.values()))
    if part.shard == "none":
        return
    owners, _ = zero_owners(recipe, part, linears)
    if part.shard == "zero2":
        # Each gradient goes to its owner. A rank sends all but its own.
        loads = rank_loads(gradients, owners, axis.ranks)
        owned = min(loads)
        if rank is not None:
            owned = loads[rank]
        yield from axis.send("gradients", sum(loads) - owned)
    fp8_layers = _fp8_weights(linears)
    weights: dict[str, float] = {}
    for name, shape in shapes.items():
        element_bytes = ELEMENT_BYTES[columns[name]["weight"]]
        if part.state.fp8_weights and name in fp8_layers:
            element_bytes += fp8_weight_extra_bytes(recipe)
        weights[name] = prod(shape) * element_bytes
    # An all-gather needs equal messages: each is padded to the largest load of a rank.
    yield from axis.all_gather("weights", max(rank_loads(weights, owners, axis.ranks)))


def _fully_sharded(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str
) -> Iterator[Sent]:
    """Yields the collectives of FSDP2, one group of parameters at a time.

    Each Transformer layer is a group. The root group has embedding, last norm and output layer.

        zero1    gathers weights and reduces gradients once a step
        zero2    gathers weights once a step, reduces gradients in each backward pass
        fsdp     gathers a layer in each forward and backward pass, and the root in each forward
                 pass, or in a pipeline once a step. Reduces gradients in each backward pass

    Replica groups (HSDP) sum their shards once a step, or in each pass if the sums are narrower
    than float32. With LoRA, only fsdp gathers frozen weights.
    """
    state, shard = part.state, part.shard
    passes = microbatches(recipe, part)
    layer_gathers = root_gathers = reductions = 1
    if shard in ("zero2", "fsdp"):
        reductions = passes
    if shard == "fsdp":
        layer_gathers = 2 * passes
        if recipe.trainer.strategy.pipeline_model_parallel_size == 1:
            root_gathers = passes

    axis = _same_parameters(part)._replace(ranks=shard_degree(recipe, part))
    replicas = Axis("replicate", part.groups)
    if shard == "none":  # each rank is a replica
        replicas = _same_parameters(part)
    comm_bytes = ELEMENT_BYTES[state.linear["comm"]]
    replica_bytes = comm_bytes
    if shard in ("zero1", "zero2"):
        replica_bytes = ELEMENT_BYTES[state.other["weight_grad"]]
    replica_sums = reductions
    if replica_bytes == 4 and recipe.storage.accumulate == "wide":
        replica_sums = 1

    weights, gradients = _shard_sizes(recipe, part, linears, backend)
    for group, weight_bytes in weights.items():
        gathers = layer_gathers
        if group == "":  # the root
            gathers = root_gathers
        yield from axis.all_gather("weights", weight_bytes, gathers)
        elements = gradients[group]
        if elements:
            yield from axis.reduce_scatter("gradients", elements * comm_bytes, reductions)
            yield from replicas.all_reduce("gradients", elements * replica_bytes, replica_sums)


def _shard_sizes(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str
) -> tuple[Counter[str], Counter[str]]:
    """Returns weight bytes and gradient elements of a rank's shard of each FSDP2 group."""
    state = part.state
    is_fsdp = part.shard == "fsdp"
    trained = trained_shapes(recipe, part)
    shapes = trained
    gathers_fp8 = state.fp8_weights
    if is_fsdp:
        shapes = {**local_shapes(recipe, part), **trained}
        gathers_fp8 = gathered(recipe.precision, backend) == "fp8"
    fp8_layers = _fp8_weights(linears)
    columns = parameter_columns(state, linears, shapes)
    weights, gradients = Counter[str](), Counter[str]()
    for name, shape in shapes.items():
        elements = shard_elements(state, name, shape, shard_degree(recipe, part))
        if gathers_fp8 and name in fp8_layers:
            element_bytes = ELEMENT_BYTES["fp8"] + fp8_weight_extra_bytes(recipe)
        elif is_fsdp:
            element_bytes = ELEMENT_BYTES[state.gathered_dtype]
        else:
            element_bytes = ELEMENT_BYTES[columns[name]["weight"]]
        weights[fsdp_group(name)] += int(elements * element_bytes)
        if name in trained:
            gradients[fsdp_group(name)] += elements
    return weights, gradients


def _fp8_weights(linears: Iterable[PlannedLinear]) -> set[str]:
    """Returns the names of the weights of FP8 layers."""
    return {f"{linear.name}.weight" for linear in linears if linear.fp8}


def _tied_embedding(recipe: Recipe, part: Part, backend: str) -> Iterator[Sent]:
    """Yields the gradient of a tied embedding, summed by the first and the last stage."""
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    if not recipe.model.share_embeddings_and_output_weights or stages == 1:
        return
    if recipe.lora.enabled:  # it is frozen
        return
    if not part.embedding and not part.output:
        return
    rows, width = local_shapes(recipe, part)["embedding.weight"]
    element_bytes = ELEMENT_BYTES[part.state.other["weight_grad"]]
    if by_fsdp2(recipe, part.state, part.shards, backend):
        element_bytes = ELEMENT_BYTES["fp32"]
        rows = shard_rows(rows, shard_degree(recipe, part))
    yield from Axis("pipeline", stages).send("gradients", rows * width * element_bytes)


def _adapter_gradients(recipe: Recipe, part: Part, backend: str) -> Iterator[Sent]:
    """Yields float32 gradients of adapter matrices replicated on tensor-parallel ranks."""
    # Each tensor-parallel rank computes a partial gradient of them.
    if not recipe.lora.enabled or part.tensor == 1:
        return
    ranks = 1
    if by_fsdp2(recipe, part.state, part.shards, backend):
        ranks = shard_degree(recipe, part)
    elements = 0
    for name, shape in trained_shapes(recipe, part).items():
        if split_dimension(recipe, name) is None:
            elements += shard_elements(part.state, name, shape, ranks)
    yield from Axis("tensor", part.tensor).all_reduce("gradients", 4 * elements)


def _same_parameters(part: Part) -> Axis:
    """Returns the axis of ranks with the same parameters, in one replica group."""
    axes = {"data": part.data // part.groups, "context": part.context}
    name = " x ".join(axis for axis, ranks in axes.items() if ranks > 1)
    return Axis(name or "data", part.shards)
