"""Megatron Core precision fields, which NeMo and Megatron-Bridge share."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

from fp8cfg.interop.key_table import (
    AMAX_COMPUTE_ALGOS,
    FORMATS,
    SILENT,
    Dialect,
    Entry,
    Unsaid,
    Values,
    boolean,
    delayed,
    integer,
    inverse,
    is_on,
    number,
    numbers,
    one_of,
    option,
    read_only,
    runs_fp8,
    same,
    shown,
    switch,
    write_only,
)
from fp8cfg.schema.errors import refuse_if
from fp8cfg.schema.scalings import SCALINGS

_FP8 = {
    scaling.megatron: name
    for name, scaling in SCALINGS.items()
    if scaling.megatron and scaling.bits == 8
}
"""Their fp8_recipe, and our scaling."""
OFF = (None, False, "", "none", "None", "null")


def fp8(ours: Values) -> bool:
    """Of recipes that Megatron calls FP8."""
    return runs_fp8(ours) and not fp4(ours)


def fp4(ours: Values) -> bool:
    """Of recipes that Megatron calls FP4."""
    return runs_fp8(ours) and SCALINGS[ours["fp8.scaling"]].bits == 4


def refuse(ours: Values) -> list[str]:
    """The line on a scaling that Megatron has not."""
    if not runs_fp8(ours) or SCALINGS[ours["fp8.scaling"]].megatron:
        return []
    those = ", ".join(name for name, scaling in SCALINGS.items() if scaling.megatron)
    return [f"fp8.scaling={ours['fp8.scaling']}: Megatron has no such scaling; it has {those}"]


def fp16(ours: Values) -> bool:
    """Of recipes that compute in fp16."""
    return bool(ours["precision.compute"] == "fp16")


def _ends(ours: Values) -> bool:
    """Of recipes with layers in high precision, as far as Megatron takes them: not under delayed scaling."""
    return (
        runs_fp8(ours)
        and not delayed(ours)
        and bool(ours["fp8.high_precision_at_start"] or ours["fp8.high_precision_at_end"])
    )


def _on(value: Any) -> dict[str, Any]:
    return (
        {}
        if value in OFF
        else {
            "fp8.enabled": True,
            "fp8.format": one_of(value, FORMATS),
        }
    )


def _fp4_on(value: Any) -> dict[str, Any]:
    return (
        {}
        if value in OFF
        else {"fp8.enabled": True, "fp8.scaling": one_of(value, {"e2m1": "nvfp4"})}
    )


def _optional(value: Any) -> float | None:
    return None if value in OFF or value == (None,) or value == [None] else number(value)


def fields(fp8_field: str = "fp8", fp4_field: str = "fp4") -> tuple[Entry, ...]:
    """The fields that all of them share, where FP8's format and FP4's have these names."""
    return (
        Entry(fp8_field, _on, lambda ours: ours["fp8.format"], fp8),
        option("fp8_recipe", "fp8.scaling", _FP8, fp8),
        Entry(fp4_field, _fp4_on, lambda ours: "e2m1", fp4),
        Entry("fp4_recipe", lambda value: one_of(value, {"nvfp4": {}}), lambda ours: "nvfp4", fp4),
        same("fp8_margin", "fp8.margin", integer, delayed),
        same("fp8_amax_history_len", "fp8.amax_history_len", integer, delayed),
        option(
            "fp8_amax_compute_algo",
            "fp8.amax_compute_algo",
            AMAX_COMPUTE_ALGOS,
            delayed,
        ),
        same("tp_only_amax_red", "fp8.tp_only_amax_red", boolean, delayed),
        same("fp8_dot_product_attention", "fp8.dot_product_attention", boolean, fp8),
        same("fp8_multi_head_attention", "fp8.multi_head_attention", boolean, fp8),
        same("fp8_param_gather", "fp8.params", boolean, fp8),
        same("fp4_param_gather", "fp8.params", boolean, fp4),
        write_only("first_last_layers_bf16", lambda _: True, _ends),
        same("num_layers_at_start_in_bf16", "fp8.high_precision_at_start", integer, _ends),
        same("num_layers_at_end_in_bf16", "fp8.high_precision_at_end", integer, _ends),
    )


WGRAD = inverse("fp8_wgrad", "fp8.override_linear_precision.wgrad", delayed)
REUSE = write_only(
    "reuse_grad_buf_for_mxfp8_param_ag",
    lambda _: True,
    lambda ours: runs_fp8(ours) and ours["fp8.scaling"] == "mxfp8" and ours["fp8.params"],
)
DYNAMIC = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def loss_scaling(prefix: str = "") -> tuple[Entry, ...]:
    """Loss scaling under fp16, where its fields begin with `prefix`."""
    return (
        Entry(
            f"{prefix}loss_scale",
            lambda value: {"precision.loss_scale": _optional(value)},
            lambda ours: ours["precision.loss_scale"] or SILENT,
            fp16,
        ),
        *(
            Entry(f"{prefix}{name}", partial(_dynamic, name), itemgetter(f"precision.{name}"), fp16)
            for name in DYNAMIC
        ),
    )


def _dynamic(name: str, value: Any) -> dict[str, Any]:
    return {} if _optional(value) is None else {f"precision.{name}": number(value)}


def _reduced(value: Any) -> dict[str, Any]:
    if value not in ("fp32", "bf16", "fp16"):  # what `reduction` makes of a truth value
        raise ValueError("expected true or false")
    return {"storage.comm": value, "storage.weight_grad": value}


def _in_fp32(ours: Values) -> Any:
    return {"fp32": True, ours["precision.compute"]: False}.get(ours["storage.comm"], SILENT)


REDUCED = Entry(
    "grad_reduce_in_fp32", _reduced, _in_fp32, lambda ours: ours["precision.compute"] != "fp32"
)


def reduction(theirs: dict[str, Any], compute: str) -> None:
    """Put into grad_reduce_in_fp32 the codec that it means under `compute`, or take it out where auto says the same."""
    in_fp32 = {"true": True, "false": False}.get(str(theirs.get("grad_reduce_in_fp32")).lower())
    if in_fp32 is None:
        return
    if compute == "fp32" or in_fp32 == (compute == "bf16"):
        del theirs["grad_reduce_in_fp32"]
    else:
        theirs["grad_reduce_in_fp32"] = "fp32" if in_fp32 else compute


def refuse_both(
    theirs: Values, named: str | None = None, fp8_field: str = "fp8", fp4_field: str = "fp4"
) -> None:
    """Raise ConfigError where bf16 and fp16 are both on, of which one may be `named` and no switch, or FP8 and FP4."""
    halves = [dtype for dtype in ("bf16", "fp16") if dtype == named or is_on(theirs.get(dtype))]
    narrow = [field for field in (fp8_field, fp4_field) if theirs.get(field) not in OFF]
    refuse_if(
        [f"{' and '.join(two)} are both on; drop one" for two in (halves, narrow) if len(two) == 2]
    )


def what_is_on(
    theirs: dict[str, Any], spared: tuple[int, int], fp4_field: str = "fp4"
) -> list[str]:
    """Take out the fields of layers at the ends, unless first_last_layers_bf16 is on, and of FP4 or FP8 where the other runs.
    A line for each that somebody set; `spared` is what the layers at the ends are where nobody did.
    """
    lines, ends = [], ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if not is_on(theirs.get("first_last_layers_bf16")):
        for key, unset in zip(ends, spared, strict=True):
            if key in theirs and theirs.pop(key) != unset:
                lines.append(f"{key}: has no effect without first_last_layers_bf16")
    idle = "fp4_" if theirs.get(fp4_field) in OFF else "fp8_"
    for key in [k for k in theirs if k in (f"{idle}recipe", f"{idle}param_gather", f"{idle}wgrad")]:
        value = theirs.pop(key)
        if idle == "fp4_" and value not in (*OFF, "nvfp4"):
            lines.append(f"{shown(key, value)}: has no effect without {fp4_field}")
    return lines


_DTYPE = Unsaid(
    "follows from precision.compute",
    (
        None,
        True,
        False,
        *(
            at + name
            for at in ("", "torch.")
            for name in ("float32", "bfloat16", "float16", "half")
        ),
    ),
)
UNSAID = {
    **dict.fromkeys(
        ("params_dtype", "pipeline_dtype", "autocast_dtype", "autocast_enabled"), _DTYPE
    ),
    "fp8_interval": Unsaid("Megatron ignores it", (1,)),
    "reuse_grad_buf_for_mxfp8_param_ag": Unsaid(
        "a buffer of Megatron's distributed optimizer", (True, False)
    ),
    "keep_fp8_transpose_cache": Unsaid(
        "of Megatron-FSDP, which gathers weights for each pass; backend=native has "
        "fp8.keep_transpose_cache where they stay",
        (False,),
    ),
    **dict.fromkeys(
        ("fp8_quantizer_factory", "fp4_quantizer_factory"),
        Unsaid("a recipe cannot name code to run", OFF),
    ),
}
WHY = {
    "fp8.interval": "Megatron ignores fp8_interval",
    "fp8.amax_history_len": "has an effect there only under delayed scaling",
    "fp8.override_linear_precision.wgrad": "fp8_wgrad does nothing there but under delayed scaling",
    "fp8.high_precision_at_start": "Megatron refuses first_last_layers_bf16 under delayed scaling",
    "fp8.high_precision_at_end": "Megatron refuses first_last_layers_bf16 under delayed scaling",
    "backend": "Megatron multiplies with Transformer Engine",
    "fp8.keep_transpose_cache": (
        "Transformer Engine keeps them, but for those that Megatron-FSDP gathers"
    ),
}
DOUBTS = {
    "fp8.override_linear_precision.wgrad": (
        "Transformer Engine 2 knows it no more and drops it without a word"
    )
}
"""What they say and Transformer Engine does not carry out."""

_WHOLE = {
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
_REAL = {
    "rotary_base": "model.rotary_base",
    "norm_epsilon": "model.layernorm_epsilon",
    "init_method_std": "model.init_method_std",
    "lr": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "adam_eps": "optim.eps",
    "clip_grad": "trainer.gradient_clip_val",
}


def _beta(value: Any) -> dict[str, Any]:
    """Half of optim.betas, which `shape` makes of both."""
    number(value)
    return {}


MODEL = (
    *(same(theirs, ours, integer) for theirs, ours in _WHOLE.items()),
    *(same(theirs, ours, number) for theirs, ours in _REAL.items()),
    Entry(
        "kv_channels",
        lambda value: {"model.kv_channels": integer(value)},
        lambda ours: ours["model.kv_channels"] or SILENT,
    ),
    Entry(
        "min_lr",
        lambda value: {"optim.min_lr": number(value)},
        lambda ours: SILENT if ours["optim.min_lr"] is None else ours["optim.min_lr"],
    ),
    option(
        "lr_decay_style",
        "optim.lr_decay_style",
        {"cosine": "cosine", "linear": "linear", "constant": "constant"},
    ),
    option("optimizer", "optim.name", {"adam": "adamw", "sgd": "sgd"}),
    read_only("BETAS", lambda both: {"optim.betas": numbers(both)}),
    Entry("adam_beta1", _beta, lambda ours: ours["optim.betas"][0]),
    Entry("adam_beta2", _beta, lambda ours: ours["optim.betas"][1]),
    switch("sequence_parallel", "trainer.strategy.sequence_parallel", True),
    *(
        switch(name, f"data.{name}", True)
        for name in ("eod_mask_loss", "reset_attention_mask", "reset_position_ids")
    ),
    Entry(
        "untie_embeddings_and_output_weights",
        lambda on: {"model.share_embeddings_and_output_weights": not boolean(on)},
        lambda ours: not ours["model.share_embeddings_and_output_weights"] or SILENT,
    ),
    option(
        "recompute_granularity",
        "model.recompute_granularity",
        {"selective": "selective", "full": "full"},
    ),
    write_only(
        "recompute_method",
        lambda _: "uniform",
        lambda ours: ours["model.recompute_granularity"] == "full",
    ),
    write_only("group_query_attention", lambda _: True),
    switch("swiglu", "model.activation", "swiglu"),
    switch("squared_relu", "model.activation", "squared_relu"),
    read_only("GELU", lambda _: {"model.activation": "gelu"}),
    Entry(
        "disable_bias_linear",
        lambda on: {"model.add_bias_linear": not boolean(on)},
        lambda ours: not ours["model.add_bias_linear"] or SILENT,
    ),
    switch("add_qkv_bias", "model.add_qkv_bias", True),
    switch("qk_layernorm", "model.qk_layernorm", "head"),
    Entry(
        "normalization",
        lambda value: {
            "model.normalization": one_of(value, {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"})
        },
        lambda ours: ours["model.normalization"],
    ),
    switch("apply_layernorm_1p", "model.layernorm_zero_centered_gamma", True),
    option(
        "position_embedding_type",
        "model.position_embedding_type",
        {"rope": "rope", "learned_absolute": "learned_absolute"},
    ),
    same(
        "rotary_percent",
        "model.rotary_percent",
        number,
        lambda ours: ours["model.rotary_percent"] != 1.0,
    ),
    Entry(
        "max_position_embeddings",
        lambda value: {"model.max_position_embeddings": integer(value)},
        lambda ours: ours["model.max_position_embeddings"] or SILENT,
    ),
)
MODEL_UNSAID = {
    "transformer_impl": Unsaid("backend says who multiplies", ("transformer_engine",)),
    "recompute_modules": Unsaid(
        "selective recomputes core attention, norms and the activation function here",
        ("core_attn", ["core_attn"]),
    ),
    "te_rng_tracker": Unsaid("random numbers follow from trainer.seed"),
}
_TOGETHER = (
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
)
_ELSEWHERE = (
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
BEYOND = (*_WHOLE.values(), *_REAL.values(), *_TOGETHER, *_ELSEWHERE)
MODEL_WHY = {
    "model.rope_scaling.factor": "write --use-rope-scaling and --rope-scaling-factor by hand",
    "optim.name": "Megatron's adam is AdamW",
    "optim.min_lr": "Megatron's default is 0; write optim.min_lr",
}


def betas(theirs: dict[str, Any]) -> None:
    """Makes one value of both betas, with Megatron's default for a missing one."""
    if "adam_beta1" in theirs or "adam_beta2" in theirs:
        theirs["BETAS"] = (theirs.get("adam_beta1", 0.9), theirs.get("adam_beta2", 0.999))


