"""Communication of a step: the bytes that one rank sends, by axis of the layout and by what they carry.

Totals per axis are within 2 % of what torch hands to the network. Amaxes, scales, losses and norms
are a few bytes for each tensor or token and are left out.

Bytes are those that leave a rank on a ring, as training counts them (parallel/traffic.py): of an
all-reduce over N ranks 2 (N - 1) / N of the data, of an all-gather N - 1 times a rank's shard, of a
reduce-scatter all shards but one.
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
from fp8cfg.planning.peak_memory import linears_of
from fp8cfg.planning.state_shards import (
    fsdp_group,
    parameter_columns,
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
    """Bytes that a rank sends over the ranks of `axis`, in so many `messages`."""

    axis: str
    what: Kind
    bytes: int
    messages: int = 1

    def times(self, count: int) -> Sent:
        """The same, `count` times."""
        return replace(self, bytes=self.bytes * count, messages=self.messages * count)


class Axis(NamedTuple):
    """The `ranks` that take part in a collective, and their name."""

    name: str
    ranks: int

    def all_reduce(self, what: Kind, data: float, count: int = 1) -> Iterator[Sent]:
        """Sums of `data` bytes."""
        yield from self._sent(what, 2 * (self.ranks - 1) * data / self.ranks, count)

    def all_gather(self, what: Kind, shard: float, count: int = 1) -> Iterator[Sent]:
        """Gathers of `shard` bytes from each rank."""
        yield from self._sent(what, (self.ranks - 1) * shard, count)

    def reduce_scatter(self, what: Kind, shard: float, count: int = 1) -> Iterator[Sent]:
        """Sums of which each rank keeps `shard` bytes: as many bytes as an all-gather."""
        yield from self.all_gather(what, shard, count)

    def send(self, what: Kind, data: float, count: int = 1) -> Iterator[Sent]:
        """Messages of `data` bytes to other ranks."""
        yield from self._sent(what, data, count)

    def _sent(self, what: Kind, each: float, count: int) -> Iterator[Sent]:
        if self.ranks > 1 and count:
            yield Sent(self.name, what, int(each) * count, count)


def of_step(recipe: Recipe, part: Part, backend: str, rank: int | None = None) -> list[Sent]:
    """What a rank of `part` sends in one optimizer step if `backend` provides the FP8 layers.

    `rank` is its number among the ranks with the same parameters, by default one that sends most.
    """
    count = microbatches(recipe, part)
    linears = linears_of(recipe, part)
    return together(
        [
            *_data_parallel(recipe, part, linears, backend, count, rank),
            *_tied_embedding(recipe, part, backend),
            *_adapter_gradients(recipe, part, backend),
            *(each.times(count) for each in of_pass(recipe, part, recipe.trainer.micro_batch_size)),
        ]
    )


def together(every: Iterable[Sent]) -> list[Sent]:
    """One entry for each axis and what it carries."""
    sums: dict[tuple[str, str], Sent] = {}
    for each in every:
        key = each.axis, each.what
        before = sums.get(key, replace(each, bytes=0, messages=0))
        messages = before.messages + each.messages
        sums[key] = replace(each, bytes=before.bytes + each.bytes, messages=messages)
    return list(sums.values())


def of_pass(recipe: Recipe, part: Part, samples: int) -> Iterator[Sent]:
    """What a rank of `part` sends in a forward and a backward pass over so many samples."""
    yield from _activations(recipe, part, samples)
    yield from _keys_and_values(recipe, part, samples)
    yield from _stage_outputs(recipe, part, samples)


def _activations(recipe: Recipe, part: Part, samples: int) -> Iterator[Sent]:
    """Sums over tensor-parallel ranks.

    The forward pass sums the outputs of attention, MLP and embedding; the backward pass sums the
    gradients of their inputs and of the output layer's input. Each is an all-reduce. Under sequence
    parallelism each is a reduce-scatter and an all-gather of the same size in the other pass. A
    layer that is recomputed stops before its last sum, which nothing reads. FP8 layers keep a rank's
    tokens of their gathered input and gather them again for wgrad.
    """
    axis = Axis("tensor", part.tensor)
    layers, back = len(part.layers), _backward_passes(recipe, part)
    again = back.layers if recipe.model.recompute_granularity == "full" else 0
    stream = _tokens(recipe, part, samples) * recipe.model.hidden_size * _compute(recipe)
    sums = 2 * layers + part.embedding + back.inputs + again
    if not part.sequence_parallel:
        yield from axis.all_reduce("activations", stream, sums)
        return
    gathers = 2 * layers + part.output + back.outputs + 2 * again
    gathers += _gathered_again(recipe, part)
    yield from axis.all_gather("activations", stream // part.tensor, gathers)
    yield from axis.reduce_scatter("activations", stream // part.tensor, sums)
    shard = stream // part.tensor // _compute(recipe) * input_shard_bytes(recipe)
    linears = linears_of(recipe, part)
    inputs = sum(keeps_input_shard(recipe, part, linear) for linear in linears)
    yield from axis.all_gather("activations", shard, inputs)


class _BackwardPasses(NamedTuple):
    """How often a backward pass of a part reaches what it may: with adapters, nothing before the first of them."""

    layers: int
    attention: int
    inputs: int
    """Inputs of attention, MLP and output layer."""
    outputs: int
    """Outputs of attention, MLP and embedding."""


def _backward_passes(recipe: Recipe, part: Part) -> _BackwardPasses:
    first = _first_trained(recipe)
    starts = [4 * layer for layer in part.layers]
    attention = sum(first <= at for at in starts)
    of_layers = sum((first < at) + (first < at + 2) for at in starts)
    of_output = int(part.output and first < 4 * recipe.model.num_layers)
    outputs = sum((first <= at + 1) + (first <= at + 3) for at in starts)
    of_embedding = int(part.embedding and first < 0)
    return _BackwardPasses(
        sum(first <= at + 3 for at in starts),
        attention,
        of_layers + of_output,
        outputs + of_embedding,
    )


def _first_trained(recipe: Recipe) -> int:
    """The number of the linear layer with the first adapter, in the order of the forward pass; -1 if all weights are trained."""
    if not recipe.lora.enabled:
        return -1
    names = [linear.name for linear in linear_layers(transformer_config(recipe))]
    return names.index(adapted_projections(recipe)[0].module)


def _gathered_again(recipe: Recipe, part: Part) -> int:
    """Inputs of column-parallel layers that selective recomputation does not keep."""
    model = recipe.model
    if model.recompute_granularity != "selective" or model.layernorm_placement == "post":
        return 0
    names = ("linear_qkv", "linear_fc1")
    columns = [linear for linear in linears_of(recipe, part) if linear.name.endswith(names)]
    return sum(
        "wgrad" not in linear.left_out
        and not (linear.gemms[2] and not keeps_input(recipe, linear))
        and not keeps_input_shard(recipe, part, linear)
        for linear in columns
    )


def _keys_and_values(recipe: Recipe, part: Part, samples: int) -> Iterator[Sent]:
    """In each layer an all-gather over context ranks, another one if it is recomputed, and a
    reduce-scatter of the gradients. Layers before the first adapter have no gradients."""
    axis = Axis("context", part.context)
    back = _backward_passes(recipe, part)
    again = back.layers if recipe.model.recompute_granularity == "full" else 0
    groups = recipe.model.num_query_groups // part.tensor
    channels = 2 * groups * recipe.model.head_dim
    shard = _tokens(recipe, part, samples) * channels * _compute(recipe)
    yield from axis.all_gather("keys and values", shard, len(part.layers) + again)
    yield from axis.reduce_scatter("keys and values", shard, back.attention)


def _stage_outputs(recipe: Recipe, part: Part, samples: int) -> Iterator[Sent]:
    """For each chunk of layers its output and the gradient of its input, unless it is an end."""
    axis = Axis("pipeline", recipe.trainer.strategy.pipeline_model_parallel_size)
    tokens = _tokens(recipe, part, samples)
    if part.sequence_parallel:
        tokens //= part.tensor
    data = tokens * recipe.model.hidden_size * _compute(recipe)
    yield from axis.send("stage outputs", data, 2 * part.chunks - part.embedding - part.output)


def _tokens(recipe: Recipe, part: Part, samples: int) -> int:
    return samples * recipe.model.seq_length // part.context


def _compute(recipe: Recipe) -> int:
    return int(ELEMENT_BYTES[recipe.precision.compute])


def _data_parallel(
    recipe: Recipe,
    part: Part,
    linears: list[PlannedLinear],
    backend: str,
    passes: int,
    rank: int | None,
) -> Iterator[Sent]:
    """Gradients and weights over the ranks with the same parameters."""
    shard = part.shard
    if by_fsdp2(recipe, part.state, part.shards, backend):
        yield from _fully_sharded(recipe, part, linears, backend, passes)
        return
    axis = _same_parameters(part)
    shapes = trained_shapes(recipe, part)
    columns = parameter_columns(part.state, linears, shapes)
    sizes = {
        name: prod(shape) * ELEMENT_BYTES[columns[name]["comm"]] for name, shape in shapes.items()
    }
    if shard in ("none", "zero1"):  # MS-AMP's two hops of FP8 send as much as an all-reduce
        yield from axis.all_reduce("gradients", sum(sizes.values()))
    if shard == "none":
        return
    owner, _ = zero_owners(recipe, part, linears)
    if shard == "zero2":
        loads = _loads(sizes, owner, axis.ranks)
        own = min(loads) if rank is None else loads[rank]
        yield from axis.send("gradients", sum(loads) - own)
    in_fp8 = {f"{linear.name}.weight" for linear in linears if linear.fp8}
    if not part.state.fp8_weights:
        in_fp8 = set()
    weights = {
        name: prod(shape)
        * (ELEMENT_BYTES[columns[name]["weight"]] + _beside(recipe, name in in_fp8))
        for name, shape in shapes.items()
    }
    # Messages are as long as those of the rank with the largest load.
    yield from axis.all_gather("weights", max(_loads(weights, owner, axis.ranks)))


def _fully_sharded(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str, passes: int
) -> Iterator[Sent]:
    """FSDP2 gathers weights a layer at a time, and sums gradients so.

    The root is embedding, last norm and output layer. Under zero1 weights and gradients are sent
    once a step. Under zero2 and fsdp gradients are summed in each backward pass. Under fsdp layers
    are gathered in each forward and backward pass, the root in each forward pass, or once a step in
    a pipeline. Replica groups (HSDP) sum their shards once a step, or in each pass if the sums are
    narrower than float32. LoRA gathers frozen weights under fsdp only.
    """
    precision = recipe.precision
    shard, ranks = part.shard, shard_degree(recipe, part)
    axis = _same_parameters(part)._replace(ranks=ranks)
    replicas = Axis("replicate", part.groups)
    if shard == "none":
        replicas = _same_parameters(part)
    comm = ELEMENT_BYTES[part.state.linear["comm"]]
    sums = passes if shard in ("zero2", "fsdp") else 1
    in_groups = comm
    if shard in ("zero1", "zero2"):
        in_groups = ELEMENT_BYTES[part.state.other["weight_grad"]]
    once = in_groups == ELEMENT_BYTES["fp32"] and precision.storage.accumulate == "wide"
    in_pipeline = recipe.trainer.strategy.pipeline_model_parallel_size > 1
    of_root = 1 if in_pipeline else passes

    trained = trained_shapes(recipe, part)
    shapes, fp8 = trained, part.state.fp8_weights
    if shard == "fsdp":
        shapes = {**local_shapes(recipe, part), **trained}
        fp8 = gathered(precision, backend) == "fp8"
    in_fp8 = {f"{linear.name}.weight" for linear in linears if fp8 and linear.fp8}
    columns = parameter_columns(part.state, linears, shapes)
    weights, gradients = Counter[str](), Counter[str]()
    for name, shape in shapes.items():
        elements = shard_elements(part.state, name, shape, ranks)
        each = ELEMENT_BYTES[
            part.state.gathered_dtype if shard == "fsdp" else columns[name]["weight"]
        ]
        if name in in_fp8:
            each = ELEMENT_BYTES["fp8"] + _beside(recipe, True)
        weights[fsdp_group(name)] += int(elements * each)
        gradients[fsdp_group(name)] += elements if name in trained else 0
    for layer, size in weights.items():
        gathers = (2 * passes if layer else of_root) if shard == "fsdp" else 1
        yield from axis.all_gather("weights", size, gathers)
        if elements := gradients[layer]:
            yield from axis.reduce_scatter("gradients", elements * comm, sums)
            yield from replicas.all_reduce("gradients", elements * in_groups, 1 if once else sums)


def _tied_embedding(recipe: Recipe, part: Part, backend: str) -> Iterator[Sent]:
    """The gradient of a tied embedding over the two pipeline stages that have it."""
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    if not recipe.model.share_embeddings_and_output_weights or stages == 1:
        return
    if recipe.lora.enabled:  # it is frozen
        return
    if not part.embedding and not part.output:
        return
    rows, width = local_shapes(recipe, part)["embedding.weight"]
    each = ELEMENT_BYTES[part.state.other["weight_grad"]]
    if by_fsdp2(recipe, part.state, part.shards, backend):
        each = ELEMENT_BYTES["fp32"]
        rows = shard_rows(rows, shard_degree(recipe, part))
    yield from Axis("pipeline", stages).send("gradients", rows * width * each)


def _adapter_gradients(recipe: Recipe, part: Part, backend: str) -> Iterator[Sent]:
    """The gradients of adapter matrices that each tensor-parallel rank has whole, in float32."""
    if not recipe.lora.enabled or part.tensor == 1:
        return
    ranks = shard_degree(recipe, part) if by_fsdp2(recipe, part.state, part.shards, backend) else 1
    elements = sum(
        shard_elements(part.state, name, shape, ranks)
        for name, shape in trained_shapes(recipe, part).items()
        if split_dimension(recipe, name) is None
    )
    yield from Axis("tensor", part.tensor).all_reduce("gradients", ELEMENT_BYTES["fp32"] * elements)


def _same_parameters(part: Part) -> Axis:
    """The ranks with the same parameters as `part`, or of these the ranks that split them."""
    axes = {"data": part.data // part.groups, "context": part.context}
    name = " x ".join(axis for axis, ranks in axes.items() if ranks > 1)
    return Axis(name or "data", part.shards)


def _beside(recipe: Recipe, in_fp8: bool) -> float:
    """Bytes for each element of an FP8 weight beside its byte: scales, and another copy for dgrad
    if that has other scales."""
    return fp8_weight_extra_bytes(recipe) if in_fp8 else 0.0


def _loads(sizes: dict[str, float], owner: dict[str, int], ranks: int) -> list[float]:
    """Bytes of the tensors that each rank owns."""
    loads = [0.0] * ranks
    for name, count in sizes.items():
        loads[owner[name]] += count
    return loads
