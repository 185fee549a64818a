"""Communication of forward and backward passes: what tensor, context and pipeline parallelism send inside of the model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import fp8_weights
from fp8cfg.layer_plan import adapted
from fp8cfg.report.communication.collectives import NUMBER, Axis, Collective
from fp8cfg.report.communication.shared_amaxes import of_operand
from fp8cfg.report.memory.layout import Part
from fp8cfg.report.memory.operands import CODEC
from fp8cfg.report.memory.peak import linears_of


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