def shape(theirs: dict[str, Any]) -> list[str]:
    """Megatron's own defaults of a model, where flags give one; betas become one value; a line for what a recipe cannot say."""
    lines: list[str] = []
    betas(theirs)
    if "hidden_size" in theirs and "num_attention_heads" in theirs:
        hidden = integer(theirs["hidden_size"])
        theirs.setdefault(
            "ffn_hidden_size", 8 * hidden // 3 // 64 * 64 if "swiglu" in theirs else 4 * hidden
        )
        if not is_on(theirs.get("group_query_attention")):
            theirs["num_query_groups"] = theirs["num_attention_heads"]
        theirs.setdefault("untie_embeddings_and_output_weights", False)
        for key, value in (
            ("normalization", "LayerNorm"),
            ("position_embedding_type", "learned_absolute"),
            ("disable_bias_linear", False),
        ):
            theirs.setdefault(key, value)
        if not is_on(theirs.get("swiglu")) and not is_on(theirs.get("squared_relu")):
            theirs["GELU"] = True
        if theirs["disable_bias_linear"] is False and theirs.pop("add_qkv_bias", False):
            lines.append("add_qkv_bias: has no effect without disable_bias_linear")
    return lines


def differs(ours: Values) -> list[str]:
    """The line on selective recomputation, which there is of core attention alone by default."""
    selective = ours["model.recompute_granularity"] == "selective"
    return (
        [
            "model.recompute_granularity=selective: Megatron recomputes core attention alone where"
            " nothing more is said; norms, as here, with --recompute-modules core_attn layernorm"
        ]
        if selective
        else []
    )


_DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16_scaled", "fp8": "fp8"}
"""Their dtypes of optimizer state as our codecs: TE's FusedAdam scales fp16 and FP8 by the amax of each tensor."""
_STATE = {
    "exp_avg_dtype": "storage.exp_avg",
    "exp_avg_sq_dtype": "storage.exp_avg_sq",
    "main_params_dtype": "storage.master_weight",
}


def _precise(ours: Values) -> bool:
    """Of recipes whose optimizer state is not Megatron's float32, or whose gradients are not those that are reduced."""
    masters = "none" if ours["precision.compute"] == "fp32" else "fp32"
    usual = {
        "storage.exp_avg": "fp32",
        "storage.exp_avg_sq": "fp32",
        "storage.master_weight": masters,
    }
    return _main_grads(ours) or any(ours[k] != v for k, v in usual.items())


def _main_grads(ours: Values) -> bool:
    return bool(ours["storage.weight_grad"] == "bf16" and ours["storage.comm"] != "bf16")


def _half_wire(ours: Values) -> Any:
    return (ours["precision.compute"] == ours["storage.comm"] == "bf16") or SILENT


def _full_wire(ours: Values) -> Any:
    return ours["storage.comm"] == "fp32" or SILENT


def _prepare(theirs: dict[str, Any]) -> list[str]:
    """What the flags come to: dtypes of state only with the precision-aware optimizer, gradients' from those about the wire."""
    lines = what_is_on(theirs, (1, 1), "fp4_format") + shape(theirs)
    if not is_on(theirs.get("use_precision_aware_optimizer")):
        for key in [k for k in (*_STATE, "main_grads_dtype") if k in theirs]:
            if theirs.pop(key) != "fp32":
                lines.append(f"{key}: has no effect without use_precision_aware_optimizer")
    compute = next((dtype for dtype in ("bf16", "fp16") if is_on(theirs.get(dtype))), "fp32")
    if theirs.get("main_params_dtype") == "fp32":
        del theirs["main_params_dtype"]  # what masters are anyway
    if theirs.get("main_grads_dtype") == "fp32" and not is_on(theirs.get("grad_reduce_in_bf16")):
        del theirs["main_grads_dtype"]
    if compute == "fp32":
        theirs["FP32"] = True
        if (masters := theirs.pop("main_params_dtype", None)) is not None:
            lines.append(f"main_params_dtype={masters}: has no effect without --bf16 or --fp16")
    if compute == "bf16" and is_on(theirs.get("grad_reduce_in_bf16")):
        theirs["GRADS"] = "bf16"
    if compute == "fp16" and is_on(theirs.get("accumulate_allreduce_grads_in_fp32")):
        theirs["GRADS"] = "fp32"
    refuse_both(theirs, None, "fp8_format", "fp4_format")
    return lines


