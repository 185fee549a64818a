"""Validation rules of the parallel layout: what of it does not divide, and what has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from fp8cfg.schema.backends import capabilities, ordered
from fp8cfg.schema.changed_fields import idle
from fp8cfg.schema.storage import (
    SCALED,
    StateDtypes,
    against_gathered_params,
    level,
    resolve_state_dtypes,
)
from fp8cfg.schema.training import Strategy, Trainer
from fp8cfg.schema.violation import Violation

if TYPE_CHECKING:
    from fp8cfg.schema.recipe import Recipe

ZERO = ("zero1", "zero2")


def by_fsdp2(recipe: Recipe, state: StateDtypes, ranks: int, backend: str) -> bool:
    """Whether FSDP2 shards the parameters of the recipe's Transformer.

    Args:
        recipe: The recipe.
        state: Its storage dtypes.
        ranks: Number of ranks with the same parameters.
        backend: The backend of the FP8 layers.
    """
    shard = state.sharding(ranks)
    if shard == "fsdp" or ranks == 1:
        return shard == "fsdp"
    replicated = recipe.trainer.strategy.data_parallel_replicate_size > 1
    # Replica groups sum the gradients as they are stored. They would not send the wider dtype.
    sends_wider = state.other["weight_grad"] not in (state.other["comm"], "fp32")
    if replicated and sends_wider:
        return False
    return _can_gather_stored_weights(recipe, state, backend)


def _can_gather_stored_weights(recipe: Recipe, state: StateDtypes, backend: str) -> bool:
    """Whether FSDP2 can gather weights in their storage dtypes."""
    fp8 = recipe.precision.fp8
    has = capabilities(backend)
    if level(recipe.precision) or not has.fully_shards:
        return False
    if state.low_bit and not state.float32_masters:
        return False
    if state.linear["comm"] in SCALED or state.other["comm"] in SCALED:
        return False
    if recipe.lora.enabled:  # only adapters are sharded, and they are no weights of linear layers
        return True
    gathers_params = has.fp8_gather == "params"
    if state.fp8_weights:
        if not gathers_params and against_gathered_params(fp8, backend):
            return False
        return has.zero_fp8_weights
    if state.linear["weight"] == state.other["weight"]:
        return True
    tensor = recipe.trainer.strategy.tensor_model_parallel_size
    return tensor == 1 and (not fp8.enabled or gathers_params)


GPUS = 8
"""Of one machine, at most."""


def strategy_rules(recipe: Recipe) -> Iterator[Violation]:
    """What the layout breaks; of that what a smoke run, which cuts it to the ranks and sizes there are, does not have."""
    return (
        line
        for line in _strategy_rules(recipe)
        if not (recipe.trainer.smoke and line.source == "layout")
    )


def _strategy_rules(recipe: Recipe) -> Iterator[Violation]:
    t, s, m = recipe.trainer, recipe.trainer.strategy, recipe.model
    world = t.num_nodes * t.devices
    if world % s.size:
        yield Violation(
            "trainer.strategy",
            f"tensor x pipeline x context parallel = {s.size} GPUs does not"
            f" divide trainer.num_nodes x trainer.devices = {world}; nearest is"
            f" {_machines(t)}{s.smaller(world)}",
            source="layout",
        )
    elif (
        t.global_batch_size % (t.micro_batch_size * (world // s.size))
        and not t.global_batch_size % t.micro_batch_size
    ):
        parallel = world // s.size
        yield batches(
            recipe,
            parallel,
            f"trainer.micro_batch_size x data-parallel size = {t.micro_batch_size * parallel}",
        )
    tp, pp, cp = (
        s.tensor_model_parallel_size,
        s.pipeline_model_parallel_size,
        s.context_parallel_size,
    )
    if m.num_attention_heads % tp:
        sizes = gcd(m.num_query_groups, m.ffn_hidden_size, m.vocab_size)
        yield Violation(
            f"trainer.strategy.tensor_model_parallel_size={tp}",
            f"must divide"
            f" model.num_attention_heads={m.num_attention_heads}; nearest is"
            f" {_dividing(sizes, tp, world, s.size // tp)}",
            source="layout",
        )
    stages, virtual = (
        _dividing(m.num_layers, pp, world, s.size // pp),
        "virtual_pipeline_model_parallel_size",
    )
    if s.virtual_pipeline_model_parallel_size is None:
        if m.num_layers % pp:
            yield Violation(
                f"trainer.strategy.pipeline_model_parallel_size={pp}",
                f"must divide model.num_layers={m.num_layers}; nearest is {stages}",
                source="layout",
            )
    elif pp == 1:
        yield (
            Violation(
                f"trainer.strategy.{virtual}",
                "has no effect while pipeline_model_parallel_size=1; write null",
            )
        )
    elif m.num_layers < pp * s.chunks:
        most = m.num_layers // pp
        fewer = (
            f"{virtual}={most}"
            if most > 1
            else f"{virtual}=null"
            if stages == pp
            else f"{stages} with {virtual}=null"
        )
        yield Violation(
            f"trainer.strategy.pipeline_model_parallel_size={pp}",
            f"model.num_layers={m.num_layers}"
            f" are too few for {pp * s.chunks} chunks of layers; nearest is {fewer}",
            source="layout",
        )
    yield from _schedule_rules(s)
    yield from _replica_rules(recipe, world)
    if s.sequence_parallel and tp == 1:
        yield Violation(
            "trainer.strategy.sequence_parallel=true",
            "has no effect while tensor_model_parallel_size=1; write false",
            [("trainer.strategy.sequence_parallel", False)],
            ["trainer.strategy.tensor_model_parallel_size"],
        )
    if cp > 1:
        yield from _context_rules(recipe, cp)


def _machines(t: Trainer) -> str:
    """The word that gives a replica whole machines: GPUs of each, or more of them where these are more than a machine has."""
    size = t.strategy.size
    step = size // gcd(size, t.num_nodes)
    devices = min(multiple(t.devices, step), GPUS // step * step)
    return (
        f"trainer.devices={devices}"
        if devices
        else f"trainer.num_nodes={size // gcd(size, t.devices)}"
    )


def _dividing(whole: int, size: int, world: int, rest: int) -> int:
    """The divisor of `whole` that is nearest to `size`, of those that leave `world` ranks whole replicas, of `rest` others each."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    return min(
        [n for n in divisors if world % (n * rest) == 0] or divisors, key=lambda n: abs(n - size)
    )


