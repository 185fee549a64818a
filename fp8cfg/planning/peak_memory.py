"""Peak memory of a training run on one rank, by kind, computed from shapes alone.

Weights, masters, gradients and moments are sums over parameters; activations follow the model's code, run eagerly
(planning/activation_memory.py). The kinds add up to the peak of a step, in its last backward pass, which finds the gradients of the
microbatches before there. Those of a single one come as its activations go: what is not there at the peak is a kind below 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod

from fp8cfg.backends import registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.models.config import parameter_shapes
from fp8cfg.parallel.sharding import ranks
from fp8cfg.planning import remarks
from fp8cfg.planning.activation_memory import activations
from fp8cfg.planning.fsdp_memory import (
    ShardedPass,
    after_backward,
    single_pass,
    stores_early,
    waiting,
)
from fp8cfg.planning.layer_plan import plan_layers, transformer_config
from fp8cfg.planning.layout import (
    Part,
    keeps_weights,
    microbatches,
    parts_that_differ,
    shard_degree,
    vectors,
)
from fp8cfg.planning.linear_memory import CODEC, held_beside
from fp8cfg.planning.state_shards import row_scales, state_bytes, trained_shapes, until_stored
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import (
    SCALED,
    against_fp8_gather,
    gathers_params,
)
from fp8cfg.schema.tables import size, table

PIECES, WORKING = {"cpu": 65536, "cuda": 64 * 65536}, 12 * 4
"""Elements of a piece of a low-bit optimizer's step (numerics/codecs.py, CHUNK and GPU_CHUNK), and the bytes that one takes in
float32."""
COMING = "to come"
"""The kind, below 0, of what is not there at the peak of one microbatch: gradients that come as activations go."""
NOT_PARAMETERS = ("activations", "logits", "backward", COMING, "gradient sums", "optimizer step")
"""Kinds that grow with tokens rather than with parameters."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of one rank: of linear layers whose weight is stored as storage.weight says, and all others; and `adapters`, where
    these alone are trained."""

    linear: int
    other: int
    adapters: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.linear + self.other + self.adapters

    @property
    def trained(self) -> Parameters:
        """Those that are trained: all, or adapters."""
        return Parameters(0, self.adapters) if self.adapters else self


def memory(
    recipe: Recipe, device: str, part: Part | None = None, backend: str | None = None
) -> dict[str, int]:
    """Bytes by kind for one rank on `device` ("cpu" or "cuda"): of `part`, or of the rank that takes most as training holds it
    here. `backend` is who multiplies, by default as `multiplying` says."""
    backend = backend or multiplying(recipe)
    part = part or widest(recipe, device, ranks(), backend)
    linears = linears_of(recipe, part)
    kinds = persistent(recipe, part, linears, backend)
    shards = by_fsdp2(recipe, part.state, part.shards, backend)
    fsdp = part.shard == "fsdp"  # which adds up gradients in parts alone
    added = CODEC[recipe.precision.compute] if fsdp else gradient_bytes(part)
    sharded = ShardedPass(recipe, device, part, linears, backend, added) if shards else None
    found = activations(recipe, device, part, linears, added, backend, sharded)
    live = asdict(found)
    whole, copies, counts = live.pop("whole"), live.pop("copies"), parameters(recipe, part, linears)
    kinds["FP8 copies"] += copies
    if fsdp:
        if gathers_params(recipe.precision, backend):
            kinds["FP8 copies"] += sum(
                p.in_features * p.out_features for p in linears if p.fp8
            ) // (part.tensor * part.shards)
        kinds["gathered"] = whole
        kinds |= {"accumulation": wait} if (wait := until_stored(recipe, part, linears)) else {}
    elif sharded:
        there = (
            before_step(recipe, part, linears) - kinds["gradients"]
            if sharded.adds_up
            else until_stored(recipe, part, linears)
        )
        kinds["accumulation"] = whole + there
    elif (wide := before_step(recipe, part, linears) - kinds["gradients"]) > 0:
        kinds["accumulation"] = wide
    elif (device == "cuda" or part.tensor > 1) and (
        wait := waiting(recipe, part, linears, backend)
    ):
        kinds["accumulation"] = wait
    kinds |= {"activations": live.pop("kept"), **live}
    in_passes = found.total
    if single := single_pass(recipe, device, part, linears, backend, added):
        in_passes = min(
            in_passes, activations(recipe, device, part, linears, added, backend, single).total
        )
        kinds[COMING] = in_passes - found.total
    gone = in_passes + (kinds.get("accumulation", 0) if stores_early(recipe, part, linears) else 0)
    kinds["gradient sums"] = max(0, after_backward(recipe, part, linears, device, backend) - gone)
    step = step_bytes(recipe, part, linears, device, backend)
    kinds["optimizer step"] = max(0, step - in_passes - kinds["gradient sums"])
    if not shards or (counts.adapters and not fsdp):
        kinds["to start"] = max(0, starting(recipe, part, linears) - sum(kinds.values()))
    return kinds


def widest(recipe: Recipe, device: str, ranks: int, backend: str | None = None) -> Part:
    """The part of that one of `ranks` ranks which takes most memory: that of a pipeline stage, where there are several."""
    every = parts_that_differ(recipe, ranks)
    return (
        every[0]
        if len(every) == 1
        else max(every, key=lambda part: sum(memory(recipe, device, part, backend).values()))
    )


def starting(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear]) -> int:
    """Bytes of the weights as they are made: float32, or where they are frozen those of linear layers in the compute dtype."""
    counts, narrow = parameters(recipe, part, linears), CODEC[recipe.precision.compute]
    if not counts.adapters:
        return 4 * counts.total
    tied = recipe.model.share_embeddings_and_output_weights
    matrices = (
        sum(
            p.in_features * p.out_features
            for p in linears
            if not (tied and p.name == "output_layer")
        )
        // part.tensor
    )
    return int(4 * (counts.total - counts.adapters - matrices) + narrow * matrices)


def multiplying(recipe: Recipe) -> str:
    """The backend that the recipe asks for. Where it leaves that open and no hardware is at hand to choose for, it is taken to be
    native, or the one that gathers in FP8 where the recipe wants that."""
    p = recipe.precision
    if p.backend != "auto" and p.fp8.enabled:
        return p.backend
    if p.storage.shard != "fsdp" or p.storage.gather != "fp8":
        return registry.REFERENCE
    offered = registry.gathering()
    return next((name for name in offered if not against_fp8_gather(p, name)), offered[0])


def persistent(
    recipe: Recipe,
    part: Part,
    linears: list[PlannedLinear],
    backend: str | None = None,
    rank: int | None = None,
) -> dict[str, int]:
    """The kinds that stay from step to step where `backend` multiplies, by default as `multiplying` says, on number `rank` of the
    ranks that storage.shard splits state over, by default on the one that has most; of FP8 copies the scales, histories and second
    copies that are state."""
    columns, rest, counts = (
        remarks.chart_row(recipe, part.state),
        part.state.other,
        parameters(recipe, part, linears),
    )
    weights = (
        counts.linear * CODEC[columns["weight"]]
        + (counts.other + counts.adapters) * CODEC[rest["weight"]]
    )
    kinds = {
        "weights": int(weights),
        **state_bytes(recipe, part, linears, backend or multiplying(recipe), rank),
    }
    if (
        counts.adapters and part.shard == "fsdp"
    ):  # shards of what is frozen too, as it is multiplied
        frozen = (
            counts.linear * CODEC[recipe.precision.compute] + counts.other * CODEC[rest["weight"]]
        )
        kinds["weights"] += int(frozen) // part.shards
    state = (
        sum(p.fp8 for p in linears) * 3 * 4 * (recipe.fp8.amax_history_len + 1)
        if SCALINGS[recipe.fp8.scaling].history
        else 0
    )
    beside = (
        int(counts.linear * held_beside(recipe)) + row_scales(recipe, part, linears)
        if part.state.fp8_weights
        else 0
    )
    # Gathered, and let go after the step.
    together = (
        by_fsdp2(recipe, part.state, part.shards, backend or multiplying(recipe))
        and not counts.adapters
    )
    kinds["weights"] += beside * together
    return {**kinds, "FP8 copies": state + beside * (not together)}


def gradient_bytes(part: Part) -> float:
    """Bytes in which an element of a weight's gradient is accumulated: float32 where it is then stored with a scale."""
    name = part.state.linear["weight_grad"]
    return 4 if name in SCALED else CODEC[name]


