"""Every key of the schema acts on what is built, or is refused. A key that does neither fails here.

ACTS reads each changed key back from the built job; RUNS names the keys that act while a run goes on, each with the
file of its test; REFUSED are those that this version does not run; PLANNED are read by the outline of a run alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.numerics import WEIGHT, fp8_linears
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.schema.keys import short
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import fields
from fp8cfg.training.data import run_data
from tests.support.small import small

FP8, CURRENT = "precision=bf16_fp8", "precision=bf16_fp8_current"
LEARNED = "model.position_embedding_type=learned_absolute"
WITHIN = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"


def layer(job: Job) -> Any:
    return next(fp8_linears(job.model))


def core(job: Job, number: int = 0) -> Any:
    """The attention of a layer."""
    return job.model.layers[number].self_attention.core_attention


def in_fp8(job: Job) -> list[str]:
    return [n for n, m in job.model.named_modules() if m in set(fp8_linears(job.model))]


def group(job: Job, key: str) -> Any:
    return job.optimizer.inner.param_groups[0][key]


def dtype(job: Job, what: str) -> str:
    """Of the first linear layer's weight, or of its optimizer state."""
    name = "layers.0.self_attention.linear_qkv."
    return str({**stored_state_dict(job.model), **job.optimizer.state_tensors()}[name + what].dtype)


def columns(job: Job) -> Any:
    """The codecs of the low-bit optimizer for that weight."""
    return job.optimizer.columns[
        job.model.layers[0].self_attention.linear_qkv._parameters["weight"]
    ]


def beside(job: Job, name: str = "q_proj") -> Any:
    """The adapter of a projection of the first layer's attention."""
    return job.model.layers[0].self_attention.linear_qkv.lora[name]


