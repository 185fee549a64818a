"""Files of NeMo, Megatron-Bridge, Megatron-LM and DeepSpeed, as people have them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg import interop
from fp8cfg.__main__ import main
from fp8cfg.interop.translation import effective_values
from tests.support.verbs import loads

SCRIPT = r"""#!/bin/bash
# --fp8-format none of this is read
LR=3e-4
FP8_ARGS=(
    --fp8-format 'e4m3'
    --fp8-recipe "blockwise"   # blockwise needs CUDA 12.9
    --fp8-param-gather
    --first-last-layers-bf16 --num-layers-at-start-in-bf16 2
    --num-layers-at-end-in-bf16=0)
EXTRA_ARGS+=" --use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 "
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    --bf16 --grad-reduce-in-bf16 --use-distributed-optimizer --tensorboard-dir /tmp/x \
    --lr $LR --fp8-margn 3 ${FP8_ARGS[@]}
"""


def test_a_script_of_megatrons(tmp_path: Path) -> None:
    file = tmp_path / "pretrain.sh"
    file.write_text(SCRIPT)
    found = interop.from_file("megatron", file)
    p = found.recipe.precision
    assert (p.compute, p.fp8.enabled, p.fp8.scaling, p.fp8.format, p.fp8.params) == (
        "bf16",
        True,
        "block",
        "e4m3",
        True,
    )
    assert (p.fp8.high_precision_at_start, p.fp8.high_precision_at_end) == (2, 0)
    assert p.storage.model_dump() == {
        "weight": "auto",
        "master_weight": "fp16_scaled",
        "weight_grad": "bf16",
        "comm": "bf16",
        "exp_avg": "fp8",
        "exp_avg_sq": "fp16_scaled",
        "accumulate": "wide",
        "rounding": "nearest",
        "shard": "zero1",
        "gather": "auto",
    }
    assert found.recipe.optim.lr == 3e-4
    assert found.lost == ("--tensorboard-dir: not read",)
    assert found.unknown == (
        "--fp8-margn: no such flag of Megatron-LM; did you mean '--fp8-margin'?",
    )


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        (
            "--bf16 --fp8-format hybrid",
            {"fp8.scaling": "delayed", "fp8.amax_history_len": 1, "fp8.params": False},
        ),
        ("--fp16", {"precision.compute": "fp16", "storage.comm": "fp16"}),
        ("--num-layers 2 --seed 1", {"precision.compute": "fp32", "model.num_layers": 2}),
        ("--bf16", {"precision.compute": "bf16", "storage.comm": "fp32"}),
        (
            "--bf16 --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --no-fp8-wgrad",
            {"fp8.amax_history_len": 1024, "fp8.override_linear_precision.wgrad": True},
        ),
        (
            "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
            {"fp8.scaling": "current", "fp8.high_precision_at_start": 0},
        ),
        (
            "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4 --fp4-param-gather",
            {"fp8.scaling": "nvfp4", "fp8.params": True, "fp8.format": "e4m3"},
        ),
        (
            "--fp16 --accumulate-allreduce-grads-in-fp32 --loss-scale 4096",
            {"storage.comm": "fp32", "precision.loss_scale": 4096.0},
        ),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16",
            {"storage.exp_avg": "bf16", "storage.exp_avg_sq": "fp32"},
        ),
        (
            "--num-layers 2 --hidden-size 128 --num-attention-heads 8 --swiglu --bf16",
            {
                "model.ffn_hidden_size": 320,
                "model.num_query_groups": 8,
                "model.share_embeddings_and_output_weights": True,
            },
        ),
        (
            "--num-layers 2 --hidden-size 128 --num-attention-heads 8 --bf16"
            " --group-query-attention --num-query-groups 2",
            {"model.num_query_groups": 2, "model.ffn_hidden_size": 512},
        ),
        (
            "--num-layers 2 --bf16 --reset-attention-mask --eod-mask-loss",
            {
                "data.reset_attention_mask": True,
                "data.eod_mask_loss": True,
                "data.reset_position_ids": False,
            },
        ),
        (
            "--num-layers 2 --bf16 --recompute-granularity selective",
            {"model.recompute_granularity": "selective"},
        ),
        (
            "--bf16 --adam-beta2 0.98 --lr 1e-4 --optimizer adam",
            {"optim.betas": (0.9, 0.98), "optim.lr": 1e-4, "optim.name": "adamw"},
        ),
    ],
)
def test_flags_with_megatrons_own_defaults(flags: str, ours: dict[str, Any]) -> None:
    for found in (
        interop.from_words("megatron", [flags]),
        interop.from_words("megatron", flags.split()),
    ):
        assert {k: effective_values(found.recipe)[k] for k in ours} == ours and found.unknown == ()


def test_query_groups_without_their_switch_are_a_remark() -> None:
    words = ["--bf16 --num-layers 2 --hidden-size 128 --num-attention-heads 8 --num-query-groups 2"]
    found = interop.from_words("megatron", words)
    assert found.recipe.model.num_query_groups == 8
    assert found.lost == ("num_query_groups=2: has no effect without group_query_attention",)


def test_swiglu_that_is_off_has_the_width_of_gelu() -> None:
    shape = {"bf16": True, "hidden_size": 128, "num_attention_heads": 8, "swiglu": False}
    model = interop.from_mapping("megatron", shape).recipe.model
    assert (model.activation, model.ffn_hidden_size) == ("gelu", 512)


def test_selective_recomputation_is_of_more_here_and_that_is_said() -> None:
    text, lost = interop.to_text(
        "megatron", fp8cfg.compose(["precision=bf16", "model.recompute_granularity=selective"])
    )
    assert "--recompute-granularity selective" in " ".join(text.split()) and any(
        "--recompute-modules core_attn layernorm" in line for line in lost
    )
    read = interop.from_words(
        "megatron", ["--bf16 --recompute-granularity selective --recompute-modules mlp"]
    )
    assert read.lost == (
        "--recompute-modules=mlp: selective recomputes core attention, norms and the activation function here",
    )


def test_a_written_array_is_one_that_bash_takes() -> None:
    text, lost = interop.to_text("megatron", fp8cfg.compose(["precision=bf16_fp8"]))
    said_by_bash = subprocess.run(
        ["bash", "-euc", text + 'printf "%s\\n" "${FP8CFG_ARGS[@]}"'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert (
        said_by_bash[:7]
        == ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-margin", "0"]
        and lost == ()
    )
    assert (
        interop.from_words("megatron", said_by_bash).recipe.precision
        == fp8cfg.compose(["precision=bf16_fp8"]).precision
    )


BRIDGE = """
_target_: megatron.bridge.training.config.ConfigContainer
mixed_precision:
  _target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig
  bf16: true
  params_dtype:
    _call_: false
    _target_: torch.bfloat16
  fp8: e4m3
  fp8_recipe: mxfp8
  fp8_param_gather: true
  reuse_grad_buf_for_mxfp8_param_ag: true
  grad_reduce_in_fp32: false