def before_step(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear]) -> int:
    """Bytes of the gradients at the end of the last backward pass: wide where a microbatch was added or ranks are to be, and all
    of them also where a rank keeps those of its own alone."""
    columns, counts = (
        remarks.chart_row(recipe, part.state),
        parameters(recipe, part, linears).trained,
    )
    summed = microbatches(recipe, part) > 1 and recipe.storage.accumulate == "wide"
    added = summed or (part.shards > 1 and columns["comm"] != columns["weight_grad"])
    each = gradient_bytes(part) if added else CODEC[columns["weight_grad"]]
    return int(counts.linear * each + counts.other * CODEC[part.state.other["weight_grad"]])


def parameters(
    recipe: Recipe, part: Part, linears: Sequence[PlannedLinear] | None = None
) -> Parameters:
    """The parameters of `part`, whose linear layers are `linears` where the caller has them. A tied output layer on its own
    pipeline stage holds a copy of the embedding."""
    shapes = parameter_shapes(transformer_config(recipe))
    tied = recipe.model.share_embeddings_and_output_weights
    own = [
        p for p in linears or linears_of(recipe, part) if not (tied and p.name == "output_layer")
    ]
    every = not part.state.fp8_layers_only
    narrow = sum(-(-p.in_features * p.out_features // part.tensor) for p in own if p.fp8 or every)
    matrices = sum(-(-p.in_features * p.out_features // part.tensor) for p in own) - narrow
    if part.embedding or (tied and part.output):
        matrices += -(-prod(shapes["embedding.weight"]) // part.tensor)
    if part.embedding:
        matrices += prod(shapes.get("position_embedding.weight", (0,)))
    final = sum(prod(shape) for name, shape in shapes.items() if name.startswith("final_layernorm"))
    adapters = 0
    if recipe.lora.enabled:
        names = {p.name for p in linears or linears_of(recipe, part)}
        adapters = sum(
            prod(shape)
            for name, shape in trained_shapes(recipe, part).items()
            if name.partition(".lora.")[0] in names
        )
    return Parameters(
        narrow, matrices + len(part.layers) * vectors(recipe, part) + part.output * final, adapters
    )


def linears_of(recipe: Recipe, part: Part) -> list[PlannedLinear]:
    """The planned linear layers of `part`, four a Transformer layer and then the output layer where it has that."""
    *layers, output = plan_layers(recipe)
    chosen = [p for i in part.layers for p in layers[4 * i : 4 * i + 4]]
    return [*chosen, output] if part.output else chosen


def memory_table(
    recipe: Recipe, device: str, part: Part | None = None, backend: str | None = None
) -> str:
    """The table of `memory`, with bytes per parameter for what grows with the parameters; what takes nothing is left out."""
    part = part or widest(recipe, device, ranks(), backend)
    count = parameters(recipe, part).total
    kinds = memory(recipe, device, part, backend)
    multiplies = backend or multiplying(recipe)
    rows = [
        [
            kind,
            size(n),
            "" if kind in NOT_PARAMETERS else f"{n / count:.1f}",
            _note(recipe, kind, part, multiplies),
        ]
        for kind, n in kinds.items()
        if n
    ]
    rows.append(["total", size(sum(kinds.values())), "", ""])
    return table(["memory per rank", "size", "B/param", ""], rows, right=(1, 2))


def step_bytes(
    recipe: Recipe,
    part: Part,
    linears: list[PlannedLinear],
    device: str,
    backend: str | None = None,
) -> int:
    """Temporary bytes of the optimizer's step: float32 copies of narrower gradients; one weight on its way into FP8, in
    float32 before and after it is cut to the range, and rounded; amax histories on their way to the next step. Compiled code
    takes no more than pieces do."""
    chosen = backend or multiplying(recipe)
    pieces, shards = part.state.low_bit, by_fsdp2(recipe, part.state, part.shards, chosen)
    counts = parameters(recipe, part, linears)
    widened = (
        4 * counts.trained.total if gradient_bytes(part) < 4 and not pieces and not shards else 0
    )
    in_fp8 = part.state.fp8_weights and not counts.adapters and not shards
    held = (
        max((p.in_features * p.out_features for p in linears if p.fp8), default=0) if in_fp8 else 0
    )
    tensors = (
        [prod(shape) for shape in parameter_shapes(transformer_config(recipe)).values()]
        if pieces
        else [0]
    )
    history = recipe.fp8.amax_history_len if SCALINGS[recipe.fp8.scaling].history else 0
    rolled = 3 * 3 * 4 * history * sum(p.fp8 for p in linears)
    gathers = shards and gathers_params(recipe.precision, chosen)
    amaxes = 0
    if device == "cpu" and history and (gathers or keeps_weights(recipe, part, chosen)):
        # The magnitudes of a shard, a mask and the magnitudes without NaN; a GPU has a kernel.
        largest = max((p.in_features * p.out_features for p in linears if p.fp8), default=0)
        amaxes = 9 * largest // part.tensor // (shard_degree(recipe, part) if shards else 1)
    return max(
        widened,
        (13 if pieces else 9) * held // part.tensor,
        WORKING * min(PIECES[device], max(tensors)),
        rolled,
        amaxes,
    )


def _note(recipe: Recipe, kind: str, part: Part, backend: str) -> str:
    columns, rest = remarks.chart_row(recipe, part.state), part.state.other
    layers = "FP8 layers" if part.state.fp8_weights else "linear layers"
    state = (
        "scales, amax histories"
        if SCALINGS[recipe.fp8.scaling].history
        else "for dgrad, and scales"
    )
    tokens = f"{recipe.trainer.micro_batch_size} x {recipe.model.seq_length // part.context} tokens"
    widens = gradient_bytes(part) < 4 and not part.state.low_bit
    shard = part.shard
    kept = keeps_weights(recipe, part, backend)
    state += ", transposes" if kept and recipe.fp8.keep_transpose_cache else ""
    passes = "for all passes of a step" if kept else "forward to backward"
    other = (
        {"weights": f"{recipe.precision.compute}, adapters fp32"}
        if recipe.lora.enabled and shard == "fsdp"
        else {}
    )
    if (
        shard != "fsdp"
        and by_fsdp2(recipe, part.state, part.shards, backend)
        and columns["weight_grad"] not in SCALED
    ):
        other = {"gradients": "fp32"}  # of shards
    over = (
        f", {shard} over {part.shards}" if shard in ("zero1", "zero2") and part.shards > 1 else ""
    )
    return {
        **{
            kind: rest[k] if columns[k] == rest[k] else f"{rest[k]}, {layers} {columns[k]}"
            for kind, k in (
                ("weights", "weight"),
                ("masters", "master_weight"),
                ("gradients", "weight_grad"),
            )
        },
        "gathered": "whole: embedding, output, two layers",
        "accumulation": "gradients until they are summed and stored",
        "moments": remarks.moments_text(columns) + over,
        "FP8 copies": state if part.state.fp8_weights else f"quantized weights, {passes}",
        "activations": f"{tokens}, recompute {recipe.model.recompute_granularity}",
        "logits": f"vocab_size={recipe.model.vocab_size}",
        COMING: "less: gradients come as activations go",
        "backward": (
            "one layer again"
            if recipe.model.recompute_granularity == "full"
            else "gradients of activations"
        ),
        "gradient sums": "messages, and sums in fp32",
        "optimizer step": "fp32 gradients" if widens else "pieces on their way to codecs",
        "to start": "more: the model in fp32, before it is stored in fewer bits",
        **other,
    }[kind]
