"""Peak memory of a training run on one rank, by kind, computed from shapes.

    weights, masters, gradients, moments    sums over parameters (state_shards.py)
    activations, logits, backward           from the model's code, run eagerly (activation_memory.py)
    gathered, accumulation                  FSDP2's unsharded tensors (fsdp_memory.py)
    gradient sums                           messages of data parallelism (zero_memory.py)

The kinds add up to the peak of a step, in the last backward pass. Gradients of earlier microbatches
exist there. With one microbatch per step, gradients appear while activations are freed. The
negative kind "to come" subtracts gradients allocated after the peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fp8cfg.backends import registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.models.config import parameter_shapes
from fp8cfg.parallel.sharding import ranks
from fp8cfg.planning import remarks
from fp8cfg.planning.activation_memory import activations
from fp8cfg.planning.fsdp_memory import FsdpSchedule, single_microbatch_schedule
from fp8cfg.planning.gemm_memory import ELEMENT_BYTES, fp8_weight_extra_bytes
from fp8cfg.planning.layer_plan import plan_layers, transformer_config
from fp8cfg.planning.layout import (
    Part,
    distinct_parts,
    keeps_quantized_weights,
    microbatches,
    shard_degree,
    vectors,
)
from fp8cfg.planning.state_shards import (
    row_scale_bytes,
    state_bytes,
    trained_shapes,
    unquantized_gradient_bytes,
)
from fp8cfg.planning.zero_memory import (
    quantizes_before_reduction,
    reduction_bytes,
    waiting_gradient_bytes,
)
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import SCALED, against_fp8_gather, gathers_params
from fp8cfg.schema.tables import Table, size, table

# A low-bit optimizer updates its state in pieces (numerics/codecs.py, CHUNK and GPU_CHUNK).
# Elements of a piece, and temporary bytes per element: 12 float32 tensors.
PIECES = {"cpu": 65536, "cuda": 64 * 65536}
PIECE_BYTES = 12 * 4
# The negative kind: gradients allocated after the peak of a single microbatch.
COMING = "to come"
# Kinds without bytes per parameter in the table. They depend on tokens or on one moment.
NOT_PARAMETERS = ("activations", "logits", "backward", COMING, "gradient sums", "optimizer step")


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters on one rank.

    Attributes:
        linear_weights: Weights of linear layers in the dtype of storage.weight.
        other_parameters: All other parameters of the model.
        adapters: LoRA adapters. With adapters all other parameters are frozen.
    """

    linear_weights: int
    other_parameters: int
    adapters: int = 0

    @property
    def total(self) -> int:
        """All parameters, trained and frozen."""
        return self.linear_weights + self.other_parameters + self.adapters

    @property
    def trained(self) -> Parameters:
        """The trained parameters: all of them, or only the adapters, counted as other parameters."""
        if self.adapters:
            return Parameters(0, self.adapters)
        return self


