"""Sharded pass memory: whole weights and gradients that a backward pass has where FSDP2 shards them, as torch 2.13 frees them.

FSDP2 gathers the weights and reduces the gradients of a group of parameters at once (FSDPParamGroup). Each layer is one; embedding,
last norm and output layer are the root's, which is reduced last:

    weights    of all groups, each until its backward pass has ended in the last pass of a step. fsdp: of the root, of the layer
               whose backward pass runs, and of the next one, which is prefetched
    gradients  of all groups where those of several microbatches are reduced at once; else of the output layer, and of the layer
               whose backward pass runs
    reduction  once a layer's backward pass has ended and its weights are freed, its gradients are copied to be sent, and freed but
               for the last parameter's, which goes after the sum (foreach_reduce); the copy is kept until the next reduction. gloo
               makes one more

Where there is one shard (none) nothing is gathered or sent in parts, and torch divides a copy of what is summed. Groups of ranks
keep the sums of a pass until it ends, beside the shards that they are cast to or added to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from fp8cfg.backends import registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning.layout import (
    Part,
    local_shapes,
    microbatches,
    shard_degree,
    summed_at_the_end,
    vectors,
)
from fp8cfg.planning.linear_memory import CODEC, held_beside, stored_bytes
from fp8cfg.planning.state_shards import (
    owner_of,
    parameter_columns,
    shard_rows,
    stored_gradients,
    summed_with,
    trained_shapes,
)
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.storage import (
    PER_TENSOR,
    SCALED,
    against_fp8_gather,
    gathered,
    gathers_params,
)
from fp8cfg.schema.tables import wrapped


def gather_line(recipe: Recipe, part: Part, backend: str) -> str:
    """What weights are gathered in over the ranks that share the parameters of `part`, and why not in FP8 where fp8.params asks for that;
    empty where that is no question."""
    p = recipe.precision
    if not by_fsdp2(recipe, part.state, part.shards, backend) or part.shard == "none":
        return ""
    if part.shard != "fsdp":
        if recipe.lora.enabled:
            return "frozen weights are whole on each rank; adapters are gathered once a step"
        if not part.state.fp8_weights:
            codec = part.state.linear["weight"]
            return (
                ""
                if codec == part.state.gathered_dtype
                else f"weights of linear layers are gathered in {codec} once a step"
            )
        two = ", two matrices of each: dgrad reads other scales" if held_beside(recipe) >= 1 else ""
        return f"weights are gathered in fp8 once a step{two}"
    said = f"weights are split over the ranks and gathered in {gathered(p, backend)}"
    if gathered(p, backend) == "fp8":
        cast = (
            f", as {backend} casts them, whatever fp8.params is; storage.gather={p.compute} leaves"
            " them in that"
        )
        return wrapped(said + cast * (capabilities(backend).fp8_gather == "cast"), more="  ")
    if not (p.fp8.enabled and p.fp8.params and p.storage.gather == "auto"):
        return said
    return wrapped(f"{said}: {against_fp8_gather(p, backend)[0].partition(';')[0]}", more="  ")


def root_bytes(
    recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int
) -> int:
    """Of the weights that stay gathered from forward to backward pass: all that are in no layer."""
    return int(_root(recipe, part, linears, parameters) * CODEC[recipe.precision.compute])


def _root(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int) -> int:
    """The parameters of embedding, last norm and output layer."""
    matrices = [q.in_features * q.out_features for q in linears if q.name != "output_layer"]
    return (
        parameters
        - sum(-(-n // part.tensor) for n in matrices)
        - len(part.layers) * vectors(recipe, part)
    )


MESSAGE = 32 * 1024 * 1024
"""Elements of a message, at most (training/distributed/shards.py)."""

WAITING, TOGETHER = 1 << 26, 4
"""Elements and tensors of gradients, at most, that wait there in float32 until they are stored together (optim/low_bit)."""


def after_backward(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], device: str, backend: str
) -> int:
    """The most that gradients take after the last backward pass to be summed, or weights to be handed round after the step."""
    tied = _tied(recipe, part, backend)
    if part.shards == 1 or by_fsdp2(recipe, part.state, part.shards, backend):
        return tied
    shapes, shard = trained_shapes(recipe, part), part.shard
    columns, widest = parameter_columns(part.state, linears, shapes), 0
    owner = owner_of(recipe, part, linears)[0] if shard != "none" else {}
    stored = stores_early(recipe, part, linears)
    for comm in {each["comm"] for each in columns.values()}:
        there = {
            name: columns[name]["weight_grad"] for name in shapes if columns[name]["comm"] == comm
        }
        sizes = {name: prod(shapes[name]) for name in there}
        copied = sum(
            sizes[name]
            for name, codec in there.items()
            if codec != comm or (codec in SCALED and not stored)
        )
        widest = max(widest, _summed(part, comm, sizes, copied, owner if shard == "zero2" else {}))
    handed = _most(
        (owner[name], int(prod(shapes[name]) * CODEC[columns[name]["weight"]])) for name in owner
    )
    return max(tied, widest, (1 + part.shards) * min(handed, MESSAGE // part.shards))


def stores_early(recipe: Recipe, part: Part, linears: list[PlannedLinear]) -> bool:
    """Whether gradients that are stored with scales are so before ranks sum them (training/distributed/gradient_sync.py)."""
    every = parameter_columns(part.state, linears, trained_shapes(recipe, part)).values()
    return all(
        each["comm"] == each["weight_grad"] or each["weight_grad"] not in SCALED for each in every
    )


def waiting(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], backend: str) -> int:
    """Bytes of float32 gradients that wait until several, each with one scale, are stored together: of a layer where other ranks
    have parts, else on a GPU."""
    alone = registry.capabilities(backend).own_state or recipe.storage.accumulate == "stored"
    if (
        alone
        or part.state.linear["weight_grad"] not in PER_TENSOR
        or microbatches(recipe, part) > 1
    ):
        return 0
    if part.tensor == 1:
        largest = sorted((p.in_features * p.out_features for p in linears), reverse=True)
        return 4 * min(WAITING, sum(largest[:TOGETHER]))
    shapes, layers = trained_shapes(recipe, part), Counter[str]()
    for name in stored_gradients(recipe, part, linears):
        layers[summed_with(name)] += 4 * prod(shapes[name])
    return max(layers.values(), default=0)


def _summed(
    part: Part, comm: str, sizes: dict[str, int], copied: int, owner: dict[str, int]
) -> int:
    """Bytes of messages in `comm` that sum gradients of these `tile_shape`, of which so many elements are `copied` into that before:
    what is sent and received in one, and the float32 sums of all; of an `owner` those of its own.
    """
    each, total = CODEC[comm], sum(sizes.values())
    message = min(MESSAGE, total)
    if comm not in SCALED and not owner:
        return int(each * (message + min(message, copied)))
    own = (
        _most((owner[name], count) for name, count in sizes.items())
        if owner
        else -(-total // part.shards)
    )
    received = min(part.shards * own, MESSAGE)
    decoded = 2 * min(own, max(sizes.values()))
    return int(each * (copied + message + received) + 4 * (own + decoded))


def _tied(recipe: Recipe, part: Part, backend: str) -> int:
    """Bytes of the gradient of a tied embedding that comes from the other stage that has it."""
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    if (
        stages == 1
        or not recipe.model.share_embeddings_and_output_weights
        or not (part.embedding or part.output)
    ):
        return 0
    rows, width = local_shapes(recipe, part)["embedding.weight"]
    if by_fsdp2(recipe, part.state, part.shards, backend):
        return shard_rows(rows, shard_degree(recipe, part)) * width * 4
    return int(rows * width * CODEC[part.state.other["weight_grad"]])


def _most(sizes: Iterable[tuple[int, int]]) -> int:
    """The largest load of an owner, of tensors each with its owner and size; 0 of none."""
    loads: dict[int, int] = {}
    for owner, count in sizes:
        loads[owner] = loads.get(owner, 0) + count
    return max(loads.values(), default=0)


class _Group(NamedTuple):
    """Bytes of a group's gathered weights, and the elements of its gradients: of all, of the last parameter."""

    weights: float
    elements: int
    last: int


