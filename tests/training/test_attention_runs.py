"""FP8 attention of a recipe: what is planned is what runs, training, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.backends import gemm_plan
from fp8cfg.backends.choice import Hardware, choose
from fp8cfg.checkpoint import job_state
from fp8cfg.models.attention import CoreAttention
from fp8cfg.numerics.fp8_attention import PRODUCTS
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.planning.coverage import coverage, planned_coverage
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.schema.fp8 import FP8
from fp8cfg.training.data import run_data
from tests.support import whole_checkpoints
from tests.support.small import losses, small, steps
from tests.support.traced import trace_model

FP8_RUN, ATTENTION = "precision=bf16_fp8", "fp8.dot_product_attention=true"
NAME = "layers.0.self_attention.core_attention"


def test_the_products_have_the_names_of_the_plan() -> None:
    assert PRODUCTS == gemm_plan.ATTENTION_GEMMS


@pytest.mark.parametrize(
    ("fp8", "reasons"),
    [
        ({}, ["scaled dot product"] * 3),
        ({"dot_product_attention": True}, [""] * 3),
        (
            {
                "dot_product_attention": True,
                "high_precision_at_start": 1,
                "high_precision_at_end": 1,
            },
            ["fp8.high_precision_at_start=1", "", "fp8.high_precision_at_end=1"],
        ),
        ({"dot_product_attention": True, "exclude": ("*",), "format": "e4m3"}, [""] * 3),
    ],
)
def test_the_plan(fp8: dict[str, Any], reasons: list[str]) -> None:
    plans = gemm_plan.plan_attention(FP8(enabled=True, **fp8), 3)
    assert [p.name for p in plans] == [
        f"layers.{i}.self_attention.core_attention" for i in range(3)
    ]
    assert [p.reason for p in plans] == reasons and [p.fp8_share for p in plans] == [
        0.0 if r else 1.0 for r in reasons
    ]
    gradient = "e4m3" if fp8.get("format") else "e5m2"
    assert plans[1].gemms == (
        (None,) * 6 if reasons[1] else (("e4m3", "e4m3"),) * 2 + ((gradient, "e4m3"),) * 4
    )


TABLE = """\
   linear layers                        FLOPs  fprop     dgrad     wgrad
