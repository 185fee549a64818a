"""Recipe -> graph -> job: shared parts once, half-precision parameters with float32 masters, bytes that are really saved."""

from __future__ import annotations

import math

import pytest
import torch

import fp8cfg
from fp8cfg.models.config import parameter_counts
from fp8cfg.numerics import FP8Linear, fp8_linears
from fp8cfg.planning import peak_memory
from fp8cfg.planning.coverage import coverage, planned_coverage
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema.recipe_registry import recipes
from fp8cfg.schema.training import Strategy
from tests.support.small import losses, small, steps, weight_bytes
from tests.support.traced import trace_model

PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama31_405b": 405_853_388_800,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
}


def test_parameter_counts_of_the_recipes_are_the_published_ones() -> None:
    counts = {
        name: parameter_counts(transformer_config(make()))["total"]
        for name, make in recipes().items()
    }
    assert {name: counts[name] for name in PUBLISHED} == PUBLISHED
    assert counts["llama_8b"] == counts["llama31_8b"] and counts["llama_1b"] == counts["llama32_1b"]
    assert 2e6 < counts["llama_tiny"] < 5e6


def test_the_optimizer_holds_the_models_own_parameters() -> None:
    job = fp8cfg.build(small("precision=bf16_fp8"))
    held = {p for group in job.optimizer.param_groups for p in group["params"]}
    assert held == set(job.model.parameters())
    assert job.optimizer.param_groups[0]["params"][0] is next(job.model.parameters())
    assert job.optimizer.loss_scaler is job.loss_scaler is None
    scaled = fp8cfg.build(small("precision=fp16_fp8"))
    assert scaled.optimizer.loss_scaler is scaled.loss_scaler is not None


@pytest.mark.parametrize(
    ("precision", "dtype", "gradient"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float16),
    ],
)
def test_compute_is_megatrons(precision: str, dtype: torch.dtype, gradient: torch.dtype) -> None:
    job = fp8cfg.build(small(f"precision={precision}"))
    assert {p.dtype for p in job.model.parameters()} == {dtype}
    tokens = torch.randint(0, 256, (2, 32))
    with job.autocast():
        job.backward(job.model(tokens, tokens))
    assert {p.grad.dtype for p in job.model.parameters()} == {gradient}
    state = job.optimizer.state_tensors()
    masters = [k for k in state if k.endswith(".master")]
    assert len(masters) == (0 if precision == "fp32" else len(list(job.model.parameters())))
    assert all(t.dtype == torch.float32 for t in state.values())
    assert (job.loss_scaler is not None) == (precision == "fp16")


def test_all_precisions_start_from_the_same_weights() -> None:
    reference = fp8cfg.build(small("precision=fp32")).model.state_dict()
    for precision in ("bf16", "bf16_fp8"):
        job = fp8cfg.build(small(f"precision={precision}"))
        for p, name in job.optimizer.names.items():
            assert torch.equal(job.optimizer.masters[p], reference[name])