class ShardedPass:
    """Bytes beyond what stays from step to step, activations, and the whole gradients of all groups where these `adds_up`. A
    gradient is made in `each` bytes an element. Groups are numbered in the order of their backward passes, the root's last.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: str,
        part: Part,
        linears: list[PlannedLinear],
        backend: str,
        each: float,
    ) -> None:
        passes = microbatches(recipe, part)
        shard, comm = part.shard, CODEC[part.state.linear["comm"]]
        zero2, self.fsdp, self.shards, self.each = (
            shard == "zero2",
            shard == "fsdp",
            shard_degree(recipe, part),
            each,
        )
        self.adds_up = summed_at_the_end(recipe, part)
        """Whether all microbatches of a step are added up in whole gradients, and reduced in the last pass."""
        self.fresh = 0.0 if self.adds_up else each
        """Bytes an element of a gradient that is not there before the backward pass of its group."""
        self.copy = comm if shard in ("none", "fsdp") else each
        """Bytes an element of the copy that is reduced, and of the sum."""
        self.cast = 0.0 if comm == self.copy else comm
        """Bytes an element of what is sent in place of the copy, in another dtype (training/distributed/fsdp.py)."""
        self.gloo = (self.cast or self.copy) if device == "cpu" or self.shards == 1 else 0.0
        """Bytes an element of gloo's own copy, or of that which torch divides where there is one shard (torch 2.13)."""
        stores = (
            part.state.linear["weight_grad"] in SCALED and not self.adds_up
        )  # or they are in place of what was added up
        passed_on = self.copy < 4 or recipe.storage.accumulate == "stored" or stores
        self.keeps_sums = (part.groups > 1 or shard == "none") and passed_on
        """Whether sums of a group of ranks stay until the pass ends, beside what is made of them."""
        self.pipeline = recipe.trainer.strategy.pipeline_model_parallel_size > 1
        self.reshards = not (self.fsdp or self.pipeline or (zero2 and passes > 2))
        """Whether a group's weights are freed after its backward pass, in the widest pass of a step under zero1 and zero2."""
        self.two_passes = zero2 and passes > 1
        """Where it reshards: whether it does so in the second of two passes alone, which finds all shards of gradients."""
        self.prefetches = self.shards > 1 and len(part.layers) > part.chunks
        self.groups = _groups(recipe, part, linears, backend)
        shapes = trained_shapes(recipe, part) if part.output else {}
        vocabulary = (
            prod(shape)
            for name, shape in shapes.items()
            if name in ("output_layer.weight", "embedding.weight")
        )
        self.head = self.fresh * max(vocabulary, default=0)
        """Bytes of the output layer's gradient, which is there from the start to the reduction of the root."""
        gathers = (
            not (self.fsdp or self.pipeline) and passes == 1 and self.shards > 1
        )  # in the widest pass
        self.received = self.groups[0].weights if gathers else 0.0
        """Bytes in which the last layer's weights came from the ranks, which are there until the forward pass ends. Under fsdp the
        backward pass begins with as many."""
        self.start = 0.0
        """Bytes at the backward pass of the output layer, beside which the last layer's weights are prefetched."""
        if self.fsdp:
            self.start = (
                self.groups[-1].weights
                + (self.shards > 1 and not self.pipeline) * self.groups[0].weights
            )

    def back(self, number: int) -> float:
        """In the backward pass of that group."""
        layer = number < len(self.groups) - 1
        weights = (
            self.groups[-1].weights
            + layer * (self.groups[number].weights + self._prefetched(number))
            if self.fsdp
            else 0
        )
        copied = self.copy * self.groups[number - 1].elements if number else 0
        return weights - self._resharded(number, number) + self._summed(number) + self.head + copied

    def summing(self, number: int) -> float:
        """At most from the end of that group's backward pass to the end of its reduction."""
        group, root = self.groups[number], number == len(self.groups) - 1
        share, copy = group.elements / self.shards, self.copy * group.elements
        outer = self.groups[-1].weights * (
            self.pipeline or not root
        )  # which stages free after all passes
        weights = outer + self._prefetched(number) if self.fsdp else 0
        there = weights - self._resharded(number + 1, number) + self._summed(number)
        there += self.fresh * group.elements + (0 if root else self.head)
        freed = self.each * (group.elements - (group.last if self.shards > 1 else 0))
        during = self.cast * (group.elements + share) + self.gloo * group.elements
        return there + max(
            copy, copy - freed + self.copy * share + max(during, 4 * share if self.copy < 4 else 0)
        )

    def _prefetched(self, number: int) -> float:
        """Bytes of the weights of the layer after that one, which are gathered meanwhile."""
        return (
            self.groups[number + 1].weights
            if self.prefetches and number + 2 < len(self.groups)
            else 0
        )

    def _resharded(self, number: int, summed: int) -> float:
        """Bytes of the weights of the groups before that one, which are freed. The first of two passes has them, and shards of the
        gradients of so many `summed` groups alone: no more is gone than the other groups' shards take.
        """
        if not self.reshards:
            return 0
        weights = sum(group.weights for group in self.groups[:number])
        return (
            min(weights, 4 * self._elements(summed, None) / self.shards)
            if self.two_passes
            else weights
        )

    def _summed(self, number: int) -> float:
        """Bytes that the sums of the groups before that one leave, less those of the gradients that they free."""
        count = self._elements(0, number) / self.shards
        return count * (self.copy * self.keeps_sums + (4 - self.each * self.shards) * self.adds_up)

    def _elements(self, first: int, end: int | None) -> int:
        return sum(group.elements for group in self.groups[first:end])