4  layers.*.self_attention.linear_qkv   15.1%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
4  layers.*.self_attention.linear_proj   7.5%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
4  layers.*.mlp.linear_fc1              45.2%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
4  layers.*.mlp.linear_fc2              22.6%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
1  output_layer                          2.0%  bf16: fp8.output_layer=false
4  attention                             7.5%  e4m3xe4m3 e5m2xe4m3
FP8: 16 of 17 linear layers, attention in 4 of 4, 98.0% of matmul FLOPs"""


def test_the_table_of_coverage() -> None:
    recipe = fp8cfg.compose(["recipe=llama_tiny", FP8_RUN, ATTENTION])
    assert str(planned_coverage(recipe, plan_layers(recipe))) == TABLE
    recipe.fp8.high_precision_at_start = 1
    lines = str(planned_coverage(recipe, plan_layers(recipe))).splitlines()
    assert lines[-4:] == [
        "1  attention                             1.9%  bf16:",
        "                                               fp8.high_precision_at_start=1",
        "3  attention                             5.7%  e4m3xe4m3 e5m2xe4m3",
        "FP8: 12 of 17 linear layers, attention in 3 of 4, 73.5% of matmul FLOPs",
    ]


ENDS = ("fp8.high_precision_at_start=1", "model.num_layers=3")


@pytest.mark.parametrize(
    ("words", "traced"),
    [
        ((FP8_RUN,), False),
        ((FP8_RUN, "fp8.high_precision_at_end=1"), False),
        (("precision=bf16_fp8_current", "model.num_layers=4"), False),
        ((FP8_RUN, "fp8.format=e4m3"), False),
        ((FP8_RUN, "model.recompute_granularity=full"), False),
        (("precision=fp16_fp8", "precision.initial_loss_scale=1024"), False),
        # Each of these keys, in two graphs.
        pytest.param(
            (
                FP8_RUN,
                *ENDS,
                "fp8.high_precision_at_end=1",
                "fp8.format=e4m3",
                "model.recompute_granularity=full",
            ),
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                "precision=fp16_fp8_current",
                "precision.initial_loss_scale=1024",
                *ENDS,
                "fp8.high_precision_at_end=1",
            ),
            True,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_ran_is_what_was_planned(words: tuple[str, ...], traced: bool) -> None:
    job = fp8cfg.build(small(*words, ATTENTION))
    if traced:
        trace_model(job)
    list(steps(job, 1))
    assert job.prove().data() == planned_coverage(job.recipe, job.plan).data()
    found = {
        name: kinds
        for name, kinds in coverage(job.model).products.items()
        if name.endswith("core_attention")
    }
    assert (
        len(found)
        == sum(
            p.fp8_share
            for p in gemm_plan.plan_attention(job.recipe.fp8, job.recipe.model.num_layers)
        )
        > 0
    )
    assert all(list(kinds) == list(PRODUCTS) for kinds in found.values())


def test_attention_that_does_not_run_in_fp8_stops_the_run() -> None:
    job = fp8cfg.build(small(FP8_RUN, ATTENTION))
    job.model.get_submodule("layers.0.self_attention").core_attention = CoreAttention()
    list(steps(job, 1))
    with pytest.raises(
        fp8cfg.NotFP8Error, match=f"{NAME} p: planned e4m3 x e4m3, ran high precision.* and 3 more"
    ):
        job.prove()


def test_scales_of_attention_move_with_the_optimizer() -> None:
    job = fp8cfg.build(small(FP8_RUN, ATTENTION))
    layer = job.model.get_submodule(NAME)
    assert layer.fp8_amax_history.shape == (1024, 6) and not layer.fp8_scale.any()
    list(steps(job, 2))
    assert (
        layer.fp8_scale.all()
        and layer.fp8_amax_history[-2:].all()
        and not layer.fp8_amax_history[:-2].any()
    )


def test_training_learns_as_without() -> None:
    with_it, without, high = (
        losses(*w, count=6) for w in ((FP8_RUN, ATTENTION), (FP8_RUN,), ("precision=bf16",))
    )
    assert (
        with_it == pytest.approx(without, rel=0.01)
        and with_it == pytest.approx(high, rel=0.01)
        and with_it != without
    )


@pytest.mark.parametrize(
    "words",
    [(), ("fp8.interval=3",), ("fp8.first_step=te",), ("model.recompute_granularity=full",)],
)
def test_a_resumed_run_goes_on_bit_for_bit(words: tuple[str, ...], tmp_path: Path) -> None:
    words = (FP8_RUN, ATTENTION, *words)
    whole, first, job = (fp8cfg.build(small(*words)) for _ in range(3))
    want = [s.loss for s in steps(whole, 6)][3:]
    list(steps(first, 3))
    tensors, json = whole_checkpoints.collect(first, run_data(first.recipe)[0], 3)
    assert f"{NAME}.fp8_amax_history" in tensors["fp8"] and not any(
        ".fp8_" in name for name in tensors["model"]
    )
    loaded = whole_checkpoints.load(whole_checkpoints.save(tmp_path, 3, tensors, json, keep=1))
    assert job_state.restore(job, *loaded, run_data(job.recipe)[0]) == 3
    assert [s.loss for s in steps(job, 3, first=3)] == want
    for (name, a), b in zip(
        stored_state_dict(job.model).items(), stored_state_dict(whole.model).values(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("start", "change"),
    [
        ((ATTENTION,), "fp8.dot_product_attention=false"),
        ((), ATTENTION),
        ((ATTENTION,), "fp8.amax_history_len=4"),
        ((ATTENTION,), "fp8.margin=1"),
    ],
)
def test_an_allowed_change_resumes(start: tuple[str, ...], change: str) -> None:
    before = fp8cfg.build(small(FP8_RUN, *start))
    list(steps(before, 2))
    job = fp8cfg.build(fp8cfg.compose([change], base=before.recipe))
    assert (
        job_state.restore(
            job,
            *whole_checkpoints.collect(before, run_data(before.recipe)[0], 2),
            run_data(job.recipe)[0],
        )
        == 2
    )
    if change == "fp8.amax_history_len=4":
        assert torch.equal(
            job.model.get_submodule(NAME).fp8_amax_history,
            before.model.get_submodule(NAME).fp8_amax_history[[0, -3, -2, -1]],
        )
    assert [s.loss for s in steps(job, 2, first=2)] == pytest.approx(
        [s.loss for s in steps(before, 2, first=2)], rel=0.02
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("precision=bf16_mxfp8", ATTENTION),
            "fp8.dot_product_attention=true: the native backend has none under fp8.scaling=mxfp8, where cuDNN "
            "quantizes the softmax by its own rules; remove it or set fp8.scaling=current",
        ),
        (
            ("precision=bf16_nvfp4", ATTENTION),
            "fp8.dot_product_attention=true: fp8.scaling=nvfp4 does not support FP8 attention (TE NVFP4BlockScaling)",
        ),
        (
            (
                "precision=bf16_fp8_current",
                "fp8={granularity: row, high_precision_at_start: 0, high_precision_at_end: 0}",
                ATTENTION,
            ),
            "fp8.dot_product_attention=true: needs fp8.granularity=tensor, not row (TE Float8CurrentScaling)",
        ),
        (
            (FP8_RUN, ATTENTION, "fp8.multi_head_attention=true"),
            "fp8.multi_head_attention=true: needs FP8 outputs of the projections: backend=te; remove it",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.build(small(*words))
    assert e.value.problems == [line]


def test_a_gpu_emulates_it_where_asked() -> None:
    hopper = Hardware("cuda", (9, 0), (12, 9))
    precision = small(FP8_RUN, ATTENTION).precision
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"fp8\.dot_product_attention=true: the native backend has it only by emulation",
    ):
        choose(precision, hopper)
    precision.fp8.emulate = True
    assert choose(precision, hopper).product == "emulate"
