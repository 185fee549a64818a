"""Parts of the memory plan against counts by hand: bytes of a parameter, shards, stages, and what a rank has of a layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fp8cfg
from fp8cfg.planning import peak_memory, zero_memory
from fp8cfg.planning.fit_search import check_memory
from fp8cfg.planning.fsdp_memory import gather_line
from fp8cfg.planning.layout import checked_parts, rank_part, stage_layers
from fp8cfg.planning.peak_memory import (
    count_parameters,
    memory_table,
    optimizer_step_bytes,
    part_linears,
    persistent_memory,
    plan_memory,
    planned_backend,
)
from fp8cfg.planning.state_shards import state_bytes
from fp8cfg.schema.recipe import Recipe
from tests.support.small import small


def test_recomputation_takes_less_and_more_tokens_take_more() -> None:
    def working(*words: str) -> int:
        kinds = plan_memory(fp8cfg.compose(["precision=bf16_fp8", *words]), "cuda")
        return kinds["activations"] + kinds["logits"] + kinds["backward"]

    assert working("model.recompute_granularity=full") < working() / 2
    assert working("trainer.micro_batch_size=8") * 1.9 < working()


@pytest.mark.parametrize(
    ("words", "each"),
    [
        ("precision=fp32", 16),
        ("precision=bf16", 18),
        ("precision=fp16", 16),
        ("precision=bf16 optim.name=sgd", 14),
        ("precision=bf16 optim.name=sgd optim.momentum=0", 10),
    ],
)
def test_bytes_of_a_parameter(words: str, each: int) -> None:
    recipe = small(*words.split())
    part = rank_part(recipe)
    assert (
        sum(persistent_memory(recipe, part, part_linears(recipe, part)).values())
        == each * count_parameters(recipe, part).total
    )


@pytest.mark.parametrize(
    ("level", "linear", "other", "scales"),
    [("O1", 11, 16, 9), ("O2", 6, 11, 9 + 2 * 15), ("O3", 7, 9, 9 + 9 + 2 * 15)],
)
def test_ms_amp_leaves_all_but_linear_layers_in_float32(
    level: str, linear: int, other: int, scales: int
) -> None:
    """Of nine linear layers and six other parameters; a scale is that of a gradient, a master or a moment."""
    words = ["precision=bf16_fp8", f"opt_level={level}", "fp8.output_layer=true"]
    if level != "O3":  # which stores weights in FP8 itself
        words.append("fp8.params=false")
    recipe = small(*words)
    part = rank_part(recipe)
    kinds, count = (
        persistent_memory(recipe, part, part_linears(recipe, part)),
        count_parameters(recipe, part),
    )
    assert (
        sum(kinds.values()) - kinds["FP8 copies"]
        == linear * count.linear_weights + other * count.other_parameters + 4 * scales
    )


def test_zero_splits_optimizer_state_over_data_parallel_ranks() -> None:
    recipe = small("precision=bf16", "model.num_layers=6")
    one, four = plan_memory(recipe, "cpu"), {}
    for shard in ("zero1", "zero2"):
        recipe.storage.shard = shard  # type: ignore[assignment]
        four[shard] = plan_memory(recipe, "cpu", rank_part(recipe, 4))
    for kinds in four.values():
        assert (
            all(kinds[kind] * 4 == one[kind] for kind in ("masters", "moments", "gradients"))
            and kinds["weights"] == one["weights"]
        )
    recipe.storage.shard, recipe.trainer.micro_batch_size = (
        "zero1",
        1,
    )  # two microbatches: gradients add up before they are summed
    kinds = plan_memory(recipe, "cpu", rank_part(recipe, 4))
    assert (
        kinds["gradients"] + kinds["accumulation"]
        == one["gradients"]
        > four["zero2"]["gradients"] + four["zero2"]["accumulation"]
    )


@pytest.mark.parametrize(
    ("shard", "split"),
    [
        ("zero1", ("masters", "moments", "gradients")),
        ("zero1 opt_level=O2", ("moments",)),
        ("zero2 opt_level=O2", ("moments", "gradients")),
        ("fsdp", ("gradients", "moments", "weights")),
    ],
)
def test_shards_of_all_ranks_are_the_whole_state(shard: str, split: tuple[str, ...]) -> None:
    recipe = small(
        "precision=bf16", *f"storage.shard={shard}".split(), "model.vocab_size=250"
    )  # rows that three ranks do not divide
    part, kept = (
        rank_part(recipe, 3),
        persistent_memory(recipe, rank_part(recipe), part_linears(recipe, rank_part(recipe))),
    )
    found = [
        state_bytes(recipe, part, part_linears(recipe, part), planned_backend(recipe), rank)
        for rank in range(3)
    ]
    every = [{kind: one[kind] for kind in split} for one in found]
    assert {kind: sum(one[kind] for one in every) for kind in split} == {
        kind: kept[kind] for kind in split
    }
    most = max(every, key=lambda one: sum(one.values()))
    assert (
        sum(most.values())
        > sum(map(kept.__getitem__, split)) / 3
        > sum(min(every, key=lambda one: sum(one.values())).values())
    )
    assert {kind: plan_memory(recipe, "cpu", part)[kind] for kind in split} == {
        kind: most[kind] for kind in split
    }, "a plan is of the rank with most"


@pytest.mark.parametrize(
    ("words", "ranks", "each"),
    [
        ("", 1, 1),
        ("trainer.micro_batch_size=4", 1, 4),
        ("", 2, 1),
        ("storage.comm=fp32", 2, 4),
        ("storage.shard=zero2", 2, 1),
        ("trainer.micro_batch_size=2 storage.shard=zero2", 2, 4),
    ],
)
def test_gradients_before_they_are_summed_and_stored(words: str, ranks: int, each: int) -> None:
    """A rank has them all; in float32 where a microbatch or another rank's are added to them."""
    recipe = small(
        "precision=bf16_fp8",
        "opt_level=O2",
        *words.split(),
        *(["trainer.micro_batch_size=4"] if ranks == 2 and "micro" not in words else []),
    )
    part = rank_part(recipe, ranks)
    kinds, count = plan_memory(recipe, "cpu", part), count_parameters(recipe, part)
    scales = 4 * len(part_linears(recipe, part))
    own = (
        state_bytes(recipe, part, part_linears(recipe, part), planned_backend(recipe))["gradients"]
        if "zero2" in words
        else 0
    )
    assert kinds["gradients"] + kinds.get(
        "accumulation", 0
    ) == each * count.linear_weights + 4 * count.other_parameters + (
        scales if each == 1 and not own else 0
    )
    assert kinds["gradients"] == (own or count.linear_weights + 4 * count.other_parameters + scales)


