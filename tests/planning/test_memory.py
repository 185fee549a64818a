"""The memory plan against measured bytes, and what the tracker of live bytes counts."""

from __future__ import annotations

import pytest

import fp8cfg
from fp8cfg.planning.layout import rank_part
from fp8cfg.planning.peak_memory import memory_table, part_linears, persistent_memory, plan_memory
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training.memory_measurement import BOUNDS, LiveBytes, measure_memory
from tests.support.small import small

PRECISIONS = [
    "fp32",
    "bf16",
    "bf16_fp8",
    "bf16_fp8 fp8.params=false",
    "bf16_fp8_current",
    "bf16_fp8_block",
    "bf16_mxfp8",
    "fp16 precision.loss_scale=1024",
    "bf16_fp8 fp8.output_layer=true",
    "bf16_fp8 fp8.dot_product_attention=true",
    "bf16_fp8 fp8.override_linear_precision.wgrad=true",
    *(f"{p} opt_level={level}" for p in ("bf16", "bf16_fp8") for level in ("O1", "O2", "O3")),
    "fp32 opt_level=O2",
    "fp32 storage.weight_grad=bf16",
    "fp16 storage.weight=fp32 precision.loss_scale=1024",
    "bf16 storage.weight=fp8",
    "bf16_fp8 storage.exp_avg=fp8_block storage.exp_avg_sq=fp8_block",
]


SELECTIVE = (
    "fp32",
    "bf16",
    "bf16_fp8",
    "bf16_fp8_current",
    "bf16_fp8 fp8.dot_product_attention=true",
    "bf16_fp8 fp8.override_linear_precision.wgrad=true",
    "bf16_fp8 opt_level=O2",
)


@pytest.mark.parametrize(
    ("precision", "recompute"),
    [
        *((p, r) for p in PRECISIONS for r in ("none", "full")),
        *(
            pytest.param(p, "selective", marks=[] if p in SELECTIVE else pytest.mark.slow)
            for p in PRECISIONS
        ),
    ],
)
def test_planned_bytes_are_the_measured_ones(precision: str, recompute: str) -> None:
    words = f"precision={precision}".split()
    found = measure_memory(
        small(*words, "model.num_layers=3", f"model.recompute_granularity={recompute}")
    )
    off = {
        kind: found[kind]
        for kind, bound in BOUNDS.items()
        if abs(found[kind][0] - found[kind][1]) > bound * found[kind][1]
    }
    assert not off, "kind: planned, measured"
    assert found["peak"][1] > found["after forward"][1] > 0


@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16_fp8 model.recompute_granularity=full",
        "precision=bf16_fp8_block fp8.params=true",
        "precision=bf16_mxfp8 fp8.params=true",
    ],
)
def test_a_transpose_that_is_kept_takes_what_is_planned(words: str) -> None:
    plain, kept = (
        measure_memory(tiny(*words.split(), f"fp8.keep_transpose_cache={on}"))
        for on in ("false", "true")
    )
    for kind in ("after forward", "peak"):
        planned, here = (kept[kind][i] - plain[kind][i] for i in (0, 1))
        assert planned == pytest.approx(here, rel=1e-4) and kept[kind][0] == pytest.approx(
            kept[kind][1], rel=0.01
        ), kind
    recipe = tiny(*words.split())
    weights = sum(
        p.in_features * p.out_features for p in part_linears(recipe, rank_part(recipe)) if p.fp8
    )
    assert kept["after forward"][0] - plain["after forward"][0] == 2 * weights, (
        "bf16 carries values of FP8 that is emulated"
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_fp8 fp8.output_layer=true"])
def test_the_loss_has_float32_logits_of_a_chunk_alone(precision: str) -> None:
    recipe = small(*f"precision={precision}".split(), "model.vocab_size=40000")
    found, logits = measure_memory(recipe), 8 * 32 * 40000
    for kind in ("after forward", "peak"):
        assert found[kind][0] == pytest.approx(found[kind][1], rel=0.03), kind
    if precision == "bf16":
        assert found["after forward"][1] < 3 * logits and found["peak"][1] < 7 * logits, (
            "bytes of a logit; 12 were float32 ones alone"
        )


@pytest.mark.parametrize(
    "words",
    [
        "recipe=llama_tiny data.reset_attention_mask=true",
        "recipe=gemma3_tiny model.recompute_granularity=full",
        "recipe=gemma2_tiny data.reset_attention_mask=true",
    ],
)
def test_a_mask_is_kept_once_for_all_layers(words: str) -> None:
    found = measure_memory(
        fp8cfg.compose(
            [
                *words.split(),
                "precision=bf16",
                "data=tiny",
                "trainer.micro_batch_size=2",
                "model.num_layers=4",
            ]
        )
    )
    assert found["after forward"][0] == pytest.approx(found["after forward"][1], rel=0.06)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16_fp8_current",
        "precision=bf16_fp8_current fp8.granularity=row",
        "precision=bf16_mxfp8",
        "precision=bf16_fp8_current fp8.override_linear_precision.wgrad=true",
        "precision=bf16_fp8_current precision.compute=fp32",
        "precision=bf16_fp8_current fp8.output_layer=true",
    ],
)
def test_torchao_keeps_inputs_and_no_quantized_weights(words: str, recompute: str) -> None:
    pytest.importorskip("torchao", minversion="0.18")
    recipe = tiny(
        *words.split(),
        "fp8.params=false",
        "backend=torchao",
        f"model.recompute_granularity={recompute}",
    )
    found = measure_memory(recipe)
    assert found["after forward"][0] == pytest.approx(found["after forward"][1], rel=0.05)
    assert found["peak"][0] == pytest.approx(found["peak"][1], rel=0.1)
    assert "FP8 copies" not in memory_table(recipe, "cpu")