ACTS: dict[str, tuple[list[str], Callable[[Job], Any], Any]] = {
    "lora.enabled": (
        ["lora.enabled=true"],
        lambda j: [p.requires_grad for p in (beside(j).lora_A, j.model.embedding.weight)],
        [True, False],
    ),
    "lora.rank": (
        ["lora.enabled=true", "lora.rank=2"],
        lambda j: [*beside(j).lora_A.shape, *beside(j).lora_B.shape],
        [2, 64, 64, 2],
    ),
    "lora.alpha": (["lora.enabled=true", "lora.alpha=4"], lambda j: beside(j).scaling, 0.5),
    "lora.dropout": (["lora.enabled=true", "lora.dropout=0.25"], lambda j: beside(j).dropout, 0.25),
    "lora.targets": (
        ["lora.enabled=true", "lora.targets=[q_proj]"],
        lambda j: [*j.model.layers[0].self_attention.linear_qkv.lora],
        ["q_proj"],
    ),
    "model.num_layers": (["model.num_layers=3"], lambda j: len(j.model.layers), 3),
    "model.hidden_size": (
        ["model.hidden_size=128"],
        lambda j: j.model.embedding.weight.shape[1],
        128,
    ),
    "model.ffn_hidden_size": (
        ["model.ffn_hidden_size=96"],
        lambda j: j.model.layers[0].mlp.linear_fc2.in_features,
        96,
    ),
    "model.num_attention_heads": (
        ["model.num_attention_heads=2"],
        lambda j: j.model.config.num_attention_heads,
        2,
    ),
    "model.num_query_groups": (
        ["model.num_query_groups=4"],
        lambda j: j.model.layers[0].self_attention.num_query_groups,
        4,
    ),
    "model.kv_channels": (
        ["model.kv_channels=32"],
        lambda j: j.model.layers[0].self_attention.linear_proj.in_features,
        128,
    ),
    "model.vocab_size": (
        ["model.vocab_size=288"],
        lambda j: j.model.output_layer.out_features,
        288,
    ),
    "model.seq_length": (
        ["model.seq_length=16"],
        lambda j: run_data(j.recipe)[0].batch(0)[0].shape[1],
        16,
    ),
    "model.rotary_base": (["model.rotary_base=500"], lambda j: j.model.config.rotary_base, 500.0),
    "model.rope_scaling.rope_type": (
        ["model.rope_scaling={factor: 8, rope_type: linear}"],
        lambda j: j.model.config.rope_scaling.rope_type,
        "linear",
    ),
    "model.normalization": (
        ["model.normalization=LayerNorm"],
        lambda j: type(j.model.final_layernorm).__name__,
        "LayerNorm",
    ),
    "model.layernorm_zero_centered_gamma": (
        ["model.layernorm_zero_centered_gamma=true"],
        lambda j: j.model.final_layernorm.weight.sum().item(),
        0.0,
    ),
    "model.layernorm_placement": (
        ["model.layernorm_placement=both"],
        lambda j: type(j.model.layers[0].post_mlp_layernorm).__name__,
        "RMSNorm",
    ),
    "model.qk_layernorm": (
        ["model.qk_layernorm=head"],
        lambda j: list(j.model.layers[0].self_attention.q_layernorm.weight.shape),
        [16],
    ),
    "model.activation": (
        ["model.activation=gelu"],
        lambda j: j.model.layers[0].mlp.linear_fc1.out_features,
        128,
    ),
    "model.add_qkv_bias": (
        ["model.add_qkv_bias=true"],
        lambda j: list(j.model.layers[0].self_attention.linear_qkv.bias.shape),
        [128],
    ),
    "model.add_bias_linear": (
        ["model.add_bias_linear=true"],
        lambda j: list(j.model.layers[0].mlp.linear_fc2.bias.shape),
        [64],
    ),
    "model.position_embedding_type": (
        [LEARNED],
        lambda j: list(j.model.position_embedding.weight.shape),
        [32, 64],
    ),
    "model.max_position_embeddings": (
        [LEARNED, "model.max_position_embeddings=48"],
        lambda j: list(j.model.position_embedding.weight.shape),
        [48, 64],
    ),
    "model.rotary_percent": (["model.rotary_percent=0.5"], lambda j: j.model.config.rotary_size, 8),
    "model.rotary_base_local": (
        ["model.sliding_window=8", "model.rotary_base_local=100"],
        lambda j: j.model.config.rotary_base_local,
        100.0,
    ),
    "model.sliding_window": (
        ["model.sliding_window=8"],
        lambda j: [core(j, n).window for n in (0, 1)],
        [8, 8],
    ),
    "model.window_attn_skip_freq": (
        ["model.sliding_window=8", "model.window_attn_skip_freq=2"],
        lambda j: [core(j, n).window for n in (0, 1)],
        [8, None],
    ),
    "model.query_pre_attn_scalar": (
        ["model.query_pre_attn_scalar=64"],
        lambda j: core(j).scale,
        0.125,
    ),
    "model.attn_logit_softcapping": (
        ["model.attn_logit_softcapping=50"],
        lambda j: core(j).softcap,
        50.0,
    ),
    "model.final_logit_softcapping": (
        ["model.final_logit_softcapping=30"],
        lambda j: j.model.config.final_logit_softcapping,
        30.0,
    ),
    "model.scale_embeddings": (
        ["model.scale_embeddings=true"],
        lambda j: j.model.config.scale_embeddings,
        True,
    ),
    "model.rope_scaling.factor": (
        ["model.rope_scaling.factor=8"],
        lambda j: j.model.config.rope_scaling.factor,
        8.0,
    ),
    "model.rope_scaling.low_freq_factor": (
        ["model.rope_scaling={factor: 8, low_freq_factor: 2}"],
        lambda j: j.model.config.rope_scaling.low_freq_factor,
        2.0,
    ),
    "model.rope_scaling.high_freq_factor": (
        ["model.rope_scaling={factor: 8, high_freq_factor: 5}"],
        lambda j: j.model.config.rope_scaling.high_freq_factor,
        5.0,
    ),
    "model.rope_scaling.original_max_position": (
        ["model.rope_scaling={factor: 8, original_max_position: 64}"],
        lambda j: j.model.config.rope_scaling.original_max_position,
        64,
    ),
    "model.layernorm_epsilon": (
        ["model.layernorm_epsilon=1e-3"],
        lambda j: j.model.final_layernorm.eps,
        1e-3,
    ),
    "model.share_embeddings_and_output_weights": (
        ["model.share_embeddings_and_output_weights=true"],
        lambda j: j.model.output_layer.weight is j.model.embedding.weight,
        True,
    ),
    "model.init_method_std": (
        ["model.init_method_std=0.5"],
        lambda j: round(j.model.embedding.weight.float().std().item(), 1),
        0.5,
    ),
    "model.recompute_granularity": (
        ["model.recompute_granularity=full"],
        lambda j: j.model.recompute,
        "full",
    ),
    "data.name": (
        ["data=stdlib"],
        lambda j: len(run_data(j.recipe)[0].samples.tokens) > 1_000_000,
        True,
    ),
    "data.path": (
        ["data=text", f"data.path={Path(__file__).parents[1]}"],
        lambda j: len(run_data(j.recipe)[1].tokens) > 20_000,
        True,
    ),
    "data.eod_mask_loss": (
        ["data.eod_mask_loss=true"],
        lambda j: run_data(j.recipe)[0].samples.eod,
        256,
    ),
    "data.reset_attention_mask": (
        ["data.reset_attention_mask=true"],
        lambda j: (j.model.reset_attention_mask, len(run_data(j.recipe)[0].batch(0))),
        (True, 3),
    ),
    "data.reset_position_ids": (
        ["data.reset_position_ids=true"],
        lambda j: (j.model.reset_position_ids, len(run_data(j.recipe)[0].batch(0))),
        (True, 3),
    ),
    "data.validation_fraction": (
        ["data.validation_fraction=0.25"],
        lambda j: round(
            len(run_data(j.recipe)[1].tokens)
            / (len(run_data(j.recipe)[0].samples.tokens) + len(run_data(j.recipe)[1].tokens)),
            2,
        ),
        0.25,
    ),
    "optim.name": (["optim.name=sgd"], lambda j: type(j.optimizer.inner).__name__, "SGD"),
    "optim.lr": (["optim.lr=0.5"], lambda j: j.schedule.lr_at(2), 0.5),
    "optim.min_lr": (["optim.min_lr=1e-6"], lambda j: j.schedule.lr_at(6), 1e-6),
    "optim.betas": (["optim.betas=[0.5,0.6]"], lambda j: group(j, "betas"), (0.5, 0.6)),
    "optim.eps": (["optim.eps=1e-3"], lambda j: group(j, "eps"), 1e-3),
    "optim.momentum": (
        ["optim.name=sgd", "optim.momentum=0.25"],
        lambda j: group(j, "momentum"),
        0.25,
    ),
    "optim.weight_decay": (
        ["optim.weight_decay=0.7"],
        lambda j: [g["weight_decay"] for g in j.optimizer.inner.param_groups],
        [0.7, 0.0],
    ),
    "optim.lr_decay_style": (["optim.lr_decay_style=linear"], lambda j: j.schedule.decay, "linear"),
    "optim.warmup_steps": (["optim.warmup_steps=3"], lambda j: j.schedule.warmup_steps, 3),
    "optim.constant_steps": (["optim.constant_steps=2"], lambda j: j.schedule.constant_steps, 2),
    "trainer.accelerator": (["trainer.accelerator=cpu"], lambda j: j.device.type, "cpu"),
    "trainer.max_steps": (["trainer.max_steps=9"], lambda j: j.schedule.max_steps, 9),
    "trainer.global_batch_size": (
        ["trainer.global_batch_size=16"],
        lambda j: run_data(j.recipe)[0].global_batch_size,
        16,
    ),
    "trainer.smoke": (["trainer.smoke=true"], lambda j: j.schedule.max_steps, 3),
    "trainer.gradient_clip_val": (
        ["trainer.gradient_clip_val=0.25"],
        lambda j: j.optimizer.clip_grad,
        0.25,
    ),
    "trainer.seed": (
        ["trainer.seed=7"],
        lambda j: (
            (j.model.embedding.weight != fp8cfg.build(small()).model.embedding.weight).any().item()
        ),
        True,
    ),
    "precision.compute": (
        ["precision=fp32"],
        lambda j: str(j.model.embedding.weight.dtype),
        "torch.float32",
    ),
    "precision.loss_scale": (
        ["precision=fp16", "precision.loss_scale=64"],
        lambda j: j.loss_scaler.scale,
        64.0,
    ),
    "precision.initial_loss_scale": (
        ["precision=fp16", "precision.initial_loss_scale=128"],
        lambda j: j.loss_scaler.scale,
        128.0,
    ),
    "precision.min_loss_scale": (
        ["precision=fp16", "precision.min_loss_scale=2"],
        lambda j: j.loss_scaler.min_loss_scale,
        2.0,
    ),
    "precision.loss_scale_window": (
        ["precision=fp16", "precision.loss_scale_window=9"],
        lambda j: j.loss_scaler.loss_scale_window,
        9,
    ),
    "precision.hysteresis": (
        ["precision=fp16", "precision.hysteresis=3"],
        lambda j: j.loss_scaler.hysteresis,
        3,
    ),
    "backend": ([FP8, "backend=native"], lambda j: j.choice.why.startswith("asked for"), True),
    "fp8.enabled": (["fp8.enabled=true"], lambda j: len(in_fp8(j)), 8),
    "fp8.scaling": ([FP8, "fp8.scaling=current"], lambda j: layer(j).scaling.kind, "current"),
    "fp8.format": ([FP8, "fp8.format=e4m3"], lambda j: layer(j).scaling.backward.name, "e4m3"),
    "fp8.margin": ([FP8, "fp8.margin=2"], lambda j: layer(j).scaling.margin, 2),
    "fp8.interval": ([FP8, "fp8.interval=2"], lambda j: layer(j).scaling.interval, 2),
    "fp8.amax_history_len": (
        [FP8, "fp8.amax_history_len=4"],
        lambda j: len(layer(j).fp8_amax_history),
        4,
    ),
    "fp8.amax_compute_algo": (
        [FP8, "fp8.amax_compute_algo=most_recent"],
        lambda j: layer(j).scaling.amax_compute_algo,
        "most_recent",
    ),
    "fp8.granularity": (
        [CURRENT, WITHIN, "fp8.granularity=row"],
        lambda j: layer(j).scaling.granularity,
        "row",
    ),
    "fp8.use_power_2_scales": (
        [CURRENT, WITHIN, "fp8.use_power_2_scales=true"],
        lambda j: layer(j).scaling.power_2_scales,
        True,
    ),
    "fp8.enable_2d_quantization": (
        ["precision=bf16_mxfp8", "fp8.enable_2d_quantization=true"],
        lambda j: layer(j).scaling.tile(WEIGHT, 1),
        (32, 32),
    ),
    "fp8.random_hadamard_transform": (
        ["precision=bf16_nvfp4", WITHIN, "fp8.random_hadamard_transform=false"],
        lambda j: layer(j).scaling.hadamard,
        False,
    ),
    "fp8.stochastic_rounding": (
        ["precision=bf16_nvfp4", WITHIN, "fp8.stochastic_rounding=false"],
        lambda j: layer(j).scaling.stochastic,
        False,
    ),
    "fp8.first_step": (
        [FP8, "fp8.first_step=te"],
        lambda j: layer(j).fp8_scale.tolist(),
        [1.0, 1.0, 1.0],
    ),
    "fp8.params": (
        [FP8, "fp8.params=false"],
        lambda j: str(layer(j).parameter.dtype),
        "torch.bfloat16",
    ),
    "fp8.keep_transpose_cache": (
        [FP8, "fp8.keep_transpose_cache=true"],
        lambda j: layer(j).keeps_transpose,
        True,
    ),
    "fp8.override_linear_precision.fprop": (
        [FP8, "fp8.override_linear_precision.fprop=true"],
        lambda j: layer(j).high_precision,
        (True, False, False),
    ),
    "fp8.override_linear_precision.dgrad": (
        [FP8, "fp8.override_linear_precision.dgrad=true"],
        lambda j: layer(j).high_precision,
        (False, True, False),
    ),
    "fp8.override_linear_precision.wgrad": (
        [FP8, "fp8.override_linear_precision.wgrad=true"],
        lambda j: layer(j).high_precision,
        (False, False, True),
    ),
    "fp8.high_precision_at_start": (
        [FP8, "fp8.high_precision_at_start=1"],
        lambda j: in_fp8(j)[0].split(".")[1],
        "1",
    ),
    "fp8.high_precision_at_end": (
        [FP8, "fp8.high_precision_at_end=1"],
        lambda j: in_fp8(j)[-1].split(".")[1],
        "0",
    ),
    "fp8.include": (
        [FP8, "fp8.include=['*.linear_fc2']"],
        in_fp8,
        ["layers.0.mlp.linear_fc2", "layers.1.mlp.linear_fc2"],
    ),
    "fp8.exclude": (
        [FP8, "fp8.exclude=['*.mlp.*','*qkv']"],
        in_fp8,
        ["layers.0.self_attention.linear_proj", "layers.1.self_attention.linear_proj"],
    ),
    "fp8.output_layer": (
        [FP8, "fp8.output_layer=true"],
        lambda j: "output_layer" in in_fp8(j),
        True,
    ),
    "fp8.dot_product_attention": (
        [FP8, "fp8.dot_product_attention=true"],
        lambda j: type(j.model.layers[0].self_attention.core_attention).__name__,
        "FP8Attention",
    ),
    "opt_level": ([FP8, "opt_level=O2"], lambda j: dtype(j, "weight"), "torch.float16"),
    "storage.weight": (["storage.weight=fp8"], lambda j: dtype(j, "weight"), "torch.float8_e4m3fn"),
    "storage.master_weight": (
        ["storage.master_weight=fp16_scaled"],
        lambda j: dtype(j, "weight.master"),
        "torch.float16",
    ),
    "storage.weight_grad": (
        [FP8, "storage.weight_grad=fp8"],
        lambda j: str(columns(j).grad),
        "e4m3 exact",
    ),
    "storage.exp_avg": (
        [FP8, "storage.exp_avg=fp8"],
        lambda j: dtype(j, "weight.exp_avg"),
        "torch.float8_e4m3fn",
    ),
    "storage.exp_avg_sq": (
        [FP8, "storage.exp_avg_sq=bf16"],
        lambda j: dtype(j, "weight.exp_avg_sq"),
        "torch.bfloat16",
    ),
    "storage.rounding": (
        ["storage.rounding=stochastic"],
        lambda j: columns(j).weight.rounding,
        "stochastic",
    ),
}
RUNS = {
    **dict.fromkeys(
        (
            "name",
            "log.every_n_steps",
            "checkpoint.every_n_steps",
            "checkpoint.keep",
            "trainer.micro_batch_size",
            "trainer.val_check_interval",
            "trainer.limit_val_batches",
            "trainer.compile",
            "fp8.use_autocast_during_eval",
        ),
        "test_loop.py",
    ),
    **dict.fromkeys(
        ("data.mixture", "data.text_key", "data.tokenizer"), "training/test_run_data.py"
    ),
    "data.streaming": "test_stream_runs.py",
    "data.validation_path": "test_stream_runs.py",
    "trainer.spike_factor": "test_bad_steps.py",
    "trainer.on_bad_step": "test_bad_steps.py",
    "trainer.max_bad_steps": "test_bad_steps.py",
    "log.dir": "test_cli.py",
    "log.level": "test_run_messages.py",
    "log.loggers": "test_loggers.py",
    "log.progress": "test_progress.py",
    "log.project": "test_loggers.py",
    "log.profile": "test_profiling.py",
    "log.memory_snapshot": "test_profiling.py",
    "fp8.min_coverage": "test_builder.py",
    "fp8.reduce_amax": "test_distributed.py",
    "fp8.tp_only_amax_red": "test_amax_group.py",
    "storage.comm": "test_storage_ranks.py",
    "storage.accumulate": "test_low_bit.py",
    "storage.shard": "test_storage_ranks.py",
    "storage.gather": "test_fsdp.py",
    "trainer.strategy.tensor_model_parallel_size": "test_tensor.py",
    "trainer.strategy.sequence_parallel": "test_tensor.py",
    "trainer.strategy.context_parallel_size": "test_context.py",
    "trainer.strategy.data_parallel_replicate_size": "test_hsdp.py",
    "trainer.strategy.pipeline_schedule": "test_pipeline.py",
    "trainer.strategy.pipeline_model_parallel_size": "test_pipeline_runs.py",
    "trainer.strategy.virtual_pipeline_model_parallel_size": "test_pipeline.py",
    "checkpoint.async_save": "test_async_save.py",
    "checkpoint.every_minutes": "test_last_step.py",
    "lora.weights": "test_peft_format.py",
    "log.folder": "test_log_folder.py",
    "log.resume": "test_log_folder.py",
    "trainer.timeout.start": "test_stalled_launches.py",
    "trainer.timeout.step": "test_stalled_launches.py",
    "model.weights": "test_hf_checkpoint.py",
    "model.path": "test_hf_checkpoint.py",
    "fp8.emulate": "test_gemm_plan.py",
    "log.fp8_stats_every_n_steps": "test_quantization_statistics.py",
}
REFUSED: dict[str, list[str]] = {
    "fp8.multi_head_attention": [
        FP8,
        "fp8.dot_product_attention=true",
        "fp8.multi_head_attention=true",
    ],
}
PLANNED = {
    "trainer.num_nodes",
    "trainer.devices",
}