"""


def test_a_run_config_of_megatron_bridges(tmp_path: Path) -> None:
    file = tmp_path / "run_config.yaml"
    file.write_text(BRIDGE)
    found = interop.from_file("bridge", file)
    assert found.recipe.precision == fp8cfg.compose(
        ["precision=bf16_mxfp8", "storage={comm: bf16, weight_grad: bf16}"]
    ).precision and found[1:] == ((), ())
    file.write_text("mixed_precision: bf16_with_fp8_current_scaling_mixed\n")
    assert (
        interop.from_file("bridge", file).recipe.precision
        == fp8cfg.bf16_with_fp8_current_scaling_mixed()
    )


@pytest.mark.parametrize(
    ("data", "ours"),
    [
        (
            {"precision": "bf16-mixed", "fp8": "hybrid"},
            {"fp8.scaling": "delayed", "fp8.amax_history_len": 1},
        ),
        ({"bf16": True, "fp8": "hybrid", "fp8_params": True}, {"fp8.params": True}),
        (
            {"precision": "16-mixed", "grad_reduce_in_fp32": False},
            {"precision.compute": "fp16", "storage.comm": "fp16"},
        ),
        ({"precision": "16-mixed"}, {"storage.comm": "fp32"}),
        (
            {"precision": "bf16-mixed", "fp8": None, "fp8_margin": 0, "fp8_recipe": "delayed"},
            {"fp8.enabled": False},
        ),
        ({"precision": "32"}, {"precision.compute": "fp32"}),
        (
            {
                "precision": "bf16-mixed",
                "fp8": "e4m3",
                "fp8_recipe": "blockwise",
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": 2,
            },
            {"fp8.high_precision_at_start": 2},
        ),
        (
            {"precision": "fp16", "fp16_initial_loss_scale": 65536, "fp16_hysteresis": 4},
            {"precision.initial_loss_scale": 65536.0, "precision.hysteresis": 4},
        ),
    ],
)
def test_fields_of_nemos(data: dict[str, Any], ours: dict[str, Any]) -> None:
    found = interop.from_mapping("nemo", data)
    assert {k: effective_values(found.recipe)[k] for k in ours} == ours and found.unknown == ()


@pytest.mark.parametrize(
    ("data", "lost"),
    [
        (
            {"fp8_recipe": "tensorwise", "fp8_margin": 2},
            "fp8_margin=2: has no effect under current scaling",
        ),
        (
            {"num_layers_at_end_in_bf16": 1},
            "num_layers_at_end_in_bf16: has no effect without first_last_layers_bf16",
        ),
        (
            {"fp8_recipe": "mxfp8"},
            "fp8=hybrid: MXFP8 and NVFP4 use E4M3 in both passes here; with E5M2 gradients and block scales training diverges",
        ),
        (
            {"fp8_wgrad": False},
            "fp8_wgrad=False: imported, but Transformer Engine 2 ignores it without a message",
        ),
    ],
)
def test_what_is_a_silent_no_op_there_is_said(data: dict[str, Any], lost: str) -> None:
    found = interop.from_mapping("nemo", {"precision": "bf16-mixed", "fp8": "hybrid", **data})
    assert lost in found.lost
    found.recipe.check()


@pytest.mark.parametrize(
    ("data", "ours"),
    [
        (
            {
                "bf16": {"enabled": True},
                "msamp": {"enabled": True, "opt_level": "O3"},
                "zero_optimization": {"stage": 2},
            },
            {
                "backend": "native",
                "storage.comm": "fp8_pow2",
                "storage.accumulate": "stored",
                "opt_level": "O3",
                "storage.shard": "zero2",
                "fp8.enabled": True,
            },
        ),
        ({"bfloat16": {"enabled": True}}, {"precision.compute": "bf16"}),
        (
            {"bf16": {"enabled": True}, "msamp": {"enabled": True, "use_te": True}},
            {"backend": "te", "opt_level": "O1"},
        ),
        (
            {"msamp": {"enabled": False, "opt_level": "O2"}},
            {"opt_level": None, "precision.compute": "fp32"},
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale": 0}},
            {"precision.initial_loss_scale": 65536.0, "precision.loss_scale": None},
        ),
        (
            {
                "bf16": {
                    "enabled": True,
                    "bf16_master_weights_and_grads": True,
                    "bf16_optimizer_states": True,
                }
            },
            {
                "storage.master_weight": "bf16",
                "storage.exp_avg_sq": "bf16",
                "storage.weight_grad": "bf16",
            },
        ),
        (
            {
                "bf16": {"enabled": "auto"},
                "gradient_clipping": "auto",
                "train_batch_size": 64,
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": 1e-4, "betas": [0.9, 0.98], "torch_adam": True},
                },
            },
            {"optim.lr": 1e-4, "optim.betas": (0.9, 0.98), "trainer.global_batch_size": 64},
        ),
    ],
)
def test_deepspeeds_json(data: dict[str, Any], ours: dict[str, Any]) -> None:
    found = interop.from_mapping("deepspeed", data)
    assert {k: effective_values(found.recipe)[k] for k in ours} == ours and found.unknown == ()


def test_the_section_that_ms_amp_reads() -> None:
    written = interop.to_mapping(
        "deepspeed", fp8cfg.compose(["precision=bf16_fp8", "opt_level=O2", "storage.shard=zero1"])
    )
    assert (
        written.value["msamp"] == {"enabled": True, "opt_level": "O2"}
        and written.value["zero_optimization"] == {"stage": 1}
        and written.value["bf16"] == {"enabled": True}
    )
    written = interop.to_mapping(
        "deepspeed",
        fp8cfg.compose(
            [
                "precision=bf16",
                "storage={master_weight: bf16, weight_grad: bf16, exp_avg: bf16, exp_avg_sq: bf16, rounding: stochastic}",
                "optim.betas=[0.9,0.95]",
            ]
        ),
    )
    assert written.value["bf16"] == {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }
    assert [line.partition("=")[0] for line in written.lost] == ["storage.rounding"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "opt_level=O1",
            "opt_level=O1: exported, but under DeepSpeed MS-AMP stores E4M3 weights and FP16 masters at every level, not in scaled FP16",
        ),
        (
            "opt_level=O2",
            "opt_level=O2: exported, but under DeepSpeed MS-AMP stores E4M3 weights and FP16 masters at every level, not in scaled FP16; opt_level=O3 is the same here",
        ),
        (
            "opt_level=O3",
            "opt_level=O3: exported, but MS-AMP needs ZeRO for it; set storage.shard=zero1 or zero2",
        ),
        ("opt_level=O3 storage.shard=zero1", ""),
        ("fp8.margin=1", ""),
    ],
)
def test_what_ms_amp_stores_otherwise_under_deepspeed_is_listed(words: str, line: str) -> None:
    lost = interop.to_mapping(
        "deepspeed", fp8cfg.compose(["precision=bf16_fp8", *words.split()])
    ).lost
    assert [said for said in lost if ": exported, but" in said] == [line] * bool(line)


@pytest.mark.parametrize(
    ("level", "said"), [({}, "O1"), ({"opt_level": "O2"}, "O2"), ({"opt_level": "O3"}, "")]
)
def test_and_where_it_is_read(level: dict[str, str], said: str) -> None:
    found = interop.from_mapping(
        "deepspeed",
        {
            "bf16": {"enabled": True},
            "msamp": {"enabled": True, **level},
            "zero_optimization": {"stage": 1},
        },
    )
    assert [line for line in found.lost if "E4M3" in line] == [
        f"msamp.opt_level={said}: under DeepSpeed MS-AMP stores E4M3 weights and FP16 masters at every level; without DeepSpeed, as here, O1 and O2 use scaled FP16"
    ] * bool(said)


@pytest.mark.parametrize(
    ("project", "ending", "text"),
    [
        ("accelerate", "json", '{"mixed_precision": "bf16"}'),
        ("torchtitan", "py", "config = Trainer.Config()\n"),
        ("te", "py", "DelayedScaling(margin=1)"),
        ("megatron", "sh", "--bf16"),
        ("nemo", "yaml", "bf16: true\r\n"),
    ],
)
def test_a_mark_of_windows_stands_before_a_text_and_is_none(
    project: str, ending: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / f"a.{ending}"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert interop.from_file(project, file).recipe.precision.compute == "bf16"


def test_neither_torch_nor_their_libraries_are_loaded() -> None:
    for argv in (
        ("import", "nemo", "--", "bf16_with_fp8_mixed"),
        ("export", "accelerate", "precision=bf16_fp8"),
        ("export", "te", "precision=bf16_fp8"),
    ):
        assert not loads(*argv) & {"torch", "accelerate", "transformer_engine", "torchao", "fiddle"}


@pytest.mark.parametrize(
    "name", ["fused_adam", "distributed_fused_adam", "mcore_distributed_optim", "adamw"]
)
def test_the_optimizers_of_nemo_1_are_adamw(name: str, tmp_path: Path) -> None:
    file = tmp_path / "megatron_gpt_config.yaml"
    file.write_text(
        "trainer: {precision: bf16, max_steps: 5000}\n"
        f"model: {{fp8: true, fp8_hybrid: true, optim: {{name: {name}, lr: 1e-4}}}}\n"
    )
    found = interop.from_file("nemo", file)
    assert (found.recipe.optim.name, found.recipe.optim.lr) == ("adamw", 1e-4)
    assert found.recipe.fp8.enabled and found.unknown == ()


def test_the_comment_of_an_import_names_the_project(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("trainer: {precision: bf16}\nmodel: {hidden_size: 4096}\n")
    assert main(["import", "nemo", str(file)]) == 0
    assert capsys.readouterr().out.startswith("# Imported from NeMo. Settings dropped")