def _groups(recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str) -> list[_Group]:
    """The layers of `part`, the last first, and the root."""
    p, fsdp = recipe.precision, part.shard == "fsdp"
    beside = held_beside(recipe) if gathers_params(p, backend) or not fsdp else 0
    in_fp8 = gathered(p, backend) == "fp8" if fsdp else part.state.fp8_weights
    trained = trained_shapes(recipe, part)
    held = {f"{q.name}.weight": CODEC["fp8"] + beside for q in linears if in_fp8 and q.fp8}
    shapes = {**local_shapes(recipe, part), **trained} if fsdp else trained
    columns, none = parameter_columns(part.state, linears, shapes), _Group(0, 0, 0)
    found: dict[str, _Group] = {}
    for name, shape in shapes.items():
        weights, elements, last = found.get(summed_with(name), none)
        count = prod(shape)
        own = count if name in trained else 0
        each = held.get(name, CODEC[p.compute if fsdp else columns[name]["weight"]])
        found[summed_with(name)] = _Group(weights + count * each, elements + own, own or last)
    return [found.get(f"layers.{layer}", none) for layer in reversed(part.layers)] + [
        found.get("", none)
    ]


class SinglePass:
    """Bytes at the moments of the backward pass beyond what stays from step to step and activations, where all gradients are taken
    to stay: of those that are not there yet, below 0. Groups are numbered as in ShardedPass."""

    adds_up = False

    def __init__(self, recipe: Recipe, part: Part, linears: Sequence[PlannedLinear]) -> None:
        shapes, found = trained_shapes(recipe, part), Counter[str]()
        columns, stored = (
            parameter_columns(part.state, linears, shapes),
            stored_gradients(recipe, part, linears, by_rows=False),
        )
        codecs = {
            name: (
                each["weight_grad"]
                if each["weight_grad"] not in SCALED
                else stored.get(name, "fp32")
            )
            for name, each in columns.items()
        }
        sizes = {name: stored_bytes(codecs[name], prod(shape)) for name, shape in shapes.items()}
        for name, count in sizes.items():
            found[summed_with(name)] += count
        kinds = (
            [part.state.linear, part.state.other]
            if part.state.fp8_layers_only
            else [part.state.linear]
        )
        self.fresh = max(CODEC[each["weight_grad"]] for each in kinds)
        """Bytes an element of the gradient of a linear layer, which is not there before the backward pass of its group."""
        head = [
            n
            for name, n in sizes.items()
            if part.output and name in ("output_layer.weight", "embedding.weight")
        ]
        self.groups = [found[f"layers.{layer}"] for layer in reversed(part.layers)] + [
            found[""] - max(head, default=0)
        ]
        """Of each layer, the last first, and of all others but the output layer."""
        self.start = self.received = -float(found.total())
        """At the backward pass of the output layer, and before it."""

    def back(self, number: int) -> float:
        """In the backward pass of that group."""
        return -float(sum(self.groups[number:]))

    def summing(self, number: int) -> float:
        """At the end of that group's backward pass."""
        return self.back(number + 1)


