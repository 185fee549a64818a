"""Key table of Megatron-LM's flags. NeMo and Bridge share the entries of the model and the job."""

from __future__ import annotations

from typing import Any

from fp8cfg.interop.key_table import (
    OMIT,
    Entry,
    KeyTable,
    Unsupported,
    Values,
    is_on,
    parse_bool,
    parse_choice,
    parse_float,
    parse_floats,
    parse_int,
    read_only,
    renamed_choice,
    same_value,
    switch_for,
    uses_delayed_scaling,
    write_only,
)
from fp8cfg.interop.megatron_core import (
    CAVEATS,
    REASONS,
    UNSUPPORTED,
    computes_in_fp16,
    drop_inactive_fields,
    find_compute_dtype,
    find_export_errors,
    loss_scale_entries,
    precision_entries,
    reject_conflicts,
)

# Model, batches, optimizer and parallelism.

_INTEGERS = {
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "ffn_hidden_size": "model.ffn_hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "num_query_groups": "model.num_query_groups",
    "seq_length": "model.seq_length",
    "vocab_size": "model.vocab_size",
    "micro_batch_size": "trainer.micro_batch_size",
    "global_batch_size": "trainer.global_batch_size",
    "train_iters": "trainer.max_steps",
    "seed": "trainer.seed",
    "lr_warmup_iters": "optim.warmup_steps",
    "tensor_model_parallel_size": "trainer.strategy.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "trainer.strategy.pipeline_model_parallel_size",
    "context_parallel_size": "trainer.strategy.context_parallel_size",
}
_NUMBERS = {
    "rotary_base": "model.rotary_base",
    "norm_epsilon": "model.layernorm_epsilon",
    "init_method_std": "model.init_method_std",
    "lr": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "adam_eps": "optim.eps",
    "clip_grad": "trainer.gradient_clip_val",
}


def _check_beta(value: Any) -> dict[str, Any]:
    """Sets nothing: `combine_betas` makes optim.betas of both betas."""
    parse_float(value)
    return {}


_NORMALIZATIONS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def _same_choices(*names: str) -> dict[str, str]:
    return {name: name for name in names}