def _schedule_rules(s: Strategy) -> Iterator[Violation]:
    """Of the order of passes, which follows from the number of chunks."""
    key, chunks = "trainer.strategy.pipeline_schedule", "virtual_pipeline_model_parallel_size"
    if s.pipeline_model_parallel_size == 1 and s.pipeline_schedule == "auto":
        return
    if s.pipeline_model_parallel_size == 1:
        yield from idle(
            s,
            ("pipeline_schedule",),
            " while pipeline_model_parallel_size=1; write auto",
            s.key(chunks),
            s.key("pipeline_model_parallel_size"),
        )
    elif s.pipeline_schedule == "1f1b" and s.chunks > 1:
        yield Violation(
            f"{key}=1f1b",
            f"is of one chunk on each GPU, and {chunks}={s.chunks}; write"
            f" interleaved_1f1b, or {chunks}=null",
            [(key, "auto")],
            [s.key(chunks)],
        )
    elif s.pipeline_schedule == "interleaved_1f1b" and s.chunks == 1:
        yield Violation(
            f"{key}=interleaved_1f1b",
            f"is of several chunks on each GPU; write {s.key(chunks)}=2",
            [(key, "auto")],
            [s.key(chunks)],
        )


def _replica_rules(recipe: Recipe, world: int) -> Iterator[Violation]:
    """Of groups that have all state each, over which FSDP2 replicates what it shards."""
    s, key, p = (
        recipe.trainer.strategy,
        "trainer.strategy.data_parallel_replicate_size",
        recipe.precision,
    )
    groups, backends = (
        s.data_parallel_replicate_size,
        (ordered() if p.backend == "auto" else [p.backend]),
    )
    state = resolve_state_dtypes(p)
    if state.sharding(2) == "none":
        instead = "" if level(p) else "storage.shard=zero1, or "
        why = {"none": f"; write {instead}1", "auto": ", which is none here; write 1"}[
            p.storage.shard
        ]
        yield from idle(
            s,
            ("data_parallel_replicate_size",),
            f" with storage.shard={p.storage.shard}{why}",
            "storage.shard",
        )
    elif groups > 1 and not any(by_fsdp2(recipe, state, 2, backend) for backend in backends):
        yield Violation(
            f"{key}={groups}",
            "groups have the shards of FSDP2, and here whole tensors have owners; write 1",
            [(key, 1)],
            [
                "storage.shard",
                "backend",
                "opt_level",
                "storage.weight",
                "storage.master_weight",
                "storage.weight_grad",
                "storage.comm",
                "storage.rounding",
            ],
        )
    elif groups > 1 and world % s.size == 0:
        data, context = world // s.size, s.context_parallel_size
        if data % groups:
            yield Violation(
                f"{key}={groups}",
                f"does not divide the data-parallel size {data}; nearest is {gcd(data, groups)}",
                [(key, gcd(data, groups))],
                ["trainer.num_nodes", "trainer.devices"],
            )
        elif data * context == groups:
            yield Violation(
                f"{key}={groups}",
                "leaves one rank to each group, which shards nothing; write"
                " storage.shard=none, or 1",
                [(key, 1)],
                ["trainer.num_nodes", "trainer.devices"],
            )


