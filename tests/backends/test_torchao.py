"""The torchao backend against loops written by hand with torchao, bit for bit; its record of what it multiplied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.backends.gemm_plan import HIGH_PRECISION, layer_numbering, plan_linears
from fp8cfg.backends.protocol import BackendError
from fp8cfg.numerics import Region
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.fp8 import FP8
from fp8cfg.training.data import run_data
from fp8cfg.training.evaluation import evaluate
from tests.support.small import small, steps

pytest.importorskip("torchao", minversion="0.18")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import CastConfig, ScalingGranularity

from fp8cfg.backends.torchao import backend, rules
from tests.support import whole_checkpoints

COUNT = 4
HERE = ("backend=torchao", "fp8.params=false", "trainer.accelerator=cpu")
TORCHAO = (
    "precision=bf16_fp8_current",
    *HERE,
    "fp8.high_precision_at_start=0",
    "fp8.high_precision_at_end=0",
)
ROW = (*TORCHAO, "fp8.granularity=row", "fp8.format=e4m3", "fp8.use_power_2_scales=true")
E4M3 = CastConfig(target_dtype=torch.float8_e4m3fn)
BY_HAND = {
    "tensorwise": (TORCHAO, Float8LinearConfig(emulate=True)),
    "tensorwise, e4m3, powers of two": (
        (*TORCHAO, "fp8.format=e4m3", "fp8.use_power_2_scales=true"),
        Float8LinearConfig(
            cast_config_grad_output=E4M3, emulate=True, round_scales_to_power_of_2=True
        ),
    ),
    "rowwise": (ROW, Float8LinearConfig.from_recipe_name("rowwise")),
    "rowwise_with_gw_hp": (
        (*ROW, "fp8.override_linear_precision.wgrad=true"),
        Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"),
    ),
}


def on(device: str, config: Float8LinearConfig) -> Float8LinearConfig:
    """`config` as it is on `device`: a CPU emulates."""
    config = copy.copy(config)
    object.__setattr__(config, "emulate", device == "cpu")
    return config


def ours(words: tuple[str, ...]) -> tuple[fp8cfg.Job, list[float]]:
    job = fp8cfg.build(small(*words))
    return job, [s.loss for s in steps(job, COUNT)]


def by_hand(words: tuple[str, ...], swap: Any) -> list[float]:
    """The run of `words` without us: torchao's conversion, torch's AdamW on float32 masters, a loop."""
    recipe = small(*words)
    plain = fp8cfg.build(
        small("precision=fp32", f"trainer.accelerator={recipe.trainer.accelerator}")
    )
    model = plain.model  # the same initial weights, in float32
    compute = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.precision.compute]
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    swap(model)
    model.to(compute)
    o, (batches, _) = recipe.optim, run_data(recipe)
    matrices, vectors = (
        [p for p in masters.values() if (p.dim() > 1) == wide] for wide in (True, False)
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": o.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=o.lr,
        betas=o.betas,
        eps=o.eps,
        fused=True,
    )
    losses = []
    for p in model.parameters():
        if compute != torch.float32:
            p.grad_dtype = torch.float32
    for step in range(COUNT):
        tokens, targets = batches.batch(step, 0, 1, 0, 1)
        loss = model(tokens.to(plain.device), targets.to(plain.device))
        loss.backward()
        for name, p in model.named_parameters():
            masters[name].grad, p.grad = p.grad, None
        torch.nn.utils.clip_grad_norm_(masters.values(), recipe.trainer.gradient_clip_val)
        plain.schedule.apply(optimizer, step)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
        losses.append(loss.item())
    return losses


def in_layers(module: nn.Module, name: str) -> bool:
    return name.startswith("layers.")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BY_HAND)
def test_a_run_equals_a_loop_written_by_hand(name: str, device: str) -> None:
    words, config = BY_HAND[name]
    words = (*words, f"trainer.accelerator={device}")
    job, losses = ours(words)
    assert job.choice.backend == "torchao" and job.choice.product == (
        "emulate" if device == "cpu" else "scaled_mm"
    )
    job.prove()
    assert losses == by_hand(
        words,
        lambda model: convert_to_float8_training(
            model, module_filter_fn=in_layers, config=on(device, config)
        ),
    )


@pytest.mark.parametrize("words", [TORCHAO, ROW], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_an_infinite_value_becomes_nan_and_no_finite_one(
    where: str, words: tuple[str, ...]
) -> None:
    """So that loss or norm of gradients show it: nothing has to count."""
    job = fp8cfg.build(small(*words))
    layer = job.model.get_submodule("layers.0.mlp.linear_fc2")
    x, dy = (
        torch.randn(2, 32, 128, dtype=torch.bfloat16),
        torch.ones(2, 32, 64, dtype=torch.bfloat16),
    )
    {"input": x, "weight": layer.weight.data, "gradient": dy[0]}[where][..., 1, 3] = torch.inf
    x.requires_grad_()
    with job.autocast():
        y = layer(x)
        y.backward(dy)
    row = [t[0, 1] for t in (y, x.grad)]
    assert row[0].isnan().any() == (where != "gradient") and row[1].isnan().any() == (
        where != "input"
    )
    assert layer.weight.grad.isnan().any() == (where != "weight")


def test_float32_weights_equal_it_too() -> None:
    words = (*TORCHAO, "precision.compute=fp32")
    config = on("cpu", Float8LinearConfig())
    assert ours(words)[1] == by_hand(
        words,
        lambda model: convert_to_float8_training(model, module_filter_fn=in_layers, config=config),
    )


def test_mxfp8_equals_torchaos_own_layer() -> None:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    def swap(model: nn.Module) -> None:
        for name, linear in list(model.named_modules()):
            if isinstance(linear, nn.Linear) and name.startswith("layers."):
                new = MXFP8Linear(
                    linear.in_features,
                    linear.out_features,
                    bias=False,
                    kernel_preference=KernelPreference.EMULATED,
                )
                new.weight = linear.weight
                model.set_submodule(name, new)

    words = ("precision=bf16_mxfp8", *HERE)
    job, losses = ours(words)
    job.prove()
    assert losses == by_hand(words, swap)


@pytest.mark.parametrize(("level", "each"), [("O1", 11), ("O2", 6)])
def test_a_level_keeps_its_bytes_and_resumes(level: str, each: int) -> None:
    from fp8cfg.checkpoint import job_state
    from fp8cfg.planning.layout import rank_part
    from fp8cfg.planning.peak_memory import count_parameters
    from fp8cfg.training.memory_measurement import tensors_by_kind

    job, losses = ours(words := (*TORCHAO, f"opt_level={level}"))
    counts = count_parameters(job.recipe, rank_part(job.recipe))
    held = sum(t.nbytes for tensors in tensors_by_kind(job).values() for t in tensors if t.dim())
    assert (
        held == each * counts.linear_weights + (each + 5) * counts.other_parameters
        and job.prove().layers_in_fp8 == 8
    )
    first = fp8cfg.build(small(*words))
    list(steps(first, 2))
    batches, _ = run_data(first.recipe)
    second = fp8cfg.build(small(*words))
    job_state.restore(second, *whole_checkpoints.collect(first, batches, 2), batches)
    assert [s.loss for s in steps(second, 2, first=2)] == losses[2:]


@pytest.mark.parametrize(
    "words",
    [TORCHAO, (*TORCHAO, "opt_level=O2"), ("precision=bf16_mxfp8", *HERE)],
    ids=["current", "O2", "mxfp8"],
)
def test_recomputed_activations_change_nothing(words: tuple[str, ...]) -> None:
    job, losses = ours((*words, "model.recompute_granularity=full"))
    job.prove()
    assert losses == ours(words)[1]


def test_a_resumed_run_equals_one_that_was_not_stopped() -> None:
    from fp8cfg.checkpoint import job_state

    _, whole = ours(TORCHAO)
    first = fp8cfg.build(small(*TORCHAO))
    list(steps(first, 2))
    batches, _ = run_data(first.recipe)
    tensors, state = whole_checkpoints.collect(first, batches, 2)
    second = fp8cfg.build(small(*TORCHAO))
    job_state.restore(second, tensors, state, batches)
    assert [s.loss for s in steps(second, 2, first=2)] == whole[2:]


@pytest.mark.parametrize("name", BY_HAND)
def test_the_configuration_is_torchaos_own_by_that_name(name: str) -> None:
    words, config = BY_HAND[name]
    assert backend.config_of(small(*words).fp8, "emulate") == on("cpu", config)


def test_a_configuration_that_says_something_else_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loses_rounding(**fields: Any) -> Float8LinearConfig:
        return Float8LinearConfig(**fields | {"round_scales_to_power_of_2": False})

    monkeypatch.setattr(backend, "Float8LinearConfig", loses_rounding)
    with pytest.raises(
        BackendError,
        match=r"Float8LinearConfig\.round_scales_to_power_of_2: the recipe says True, the library has False",
    ) as e:
        backend.config_of(FP8(enabled=True, scaling="current", use_power_2_scales=True), "emulate")
    assert e.value.exit_code == 3


def tiny(**fp8: Any) -> tuple[nn.Module, list[Any]]:
    node = FP8(enabled=True, **fp8)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    plan = plan_linears([("0", 64, 64), ("2", 64, 32)], node, layer_numbering(1), rules.misfit)
    backend.convert(model, node, plan, Region(), "emulate")
    return model, plan


KINDS = [
    {"scaling": "current"},
    {"scaling": "current", "format": "e4m3"},
    {"scaling": "current", "granularity": "row"},
    *(
        {"scaling": "current", "override_linear_precision": {gemm: True}}
        for gemm in ("fprop", "dgrad", "wgrad")
    ),
    {"scaling": "mxfp8", "format": "e4m3"},
    {"scaling": "mxfp8", "format": "e4m3", "override_linear_precision": {"wgrad": True}},
]


@pytest.mark.parametrize(
    ("fp8", "compiler"),
    [
        *((fp8, "none") for fp8 in KINDS),
        *(pytest.param(fp8, "aot_eager", marks=pytest.mark.slow) for fp8 in KINDS[:-1]),
        pytest.param(KINDS[-1], "inductor", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_recorded_is_what_was_multiplied(fp8: dict[str, Any], compiler: str) -> None:
    torch._dynamo.reset()
    model, plan = tiny(**fp8)
    run = model if compiler == "none" else torch.compile(model, fullgraph=True, backend=compiler)
    x = torch.randn(32, 64)
    with backend.autocast(model):
        run(x).square().sum().backward()
    assert backend.observed(model) == {
        p.name: {g: k or HIGH_PRECISION for g, k in p.products.items()} for p in plan
    }
    backend.forget_observed(model)
    assert not any(kinds for gemms in backend.observed(model).values() for kinds in gemms.values())


def test_outside_of_its_context_a_layer_is_a_linear_layer() -> None:
    model, _ = tiny(scaling="current")
    x = torch.randn(32, 64)
    plain = nn.Sequential(*(backend.plain(m) or m for m in model))
    assert torch.equal(model(x), plain(x)) and not backend.observed(model)["0"]["fprop"]
    with backend.autocast(model):
        assert not torch.equal(model(x), plain(x))
        with backend.autocast(model, enabled=False):
            assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("wgrad", [False, True])
def test_under_torchs_autocast(wgrad: bool) -> None:
    model, _ = tiny(scaling="current", override_linear_precision={"wgrad": wgrad})
    with backend.autocast(model), torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(32, 64))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and model[0].weight.grad.dtype == torch.float32


def test_evaluation_is_in_high_precision() -> None:
    job = fp8cfg.build(small(*TORCHAO))
    list(steps(job, 1))
    batch: tuple[Tensor, Tensor] = run_data(job.recipe)[0].batch(0, 0, 1, 0, 1)
    backend.forget_observed(job.model)
    evaluate(job, [batch], World())
    assert not any(gemms["fprop"] for gemms in backend.observed(job.model).values())


@pytest.mark.slow
def test_compiled_it_runs_what_was_planned() -> None:
    words = (*TORCHAO, "model.num_layers=1")
    job = fp8cfg.build(small(*words))
    job.compile_model()
    compiled = [s.loss for s in steps(job, 2)]
    job.prove()
    assert compiled == pytest.approx(ours(words)[1][:2], rel=1e-3)


def test_tokens_that_its_product_cannot_have_are_refused() -> None:
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"gives 30 tokens with .*, but backend=torchao needs a multiple of 32; set backend=native, or model\.seq_length=32",
    ):
        fp8cfg.build(
            small(
                "precision=bf16_mxfp8", *HERE, "model.seq_length=30", "trainer.micro_batch_size=1"
            )
        )


def test_tokens_that_a_model_of_ones_own_gives_it_are_refused_by_one_line() -> None:
    model, _ = tiny(scaling="mxfp8", format="e4m3")
    x = torch.randn(2, 15, 64)
    line = r"^backend=torchao: a layer got 30 tokens, its MXFP8 needs a multiple of 32; set backend=native, or give the model another batch"
    with backend.autocast(model):
        with pytest.raises(fp8cfg.ConfigError, match=line):
            model(x).sum().backward()
        with torch.no_grad():
            assert model(x).shape == (2, 15, 32)
    wide, _ = tiny(scaling="mxfp8", format="e4m3", override_linear_precision={"wgrad": True})
    with backend.autocast(wide):
        wide(x).sum().backward()


def test_rows_are_rows() -> None:
    config = backend.config_of(FP8(enabled=True, scaling="current", granularity="row"), "scaled_mm")
    assert (
        config.cast_config_input.scaling_granularity == ScalingGranularity.AXISWISE
        and not config.emulate
    )


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("0.18rc1", ""),
        ("0.19.0.dev20260101+cu130", ""),
        ("0.7rc1+cu130", "torchao 0.7rc1+cu130 is older than 0.18"),
    ],
)
def test_versions_of_other_builds_are_read(
    version: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "installed_version", lambda _: version)
    assert rules.unavailable() == problem
