"""Limits of tensor parallelism: what of a recipe is not trained with split matrices, a line each with what to write instead.

They reject a recipe that is checked, planned or trained, but not one that is exported to a project that can train it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import gcd

from fp8cfg.backends.choice import ALIGNMENT, against_layout
from fp8cfg.models.config import stage_chunks
from fp8cfg.planning.layer_plan import adapted_projections, plan_layers, transformer_config
from fp8cfg.schema.backends import capabilities, ordered
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import ZERO, by_fsdp2
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import SCALED, StateDtypes, level, resolve_state_dtypes
from fp8cfg.schema.violation import Violation


def pipeline_limits(recipe: Recipe, ranks: int) -> list[Violation]:
    """A line for each reason why `recipe` is not trained with its pipeline_model_parallel_size on `ranks` ranks."""
    if recipe.trainer.strategy.pipeline_model_parallel_size == 1:
        return []
    strategy = recipe.trainer.strategy
    stages = of_adapters(recipe, strategy.pipeline_model_parallel_size, strategy.chunks)
    return [*_microbatches(recipe, ranks), *of_precision(recipe), *stages]


def of_precision(recipe: Recipe) -> list[Violation]:
    """Those lines that are about who multiplies and what is logged, whatever the sizes."""
    stages, lines = recipe.trainer.strategy.pipeline_model_parallel_size, list[Violation]()
    if recipe.fp8.enabled:
        lines += against_layout(recipe.backend, stages=stages)
    if every := recipe.log.fp8_stats_every_n_steps:
        lines.append(
            Violation(
                f"log.fp8_stats_every_n_steps={every}",
                f"one rank measures, and under "
                f"pipeline_model_parallel_size={stages} none has all layers; write 0",
                source="layout",
            )
        )
    return lines


def of_adapters(recipe: Recipe, stages: int, chunks: int) -> list[Violation]:
    """A line if adapters leave one of so many pipeline stages nothing to train, or the first chunk of layers no gradient to send
    back."""
    layers = recipe.model.num_layers
    if not recipe.lora.enabled or layers % (stages * chunks):
        return []  # another line is about sizes
    modules = [projection.module.split(".") for projection in adapted_projections(recipe)]
    numbers = {int(module[1]) if module[0] == "layers" else layers - 1 for module in modules}
    every = stage_chunks(layers, stages, chunks)
    empty = [stage for stage, own in enumerate(every) if not numbers & {*chain(*own)}]
    if not numbers & {*every[0][0]}:
        empty = [0]
    if not empty:
        return []
    key = recipe.trainer.strategy.key("pipeline_model_parallel_size")
    return [
        Violation(
            "lora.targets",
            f"no layer of pipeline stage {empty[0]} has an adapter, so that it has nothing"
            f" to train; name layers of each stage, or write {key}=1",
            source="layout",
        )
    ]


def _microbatches(recipe: Recipe, ranks: int) -> Iterator[Violation]:
    """A pipeline is filled by as many microbatches as it has ranks; interleaved stages take turns over so many at a time."""
    t, s = recipe.trainer, recipe.trainer.strategy
    stages, shares = s.pipeline_model_parallel_size, max(1, ranks // s.size)
    count, left = divmod(t.global_batch_size, t.micro_batch_size * shares)
    chunks = s.chunks
    if left or (count >= stages and (chunks == 1 or count % stages == 0)):
        return
    why = (
        f"so few do not fill {stages} stages"
        if count < stages
        else f"interleaved stages take a multiple of {stages}"
    )
    share = t.global_batch_size // shares  # samples of a rank
    micro = next(
        (
            m
            for m in range(min(t.micro_batch_size, share // stages), 0, -1)
            if share % m == 0 and (chunks == 1 or share // m % stages == 0)
        ),
        None,
    )
    cure = (
        f"trainer.micro_batch_size={micro}"
        if micro
        else f"trainer.global_batch_size={stages * t.micro_batch_size * shares}"
    )
    many = "1 microbatch" if count == 1 else f"{count} microbatches"
    yield (
        Violation(
            f"{s.key('pipeline_model_parallel_size')}={stages}",
            f"a step has {many} on each rank, and {why}; write {cure}",
            source="layout",
        )
    )


def limits(recipe: Recipe, ranks: int) -> list[Violation]:
    """A line for each reason why `recipe` is not trained with its tensor_model_parallel_size on `ranks` ranks."""
    tensor = recipe.trainer.strategy.tensor_model_parallel_size
    return (
        []
        if tensor == 1
        else [
            *_sizes(recipe, tensor),
            *of_state(recipe),
            *_dropout(recipe, tensor),
            *_fp8(recipe, tensor),
        ]
    )


def _dropout(recipe: Recipe, tensor: int) -> Iterator[Violation]:
    """Tensor-parallel ranks draw the same random numbers, as all of them need for a whole input."""
    if recipe.lora.enabled and recipe.lora.dropout:
        yield Violation(
            f"lora.dropout={recipe.lora.dropout:g}",
            f"ranks would drop the same channels of each part"
            f" of an input, and tensor_model_parallel_size={tensor} splits inputs; write 0",
            source="layout",
        )


def _sizes(recipe: Recipe, tensor: int) -> Iterator[Violation]:
    m, s = recipe.model, recipe.trainer.strategy
    key = s.key("tensor_model_parallel_size")
    for name in ("num_query_groups", "ffn_hidden_size", "vocab_size"):
        if (size := getattr(m, name)) % tensor:
            cure = (
                f"model.{name}={-(-size // tensor) * tensor}"
                if name != "num_query_groups"
                else f"{key}={gcd(size, tensor)}"
            )
            yield Violation(
                f"{key}={tensor}",
                f"does not divide model.{name}={size}; write {cure}",
                source="layout",
            )
    if s.sequence_parallel and m.seq_length // s.context_parallel_size % tensor:
        step = tensor * s.context_parallel_size
        yield (
            Violation(
                f"{s.key('sequence_parallel')}=true",
                f"splits model.seq_length={m.seq_length} over {step}"
                f" ranks; write model.seq_length={-(-m.seq_length // step) * step}",
                source="layout",
            )
        )


_WIDE = {"weight": "auto", "master_weight": "auto", "weight_grad": "auto", "rounding": "nearest"}
"""Storage keys with which state can be split."""


def of_state(recipe: Recipe) -> Iterator[Violation]:
    """Of state in fewer bits that is that of whole matrices, under tensor parallelism. Levels are refused beside any layout
    (layout_limits.py)."""
    p, tensor = recipe.precision, recipe.trainer.strategy.tensor_model_parallel_size
    if tensor == 1 or level(p):
        return
    state = resolve_state_dtypes(p)
    if not state.low_bit or state.can_be_split:
        return
    narrow = [key for key in _WIDE if not _widened(p, but=key).can_be_split]
    words = " ".join(f"storage.{key}={_WIDE[key]}" for key in narrow)
    yield Violation(
        "storage",
        "state in fewer bits, but for moments and gradients over float32 masters, is that"
        f" of whole matrices, and tensor_model_parallel_size={tensor} splits them; write {words}",
        source="layout",
    )


def _widened(precision: Precision, but: str) -> StateDtypes:
    """The storage dtypes of `precision` with those keys, `but` for one."""
    wide = {key: value for key, value in _WIDE.items() if key != but}
    storage = precision.storage.model_copy(update=wide)
    return resolve_state_dtypes(precision.model_copy(update={"storage": storage}))


def _fp8(recipe: Recipe, tensor: int) -> Iterator[Violation]:
    f, key = recipe.fp8, f"tensor_model_parallel_size={tensor}"
    if not f.enabled:
        return
    yield from against_layout(recipe.backend, tensor=tensor)
    scaling = SCALINGS[f.scaling]
    if f.dot_product_attention:
        yield Violation(
            "fp8.dot_product_attention=true",
            f"attention in FP8 takes all heads, and {key} splits them; write false",
            source="layout",
        )
    if every := recipe.log.fp8_stats_every_n_steps:
        yield Violation(
            f"log.fp8_stats_every_n_steps={every}",
            f"one rank measures, and under {key} none has whole matrices; write 0",
            source="layout",
        )
    if not f.reduce_amax:
        yield Violation(
            "fp8.reduce_amax=false",
            f"parts of a matrix share one scale under {key}; write true",
            source="layout",
        )
    block = max(scaling.block, ALIGNMENT)
    config = transformer_config(recipe)
    widths = {
        "linear_qkv": (
            (config.num_query_groups // tensor) * (config.heads_per_group + 2) * config.head_dim
        ),
        "linear_proj": config.query_size // tensor,
        "linear_fc1": config.ffn_hidden_size // tensor,
        "linear_fc2": config.ffn_hidden_size // tensor,
        "output_layer": -(-config.vocab_size // tensor),
    }
    keys = {
        "linear_qkv": "model.kv_channels",
        "linear_proj": "model.kv_channels",
        "output_layer": "model.vocab_size",
    }
    for name in dict.fromkeys(p.name.rpartition(".")[2] for p in plan_layers(recipe) if p.fp8):
        if (width := widths[name]) % block:
            yield (
                Violation(
                    f"fp8.scaling={f.scaling}",
                    f"{key} gives each rank {width} channels of {name}, which"
                    f" must be a multiple of {block}; write fp8.exclude=[*.{name}], another"
                    f" {keys.get(name, 'model.ffn_hidden_size')}, or a smaller"
                    " tensor_model_parallel_size",
                    source="layout",
                )
            )


def state_limits(recipe: Recipe, ranks: int) -> list[Violation]:
    """A line for each reason why state of `recipe` does not go with its parallel layout on `ranks` ranks."""
    s = recipe.trainer.strategy
    sizes = {
        name: size
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        )
        if (size := getattr(s, name)) > 1
    }
    if not sizes:
        return []
    alone = (
        "with data parallelism alone, not with"
        f" {', '.join(f'{name}={size}' for name, size in sizes.items())}"
    )
    if level(recipe.precision):
        return [_level(recipe, alone, [s.key(name) for name in sizes])]
    owned = (
        []
        if [*of_state(recipe)]
        else _owned(recipe, max(1, ranks // s.size) * s.context_parallel_size, alone)
    )
    return [*_sent(recipe, alone), *owned]


def _level(recipe: Recipe, alone: str, keys: list[str]) -> Violation:
    p = recipe.precision
    if capabilities(p.backend).level:
        plain = "backend=native opt_level=null" if p.opt_level else "backend=native"
        return Violation(
            f"backend={p.backend}",
            f"its level {level(p)} goes {alone}; write {plain}",
            source="layout",
        )
    other = f", or {keys[0]}=1" if len(keys) == 1 and recipe.trainer.strategy.chunks == 1 else ""
    return Violation(
        f"opt_level={p.opt_level}",
        f"goes {alone}; write opt_level=null{other}",
        source="layout",
    )


def _sent(recipe: Recipe, alone: str) -> Iterator[Violation]:
    p, storage = recipe.precision, recipe.storage
    if resolve_state_dtypes(p).linear["comm"] not in SCALED:
        return
    words = "storage.comm=auto"
    if storage.accumulate != "wide":
        words += " storage.accumulate=wide"
    yield Violation(
        f"storage.comm={storage.comm}",
        f"gradients sent in FP8 go {alone}; write {words}",
        source="layout",
    )


def _owned(recipe: Recipe, alike: int, alone: str) -> Iterator[Violation]:
    """Of whole tensors that have owners among the `alike` ranks with the same parameters, where FSDP2 does not shard them, whatever
    gradients are sent in."""
    p, backend = recipe.precision.model_copy(deep=True), recipe.precision.backend
    p.storage.comm = "auto"
    recipe = recipe.model_copy(update={"precision": p})
    state = resolve_state_dtypes(p)
    shard, backends = state.sharding(alike), ordered() if backend == "auto" else [backend]
    if (
        alike > 1
        and shard in ZERO
        and not any(by_fsdp2(recipe, state, alike, name) for name in backends)
    ):
        said = f"storage.shard={p.storage.shard}" + (
            "" if p.storage.shard == shard else f", which is {shard}"
        )
        yield Violation(
            said,
            f"tensors of this state have owners, which go {alone}; write storage.shard=none",
            source="layout",
        )