def _context_rules(recipe: Recipe, cp: int) -> Iterator[Violation]:
    """Of sequences that are split over `cp` ranks, each with two chunks of them."""
    length, key = recipe.model.seq_length, "trainer.strategy.context_parallel_size"
    if length % (2 * cp):
        nearest = multiple(length, 2 * cp)
        yield Violation(
            f"model.seq_length={length}",
            f"must be a multiple of 2 x context_parallel_size = {2 * cp}; nearest is {nearest}",
            source="layout",
        )
    if recipe.fp8.enabled and recipe.fp8.dot_product_attention:
        yield Violation(
            "fp8.dot_product_attention=true",
            f"attention in FP8 takes whole sequences, and {key}={cp} splits them; write false",
            [("fp8.dot_product_attention", False)],
            [key],
        )
    for name in (
        name
        for name in ("reset_attention_mask", "reset_position_ids")
        if getattr(recipe.data, name)
    ):
        yield Violation(
            f"data.{name}=true",
            f"documents are told apart in whole sequences, and {key}={cp} splits them; write false",
            [(f"data.{name}", False)],
            [key],
        )
    if every := recipe.log.fp8_stats_every_n_steps:
        yield Violation(
            f"log.fp8_stats_every_n_steps={every}",
            f"one rank measures, and under {key}={cp} none has whole sequences; drop it",
            [("log.fp8_stats_every_n_steps", 0)],
            [key],
        )


def batches(recipe: Recipe, parallel: int, of: str) -> Violation:
    """A global batch that is no multiple `of` the microbatches of all `parallel` replicas. Microbatches, which change no result,
    give way before it."""
    t = recipe.trainer
    near, share = (
        multiple(t.global_batch_size, t.micro_batch_size * parallel),
        t.global_batch_size // parallel,
    )
    gives = [("trainer.global_batch_size", near)]
    if t.global_batch_size % parallel == 0:
        gives.insert(
            0,
            (
                "trainer.micro_batch_size",
                max(d for d in range(1, t.micro_batch_size + 1) if share % d == 0),
            ),
        )
    return Violation(
        f"trainer.global_batch_size={t.global_batch_size}",
        f"not a multiple of {of}; nearest is {near}",
        gives,
        [
            "trainer.global_batch_size",
            "trainer.micro_batch_size",
            "trainer.num_nodes",
            "trainer.devices",
        ],
    )


def multiple(value: int, of: int) -> int:
    """The multiple of `of` that is nearest to `value`, at least one."""
    return max(of, round(value / of) * of)