def gathered(recipe: Recipe, backend: str) -> str:
    return gather_line(recipe, rank_part(recipe, 2), backend)


def test_a_line_says_in_what_weights_are_gathered() -> None:
    said = {
        words: gathered(small("precision=bf16", *words.split()), "native")
        for words in ("", "storage.weight=fp8", "storage.weight=fp8 storage.comm=fp8")
    }
    assert [*said.values()] == ["", "weights of linear layers are gathered in fp8 once a step", ""]
    cast = gathered(
        small("precision=bf16_fp8_current", "storage.shard=fsdp", "fp8.params=false"), "torchao"
    )
    assert " ".join(cast.split()).endswith(
        "gathered in fp8, cast by torchao, with any fp8.params; storage.gather=bf16 turns it off"
    )


def test_the_plan_knows_the_optimizer_s_pieces() -> None:
    from fp8cfg.numerics import codecs
    from fp8cfg.optim.low_bit import adam_step, gradients

    assert (
        peak_memory.PIECES == {"cpu": codecs.CHUNK, "cuda": codecs.GPU_CHUNK}
        and zero_memory.WAITING == gradients.MAX_PENDING_ELEMENTS
    )
    recipe = small(
        "precision=fp32", "model.hidden_size=1024", "model.ffn_hidden_size=4097", "opt_level=O2"
    )
    part = rank_part(recipe)
    assert (
        optimizer_step_bytes(recipe, part, part_linears(recipe, part), "cpu") == 48 * codecs.CHUNK
    )
    alone = fp8cfg.compose(
        [
            "recipe=llama_8b",
            "opt_level=O2",
            "trainer.strategy.context_parallel_size=1",
            "trainer.devices=1",
            "trainer.global_batch_size=1",
        ]
    )
    assert plan_memory(alone, "cuda", rank_part(alone))[
        "accumulation"
    ] == 4 * gradients.MAX_PENDING_ELEMENTS and "accumulation" not in plan_memory(
        alone, "cpu", rank_part(alone)
    )
    few, at_once = (
        small("opt_level=O2"),
        ("storage.weight_grad=fp8_block", "storage.accumulate=stored opt_level=O2"),
    )
    largest = sorted(
        (p.in_features * p.out_features for p in part_linears(few, rank_part(few))), reverse=True
    )
    assert (
        plan_memory(few, "cuda", rank_part(few))["accumulation"]
        == 4 * sum(largest[: zero_memory.TOGETHER])
        and zero_memory.TOGETHER == adam_step.TENSORS_PER_LAUNCH
    )
    assert not [
        "accumulation"
        for words in at_once
        if "accumulation"
        in plan_memory(small(*words.split()), "cuda", rank_part(small(*words.split())))
    ]


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "sizes"),
    [
        (80, 4, 5, [20] * 4),
        (126, 8, 2, [15, *[16] * 6, 15]),
        (6, 3, 1, [2, 2, 2]),
        (7, 2, 1, [4, 3]),
        (10, 3, 1, [3, 4, 3]),
    ],
)
def test_layers_of_pipeline_stages(layers: int, stages: int, chunks: int, sizes: list[int]) -> None:
    held = stage_layers(layers, stages, chunks)
    assert [len(stage) for stage in held] == sizes
    assert sorted(layer for stage in held for layer in stage) == list(range(layers))