def plan_memory(
    recipe: Recipe, device: str, part: Part | None = None, backend: str | None = None
) -> dict[str, int]:
    """Returns the peak memory of one rank, in bytes by kind.

    Args:
        recipe: The recipe.
        device: "cpu" or "cuda".
        part: The layers and shards of the rank. Defaults to the rank with the most memory, on the
            launched ranks.
        backend: Name of the backend of the FP8 layers. Defaults to `planned_backend`.
    """
    backend = backend or planned_backend(recipe)
    part = part or widest_part(recipe, device, ranks(), backend)
    linears = part_linears(recipe, part)
    is_fsdp2 = by_fsdp2(recipe, part.state, part.shards, backend)
    is_fsdp = part.shard == "fsdp"
    # fsdp accumulates in the shards. Unsharded gradients keep the compute dtype.
    wgrad_bytes = gradient_bytes(part)
    if is_fsdp:
        wgrad_bytes = ELEMENT_BYTES[recipe.precision.compute]
    schedule = None
    if is_fsdp2:
        schedule = FsdpSchedule(recipe, device, part, linears, backend, wgrad_bytes)
    in_passes = activations(recipe, device, part, linears, wgrad_bytes, backend, schedule)

    kinds = persistent_memory(recipe, part, linears, backend)
    kinds["FP8 copies"] += in_passes.quantized_weights
    if is_fsdp and gathers_params(recipe.precision, backend):
        # Each rank casts its float32 shards to FP8 before the gather, one byte per element.
        fp8_elements = sum(linear.weights for linear in linears if linear.fp8)
        kinds["FP8 copies"] += fp8_elements // (part.tensor * part.shards)

    # Gradients take more bytes until they are reduced or quantized: FSDP2's shards, or the whole
    # gradients of a rank.
    wider_shards = unquantized_gradient_bytes(recipe, part, linears)
    wider_gradients = gradient_bytes_before_step(recipe, part, linears) - kinds["gradients"]
    if is_fsdp:
        kinds["gathered"] = in_passes.unsharded
        if wider_shards:
            kinds["accumulation"] = wider_shards
    elif schedule:
        kinds["accumulation"] = in_passes.unsharded
        if schedule.reduces_once:
            kinds["accumulation"] += wider_gradients
        else:
            kinds["accumulation"] += wider_shards
    elif wider_gradients > 0:
        kinds["accumulation"] = wider_gradients
    elif device == "cuda" or part.tensor > 1:
        waiting = waiting_gradient_bytes(recipe, part, linears, backend)
        if waiting:
            kinds["accumulation"] = waiting
    kinds["activations"] = in_passes.kept_activations
    kinds["logits"] = in_passes.logits
    kinds["backward"] = in_passes.backward

    peak = in_passes.total
    # A single microbatch frees activations before its gradients exist.
    single = single_microbatch_schedule(recipe, device, part, linears, backend, wgrad_bytes)
    if single:
        in_one = activations(recipe, device, part, linears, wgrad_bytes, backend, single)
        peak = min(peak, in_one.total)
        kinds[COMING] = peak - in_passes.total

    # After the last pass, messages and the optimizer reuse the memory of activations. Only bytes
    # beyond it count.
    freed = peak
    if quantizes_before_reduction(recipe, part, linears):
        freed += kinds.get("accumulation", 0)
    reduction = reduction_bytes(recipe, part, linears, device, backend)
    kinds["gradient sums"] = max(0, reduction - freed)
    step = optimizer_step_bytes(recipe, part, linears, device, backend)
    kinds["optimizer step"] = max(0, step - peak - kinds["gradient sums"])
    # FSDP2 creates the model on the meta device and initializes only shards. With zero1 and zero2,
    # frozen weights of LoRA are not sharded.
    initializes_shards = is_fsdp2
    if count_parameters(recipe, part, linears).adapters and not is_fsdp:
        initializes_shards = False
    if not initializes_shards:
        start = initialization_bytes(recipe, part, linears)
        kinds["to start"] = max(0, start - sum(kinds.values()))
    return kinds


def widest_part(recipe: Recipe, device: str, ranks: int, backend: str | None = None) -> Part:
    """Returns the part of the pipeline stage with the most memory.

    Args:
        recipe: The recipe.
        device: "cpu" or "cuda".
        ranks: Number of ranks.
        backend: Name of the backend of the FP8 layers. Defaults to `planned_backend`.
    """
    stages = distinct_parts(recipe, ranks)
    if len(stages) == 1:
        return stages[0]
    return max(stages, key=lambda part: sum(plan_memory(recipe, device, part, backend).values()))


def planned_backend(recipe: Recipe) -> str:
    """Returns the backend of a plan without hardware.

    This is the recipe's own backend. For backend=auto it is native, or with storage.gather=fp8
    the first backend with FP8 gathers.
    """
    precision = recipe.precision
    if precision.backend != "auto" and precision.fp8.enabled:
        return precision.backend
    if precision.storage.shard != "fsdp" or precision.storage.gather != "fp8":
        return registry.REFERENCE
    candidates = registry.gathering()
    for name in candidates:
        if not against_fp8_gather(precision, name):
            return name
    return candidates[0]


# State.


