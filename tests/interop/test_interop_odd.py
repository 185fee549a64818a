"""Odd but plausible files and objects of other projects: refused in their own words, or read with a line on what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg import interop
from fp8cfg.__main__ import main
from fp8cfg.interop.translation import effective_values
from fp8cfg.planning.violations import violations
from fp8cfg.schema.errors import ConfigError
from tests.support.verbs import refused, said

FSDP = {"mixed_precision": "fp8", "distributed_type": "FSDP"}
BF16 = {"bf16": {"enabled": True}}
O2 = {**BF16, "msamp": {"enabled": True, "opt_level": "O2"}}
SPLIT = ": MS-AMP does not shard weights; use DeepSpeed's ZeRO stage 1 or 2, or remove MS-AMP"
KEPT = ": storage.shard=fsdp keeps weights and gradients in float32, and reduces gradients in float32 or bf16"


@pytest.mark.parametrize(
    ("project", "data", "line"),
    [
        (
            "accelerate",
            {**FSDP, "fp8_config": {"backend": "MSAMP", "opt_level": "O2"}},
            f"distributed_type=FSDP and fp8_config.opt_level=O2{SPLIT}",
        ),
        (
            "accelerate",
            {**FSDP, "fp8_config": {"backend": "MSAMP"}},
            f"distributed_type=FSDP and fp8_config.backend=MSAMP{SPLIT}",
        ),
        (
            "accelerate",
            {"mixed_precision": "fp8", "deepspeed_config": {"zero_stage": 3, "enable_msamp": True}},
            f"deepspeed_config.zero_stage=3 and deepspeed_config.enable_msamp=True{SPLIT}",
        ),
        (
            "accelerate",
            {
                "mixed_precision": "fp8",
                "deepspeed_config.enable_msamp": True,
                "fp8_config.backend": "TE",
            },
            "Accelerate: deepspeed_config.enable_msamp=True and fp8_config.backend=TE: two FP8 backends; remove one",
        ),
        (
            "accelerate",
            {"fp8_config": {"backend": "TE"}, "fp8_config.backend": "AO"},
            "fp8_config.backend: given twice, in its section and with dots; remove one",
        ),
        (
            "accelerate",
            {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "amax_history_len": -5}},
            "fp8_config.amax_history_len=-5: must be at least 1",
        ),
        (
            "deepspeed",
            {**O2, "zero_optimization": {"stage": 3}},
            f"zero_optimization.stage=3 and msamp.opt_level=O2{SPLIT}",
        ),
        (
            "deepspeed",
            {**BF16, "msamp": {"enabled": True}, "zero_optimization": {"stage": 3}},
            f"zero_optimization.stage=3 and msamp.enabled=True{SPLIT}",
        ),
        (
            "deepspeed",
            {**O2, "msamp.use_te": True, "zero_optimization": {"stage": 3}},
            f"zero_optimization.stage=3 and msamp.opt_level=O2{SPLIT}",
        ),
        (
            "deepspeed",
            {**BF16, "optimizer": {"params": {"betas": [0.9]}}},
            "optimizer.params.betas=[0.9]: expected 2 values, got 1",
        ),
        (
            "deepspeed",
            {"fp16": {"enabled": True, "initial_scale_power": 999}},
            "fp16.initial_scale_power=999: expected at most 127, the largest power of two in float32",
        ),
        ("megatron", {"--bf16": True, "--adam-beta1": "x"}, "--adam-beta1=x: expected a number"),
        (
            "megatron",
            {"--bf16": True, "--fp8-format": True},
            "--fp8-format: not an option; choose from hybrid, e4m3",
        ),
        (
            "torchtitan",
            {"converter": "mx", "recipe_name": "mxfp4_cutlass"},
            "recipe_name=mxfp4_cutlass: not an option; did you mean 'mxfp8_cublas'?",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_their_words(
    project: str, data: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as e:
        interop.from_mapping(project, data)
    assert e.value.problems == [line]


@pytest.mark.parametrize(
    ("project", "data", "ours", "lost"),
    [
        (
            "accelerate",
            {**FSDP, "fp8_config": {"backend": "TE", "margin": 2}},
            {"storage.shard": "fsdp", "backend": "auto", "fp8.margin": 2},
            ["fp8_config.backend=TE: backend stays auto, backend=te has no storage.shard=fsdp"],
        ),
        (
            "accelerate",
            {
                "mixed_precision": "fp8",
                "deepspeed_config": {"enable_msamp": True},
                "fp8_config": {"fp8_format": "E4M3", "use_mxfp8_block_scaling": True},
            },
            {"backend": "msamp", "fp8.scaling": "delayed", "fp8.format": "hybrid"},
            [
                "fp8_config.fp8_format=E4M3: has no effect with backend=MSAMP",
                "fp8_config.use_mxfp8_block_scaling=True: has no effect with backend=MSAMP",
                "deepspeed_config.enable_msamp=True: under DeepSpeed MS-AMP stores E4M3 weights and FP16 masters at every level; without DeepSpeed, as here, O1 and O2 use scaled FP16",
            ],
        ),
        (
            "accelerate",
            {
                "mixed_precision": "fp8",
                "deepspeed_config": {"msamp_opt_level": "O1"},
                "fp8_config": {"backend": "TE"},
            },
            {"opt_level": None, "backend": "te"},
            [
                "deepspeed_config.msamp_opt_level=O1: has no effect without deepspeed_config.enable_msamp"
            ],
        ),
        (
            "accelerate",
            {"mixed_precision": "bf16", "fp8_config": {"backend": "MSAMP", "opt_level": "O2"}},
            {"opt_level": None, "backend": "auto", "storage.exp_avg": "fp32"},
            [
                "fp8_config.backend=MSAMP: has no effect, FP8 is off",
                "fp8_config.opt_level=O2: has no effect, FP8 is off",
            ],
        ),
        ("deepspeed", {"bf16": {"enabled": "yes"}}, {"precision.compute": "bf16"}, []),
        (
            "deepspeed",
            {"bf16": {"enabled": False, "bf16_master_weights_and_grads": True}},
            {"precision.compute": "fp32", "storage.weight_grad": "fp32"},
            ["bf16.bf16_master_weights_and_grads: has no effect without bf16.enabled"],
        ),
        (
            "deepspeed",
            {
                "bf16": {"enabled": True, "bf16_optimizer_states": True},
                "zero_optimization": {"stage": 3},
            },
            {"storage.shard": "fsdp", "storage.exp_avg": "bf16"},
            ["zero_optimization.stage=3: imported as FSDP2 (storage.shard=fsdp)"],
        ),
        (
            "deepspeed",
            {**BF16, "communication_data_type": "fp16", "zero_optimization": {"stage": "3"}},
            {"storage.shard": "fsdp", "storage.comm": "fp32"},
            [
                "zero_optimization.stage=3: imported as FSDP2 (storage.shard=fsdp)",
                f"communication_data_type=fp16{KEPT}",
            ],
        ),
        (
            "deepspeed",
            {"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 16}},
            {"precision.loss_scale": 128.0},
            ["fp16.initial_scale_power=16: has no effect with the fixed loss scale 128"],
        ),
        (
            "megatron",
            {"--use-precision-aware-optimizer": True, "--main-params-dtype": "fp16"},
            {"storage.master_weight": "none"},
            ["main_params_dtype=fp16: has no effect without --bf16 or --fp16"],
        ),
        (
            "torchtitan",
            {
                "converter": "float8",
                "recipe_name": "rowwise",
                "enable_fsdp_float8_all_gather": True,
            },
            {"storage.shard": "none", "fp8.granularity": "row"},
            [
                "enable_fsdp_float8_all_gather=True: has no effect under rowwise, only under tensorwise"
            ],
        ),
        (
            "torchtitan",
            {"converter": "mx", "recipe_name": "mxfp8_emulated", "filter_fqns": []},
            {"fp8.scaling": "mxfp8", "fp8.emulate": True},
            [
                "fp8.output_layer=true: has no effect, its layers stay in high precision (out_features=272 is not a multiple of 32)"
            ],
        ),
    ],
)
def test_what_is_left_out_is_said_and_the_rest_checks(
    project: str, data: dict[str, Any], ours: dict[str, Any], lost: list[str]
) -> None:
    found = interop.from_mapping(project, data, fp8cfg.compose())
    assert (
        {k: effective_values(found.recipe)[k] for k in ours} == ours
        and [*found.lost] == lost
        and found.unknown == ()
    )
    assert violations(found.recipe) == []


def test_the_output_layer_of_a_model_that_fits_is_in_fp8() -> None:
    base, on = fp8cfg.compose(["recipe=llama_8b"]), {"converter": "mx"}
    found = interop.from_mapping("torchtitan", {**on, "filter_fqns": []}, base)
    assert found.recipe.fp8.output_layer and found.lost == ()
    assert not interop.from_mapping(
        "torchtitan", on, base
    ).recipe.fp8.output_layer  # its default is ["output"]


def test_fsdp_with_te_is_a_recipe_that_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, recipe = tmp_path / "a.yaml", tmp_path / "recipe.yaml"
    file.write_text(
        "distributed_type: FSDP\nmixed_precision: fp8\nfsdp_config: {fsdp_version: 2}\nfp8_config: {backend: TE, fp8_format: HYBRID}\n"
    )
    recipe.write_text(said(capsys, "import", "accelerate", str(file)))
    assert main(["check", str(recipe)]) == 0 and capsys.readouterr().out.startswith(
        "ok: llama_tiny, bf16, FP8 delayed"
    )


@pytest.mark.parametrize(
    ("text", "compute", "fp8", "lost"),
    [
        ('TRAIN_ARGS="--bf16 --fp8-format hybrid"\n', "bf16", True, ()),
        ("export ARGS='--bf16'\n", "bf16", False, ()),
        ("ARGS=--bf16\n", "bf16", False, ()),
        ("if true; then\n  N=1\nfi\nARGS+=(--bf16)\n", "bf16", False, ()),
        ("python x.py --fp8-format hybrid --bf16 | tee log\n", "bf16", True, ()),
        ("python x.py --bf16 2>&1\n", "bf16", False, ()),
        ("python x.py --bf16 && echo\n", "bf16", False, ()),
    ],
)
def test_ways_to_write_a_script(
    text: str, compute: str, fp8: bool, lost: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "a.sh"
    file.write_text(text)
    found = interop.from_file("megatron", file)
    assert (
        found.recipe.precision.compute,
        found.recipe.fp8.enabled,
        found.lost,
        found.unknown,
    ) == (compute, fp8, lost, ())


@pytest.mark.parametrize(
    ("project", "text"),
    [
        (
            "bridge",
            "mixed_precision: {bf16: true, params_dtype: {_target_: torch.bfloat16, _call_: false}, fp8: hybrid}\n",
        ),
        ("nemo", "plugins: [{precision: bf16-mixed, fp8: hybrid}]\n"),
        (
            "nemo",
            "trainer:\n  plugins:\n  - _target_: nemo.lightning.MegatronMixedPrecision\n    precision: bf16-mixed\n    fp8: hybrid\n",
        ),
        ("nemo", "plugins: [bf16_with_fp8_mixed]\n"),
    ],
)
def test_ways_to_write_a_plugin(project: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    found = interop.from_file(project, file)
    assert (
        found.recipe.precision.compute,
        found.recipe.fp8.enabled,
        found.lost,
        found.unknown,
    ) == ("bf16", True, (), ())


def test_calls_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "import", "accelerate", "--", "TERecipeKwargs(margin=1, margin=2)") == [
        "margin: given twice"
    ]
    assert refused(capsys, "import", "te", "--", "DelayedScaling(margin=-1)") == [
        "margin=-1: must be at least 0"
    ]
    assert (
        main(
            [
                "import",
                "accelerate",
                "--",
                "AORecipeKwargs(pad_inner_dim=True, enable_fsdp_float8_all_gather=True)",
            ]
        )
        == 0
    )
    out = capsys.readouterr()
    assert (
        out.err == ""
        and "# pad_inner_dim=True: layers" in out.out
        and "# enable_fsdp_float8_all_gather=True: has no effect without FSDP" in out.out
        and "\nstorage:" not in out.out
    )


@pytest.mark.filterwarnings("ignore")
def test_a_handler_alone_splits_no_weights() -> None:
    """Accelerate's default of the gather is true, on one GPU too."""
    found = interop.from_object(pytest.importorskip("accelerate.utils").AORecipeKwargs())
    assert (
        found.recipe.storage == fp8cfg.Storage()
        and found.lost[-1]
        == "enable_fsdp_float8_all_gather=True: has no effect without FSDP, which a handler does not set; set storage.shard=fsdp"
    )
