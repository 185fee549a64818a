"""The rules of storage.shard=fsdp: what is refused, each in one line, and what storage.gather=auto comes to."""

from __future__ import annotations

import pytest
from torch import nn

import fp8cfg
from fp8cfg.parallel.fsdp_refusals import refuse_uneven
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.schema.storage import gathered
from tests.support.fsdp_runs import CURRENT, FSDP, PLAIN, TORCHAO, job_of
from tests.support.small import small

ZERO2 = "or set storage.shard=zero2"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "storage.gather=bf16",
            "storage.gather=bf16: has no effect with storage.shard=auto, which keeps full weights on every rank; remove it or set storage.shard=fsdp",
        ),
        (
            f"{FSDP} opt_level=O2 precision=bf16_fp8",
            f"opt_level=O2: storage.shard=fsdp keeps float32 weights; remove it, {ZERO2}",
        ),
        (
            f"{FSDP} backend=msamp precision=bf16_fp8 {PLAIN}",
            f"backend=msamp: storage.shard=fsdp keeps float32 weights; remove it, {ZERO2}",
        ),
        (
            f"{FSDP} storage.weight=bf16",
            f"storage.weight=bf16: storage.shard=fsdp needs fp32; set it to that, {ZERO2}",
        ),
        (
            f"{FSDP} storage.master_weight=fp32",
            f"storage.master_weight=fp32: storage.shard=fsdp needs none; set it to that, {ZERO2}",
        ),
        (
            f"{FSDP} storage.weight_grad=bf16",
            f"storage.weight_grad=bf16: storage.shard=fsdp needs fp32; set it to that, {ZERO2}",
        ),
        (
            f"{FSDP} storage.accumulate=stored",
            "storage.accumulate=stored: needs storage.weight_grad in FP8, not fp32; remove it or set it to fp8",
        ),
        (
            f"{FSDP} storage.master_weight=bf16",
            f"storage.master_weight=bf16: storage.shard=fsdp needs none; set it to that, {ZERO2}",
        ),
        (
            f"{FSDP} storage.comm=fp8",
            f"storage.comm=fp8: FSDP2 sums gradients in fp32 or bf16; set one of them, {ZERO2}",
        ),
        (
            f"{FSDP} precision=fp16 storage.comm=fp8",
            f"storage.comm=fp8: FSDP2 sums gradients in fp32 or bf16 or fp16; set one of them, {ZERO2}",
        ),
        (
            f"{FSDP} storage.rounding=stochastic",
            "storage.rounding=stochastic: has no effect, weights are float32; remove it",
        ),
        (
            f"{FSDP} precision=fp16 storage.gather=bf16",
            "storage.gather=bf16: FSDP2 gathers weights in precision.compute=fp16; set it to auto or fp8",
        ),
        (
            f"{FSDP} storage.gather=fp8",
            "storage.gather=fp8: precision.compute=bf16 runs no FP8; set precision=bf16_fp8_current, or remove it",
        ),
        (
            f"{FSDP} precision=bf16_fp8 {PLAIN} storage.gather=fp8",
            "storage.gather=fp8: needs fp8.scaling=current, not delayed; set that, or storage.gather=auto",
        ),
        (
            f"{FSDP} {TORCHAO} fp8.granularity=row storage.gather=fp8",
            "storage.gather=fp8: needs fp8.granularity=tensor, not row; set that, or storage.gather=auto",
        ),
        (
            f"{FSDP} {TORCHAO} fp8.use_power_2_scales=true storage.gather=fp8",
            "storage.gather=fp8: torchao does not round the scales of gathered weights; set fp8.use_power_2_scales=false, or storage.gather=auto",
        ),
        (
            f"{FSDP} {TORCHAO} fp8.override_linear_precision.dgrad=true storage.gather=fp8",
            "storage.gather=fp8: needs fp8.override_linear_precision.dgrad=false, which reads the weight; set that, or storage.gather=auto",
        ),
        (
            f"{FSDP} {CURRENT} backend=native storage.gather=fp8",
            "storage.gather=fp8: backend=native gathers the FP8 weights of fp8.params; set fp8.params=true, or storage.gather=auto",
        ),
        (
            f"{FSDP} precision=bf16_mxfp8 backend=native storage.gather=fp8",
            "storage.gather=fp8: fp8.scaling=mxfp8 needs two copies of a weight, which take as many bytes as bf16; set storage.gather=auto",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: str, line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        small(*words.split())
    assert line in e.value.problems


@pytest.mark.parametrize(
    ("words", "backend", "gather"),
    [
        (CURRENT, "native", "bf16"),
        (CURRENT, "torchao", "fp8"),
        (f"{CURRENT} fp8.use_power_2_scales=true", "torchao", "bf16"),
        (f"{CURRENT} fp8.override_linear_precision.wgrad=true", "torchao", "fp8"),
        (f"{CURRENT} precision.compute=fp32", "native", "fp32"),
        (f"{CURRENT} storage.gather=bf16", "torchao", "bf16"),
        ("precision=fp16", "native", "fp16"),
        ("precision=bf16_fp8", "native", "fp8"),
        ("precision=bf16_fp8_block fp8.params=true", "native", "fp8"),
        ("precision=bf16_mxfp8", "native", "bf16"),
        ("precision=bf16_fp8_current fp8.params=true fp8.granularity=row", "native", "bf16"),
    ],
)
def test_what_auto_comes_to(words: str, backend: str, gather: str) -> None:
    assert gathered(small(*words.split(), FSDP).precision, backend) == gather


def test_an_fp8_gather_wants_equal_parts() -> None:
    recipe = small(*TORCHAO.split(), FSDP)
    refuse_uneven(plan_layers(recipe), recipe.precision, "torchao", 2)
    refuse_uneven(plan_layers(recipe), recipe.precision, "native", 3)
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"storage.gather=fp8: layers.0.self_attention.linear_qkv has out_features=128, not a multiple of 3 ranks; set storage.gather=bf16",
    ):
        refuse_uneven(plan_layers(recipe), recipe.precision, "torchao", 3)


def test_an_fp8_gather_picks_the_backend_that_has_it() -> None:
    pytest.importorskip("torchao", minversion="0.18")
    job = job_of(CURRENT, FSDP, "storage.gather=fp8")
    assert job.choice.backend == "torchao" and "native: storage.gather=fp8" in str(
        job.choice.passed_over
    )


def test_a_model_of_ones_own_is_for_torchs_own_call() -> None:
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"storage.shard=fsdp: shards a recipe's Transformer, not a custom model; call fp8cfg.convert_model",
    ):
        fp8cfg.build(small("precision=bf16", FSDP), model=nn.Sequential(nn.Linear(64, 64)))