JOB_ENTRIES = (
    *(same_value(key, recipe_key, parse_int) for key, recipe_key in _INTEGERS.items()),
    *(same_value(key, recipe_key, parse_float) for key, recipe_key in _NUMBERS.items()),
    Entry(
        "kv_channels",
        lambda setting: {"model.kv_channels": parse_int(setting)},
        lambda values: values["model.kv_channels"] or OMIT,
    ),
    Entry(
        "min_lr",
        lambda setting: {"optim.min_lr": parse_float(setting)},
        lambda values: OMIT if values["optim.min_lr"] is None else values["optim.min_lr"],
    ),
    renamed_choice(
        "lr_decay_style", "optim.lr_decay_style", _same_choices("cosine", "linear", "constant")
    ),
    renamed_choice("optimizer", "optim.name", {"adam": "adamw", "sgd": "sgd"}),
    read_only("BETAS", lambda setting: {"optim.betas": parse_floats(setting)}),
    Entry("adam_beta1", _check_beta, lambda values: values["optim.betas"][0]),
    Entry("adam_beta2", _check_beta, lambda values: values["optim.betas"][1]),
    switch_for("sequence_parallel", "trainer.strategy.sequence_parallel", True),
    switch_for("eod_mask_loss", "data.eod_mask_loss", True),
    switch_for("reset_attention_mask", "data.reset_attention_mask", True),
    switch_for("reset_position_ids", "data.reset_position_ids", True),
    Entry(
        "untie_embeddings_and_output_weights",
        lambda setting: {"model.share_embeddings_and_output_weights": not parse_bool(setting)},
        lambda values: not values["model.share_embeddings_and_output_weights"] or OMIT,
    ),
    renamed_choice(
        "recompute_granularity", "model.recompute_granularity", _same_choices("selective", "full")
    ),
    write_only(
        "recompute_method",
        lambda values: "uniform",
        lambda values: values["model.recompute_granularity"] == "full",
    ),
    write_only("group_query_attention", lambda values: True),
    switch_for("swiglu", "model.activation", "swiglu"),
    switch_for("squared_relu", "model.activation", "squared_relu"),
    read_only("GELU", lambda setting: {"model.activation": "gelu"}),
    Entry(
        "disable_bias_linear",
        lambda setting: {"model.add_bias_linear": not parse_bool(setting)},
        lambda values: not values["model.add_bias_linear"] or OMIT,
    ),
    switch_for("add_qkv_bias", "model.add_qkv_bias", True),
    switch_for("qk_layernorm", "model.qk_layernorm", "head"),
    Entry(
        "normalization",
        lambda setting: {"model.normalization": parse_choice(setting, _NORMALIZATIONS)},
        lambda values: values["model.normalization"],
    ),
    switch_for("apply_layernorm_1p", "model.layernorm_zero_centered_gamma", True),
    renamed_choice(
        "position_embedding_type",
        "model.position_embedding_type",
        _same_choices("rope", "learned_absolute"),
    ),
    same_value(
        "rotary_percent",
        "model.rotary_percent",
        parse_float,
        lambda values: values["model.rotary_percent"] != 1.0,
    ),
    Entry(
        "max_position_embeddings",
        lambda setting: {"model.max_position_embeddings": parse_int(setting)},
        lambda values: values["model.max_position_embeddings"] or OMIT,
    ),
)
JOB_UNSUPPORTED = {
    "transformer_impl": Unsupported("follows from backend", ("transformer_engine",)),
    "recompute_modules": Unsupported(
        "selective recomputes core attention, norms and the activation function here",
        ("core_attn", ["core_attn"]),
    ),
    "recompute_method": Unsupported(
        "model.recompute_granularity=full recomputes every layer here", ("uniform",)
    ),
    "te_rng_tracker": Unsupported("random numbers follow from trainer.seed"),
}
# The recipe keys of a job. Those in the second half cannot be exported.
_JOB_RECIPE_KEYS = (
    *_INTEGERS.values(),
    *_NUMBERS.values(),
    "optim.betas",
    "optim.min_lr",
    "optim.lr_decay_style",
    "optim.name",
    "model.kv_channels",
    "model.share_embeddings_and_output_weights",
    "model.activation",
    "model.add_bias_linear",
    "model.add_qkv_bias",
    "model.qk_layernorm",
    "model.normalization",
    "model.layernorm_zero_centered_gamma",
    "model.position_embedding_type",
    "model.rotary_percent",
    "model.max_position_embeddings",
    "model.recompute_granularity",
    "trainer.strategy.sequence_parallel",
    "data.eod_mask_loss",
    "data.reset_attention_mask",
    "data.reset_position_ids",
    # Without a flag, or with flags that an export does not write:
    "model.rope_scaling.factor",
    "model.rope_scaling.low_freq_factor",
    "model.rope_scaling.high_freq_factor",
    "model.rope_scaling.original_max_position",
    "model.rope_scaling.rope_type",
    "model.layernorm_placement",
    "model.rotary_base_local",
    "model.sliding_window",
    "model.window_attn_skip_freq",
    "model.query_pre_attn_scalar",
    "model.attn_logit_softcapping",
    "model.final_logit_softcapping",
    "model.scale_embeddings",
    "optim.constant_steps",
    "trainer.strategy.virtual_pipeline_model_parallel_size",
)
_JOB_REASONS = {
    "model.rope_scaling.factor": "add --use-rope-scaling and --rope-scaling-factor by hand",
    "optim.name": "Megatron's adam is AdamW",
    "optim.min_lr": "Megatron's default is 0; set optim.min_lr",
}


