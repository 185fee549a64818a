"""Collectives of a training step: what they carry, over which axis of the layout, and the bytes that one rank sends in them.

Bytes are those that leave a rank on a ring, as training counts them (training/distributed/traffic.py): of an all-reduce over N
ranks 2 (N - 1) / N of the data, of an all-gather N - 1 times a rank's part, of a reduce-scatter all parts but one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning.layer_plan import adapted
from fp8cfg.planning.layout import ROW, Part, shard_degree
from fp8cfg.planning.linear_memory import CODEC
from fp8cfg.planning.peak_memory import linears_of
from fp8cfg.planning.state_shards import shard_rows
from fp8cfg.schema.fp8 import FP8, per_row, transforms, weights_2d
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALE_BYTES, SCALINGS, Tile
from fp8cfg.schema.storage import fp8_weights

NUMBER = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Collective:
    """So many collectives of one kind, `how`, that carry `what` over the ranks of `axis`, and the `bytes` that a rank sends in all
    of them."""

    axis: str
    what: str
    how: str
    count: int
    bytes: int

    def times(self, n: int) -> Collective:
        """The same, so often."""
        return replace(self, count=self.count * n, bytes=self.bytes * n)


class Axis(NamedTuple):
    """The `ranks` that take part, and their name."""

    name: str
    ranks: int

    def all_reduce(self, what: str, data: int, count: int = 1) -> Iterator[Collective]:
        """Sums or maxima of `data` bytes, so many."""
        yield from self._sent(what, "all-reduce", 2 * (self.ranks - 1) * data // self.ranks, count)

    def all_reduce_amaxes(self, numbers: int, count: int = 1) -> Iterator[Collective]:
        """Maxima of so many amaxes in each of `count` messages; none of no amaxes."""
        yield from self.all_reduce("amaxes", NUMBER * numbers, count * bool(numbers))

    def all_gather(self, what: str, part: int, count: int = 1) -> Iterator[Collective]:
        """Gathers of parts of `part` bytes each, so many."""
        yield from self._sent(what, "all-gather", (self.ranks - 1) * part, count)

    def all_gather_in(self, what: str, part: int, count: int) -> Iterator[Collective]:
        """Gathers of parts of `part` bytes in all of so many messages."""
        if self.ranks > 1 and count:
            yield Collective(self.name, what, "all-gather", count, (self.ranks - 1) * part)

    def reduce_scatter(self, what: str, part: int, count: int = 1) -> Iterator[Collective]:
        """Sums of which every rank keeps `part` bytes, so many."""
        yield from self._sent(what, "reduce-scatter", (self.ranks - 1) * part, count)

    def all_to_all(self, what: str, others: int, count: int = 1) -> Iterator[Collective]:
        """Exchanges in which this rank has `others` bytes for other ranks, in all of them."""
        if self.ranks > 1 and count:
            yield Collective(self.name, what, "all-to-all", count, others)

    def send(self, what: str, data: int, count: int = 1) -> Iterator[Collective]:
        """Messages to one other rank."""
        yield from self._sent(what, "send", data, count)

    def _sent(self, what: str, how: str, each: int, count: int) -> Iterator[Collective]:
        if self.ranks > 1 and count:
            yield Collective(self.name, what, how, count, each * count)


def same_parameters(part: Part) -> Axis:
    """The ranks with the same parameters as `part`, or of these the ranks that split them."""
    axes = {"data": part.data // part.groups, "context": part.context}
    return Axis(
        " x ".join(axis for axis, ranks in axes.items() if ranks > 1) or "data", part.shards
    )


def over_shards(recipe: Recipe, part: Part) -> Axis:
    """The ranks of these that have other shards of FSDP2's, and this one."""
    return same_parameters(part)._replace(ranks=shard_degree(recipe, part))


def together(every: Iterable[Collective]) -> list[Collective]:
    """One of each axis, what it carries, and kind, in the order in which they come."""
    found: dict[tuple[str, str, str], Collective] = {}
    for one in every:
        key = one.axis, one.what, one.how
        before = found.get(key, replace(one, count=0, bytes=0))
        found[key] = replace(one, count=before.count + one.count, bytes=before.bytes + one.bytes)
    return list(found.values())