class OneShardPass(ShardedPass):
    """The same where every rank has one shard of each gradient, which is as large as the gradient, once it is summed."""

    def __init__(
        self,
        recipe: Recipe,
        device: str,
        part: Part,
        linears: list[PlannedLinear],
        backend: str,
        each: float,
    ) -> None:
        super().__init__(recipe, device, part, linears, backend, each)
        stored, found = stored_gradients(recipe, part, linears), Counter[str]()
        for name, shape in trained_shapes(recipe, part).items():
            found[summed_with(name)] += stored_bytes(stored.get(name, "fp32"), prod(shape))
        self.coming = [found[f"layers.{layer}"] for layer in reversed(part.layers)] + [found[""]]
        self.start -= found.total()
        self.received -= found.total()

    def back(self, number: int) -> float:
        """In the backward pass of that group."""
        return super().back(number) - sum(self.coming[number:])

    def summing(self, number: int) -> float:
        """At most from the end of that group's backward pass to the end of its reduction."""
        return super().summing(number) - sum(self.coming[number:])


def single_pass(
    recipe: Recipe, device: str, part: Part, linears: list[PlannedLinear], backend: str, each: float
) -> SinglePass | OneShardPass | None:
    """The gradients of a step of `part`, a whole model, on `device`, where `backend` multiplies and a gradient is made in `each`
    bytes an element; None where a step has several microbatches, or ranks have shards of gradients.
    """
    if recipe.trainer.strategy.pipeline_model_parallel_size > 1 or microbatches(recipe, part) > 1:
        return None
    if not by_fsdp2(recipe, part.state, part.shards, backend):
        return SinglePass(recipe, part, linears)
    return (
        OneShardPass(recipe, device, part, linears, backend, each)
        if shard_degree(recipe, part) == 1
        else None
    )