def laid_out(*words: str, tp: int = 1, pp: int = 1) -> Recipe:
    recipe = fp8cfg.compose(["model.num_layers=6", "trainer.micro_batch_size=1", *words])
    (
        recipe.trainer.strategy.tensor_model_parallel_size,
        recipe.trainer.strategy.pipeline_model_parallel_size,
    ) = tp, pp
    return recipe


def test_stages_and_tensor_ranks_hold_all_parameters_together() -> None:
    recipe = laid_out(tp=2, pp=3)
    found = checked_parts(recipe, 12)
    assert [(p.name, p.data, p.in_flight) for p in found] == [
        ("first stage", 2, 3),
        ("middle stage", 2, 2),
        ("last stage", 2, 1),
    ]
    matrices = [
        count_parameters(recipe, p).total - 256 * (2 * len(p.layers) + p.output) for p in found
    ]
    everything = count_parameters(recipe, rank_part(recipe)).total - 256 * (2 * 6 + 1)
    assert sum(matrices) * 2 == everything
    tied = laid_out("model.share_embeddings_and_output_weights=true", pp=2)
    first, last = checked_parts(tied, 2)
    assert (
        count_parameters(tied, first).total + count_parameters(tied, last).total
        == count_parameters(tied, rank_part(tied)).total + 272 * 256
    )


def test_a_layout_shares_activations_too() -> None:
    one = plan_memory(laid_out(), "cuda")
    first, _, last = (
        plan_memory(laid_out(pp=3), "cuda", p) for p in checked_parts(laid_out(pp=3), 3)
    )
    assert first["logits"] == 0 and last["logits"] == one["logits"], "logits are the last stage's"
    assert first["activations"] > last["activations"] - one["activations"] / 3, (
        "as many microbatches in flight as stages"
    )
    halves = replace(rank_part(laid_out()), tensor=2, sequence_parallel=True)
    m = laid_out().model
    gathered = (
        (6 * 2 + 1) * m.seq_length * m.hidden_size * 2
    )  # inputs of linear_qkv, linear_fc1 and the output layer are all tokens' on each rank
    assert plan_memory(laid_out(), "cuda", halves)["activations"] * 2 == pytest.approx(
        one["activations"] + gathered, rel=0.01
    )
    by_sequence = plan_memory(laid_out(), "cuda", replace(rank_part(laid_out()), context=2))
    # Of a token a rank keeps two keys and two values, its own and the other rank's, where one rank keeps the output of the projection,
    # of which the values are a view, and keys; and attention's output twice, by chunks and put together.
    more = 2 * m.head_dim * m.num_query_groups  # bytes
    assert by_sequence["activations"] == pytest.approx(
        one["activations"] / 2 + 6 * m.seq_length / 2 * more, rel=0.001
    )


@pytest.mark.parametrize(
    ("world", "line"),
    [
        (
            9,
            "9 GPUs: must be a multiple of tensor x pipeline x context parallel size = 6; nearest is 12 (--gpus 12)",
        ),  # three replicas do not share 16
        (
            18,
            "18 GPUs: trainer.global_batch_size=16 is not a multiple of trainer.micro_batch_size x data-parallel size = 3; nearest is 15",
        ),
    ],
)
def test_a_world_that_does_not_divide(world: int, line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        checked_parts(laid_out(tp=2, pp=3), world)
    assert e.value.problems == [line]


def test_a_recipe_that_is_too_large_is_refused_with_what_fits() -> None:
    recipe = small("precision=bf16")
    need = sum(plan_memory(recipe, "cpu").values())
    check_memory(recipe, "cpu", need)
    offered = r"model\.recompute_granularity=selective · trainer\.smoke=true"
    with pytest.raises(
        fp8cfg.ConfigError,
        match=rf"needs .*, this machine has .* free on cpu; nearest that fit: {offered}",
    ):
        check_memory(recipe, "cpu", need - 1)


def test_the_table() -> None:
    assert (
        memory_table(small("precision=fp16", "trainer.micro_batch_size=1"), "cpu")
        == """\
memory per rank       size  B/param
weights          212.6 KiB      2.0  fp16
masters          425.2 KiB      4.0  fp32
gradients        212.6 KiB      2.0  fp16
moments          850.5 KiB      8.0  fp32+fp32
activations      137.1 KiB           1 x 32 tokens, recompute none
logits           102.0 KiB           vocab_size=272
optimizer step   186.1 KiB           fp32 gradients
total              2.1 MiB"""
    )