@pytest.mark.parametrize(
    "words", ["precision=bf16_fp8 fp8.params=false", "precision=bf16_fp8_current fp8.params=false"]
)
def test_a_repeated_forward_pass_quantizes_weights_beside_activations(words: str) -> None:
    plan, here = measure_memory(tiny(*words.split(), "model.recompute_granularity=full"))["peak"]
    assert plan == pytest.approx(here, rel=0.03)


@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16_nvfp4",
        "precision=bf16_nvfp4 fp8.stochastic_rounding=false",
        "precision=bf16_mxfp8 precision.compute=fp32",
        "precision=bf16_fp8_current fp8.granularity=row model.recompute_granularity=full",
    ],
)
def test_what_rounding_and_scales_take_is_planned(words: str) -> None:
    """Of few tokens, where a matrix that is rounded, or a product that is scaled, is the peak."""
    plan, here = measure_memory(tiny(*words.split(), "model.num_layers=2", "model.seq_length=128"))[
        "peak"
    ]
    assert plan == pytest.approx(here, rel=0.01)


@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16",
        "precision=fp32 model.seq_length=32",
        "precision=bf16_fp8 model.recompute_granularity=full",
        "precision=bf16_fp8 opt_level=O3",
    ],
)
def test_gradients_of_one_microbatch_come_as_activations_go(words: str) -> None:
    one, several = (
        tiny(
            "model.num_layers=2",
            "model.seq_length=128",
            *words.split(),
            f"trainer.global_batch_size={n}",
        )
        for n in (2, 4)
    )
    plan, here = measure_memory(one)["peak"]
    assert plan == pytest.approx(here, rel=0.02)
    single, accumulated = plan_memory(one, "cpu"), plan_memory(several, "cpu")
    assert single["to come"] < -0.2 * single["gradients"] and "to come" not in accumulated
    assert sum(single.values()) >= sum(
        persistent_memory(one, rank_part(one), part_linears(one, rank_part(one))).values()
    )


@pytest.mark.parametrize(
    "recipe",
    [
        "qwen3_tiny",
        pytest.param("olmo2_tiny", marks=pytest.mark.slow),
        pytest.param("gpt3_tiny", marks=pytest.mark.slow),
        "gemma2_tiny",
        pytest.param("gemma3_tiny", marks=pytest.mark.slow),
        pytest.param("llama_tiny task=lora", marks=pytest.mark.slow),
    ],
)
def test_selective_recomputation_keeps_what_was_planned(recipe: str) -> None:
    words = (
        f"recipe={recipe}",
        "precision=bf16",
        "data=tiny",
        "trainer.micro_batch_size=2",
        "model.num_layers=4",
    )
    plain, found = (
        measure_memory(
            fp8cfg.compose(
                [w for word in words for w in word.split()] + [f"model.recompute_granularity={g}"]
            )
        )
        for g in ("none", "selective")
    )
    assert found["after forward"][0] == pytest.approx(
        found["after forward"][1], rel=0.03
    ) and found["peak"][0] == pytest.approx(found["peak"][1], rel=0.12)
    assert found["after forward"][1] < 0.8 * plain["after forward"][1]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_before_and_after_the_first_adapter_differ(recompute: str) -> None:
    """Only the layers after it keep activations. In BF16 all of them have the same GEMM formats."""
    words = ["precision=bf16", "lora.enabled=true", "lora.targets=[layers.1.*]"]
    recipe = small(*words, "model.num_layers=4", f"model.recompute_granularity={recompute}")
    planned, measured = measure_memory(recipe)["peak"]
    assert planned == pytest.approx(measured, rel=BOUNDS["peak"])


def tiny(*words: str) -> Recipe:
    return fp8cfg.compose(["recipe=llama_tiny", "data=tiny", "trainer.micro_batch_size=2", *words])


def test_what_the_tracker_counts_of_wrappers_and_of_resized_tensors() -> None:
    import torch
    from torch.testing._internal.two_tensor import TwoTensor

    gathered = torch.zeros(100)
    with LiveBytes([], resized=[gathered]) as live:
        pair = TwoTensor(torch.zeros(10), torch.zeros(10))
        assert live.now == 400 + 80, "a wrapper has the memory of what is inside"
        more = pair + 1
        assert live.now == 400 + 160
        gathered.untyped_storage().resize_(0)
        assert live.now == 160 and more is not pair
        del pair, more
        assert live.now == 0


def test_what_the_tracker_counts() -> None:
    import torch

    known = torch.zeros(100)
    with LiveBytes([known]) as live:
        a = torch.zeros(10)
        view, kept = a.view(2, 5), known[:5]
        b = a + 1
        del a, b
        assert (live.now, live.peak) == (40, 80), (
            "a lives in its view, b does not, what was known is not counted"
        )
        del view
        assert live.now == 0 and kept is not None
