"""Memory of gradient sums after the last backward pass: ZeRO, data parallelism and tied embeddings.

Without FSDP2 the ranks sum gradients after the last backward pass, in messages of at most MESSAGE
elements. With zero1 and zero2 the owner of each tensor sends the updated weight after the optimizer
step. The buffers reuse the memory of freed activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from fp8cfg.backends import registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning.gemm_memory import ELEMENT_BYTES
from fp8cfg.planning.layout import Part, local_shapes, microbatches, shard_degree
from fp8cfg.planning.state_shards import (
    fsdp_group,
    parameter_columns,
    quantized_gradients,
    rank_loads,
    shard_rows,
    trained_shapes,
    zero_owners,
)
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.storage import PER_TENSOR, SCALED

# Largest number of elements in a message (parallel/quantized_allreduce.py).
MESSAGE = 32 * 1024 * 1024

# Limits of float32 gradients quantized together: elements (optim/low_bit/gradients.py, WAITING) and
# tensors (optim/low_bit/adam_step.py, TOGETHER).
WAITING = 1 << 26
TOGETHER = 4


def reduction_bytes(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], device: str, backend: str
) -> int:
    """Returns peak bytes of summing gradients or sending updated weights.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        linears: Its linear layers.
        device: "cpu" or "cuda".
        backend: Name of the backend of the FP8 layers.
    """
    tied = _tied_embedding_bytes(recipe, part, backend)
    if part.shards == 1 or by_fsdp2(recipe, part.state, part.shards, backend):
        return tied
    shapes = trained_shapes(recipe, part)
    shard = part.shard
    columns = parameter_columns(part.state, linears, shapes)
    owners: dict[str, int] = {}
    if shard != "none":
        owners, _ = zero_owners(recipe, part, linears)
    quantizes_first = quantizes_before_reduction(recipe, part, linears)

    # Gradients of one dtype share messages.
    widest = 0
    for dtype in {column["comm"] for column in columns.values()}:
        sizes: dict[str, int] = {}
        cast_elements = 0
        for name, shape in shapes.items():
            if columns[name]["comm"] != dtype:
                continue
            sizes[name] = prod(shape)
            gradient_dtype = columns[name]["weight_grad"]
            is_quantized_later = gradient_dtype in SCALED and not quantizes_first
            if gradient_dtype != dtype or is_quantized_later:
                cast_elements += sizes[name]
        gradient_owners: dict[str, int] = {}
        if shard == "zero2":
            gradient_owners = owners
        widest = max(widest, _message_bytes(part, dtype, sizes, cast_elements, gradient_owners))

    weights: dict[str, int] = {}
    for name in owners:
        weights[name] = int(prod(shapes[name]) * ELEMENT_BYTES[columns[name]["weight"]])
    # An owner's own message and one from each rank.
    largest_load = int(max(rank_loads(weights, owners, part.shards)))
    weight_message = min(largest_load, MESSAGE // part.shards)
    return max(tied, widest, (1 + part.shards) * weight_message)


def _message_bytes(
    part: Part,
    dtype: str,
    sizes: Mapping[str, int],
    cast_elements: int,
    owners: Mapping[str, int],
) -> int:
    """Returns bytes of summing the gradients of one dtype.

    Args:
        part: The layers and shards of the rank.
        dtype: Storage dtype of the messages.
        sizes: Elements of each gradient by parameter.
        cast_elements: Elements with a cast to `dtype` before the sum.
        owners: Owner of each gradient with zero2. Otherwise empty, and each rank sums a shard.
    """
    element_bytes = ELEMENT_BYTES[dtype]
    total = sum(sizes.values())
    message = min(MESSAGE, total)
    if dtype not in SCALED and not owners:
        return int(element_bytes * (message + min(message, cast_elements)))  # plain all-reduce
    sum_elements = -(-total // part.shards)
    if owners:
        sum_elements = int(max(rank_loads(sizes, owners, part.shards)))
    received = min(part.shards * sum_elements, MESSAGE)
    # Float32: the sums, and a received gradient before and after it is scaled.
    decoded = 2 * min(sum_elements, max(sizes.values()))
    return int(element_bytes * (cast_elements + message + received) + 4 * (sum_elements + decoded))


def _tied_embedding_bytes(recipe: Recipe, part: Part, backend: str) -> int:
    """Returns bytes of the tied embedding's gradient received from the other pipeline stage."""
    # The first and the last stage each have a copy of the embedding, and sum their gradients.
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    if stages == 1 or not recipe.model.share_embeddings_and_output_weights:
        return 0
    if not (part.embedding or part.output):
        return 0
    rows, width = local_shapes(recipe, part)["embedding.weight"]
    if by_fsdp2(recipe, part.state, part.shards, backend):
        return shard_rows(rows, shard_degree(recipe, part)) * width * 4  # float32 shards
    return int(rows * width * ELEMENT_BYTES[part.state.other["weight_grad"]])


def quantizes_before_reduction(
    recipe: Recipe, part: Part, linears: Sequence[PlannedLinear]
) -> bool:
    """Whether gradients are quantized before the ranks sum them (parallel/gradient_sync.py)."""
    columns = parameter_columns(part.state, linears, trained_shapes(recipe, part))
    for column in columns.values():
        if column["weight_grad"] in SCALED and column["comm"] != column["weight_grad"]:
            return False
    return True


def waiting_gradient_bytes(
    recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], backend: str
) -> int:
    """Returns float32 bytes of gradients buffered to be quantized together.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        linears: Its linear layers.
        backend: Name of the backend of the FP8 layers.
    """
    # Only dtypes with one scale per tensor wait. On a GPU one kernel computes several amaxes. With
    # tensor-parallel ranks one collective reduces all amaxes of a layer.
    has_own_state = registry.capabilities(backend).own_state
    if has_own_state or recipe.storage.accumulate == "stored":
        return 0
    if part.state.linear["weight_grad"] not in PER_TENSOR:
        return 0
    if microbatches(recipe, part) > 1:
        return 0  # they are summed in float32 anyway
    if part.tensor == 1:
        largest = sorted((linear.weights for linear in linears), reverse=True)
        return 4 * min(WAITING, sum(largest[:TOGETHER]))
    shapes = trained_shapes(recipe, part)
    layers = Counter[str]()
    for name in quantized_gradients(recipe, part, linears):
        layers[fsdp_group(name)] += 4 * prod(shapes[name])
    return max(layers.values(), default=0)