def gathered_bytes(fp8: FP8, shape: tuple[int, ...], ranks: int, part_of_rows: bool = False) -> int:
    """Bytes that a rank gives of a weight of `shape` [out, in]: its rows, for dgrad once more where that reads other scales, and
    the scales of tiles that it alone has. With `part_of_rows` other ranks have the other columns of a weight.
    """
    (rows, columns), sent, scale = shape, 0, SCALE_BYTES[SCALINGS[fp8.scaling].scale]
    for tile in _tiles(fp8):
        sent += shard_rows(rows, ranks) * columns
        if tile is not None and not _cut(tile, rows, ranks, part_of_rows):
            sent += scale * shard_rows(rows // tile[0], ranks) * -(-columns // (tile[1] or columns))
    return sent


def amaxes_of_cut_tiles(
    fp8: FP8, shape: tuple[int, ...], ranks: int, part_of_rows: bool = False
) -> int:
    """The amaxes of a weight of `shape` [out, in] that are the largest over its shards: of all of it, and of tiles of which several
    ranks have parts."""
    (rows, columns), numbers = shape, int(SCALINGS[fp8.scaling].two_levels)
    for tile in _tiles(fp8):
        if tile is None:
            numbers += 1
        elif _cut(tile, rows, ranks, part_of_rows):
            numbers += -(-rows // (tile[0] or rows)) * -(-columns // (tile[1] or columns))
    return numbers


def _tiles(fp8: FP8) -> list[Tile | None]:
    """The tiles of each matrix of a weight."""
    each = [
        SCALINGS[fp8.scaling].tile(axis, fp8.granularity, square=weights_2d(fp8)) for axis in (1, 0)
    ]
    return each[:1] if each[0] == each[1] else each


def _cut(tile: Tile, rows: int, ranks: int, part_of_rows: bool) -> bool:
    """As `ShardPlace.cuts`."""
    return tile[0] == 0 or (part_of_rows and tile[1] == 0) or rows % (tile[0] * ranks) != 0


OPERANDS = {
    "input": {"fprop": 1, "wgrad": 0},
    "weight": {"fprop": 1, "dgrad": 0},
    "grad_output": {"dgrad": 1, "wgrad": 0},
}
"""The operands of a linear layer: the products that read each, and which dimension these contract."""


def operand_split(linear: PlannedLinear, operand: str) -> int | None:
    """The dimension of an `operand` of `linear`, a row- or column-parallel layer, that tensor-parallel ranks split."""
    row = linear.name.endswith(ROW)
    return {
        "input": 1 if row else None,
        "weight": 1 if row else 0,
        "grad_output": None if row else 1,
    }[operand]


def of_operand(fp8: FP8, linear: PlannedLinear, operand: str, tokens: int = 0) -> int:
    """The amaxes, in one message, of an `operand` of `linear`, of so many `tokens`, that is quantized for all of its products in
    FP8: that of all of it, or those of its rows or columns that ranks split; 0 where each rank has whole ones, and under delayed
    scaling, whose amaxes are sent once a step."""
    scaling, dim = SCALINGS[fp8.scaling], operand_split(linear, operand)
    axes = {axis for product, axis in OPERANDS[operand].items() if linear.products[product]}
    if dim is None or not axes or scaling.history:
        return 0
    if scaling.two_levels:  # of the tensor, and of its Hadamard transform
        return 2 if operand != "weight" and transforms(fp8) and axes == {0, 1} else 1
    if scaling.block:
        return 0
    if not per_row(fp8):
        return 1
    return (_rows(linear) if operand == "weight" else tokens) if dim in axes else 0


def of_written_weight(fp8: FP8, linear: PlannedLinear) -> int:
    """The amaxes of a weight that is written in FP8 after a step, for products that contract either dimension."""
    scaling = SCALINGS[fp8.scaling]
    if scaling.block and not scaling.two_levels:
        return 0
    return _rows(linear) if per_row(fp8) else 1


def _rows(linear: PlannedLinear) -> int:
    """The rows, or columns, of a weight that lie across the ranks that split it."""
    return linear.out_features if operand_split(linear, "weight") == 1 else linear.in_features


def of_pass(recipe: Recipe, part: Part, samples: int) -> Iterator[Collective]:
    """What a rank of `part` sends in a forward and a backward pass over that many samples: residual streams, keys and values. The
    numbers of a token or of a tensor, as losses and amaxes, are those of `numbers`."""
    yield from _activations(recipe, part, samples)
    yield from _keys_and_values(recipe, part, samples)
    yield from _stage_outputs(recipe, part, samples)


def numbers(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], samples: int, kept: bool
) -> Iterator[Collective]:
    """The rest of it, over the ranks that share matrices: of a token the loss over split logits (its largest logit, and in one
    message the sum of exponentials and the logit of the target) and the mean squares of norms over all heads; of a tensor its
    amaxes, where scales are made of them in each pass. Quantized weights that are `kept` are those of another pass.
    """
    axis, m, again = Axis("tensor", part.tensor), recipe.model, _recomputed(recipe)
    tokens = samples * m.seq_length // part.context
    if part.output:
        yield from axis.all_reduce("losses and norms", NUMBER * tokens)
        yield from axis.all_reduce("losses and norms", NUMBER * 2 * tokens)
    if (
        m.qk_layernorm == "hidden"
    ):  # of queries and keys; selective recomputation computes norms again too
        means, passes = (
            2 if m.normalization == "LayerNorm" else 1,
            (2 if m.recompute_granularity == "none" else 3),
        )
        yield from axis.all_reduce(
            "losses and norms", NUMBER * tokens, 2 * means * passes * len(part.layers)
        )
    of_passes = {
        "input": 1 + again,
        "weight": 0 if kept or fp8_weights(recipe.precision) else 1 + again,
        "grad_output": 1,
    }
    for linear, operand in product((linear for linear in linears if linear.fp8), of_passes):
        count = (
            min(1, of_passes[operand]) if linear.name == "output_layer" else of_passes[operand]
        )  # it is not recomputed
        yield from axis.all_reduce_amaxes(of_operand(recipe.fp8, linear, operand, tokens), count)


def _activations(recipe: Recipe, part: Part, samples: int) -> Iterator[Collective]:
    """Sums of outputs of attention, MLP and embedding in the forward pass, of the gradients of their inputs and that of the output
    layer in the backward pass, each an all-reduce; under sequence parallelism each is a reduce-scatter, to which an all-gather of
    the same size in the other pass belongs. A layer that is recomputed stops before its last sum, of which nothing is kept;
    selective recomputation gathers inputs again that are not kept quantized."""
    axis, again, layers = Axis("tensor", part.tensor), _recomputed(recipe), len(part.layers)
    stream = (
        samples
        * recipe.model.seq_length
        // part.context
        * recipe.model.hidden_size
        * _compute(recipe)
    )
    sums = part.embedding + layers * (2 + again) + layers * 2 + part.output
    if not part.sequence_parallel:
        yield from axis.all_reduce("activations", stream, sums)
        return
    # Inputs; gradients of outputs, of the embedding's too.
    gathers = (
        layers * 2 * (1 + again)
        + part.output
        + layers * 2
        + part.embedding
        + _gathered_again(recipe, part)
    )
    yield from axis.all_gather("activations", stream // part.tensor, gathers)
    yield from axis.reduce_scatter("activations", stream // part.tensor, sums)


def _keys_and_values(recipe: Recipe, part: Part, samples: int) -> Iterator[Collective]:
    """In each layer an all-gather of its keys and values, once more where the layer is recomputed, and a reduce-scatter of the
    gradients of all of them."""
    axis, m = Axis("context", part.context), recipe.model
    own = (
        2
        * samples
        * (m.seq_length // part.context)
        * (m.num_query_groups // part.tensor)
        * m.head_dim
        * _compute(recipe)
    )
    again = len(part.layers) - _without_gradients(recipe) if _recomputed(recipe) else 0
    yield from axis.all_gather("keys and values", own, len(part.layers) + again)
    yield from axis.reduce_scatter(
        "keys and values", own, len(part.layers) - _without_gradients(recipe, "linear_qkv")
    )


def _stage_outputs(recipe: Recipe, part: Part, samples: int) -> Iterator[Collective]:
    """Of each chunk of layers the residual stream after it and its gradient before it, where there is another chunk."""
    tokens = (
        samples
        * recipe.model.seq_length
        // part.context
        // (part.tensor if part.sequence_parallel else 1)
    )
    sent = 2 * part.chunks - part.embedding - part.output
    yield from Axis("pipeline", recipe.trainer.strategy.pipeline_model_parallel_size).send(
        "stage outputs", tokens * recipe.model.hidden_size * _compute(recipe), sent
    )


def _without_gradients(recipe: Recipe, name: str = "") -> int:
    """The first layers with frozen weights of which no number needs a gradient: those before the first adapter, or before that of
    the linear layer `name`, where it comes before all others of its layer."""
    if not recipe.lora.enabled:
        return 0
    modules = [p.module.split(".") for p in adapted(recipe)]
    first = min(int(m[1]) if m[0] == "layers" else recipe.model.num_layers for m in modules)
    here = any(m[:2] == ["layers", str(first)] and m[-1] == name for m in modules)
    return first + (bool(name) and not here and first < recipe.model.num_layers)


def _gathered_again(recipe: Recipe, part: Part) -> int:
    """Inputs of column-parallel layers that selective recomputation does not keep."""
    if (
        recipe.model.recompute_granularity != "selective"
        or recipe.model.layernorm_placement == "post"
    ):
        return 0
    column = [
        linear
        for linear in linears_of(recipe, part)
        if linear.name.endswith(("linear_qkv", "linear_fc1"))
    ]
    return sum("wgrad" not in linear.left_out and not linear.gemms[2] for linear in column)


def _recomputed(recipe: Recipe) -> int:
    return int(recipe.model.recompute_granularity == "full")


def _compute(recipe: Recipe) -> int:
    return int(CODEC[recipe.precision.compute])