def combine_betas(settings: dict[str, Any]) -> None:
    """Combines both betas into one setting. A missing beta has Megatron's default."""
    if "adam_beta1" in settings or "adam_beta2" in settings:
        settings["BETAS"] = (settings.get("adam_beta1", 0.9), settings.get("adam_beta2", 0.999))


def apply_model_defaults(settings: dict[str, Any]) -> list[str]:
    """Adds Megatron's defaults of a model, in place, if the settings have a model's shape.

    Returns:
        A remark on a setting without effect, if any.
    """
    combine_betas(settings)
    if "hidden_size" not in settings or "num_attention_heads" not in settings:
        return []
    hidden_size = parse_int(settings["hidden_size"])
    ffn_hidden_size = 4 * hidden_size
    if is_on(settings.get("swiglu")):
        # Megatron: int((4 * hidden_size * 2 / 3) / 64) * 64
        ffn_hidden_size = 8 * hidden_size // 3 // 64 * 64
    settings.setdefault("ffn_hidden_size", ffn_hidden_size)
    settings.setdefault("num_query_groups", settings["num_attention_heads"])
    settings.setdefault("untie_embeddings_and_output_weights", False)
    settings.setdefault("normalization", "LayerNorm")
    settings.setdefault("position_embedding_type", "learned_absolute")
    settings.setdefault("disable_bias_linear", False)
    if not is_on(settings.get("swiglu")) and not is_on(settings.get("squared_relu")):
        settings["GELU"] = True
    # With biases in all linear layers, qkv has one anyway. Megatron-LM has the negated switch.
    has_biases = not is_on(settings["disable_bias_linear"])
    if "add_bias_linear" in settings:
        has_biases = is_on(settings["add_bias_linear"])
    if has_biases and settings.pop("add_qkv_bias", False):
        return ["add_qkv_bias: has no effect, all linear layers have biases"]
    return []


def _drop_query_groups(settings: dict[str, Any]) -> list[str]:
    """Removes the query groups of a model without group_query_attention, as Megatron-LM does."""
    if "hidden_size" not in settings or is_on(settings.get("group_query_attention")):
        return []
    groups = settings.pop("num_query_groups", 1)
    if groups in (1, "1"):  # Megatron's default
        return []
    return [f"num_query_groups={groups}: has no effect without group_query_attention"]


def _list_export_remarks(values: Values) -> list[str]:
    if values["model.recompute_granularity"] != "selective":
        return []
    return [
        "model.recompute_granularity=selective: Megatron recomputes only core attention by default;"
        " add --recompute-modules core_attn layernorm to recompute norms, as fp8cfg does"
    ]


# Optimizer state of Megatron-LM.

# TE's FusedAdam scales fp16 and FP8 state by the amax of each tensor.
_STATE_DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16_scaled", "fp8": "fp8"}
_STATE_KEYS = {
    "exp_avg_dtype": "storage.exp_avg",
    "exp_avg_sq_dtype": "storage.exp_avg_sq",
    "main_params_dtype": "storage.master_weight",
}


def _needs_precision_aware_optimizer(values: Values) -> bool:
    """Returns whether state is not Megatron's default, float32, or gradients have another dtype."""
    master_weight = "none" if values["precision.compute"] == "fp32" else "fp32"
    return (
        _has_bf16_main_grads(values)
        or values["storage.exp_avg"] != "fp32"
        or values["storage.exp_avg_sq"] != "fp32"
        or values["storage.master_weight"] != master_weight
    )


def _has_bf16_main_grads(values: Values) -> bool:
    """Returns whether gradients are stored in bf16 and reduced in another dtype."""
    return bool(values["storage.weight_grad"] == "bf16" and values["storage.comm"] != "bf16")


def _write_reduce_in_bf16(values: Values) -> Any:
    return values["precision.compute"] == values["storage.comm"] == "bf16" or OMIT


def _write_reduce_in_fp32_under_fp16(values: Values) -> Any:
    return values["storage.comm"] == "fp32" or OMIT