@pytest.mark.parametrize("scaling", ["bf16_fp8", "bf16_fp8_current"])
def test_fp8_params_hold_linear_weights_in_eight_bits_alone(scaling: str) -> None:
    words = (f"precision={scaling}", "model.num_layers=4")
    held, kept = (fp8cfg.build(small(*words, f"fp8.params={p}")) for p in ("true", "false"))
    layers = list(fp8_linears(held.model))
    assert layers and all(
        (layer.parameter.dtype, layer.weight.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
        for layer in layers
    )
    saved = weight_bytes(kept) - weight_bytes(held)
    assert saved == sum(layer.parameter.numel() for layer in layers), (
        "one byte of two for each weight"
    )
    for job in (held, kept):
        job.recipe.trainer.micro_batch_size = 8
        kinds = peak_memory.plan_memory(job.recipe, "cpu")
        assert kinds["weights"] == weight_bytes(job)
        masters = sum(
            t.nbytes for k, t in job.optimizer.state_tensors().items() if k.endswith(".master")
        )
        assert kinds["masters"] == masters


@pytest.mark.parametrize("scaling", ["bf16_fp8", "bf16_fp8_current"])
def test_fp8_params_multiply_the_very_same_values_under_fp32(scaling: str) -> None:
    words = (f"precision={scaling}", "precision.compute=fp32", "model.num_layers=4")
    assert losses(*words, "fp8.params=true") == losses(*words, "fp8.params=false")


def test_moments_and_gradients_are_the_planned_bytes() -> None:
    recipe = small("precision=bf16_fp8")
    job = fp8cfg.build(recipe)
    list(steps(job, 1))
    kinds = peak_memory.plan_memory(recipe, "cpu")
    moments = sum(t.nbytes for k, t in job.optimizer.state_tensors().items() if "exp_avg" in k)
    assert kinds["moments"] == moments
    assert kinds["gradients"] == sum(p.grad.nbytes for p in job.model.parameters())


def test_tied_embeddings_stay_tied_also_with_an_fp8_output_layer() -> None:
    job = fp8cfg.build(
        small(
            "precision=bf16_fp8",
            "model.share_embeddings_and_output_weights=true",
            "fp8.output_layer=true",
        )
    )
    assert isinstance(job.model.output_layer, FP8Linear)
    assert job.model.output_layer.weight is job.model.embedding.weight
    assert job.model.embedding.weight.dtype == torch.bfloat16
    before = job.model.embedding.weight.detach().clone()
    assert all(math.isfinite(s.loss) for s in steps(job, 2))
    assert job.model.output_layer.weight is job.model.embedding.weight and not torch.equal(
        before, job.model.embedding.weight
    )


def test_outside_of_the_autocast_context_nothing_runs_in_fp8() -> None:
    job = fp8cfg.build(small("precision=bf16_fp8"))
    tokens = torch.randint(0, 256, (2, 32))
    job.backward(job.model(tokens, tokens))
    assert {kind for gemms in coverage(job.model).products.values() for kind in gemms.values()} == {
        "high precision"
    }
    with job.autocast():
        job.backward(job.model(tokens, tokens))
    assert {
        p["dgrad"] for name, p in coverage(job.model).products.items() if name != "output_layer"
    } == {"e5m2xe4m3"}


KEPT = ("fp8.override_linear_precision.wgrad=true", "fp8.exclude=['*.linear_fc2']")


@pytest.mark.parametrize(
    ("words", "traced"),
    [
        (("precision=bf16_fp8",), False),
        (("precision=bf16_fp8_current", "model.num_layers=4"), False),
        (("precision=bf16_fp8", "fp8.format=e4m3"), False),
        (("precision=bf16_fp8", *KEPT), False),
        (("precision=bf16_fp8", "model.recompute_granularity=full"), False),
        # Each of these keys, in two graphs; tests/training/test_compiled_runs.py has a run under Inductor.
        pytest.param(
            (
                "precision=bf16_fp8",
                "model.num_layers=1",
                *KEPT,
                "fp8.format=e4m3",
                "model.recompute_granularity=full",
            ),
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("precision=bf16_fp8_current", "model.num_layers=1"), True, marks=pytest.mark.slow
        ),
    ],
)
def test_what_ran_is_what_was_planned(words: tuple[str, ...], traced: bool) -> None:
    job = fp8cfg.build(small(*words))
    if traced:
        trace_model(job)
    list(steps(job, 1))
    assert job.prove().data() == planned_coverage(job.recipe, job.plan).data()


def test_a_run_that_is_not_what_was_planned_is_stopped() -> None:

    job = fp8cfg.build(small("precision=bf16_fp8"))
    job.prepared.region.entered = lambda enabled=True: (
        torch.no_grad().__class__()
    )  # a context that enters no FP8 region
    tokens = torch.randint(0, 256, (2, 32))
    job.backward(job.model(tokens, tokens))
    with pytest.raises(
        fp8cfg.NotFP8Error, match=r"linear_qkv fprop: planned e4m3 x e4m3, ran high precision"
    ) as e:
        job.prove()
    assert e.value.exit_code == 3


def test_too_little_coverage_stops_the_run() -> None:

    job = fp8cfg.build(small("precision=bf16_fp8", "fp8.min_coverage=0.99"))
    list(steps(job, 1))
    with pytest.raises(
        fp8cfg.NotFP8Error,
        match=r"fp8\.min_coverage=0\.99: only \d+\.\d% of matmul FLOPs ran in FP8",
    ):
        job.prove()


def test_an_impossible_recipe_is_refused_before_memory_is_taken() -> None:
    from fp8cfg.recipes import llama_405b

    recipe = llama_405b()
    recipe.precision = "bf16_fp8"
    recipe.backend = "te"
    recipe.trainer.accelerator = "cpu"
    with pytest.raises(
        fp8cfg.ConfigError, match="backend=te: Transformer Engine runs only on CUDA"
    ):
        fp8cfg.build(recipe)


def test_a_model_that_does_not_fit_is_refused_before_memory_is_taken() -> None:
    from fp8cfg.recipes import llama_405b

    recipe = llama_405b()
    recipe.trainer.accelerator, recipe.trainer.strategy = "cpu", Strategy()
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"recipe=llama_405b: needs .* GiB, this machine has .* nearest that fit: trainer.smoke=true$",
    ):
        fp8cfg.build(recipe)


def test_later_changes_of_the_recipe_do_not_reach_the_job() -> None:
    recipe = small("precision=bf16_fp8")
    job = fp8cfg.build(recipe)
    recipe.fp8.margin = 5
    assert job.recipe.fp8.margin == 0