def persistent_memory(
    recipe: Recipe,
    part: Part,
    linears: list[PlannedLinear],
    backend: str | None = None,
    rank: int | None = None,
) -> dict[str, int]:
    """Returns the memory kept from step to step, in bytes by kind.

    Here "FP8 copies" are only scales, amax histories and second copies of FP8 primary weights.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        linears: Its linear layers.
        backend: Name of the backend of the FP8 layers. Defaults to `planned_backend`.
        rank: Number among the ranks with shards of the same state. Defaults to the rank with the
            most bytes.
    """
    backend = backend or planned_backend(recipe)
    precision = recipe.precision
    linear_bytes = ELEMENT_BYTES[remarks.chart_row(recipe, part.state)["weight"]]
    other_bytes = ELEMENT_BYTES[part.state.other["weight"]]
    counts = count_parameters(recipe, part, linears)
    weights = (
        counts.linear_weights * linear_bytes
        + (counts.other_parameters + counts.adapters) * other_bytes
    )
    kinds = {"weights": int(weights)}
    kinds.update(state_bytes(recipe, part, linears, backend, rank))  # fsdp: weights too
    if counts.adapters and part.shard == "fsdp":
        # Frozen weights are sharded too, in the compute dtype.
        linear_bytes = ELEMENT_BYTES[precision.compute]
        frozen = counts.linear_weights * linear_bytes + counts.other_parameters * other_bytes
        kinds["weights"] += int(frozen) // part.shards

    kinds["FP8 copies"] = 0
    if SCALINGS[recipe.fp8.scaling].history:
        # Input, weight and grad_output have a float32 scale and amax history each.
        fp8_layers = sum(linear.fp8 for linear in linears)
        kinds["FP8 copies"] = fp8_layers * 3 * 4 * (recipe.fp8.amax_history_len + 1)
    if part.state.fp8_weights:
        extra = int(counts.linear_weights * fp8_weight_extra_bytes(recipe))
        extra += row_scale_bytes(recipe, part, linears)
        # FSDP2 gathers scales and second copies with the weights, and frees them after the step.
        if by_fsdp2(recipe, part.state, part.shards, backend) and not counts.adapters:
            kinds["weights"] += extra
        else:
            kinds["FP8 copies"] += extra
    return kinds


def count_parameters(
    recipe: Recipe, part: Part, linears: Sequence[PlannedLinear] | None = None
) -> Parameters:
    """Counts the parameters of a rank.

    A tied output layer on another pipeline stage counts as a copy of the embedding.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        linears: Its linear layers. Planned here by default.
    """
    linears = linears or part_linears(recipe, part)
    shapes = parameter_shapes(transformer_config(recipe))
    is_tied = recipe.model.share_embeddings_and_output_weights
    # With fp8_layers_only, linear layers in high precision keep the dtype of other parameters.
    stores_all_linears = not part.state.fp8_layers_only
    linear_elements = 0
    other_elements = len(part.layers) * vectors(recipe, part)
    for linear in linears:
        if is_tied and linear.name == "output_layer":
            continue  # the embedding
        elements = -(-linear.weights // part.tensor)
        if linear.fp8 or stores_all_linears:
            linear_elements += elements
        else:
            other_elements += elements
    if part.embedding or (is_tied and part.output):
        other_elements += -(-prod(shapes["embedding.weight"]) // part.tensor)
    if part.embedding:
        other_elements += prod(shapes.get("position_embedding.weight", (0,)))
    if part.output:
        for name, shape in shapes.items():
            if name.startswith("final_layernorm"):
                other_elements += prod(shape)
    adapters = 0
    if recipe.lora.enabled:
        names = {linear.name for linear in linears}
        for name, shape in trained_shapes(recipe, part).items():
            module, _, _ = name.partition(".lora.")
            if module in names:
                adapters += prod(shape)
    return Parameters(linear_elements, other_elements, adapters)


def part_linears(recipe: Recipe, part: Part) -> list[PlannedLinear]:
    """Returns the planned linear layers of a rank.

    Each Transformer layer has four: linear_qkv, linear_proj, linear_fc1, linear_fc2. On the last
    pipeline stage the output layer follows.
    """
    *layers, output = plan_layers(recipe)
    linears: list[PlannedLinear] = []
    for number in part.layers:
        linears += layers[4 * number : 4 * number + 4]
    if part.output:
        linears.append(output)
    return linears


def gradient_bytes(part: Part) -> float:
    """Returns bytes per element of an accumulated weight gradient."""
    # Quantized gradients accumulate in float32 before they are quantized.
    dtype = part.state.linear["weight_grad"]
    return 4 if dtype in SCALED else ELEMENT_BYTES[dtype]


# Peaks outside the backward pass.


def gradient_bytes_before_step(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear]) -> int:
    """Returns bytes of a rank's gradients at the end of the last backward pass."""
    # Gradients are unquantized after several microbatches, or until they are cast to be sent.
    columns = remarks.chart_row(recipe, part.state)
    trained = count_parameters(recipe, part, linears).trained
    adds_microbatches = microbatches(recipe, part) > 1 and recipe.storage.accumulate == "wide"
    casts_to_send = part.shards > 1 and columns["comm"] != columns["weight_grad"]
    linear_bytes = ELEMENT_BYTES[columns["weight_grad"]]
    if adds_microbatches or casts_to_send:
        linear_bytes = gradient_bytes(part)
    other_bytes = ELEMENT_BYTES[part.state.other["weight_grad"]]
    return int(trained.linear_weights * linear_bytes + trained.other_parameters * other_bytes)


def initialization_bytes(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear]) -> int:
    """Returns bytes of the weights at initialization."""
    # Weights start in float32. Frozen weights of linear layers start in the compute dtype.
    counts = count_parameters(recipe, part, linears)
    if not counts.adapters:
        return 4 * counts.total
    is_tied = recipe.model.share_embeddings_and_output_weights
    matrices = 0
    for linear in linears:
        if not (is_tied and linear.name == "output_layer"):
            matrices += linear.weights
    matrices //= part.tensor
    frozen_bytes = ELEMENT_BYTES[recipe.precision.compute]
    return int(4 * (counts.total - counts.adapters - matrices) + frozen_bytes * matrices)