_PRECISION = (
    read_only("FP32", lambda _: {"precision.compute": "fp32"}),
    switch("fp16", "precision.compute", "fp16"),
    switch("bf16", "precision.compute", "bf16"),
    *fields("fp8_format", "fp4_format"),
    Entry(
        "no_fp8_wgrad",
        lambda on: {"fp8.override_linear_precision.wgrad": boolean(on)},
        lambda ours: ours["fp8.override_linear_precision.wgrad"] or SILENT,
        delayed,
    ),
    read_only("GRADS", lambda codec: {"storage.comm": codec, "storage.weight_grad": codec}),
    write_only("grad_reduce_in_bf16", _half_wire),
    write_only("accumulate_allreduce_grads_in_fp32", _full_wire, fp16),
    write_only("use_precision_aware_optimizer", lambda _: True, _precise),
    option(
        "main_grads_dtype",
        "storage.weight_grad",
        {"bf16": "bf16", "fp32": "fp32"},
        lambda ours: _precise(ours) and ours["storage.weight_grad"] == "bf16",
    ),
    *(option(theirs, ours, _DTYPES, _precise) for theirs, ours in _STATE.items()),
    switch("use_distributed_optimizer", "storage.shard", "zero1"),
    *loss_scaling(),
)
PRECISION_FLAGS = frozenset(entry.theirs for entry in _PRECISION)
MEGATRON = Dialect(
    "Megatron-LM",
    (*_PRECISION, *MODEL),
    {"fp8": "fp8_format", "fp4": "fp4_format", "fp8_param": "fp8_param_gather"},
    {
        "fp8_amax_history_len": 1,
        "fp8_amax_compute_algo": "most_recent",
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    },
    {**UNSAID, **MODEL_UNSAID},
    _prepare,
    refuse,
    why={**WHY, **MODEL_WHY},
    doubts=DOUBTS,
    beyond=BEYOND,
    differs=differs,
)
