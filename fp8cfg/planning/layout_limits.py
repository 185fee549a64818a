"""Limits of parallel layouts: settings without support in training with a given layout.

Each violation has the override to set instead. `check`, `plan` and training reject such recipes.
Export accepts them, because other projects may support the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import gcd

from fp8cfg.backends.choice import ALIGNMENT, backend_layout_violations
from fp8cfg.models.config import stage_chunks
from fp8cfg.planning.layer_plan import adapted_projections, plan_layers, transformer_config
from fp8cfg.schema.backends import capabilities, ordered
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2, nearest_multiple
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import SCALED, ZERO, StateDtypes, level, resolve_state_dtypes
from fp8cfg.schema.violation import Violation


def _violation(setting: str, message: str) -> Violation:
    """Returns a violation with source "layout"."""
    return Violation(setting, message, source="layout")


# Pipeline parallelism.


def pipeline_limits(recipe: Recipe, ranks: int) -> list[Violation]:
    """Returns the violations of pipeline parallelism on a number of ranks."""
    strategy = recipe.trainer.strategy
    stages = strategy.pipeline_model_parallel_size
    if stages == 1:
        return []
    return [
        *_microbatch_violations(recipe, ranks),
        *precision_limits(recipe),
        *adapter_limits(recipe, stages, strategy.chunks),
    ]


def precision_limits(recipe: Recipe) -> list[Violation]:
    """Returns the pipeline violations of the backend and of logging, for any sizes."""
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    violations: list[Violation] = []
    if recipe.fp8.enabled:
        violations += backend_layout_violations(recipe.backend, stages=stages)
    interval = recipe.log.fp8_stats_every_n_steps
    if interval:
        violations.append(
            _violation(
                f"log.fp8_stats_every_n_steps={interval}",
                f"needs all layers on one rank, but pipeline_model_parallel_size={stages} splits"
                " them; set it to 0",
            )
        )
    return violations


def adapter_limits(recipe: Recipe, stages: int, chunks: int) -> list[Violation]:
    """Returns a violation if a pipeline stage has no LoRA adapters to train.

    Args:
        recipe: The recipe.
        stages: Number of pipeline stages.
        chunks: Chunks of layers per stage.
    """
    layers = recipe.model.num_layers
    if not recipe.lora.enabled or layers % (stages * chunks):
        return []  # another rule rejects the sizes
    adapted_layers = set()
    for projection in adapted_projections(recipe):
        module, _, name = projection.module.partition(".")
        if module == "layers":
            adapted_layers.add(int(name.partition(".")[0]))
        else:  # the output layer, on the stage of the last layer
            adapted_layers.add(layers - 1)
    key = recipe.trainer.strategy.key("pipeline_model_parallel_size")
    for stage, layers_by_chunk in enumerate(stage_chunks(layers, stages, chunks)):
        # A stage needs parameters to train, in any chunk. On the first stage backward runs down to
        # the first chunk. Without an adapter there autograd records no graph.
        candidates = set(chain(*layers_by_chunk))
        if stage == 0:
            candidates = set(layers_by_chunk[0])
        if not adapted_layers & candidates:
            return [
                _violation(
                    "lora.targets",
                    f"pipeline stage {stage} has no adapter to train; add layers of each stage, or"
                    f" set {key}=1",
                )
            ]
    return []


def _microbatch_violations(recipe: Recipe, ranks: int) -> Iterator[Violation]:
    """Yields a violation if the number of microbatches does not fit the pipeline."""
    # 1F1B needs at least as many microbatches as stages. The interleaved schedule needs a
    # multiple of the stages.
    trainer, strategy = recipe.trainer, recipe.trainer.strategy
    stages, chunks = strategy.pipeline_model_parallel_size, strategy.chunks
    replicas = max(1, ranks // strategy.size)
    count, remainder = divmod(trainer.global_batch_size, trainer.micro_batch_size * replicas)
    if remainder:
        return  # another rule rejects the batch
    is_interleaved = chunks > 1
    if count < stages:
        reason = f"{stages} stages need at least {stages}"
    elif is_interleaved and count % stages:
        reason = f"interleaved stages need a multiple of {stages}"
    else:
        return
    samples = trainer.global_batch_size // replicas  # of a rank
    nearest = nearest_multiple(count, stages)
    fix = f"trainer.global_batch_size={nearest * trainer.micro_batch_size * replicas}"
    for micro in range(min(trainer.micro_batch_size, samples // stages), 0, -1):
        if samples % micro == 0 and (not is_interleaved or samples // micro % stages == 0):
            fix = f"trainer.micro_batch_size={micro}"
            break
    microbatches = f"{count} microbatches"
    if count == 1:
        microbatches = "1 microbatch"
    yield _violation(
        f"{strategy.key('pipeline_model_parallel_size')}={stages}",
        f"a step has {microbatches} on each rank, but {reason}; set {fix}",
    )


# Tensor parallelism.


def tensor_limits(recipe: Recipe, ranks: int) -> list[Violation]:
    """Returns the violations of tensor parallelism on a number of ranks."""
    tensor = recipe.trainer.strategy.tensor_model_parallel_size
    if tensor == 1:
        return []
    return [
        *_size_violations(recipe, tensor),
        *split_state_limits(recipe),
        *_dropout_violations(recipe, tensor),
        *_fp8_violations(recipe, tensor),
    ]


def _size_violations(recipe: Recipe, tensor: int) -> Iterator[Violation]:
    """Yields a violation for each size of the model without that divisor."""
    model, strategy = recipe.model, recipe.trainer.strategy
    key = strategy.key("tensor_model_parallel_size")
    for name in ("num_query_groups", "ffn_hidden_size", "vocab_size"):
        size = getattr(model, name)
        if size % tensor:
            fix = f"model.{name}={-(-size // tensor) * tensor}"
            if name == "num_query_groups":  # more groups would be another model
                fix = f"{key}={gcd(size, tensor)}"
            yield _violation(f"{key}={tensor}", f"does not divide model.{name}={size}; set {fix}")
    context = strategy.context_parallel_size
    if strategy.sequence_parallel and model.seq_length // context % tensor:
        ranks = tensor * context
        yield _violation(
            f"{strategy.key('sequence_parallel')}=true",
            f"needs model.seq_length={model.seq_length} to be a multiple of {ranks} ranks; set"
            f" model.seq_length={-(-model.seq_length // ranks) * ranks}",
        )


def _dropout_violations(recipe: Recipe, tensor: int) -> Iterator[Violation]:
    """Yields a violation for LoRA dropout."""
    # Tensor-parallel ranks draw equal random numbers, because replicated inputs need equal masks.
    # Split inputs would need different ones.
    if recipe.lora.enabled and recipe.lora.dropout:
        yield _violation(
            f"lora.dropout={recipe.lora.dropout:g}",
            f"does not work with tensor_model_parallel_size={tensor}, because ranks would drop the"
            " same channels of their shards; set it to 0",
        )


# Storage keys and values for state with support for tensor parallelism.
_SPLITTABLE = {
    "weight": "auto",
    "master_weight": "auto",
    "weight_grad": "auto",
    "rounding": "nearest",
}


def split_state_limits(recipe: Recipe) -> Iterator[Violation]:
    """Yields a violation for low-bit state without support for tensor parallelism."""
    # `state_limits` rejects MS-AMP levels with any layout.
    precision = recipe.precision
    tensor = recipe.trainer.strategy.tensor_model_parallel_size
    if tensor == 1 or level(precision):
        return
    state = resolve_state_dtypes(precision)
    if not state.low_bit or state.can_be_split:
        return
    # A key is at fault if changing all other keys does not help.
    at_fault = []
    for key in _SPLITTABLE:
        if not _splittable_state(precision, unchanged=key).can_be_split:
            at_fault.append(key)
    overrides = " ".join(f"storage.{key}={_SPLITTABLE[key]}" for key in at_fault)
    yield _violation(
        "storage",
        "low-precision state needs whole matrices, except for moments and gradients with"
        f" float32 masters, but tensor_model_parallel_size={tensor} splits them; set"
        f" {overrides}",
    )


def _splittable_state(precision: Precision, unchanged: str) -> StateDtypes:
    """Returns the storage dtypes after changing all keys in _SPLITTABLE except one."""
    values = {key: value for key, value in _SPLITTABLE.items() if key != unchanged}
    storage = precision.storage.model_copy(update=values)
    return resolve_state_dtypes(precision.model_copy(update={"storage": storage}))


def _fp8_violations(recipe: Recipe, tensor: int) -> Iterator[Violation]:
    """Yields the violations of FP8 layers, attention and logging."""
    fp8, key = recipe.fp8, f"tensor_model_parallel_size={tensor}"
    if not fp8.enabled:
        return
    yield from backend_layout_violations(recipe.backend, tensor=tensor)
    if fp8.dot_product_attention:
        yield _violation(
            "fp8.dot_product_attention=true",
            f"FP8 attention needs all heads, but {key} splits them; set it to false",
        )
    interval = recipe.log.fp8_stats_every_n_steps
    if interval:
        yield _violation(
            f"log.fp8_stats_every_n_steps={interval}",
            f"needs whole matrices on one rank, but {key} splits them; set it to 0",
        )
    if not fp8.reduce_amax:
        yield _violation(
            "fp8.reduce_amax=false",
            f"shards of a matrix share one scale with {key}; set it to true",
        )
    yield from _alignment_violations(recipe, tensor)


def _alignment_violations(recipe: Recipe, tensor: int) -> Iterator[Violation]:
    """Yields a violation for each kind of layer with a shard too uneven for FP8 GEMMs."""
    config = transformer_config(recipe)
    # cuBLASLt needs multiples of 16 channels in FP8. A shard must not cut a block of scales.
    multiple = max(SCALINGS[recipe.fp8.scaling].block, ALIGNMENT)
    groups = config.num_query_groups // tensor
    # Channels of a rank's shard, and the key that changes them.
    channels = {
        "linear_qkv": groups * (config.heads_per_group + 2) * config.head_dim,
        "linear_proj": config.query_size // tensor,
        "linear_fc1": config.ffn_hidden_size // tensor,
        "linear_fc2": config.ffn_hidden_size // tensor,
        "output_layer": -(-config.vocab_size // tensor),
    }
    keys = {
        "linear_qkv": "model.kv_channels",
        "linear_proj": "model.kv_channels",
        "linear_fc1": "model.ffn_hidden_size",
        "linear_fc2": "model.ffn_hidden_size",
        "output_layer": "model.vocab_size",
    }
    fp8_layers = [linear.name for linear in plan_layers(recipe) if linear.fp8]
    for name in dict.fromkeys(layer.rpartition(".")[2] for layer in fp8_layers):
        width = channels[name]
        if width % multiple:
            yield _violation(
                f"fp8.scaling={recipe.fp8.scaling}",
                f"tensor_model_parallel_size={tensor} gives each rank {width} channels of {name},"
                f" which must be a multiple of {multiple}; set fp8.exclude=[*.{name}], another"
                f" {keys[name]}, or a smaller tensor_model_parallel_size",
            )


# State that supports data parallelism only.


def state_limits(recipe: Recipe, ranks: int) -> list[Violation]:
    """Returns the violations of storage dtypes that only support data parallelism.

    Args:
        recipe: The recipe.
        ranks: Number of ranks.
    """
    strategy = recipe.trainer.strategy
    sizes = {}
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ):
        size = getattr(strategy, name)
        if size > 1:
            sizes[name] = size
    if not sizes:
        return []
    layout = ", ".join(f"{name}={size}" for name, size in sizes.items())
    condition = f"with data parallelism only, not with {layout}"
    if level(recipe.precision):
        return [_level_violation(recipe, condition, [strategy.key(name) for name in sizes])]
    violations = list(_comm_violations(recipe, condition))
    if not list(split_state_limits(recipe)):
        shards = max(1, ranks // strategy.size) * strategy.context_parallel_size
        violations += _owner_violations(recipe, shards, condition)
    return violations


def _level_violation(recipe: Recipe, condition: str, keys: Sequence[str]) -> Violation:
    """Returns the violation of an MS-AMP level, set by opt_level or implied by the backend."""
    precision = recipe.precision
    if capabilities(precision.backend).level:
        fix = "backend=native"
        if precision.opt_level:
            fix += " opt_level=null"
        return _violation(
            f"backend={precision.backend}",
            f"its level {level(precision)} works {condition}; set {fix}",
        )
    fix = "opt_level=null"
    if len(keys) == 1 and recipe.trainer.strategy.chunks == 1:
        fix += f", or {keys[0]}=1"
    return _violation(f"opt_level={precision.opt_level}", f"works {condition}; set {fix}")


def _comm_violations(recipe: Recipe, condition: str) -> Iterator[Violation]:
    """Yields a violation for quantized gradient communication."""
    storage = recipe.storage
    if resolve_state_dtypes(recipe.precision).linear["comm"] not in SCALED:
        return
    fix = "storage.comm=auto"
    if storage.accumulate != "wide":
        fix += " storage.accumulate=wide"
    yield _violation(
        f"storage.comm={storage.comm}",
        f"gradients sent in FP8 work {condition}; set {fix}",
    )


def _owner_violations(recipe: Recipe, shards: int, condition: str) -> Iterator[Violation]:
    """Yields a violation for low-bit state without FSDP2 support, sharded by whole tensors.

    Args:
        recipe: The recipe.
        shards: Number of ranks with the same parameters.
        condition: The supported layout in words, for the message.
    """
    if shards == 1:
        return
    # Quantized communication has its own violation. Without it FSDP2 may shard the state.
    precision = recipe.precision.model_copy(deep=True)
    precision.storage.comm = "auto"
    recipe = recipe.model_copy(update={"precision": precision})
    state = resolve_state_dtypes(precision)
    shard = state.sharding(shards)
    if shard not in ZERO:
        return
    backends = ordered() if precision.backend == "auto" else [precision.backend]
    if any(by_fsdp2(recipe, state, shards, name) for name in backends):
        return
    setting = f"storage.shard={precision.storage.shard}"
    if precision.storage.shard != shard:
        setting += f", which is {shard}"
    yield _violation(
        setting,
        f"shards whole tensors, which works {condition}; set storage.shard=none",
    )