def optimizer_step_bytes(
    recipe: Recipe,
    part: Part,
    linears: list[PlannedLinear],
    device: str,
    backend: str | None = None,
) -> int:
    """Returns peak temporary bytes of an eager optimizer step.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        linears: Its linear layers.
        device: "cpu" or "cuda".
        backend: Name of the backend of the FP8 layers. Defaults to `planned_backend`.
    """
    # The temporaries exist one after another, so only the largest counts. Compiled steps take no
    # more than the pieces of a low-bit optimizer.
    backend = backend or planned_backend(recipe)
    precision = recipe.precision
    counts = count_parameters(recipe, part, linears)
    is_fsdp2 = by_fsdp2(recipe, part.state, part.shards, backend)
    is_low_bit = part.state.low_bit
    history = 0
    if SCALINGS[recipe.fp8.scaling].history:
        history = recipe.fp8.amax_history_len
    fp8_sizes = [linear.weights for linear in linears if linear.fp8]
    largest_fp8 = max(fp8_sizes, default=0)

    widened_gradients = 0  # to float32, all at once
    if gradient_bytes(part) < 4 and not is_low_bit and not is_fsdp2:
        widened_gradients = 4 * counts.trained.total
    quantized_weight = 0
    if part.state.fp8_weights and not counts.adapters and not is_fsdp2:
        # One weight at a time: scaled in float32, clamped in float32, and FP8. Low-bit masters are
        # decoded to float32 first.
        element_bytes = 4 + 4 + 1
        if is_low_bit:
            element_bytes += 4
        quantized_weight = element_bytes * largest_fp8 // part.tensor
    piece = 0
    if is_low_bit:
        shapes = parameter_shapes(transformer_config(recipe))
        largest = max(prod(shape) for shape in shapes.values())
        piece = PIECE_BYTES * min(PIECES[device], largest)
    # Three float32 temporaries while the histories are rolled (numerics/amax_update.py), for input,
    # weight and grad_output of each layer.
    rolled_histories = 3 * 4 * 3 * history * len(fp8_sizes)
    amaxes = 0
    quantizes_after_step = keeps_quantized_weights(recipe, part, backend) or (
        is_fsdp2 and gathers_params(precision, backend)
    )
    if device == "cpu" and history and quantizes_after_step:
        # Magnitudes in float32, a bool mask, and magnitudes without NaN (numerics/amax.py). A GPU
        # has a kernel.
        amaxes = (4 + 1 + 4) * largest_fp8 // part.tensor
        if is_fsdp2:
            amaxes //= shard_degree(recipe, part)
    return max(widened_gradients, quantized_weight, piece, rolled_histories, amaxes)


