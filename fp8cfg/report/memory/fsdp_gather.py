"""FSDP all-gather and reduce-scatter memory: parameters and gradients that are temporarily whole where FSDP2 shards them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fsdp_sharding import by_fsdp2, gathered_plain
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import against_fp8_gather, fp8_weights, gathered, resolved, sharding
from fp8cfg.report.memory.layout import Part, local_shapes, vectors
from fp8cfg.report.memory.operands import CODEC, held_beside
from fp8cfg.report.memory.shards import parameter_columns, trained_shapes
from fp8cfg.report.tables import wrapped


def gathered_bytes(
    recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int, backend: str, head: int = 0
) -> int:
    """Of embedding, last norm and output layer weights and gradients, and at the end what is sent of these; before that the weights
    of two layers, of which one is being gathered, and the gradients of one, as they are and as they are sent, when `head` bytes of
    logits are gone. That is so with several ranks, which gather ahead; one alone takes less. `part` has `parameters` of them, and
    `backend` multiplies. Frozen ones, beside adapters, have no gradients."""
    p, root = recipe.precision, _root(recipe, part, linears, parameters)
    layer, ahead = (parameters - root) // len(part.layers), 2 if len(part.layers) > part.chunks else 1
    compute, sent, weight = CODEC[p.compute], CODEC[resolved(p)["comm"]], CODEC[gathered(p, backend)]
    if recipe.lora.enabled:
        return int(root * compute + layer * 2 * weight)
    last = layer * weight if recipe.trainer.strategy.pipeline_model_parallel_size == 1 else 0  # gathered beside the output layer
    return int(root * 2 * compute + max(last, max(layer * (ahead * weight + compute + sent), root * sent) - head))


def reduced_bytes(recipe: Recipe, part: Part, each: float) -> int:
    """Under zero1 and zero2, of gradients of `each` bytes an element that are summed as they come: those of embedding, last norm
    and output layer, and at the end what is sent of them; before that those of one layer, as they are and as they are sent."""
    groups: dict[str, int] = {}
    for name, shape in trained_shapes(recipe, part).items():
        group = name.split(".")[1] if name.startswith("layers.") else ""
        groups[group] = groups.get(group, 0) + prod(shape)
    root = groups.pop("", 0)
    layer, sent = max(groups.values(), default=0), CODEC[resolved(recipe.precision)["comm"]]
    sent += each if sent != each else 0  # a copy of what FSDP2 would send
    return int(root * each + max(layer * (each + sent), root * sent))


class LayerSums(NamedTuple):
    """Bytes more than the gradients of all layers and gathered weights, once a layer is back and lets its weights go: at most while
    its gradients are summed, and then while the next one goes back."""

    summing: float
    after: float


def layer_sums(recipe: Recipe, device: str, part: Part, linears: Sequence[PlannedLinear], each: float) -> LayerSums:
    """Under zero1, of gradients of `each` bytes an element: they are copied to be sent, and freed but for the last parameter's,
    which torch 2.13 lets go after the sum (foreach_reduce); the copy is kept until the next layer's. gloo copies it once more."""
    p, layer = recipe.precision, part.layers[-1:]
    shapes, comm = [*local_shapes(recipe, part, layer).values()], CODEC[resolved(p)["comm"]]
    count = sum(map(prod, shapes))
    share, copy = count / part.shards, each * count
    sent = comm * (count + share) if comm != each else 0  # beside copy and sum (training/distributed/fsdp.py)
    cast = 4 * share if each < 4 else 0  # shards are float32
    inside = comm * count if device == "cpu" else 0
    held = {f"{q.name}.weight": CODEC["fp8"] + held_beside(recipe) for q in linears if fp8_weights(p) and q.fp8}
    own = local_shapes(recipe, part, layer)
    columns = parameter_columns(recipe, list(linears), own)
    weights = sum(prod(shape) * held.get(name, CODEC[columns[name]["weight"]]) for name, shape in own.items())
    freed = each * (count - prod(shapes[-1]))
    return LayerSums(max(copy, copy - freed + each * share + max(sent + inside, cast)) - weights, 4 * share - weights)


def gather_line(recipe: Recipe, ranks: int, backend: str) -> str:
    """What weights are gathered in over `ranks`, those that share parameters, and why not in FP8 where fp8.params asks for that;
    empty where that is no question."""
    p = recipe.precision
    if not by_fsdp2(recipe, ranks, backend):
        return ""
    if sharding(p, ranks) != "fsdp":
        if recipe.lora.enabled:
            return "frozen weights are whole on each rank; adapters are gathered once a step"
        if not fp8_weights(p):
            codec = resolved(p)["weight"]
            return "" if codec == gathered_plain(p) else f"weights of linear layers are gathered in {codec} once a step"
        two = ", two matrices of each: dgrad reads other scales" if held_beside(recipe) >= 1 else ""
        return f"weights are gathered in fp8 once a step{two}"
    said = f"weights are split over the ranks and gathered in {gathered(p, backend)}"
    if gathered(p, backend) == "fp8" or not (p.fp8.enabled and p.fp8.params and p.storage.gather == "auto"):
        return said
    return wrapped(f"{said}: {against_fp8_gather(p, backend)[0].partition(';')[0]}", more="  ")


def root_bytes(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int) -> int:
    """Of the weights that stay gathered from forward to backward pass: all that are in no layer."""
    return int(_root(recipe, part, linears, parameters) * CODEC[recipe.precision.compute])


def _root(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int) -> int:
    """The parameters of embedding, last norm and output layer."""
    matrices = [q.in_features * q.out_features for q in linears if q.name != "output_layer"]
    return parameters - sum(-(-n // part.tensor) for n in matrices) - len(part.layers) * vectors(recipe, part)