def _prepare(settings: dict[str, Any]) -> list[str]:
    remarks = drop_inactive_fields(settings, (1, 1), "fp4_format")
    remarks += _drop_query_groups(settings)
    remarks += apply_model_defaults(settings)
    if not is_on(settings.get("use_precision_aware_optimizer")):
        for key in (*_STATE_KEYS, "main_grads_dtype"):
            if key in settings and settings.pop(key) != "fp32":
                remarks.append(f"{key}: has no effect without use_precision_aware_optimizer")
    compute = find_compute_dtype(settings)
    reduces_in_bf16 = is_on(settings.get("grad_reduce_in_bf16"))
    # The defaults of both projects are the same here.
    if settings.get("main_params_dtype") == "fp32":
        del settings["main_params_dtype"]
    if settings.get("main_grads_dtype") == "fp32" and not reduces_in_bf16:
        del settings["main_grads_dtype"]

    if compute == "fp32":
        settings["FP32"] = True
        if "main_params_dtype" in settings:
            dtype = settings.pop("main_params_dtype")
            remarks.append(f"main_params_dtype={dtype}: has no effect without --bf16 or --fp16")
    if compute == "bf16" and reduces_in_bf16:
        settings["GRADS"] = "bf16"
    if compute == "fp16" and is_on(settings.get("accumulate_allreduce_grads_in_fp32")):
        settings["GRADS"] = "fp32"
    reject_conflicts(settings, None, "fp8_format", "fp4_format")
    return remarks


_PRECISION_ENTRIES = (
    read_only("FP32", lambda setting: {"precision.compute": "fp32"}),
    switch_for("fp16", "precision.compute", "fp16"),
    switch_for("bf16", "precision.compute", "bf16"),
    *precision_entries("fp8_format", "fp4_format"),
    Entry(
        "no_fp8_wgrad",
        lambda setting: {"fp8.override_linear_precision.wgrad": parse_bool(setting)},
        lambda values: values["fp8.override_linear_precision.wgrad"] or OMIT,
        uses_delayed_scaling,
    ),
    read_only("GRADS", lambda dtype: {"storage.comm": dtype, "storage.weight_grad": dtype}),
    write_only("grad_reduce_in_bf16", _write_reduce_in_bf16),
    write_only(
        "accumulate_allreduce_grads_in_fp32", _write_reduce_in_fp32_under_fp16, computes_in_fp16
    ),
    write_only(
        "use_precision_aware_optimizer", lambda values: True, _needs_precision_aware_optimizer
    ),
    renamed_choice(
        "main_grads_dtype",
        "storage.weight_grad",
        {"bf16": "bf16", "fp32": "fp32"},
        lambda values: (
            _needs_precision_aware_optimizer(values) and values["storage.weight_grad"] == "bf16"
        ),
    ),
    *(
        renamed_choice(key, recipe_key, _STATE_DTYPES, _needs_precision_aware_optimizer)
        for key, recipe_key in _STATE_KEYS.items()
    ),
    switch_for("use_distributed_optimizer", "storage.shard", "zero1"),
    *loss_scale_entries(),
)
PRECISION_FLAGS = frozenset(entry.key for entry in _PRECISION_ENTRIES)
MEGATRON = KeyTable(
    "Megatron-LM",
    (*_PRECISION_ENTRIES, *JOB_ENTRIES),
    aliases={"fp8": "fp8_format", "fp4": "fp4_format", "fp8_param": "fp8_param_gather"},
    defaults={
        "fp8_amax_history_len": 1,
        "fp8_amax_compute_algo": "most_recent",
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    },
    unsupported={**UNSUPPORTED, **JOB_UNSUPPORTED},
    prepare=_prepare,
    export_errors=find_export_errors,
    reasons={**REASONS, **_JOB_REASONS},
    caveats=CAVEATS,
    extra_keys=_JOB_RECIPE_KEYS,
    export_remarks=_list_export_remarks,
)