# The table.


def memory_table(
    recipe: Recipe, device: str, part: Part | None = None, backend: str | None = None
) -> Table:
    """Returns the memory of a rank as a table, without empty kinds.

    Kinds of state have bytes per parameter. For the arguments see `plan_memory`.
    """
    part = part or widest_part(recipe, device, ranks(), backend)
    count = count_parameters(recipe, part).total
    kinds = plan_memory(recipe, device, part, backend)
    notes = _notes(recipe, part, backend or planned_backend(recipe))
    rows = []
    for kind, num_bytes in kinds.items():
        if num_bytes == 0:
            continue
        per_parameter = ""
        if kind not in NOT_PARAMETERS:
            per_parameter = f"{num_bytes / count:.1f}"
        rows.append([kind, size(num_bytes), per_parameter, notes[kind]])
    rows.append(["total", size(sum(kinds.values())), "", ""])
    return table(["memory per rank", "size", "B/param", ""], rows, right=(1, 2))


def _notes(recipe: Recipe, part: Part, backend: str) -> dict[str, str]:
    """Returns the note on each kind for the last column of the table."""
    precision, model = recipe.precision, recipe.model
    columns = remarks.chart_row(recipe, part.state)
    shard = part.shard
    tokens = f"{recipe.trainer.micro_batch_size} x {model.seq_length // part.context} tokens"
    shards_text = ""
    if shard in ("zero1", "zero2") and part.shards > 1:
        shards_text = f", {shard} over {part.shards}"

    notes = _dtype_notes(recipe, part)
    notes |= {
        "gathered": "whole: embedding, output, two layers",
        "accumulation": "gradients until they are summed and stored",
        "moments": remarks.moments_text(columns) + shards_text,
        "FP8 copies": _fp8_copies_note(recipe, part, backend),
        "activations": f"{tokens}, recompute {model.recompute_granularity}",
        "logits": f"vocab_size={model.vocab_size}",
        COMING: "less: freed before gradients exist",
        "backward": "gradients of activations",
        "gradient sums": "messages, and sums in fp32",
        "optimizer step": "chunks to be quantized",
        "to start": "more: the model in fp32, before it is quantized",
    }
    if model.recompute_granularity == "full":
        notes["backward"] = "one layer again"
    if gradient_bytes(part) < 4 and not part.state.low_bit:
        notes["optimizer step"] = "fp32 gradients"
    is_fsdp2 = by_fsdp2(recipe, part.state, part.shards, backend)
    if recipe.lora.enabled and shard == "fsdp":
        notes["weights"] = f"{precision.compute}, adapters fp32"
    if shard != "fsdp" and is_fsdp2 and columns["weight_grad"] not in SCALED:
        notes["gradients"] = "fp32"  # shards
    return notes


def _dtype_notes(recipe: Recipe, part: Part) -> dict[str, str]:
    """Returns the storage dtypes of weights, masters and gradients."""
    columns, other_columns = remarks.chart_row(recipe, part.state), part.state.other
    layers = "FP8 layers" if part.state.fp8_weights else "linear layers"
    kinds = {"weights": "weight", "masters": "master_weight", "gradients": "weight_grad"}
    notes = {}
    for kind, column in kinds.items():
        notes[kind] = other_columns[column]
        if columns[column] != other_columns[column]:
            notes[kind] += f", {layers} {columns[column]}"
    return notes


def _fp8_copies_note(recipe: Recipe, part: Part, backend: str) -> str:
    """Returns the note on "FP8 copies": quantized weights, or data next to FP8 primary weights."""
    keeps_all_passes = keeps_quantized_weights(recipe, part, backend)
    if not part.state.fp8_weights:
        if keeps_all_passes:
            return "quantized weights, for all passes of a step"
        return "quantized weights, forward to backward"
    note = "for dgrad, and scales"
    if SCALINGS[recipe.fp8.scaling].history:
        note = "scales, amax histories"
    if keeps_all_passes and recipe.fp8.keep_transpose_cache:
        note += ", transposes"
    return note