def test_every_key_stands_in_one_of_the_tables() -> None:
    leaves = {
        short(k)
        for k, f in fields().items()
        if not (isinstance(f.annotation, type) and issubclass(f.annotation, Node))
    }
    listed = [*ACTS, *RUNS, *REFUSED, *PLANNED]
    assert len(listed) == len(set(listed))
    assert leaves == set(listed)


@pytest.mark.parametrize("key", ACTS)
def test_a_key_is_read_back_from_the_built_job(key: str) -> None:
    words, read, want = ACTS[key]
    assert read(fp8cfg.build(small(*words))) == want
    base = (
        [w for w in words if w.startswith(("precision=", "fp8={", "optim.name=", "data="))]
        if key not in ("precision.compute", "optim.name", "data.name")
        else []
    )
    if key != "data.path" and not key.startswith("trainer.accel"):
        assert _read(read, _built(*base)) != want, "the test would pass without the key"


@functools.cache
def _built(*words: str) -> Job:
    """A job without the key at hand, which many keys share: it is read alone."""
    return fp8cfg.build(small(*words))


def _read(read: Callable[[Job], Any], job: Job) -> Any:
    """What `read` gives, or that it finds nothing to read there."""
    try:
        return read(job)
    except (AttributeError, KeyError, StopIteration, TypeError) as nothing:
        return nothing


@pytest.mark.parametrize("key", RUNS)
def test_a_key_of_the_run_is_set_by_its_test(key: str) -> None:
    (file,) = Path(__file__).parents[1].rglob(RUNS[key])
    text = file.read_text(encoding="utf-8")
    assert f"{key}=" in text or f"{key} =" in text


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_this_version_does_not_run_is_refused_by_name(key: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.build(small(*REFUSED[key]))
    assert any(line.startswith(f"{key}=") for line in e.value.problems), e.value.problems


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["precision=bf16_fp8_block"], ("block", "e4m3", "e5m2", True, True)),
        (
            ["precision=bf16_fp8_block", "fp8.format=e4m3", "fp8.use_power_2_scales=false"],
            ("block", "e4m3", "e4m3", False, True),
        ),
        (["precision=bf16_mxfp8"], ("mxfp8", "e4m3", "e4m3", False, False)),
        (["precision=bf16_nvfp4"], ("nvfp4", "e2m1", "e2m1", False, True)),
    ],
)
def test_every_scaling_is_built_with_its_defaults(words: list[str], want: tuple) -> None:
    s = layer(fp8cfg.build(small(*words))).scaling
    assert (s.kind, s.forward.name, s.backward.name, s.power_2_scales, s.weights_2d) == want
