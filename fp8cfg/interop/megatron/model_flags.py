"""Megatron-LM flags of the model, the optimizer and the batch, as far as a recipe has keys for them."""

from __future__ import annotations

from typing import Any

from fp8cfg.interop.key_table import SILENT, Entry, Unsaid, Values
from fp8cfg.interop.value_spellings import (
    boolean,
    integer,
    is_on,
    number,
    numbers,
    one_of,
    option,
    read_only,
    same,
    switch,
    write_only,
)

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
        ("core_attn",),
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


def shape(theirs: dict[str, Any]) -> list[str]:
    """Megatron's own defaults of a model, where flags give one; betas become one value; a line for what a recipe cannot say."""
    lines: list[str] = []
    if "adam_beta1" in theirs or "adam_beta2" in theirs:
        theirs["BETAS"] = (theirs.get("adam_beta1", 0.9), theirs.get("adam_beta2", 0.999))
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
