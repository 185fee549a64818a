"""Keys of whole jobs of NeMo and Megatron-Bridge: model, batches, optimizer and parallelism.

A key has the path of its section, such as `trainer.strategy.tensor_model_parallel_size` or
`optimizer.lr`. Most leaves have the names of Megatron-LM's flags, whose table reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8cfg.interop.key_table import (
    Entry,
    boolean,
    flattened,
    integer,
    number,
    one_of,
    read_only,
)
from fp8cfg.interop.megatron import MODEL, betas, shape
from fp8cfg.interop.source_files import Said


def _interval(value: Any) -> int:
    """Number of steps. A float counts epochs in Lightning."""
    if isinstance(value, float):
        raise ValueError("counts epochs there; expected a number of steps")
    return integer(value)


def _validation_batches(value: Any) -> dict[str, Any]:
    if isinstance(value, float):
        raise ValueError("is a part of the validation data there; expected a number of batches")
    batches = integer(value)
    if batches == 0:
        return {"trainer.val_check_interval": 0}
    return {"trainer.limit_val_batches": batches}


def _optional_size(value: Any) -> dict[str, Any]:
    return {"trainer.strategy.virtual_pipeline_model_parallel_size": integer(value)}


def _read(theirs: str, ours: str, kind: Any) -> Entry:
    return read_only(theirs, lambda value: {ours: kind(value)})


_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}
_ACTIVATIONS = {
    "swiglu": "swiglu",
    "fast-swiglu": "swiglu",
    "geglu": "geglu",
    "fast-geglu": "geglu",
    "gelu": "gelu",
    "squared-relu": "squared_relu",
}

JOB: tuple[Entry, ...] = (
    *(
        read_only(entry.theirs, entry.read)
        for entry in MODEL
        if entry.theirs not in ("normalization", "qk_layernorm")
    ),
    _read("num_nodes", "trainer.num_nodes", integer),
    _read("devices", "trainer.devices", integer),
    _read("val_check_interval", "trainer.val_check_interval", _interval),
    read_only("limit_val_batches", _validation_batches),
    read_only("virtual_pipeline_model_parallel_size", _optional_size),
    _read("log_every_n_steps", "log.every_n_steps", integer),
    _read("save_interval", "checkpoint.every_n_steps", integer),
    _read("constant_steps", "optim.constant_steps", integer),
    _read("run_name", "name", str),
    _read("log_dir", "log.dir", str),
    _read("layernorm_zero_centered_gamma", "model.layernorm_zero_centered_gamma", boolean),
    read_only(
        "normalization",
        lambda value: {"model.normalization": one_of(value, _NORMS)},
    ),
    read_only("activation", lambda value: {"model.activation": one_of(value, _ACTIVATIONS)}),
    read_only(
        "qk_layernorm",
        lambda value: {"model.qk_layernorm": "head" if boolean(value) else "none"},
    ),
    _read("add_bias_linear", "model.add_bias_linear", boolean),
    _read(
        "share_embeddings_and_output_weights",
        "model.share_embeddings_and_output_weights",
        boolean,
    ),
    _read("scale_factor", "model.rope_scaling.factor", number),
    _read("low_freq_factor", "model.rope_scaling.low_freq_factor", number),
    _read("high_freq_factor", "model.rope_scaling.high_freq_factor", number),
    _read("old_context_len", "model.rope_scaling.original_max_position", integer),
    read_only(
        "use_distributed_optimizer",
        lambda value: {"storage.shard": "zero1"} if boolean(value) else {},
    ),
)
"""Read and never written: files for these projects have precision alone."""


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_PARALLEL = {
    **_same(
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
    ),
}
_SHAPE = {
    **_same(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "seq_length",
        "vocab_size",
        "rotary_base",
        "rotary_percent",
        "init_method_std",
        "normalization",
        "activation",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "position_embedding_type",
        "max_position_embeddings",
        "layernorm_zero_centered_gamma",
        "share_embeddings_and_output_weights",
        "recompute_granularity",
        "recompute_modules",
        "gated_linear_unit",
        "activation_func",
        "scale_factor",
        "low_freq_factor",
        "high_freq_factor",
        "old_context_len",
        "transformer_impl",
    ),
    # NeMo 1
    "layernorm_epsilon": "norm_epsilon",
    "encoder_seq_length": "seq_length",
    "bias": "add_bias_linear",
    "rotary_percentage": "rotary_percent",
    "activations_checkpoint_granularity": "recompute_granularity",
}
_BATCHES = _same("global_batch_size", "micro_batch_size")
_ADAM = {
    **_same(
        "lr",
        "min_lr",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "optimizer",
        "clip_grad",
        "use_distributed_optimizer",
    ),
    "betas": "BETAS",
}
_SCHEDULE = {
    **_same("min_lr", "lr_decay_style", "lr_warmup_iters", "constant_steps"),
    "warmup_steps": "lr_warmup_iters",
}
_TRAINER = {
    **_same("num_nodes", "devices", "val_check_interval", "limit_val_batches", "log_every_n_steps"),
    "max_steps": "train_iters",
    "gradient_clip_val": "clip_grad",
    "precision": "precision",
}
_FP8_OF_MODEL = _same(
    "fp8",
    "fp8_margin",
    "fp8_interval",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_recipe",
    "fp8_params",
    "fp8_param",
    "fp8_wgrad",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "tp_only_amax_red",
)

PLACES: dict[str, Mapping[str, str]] = {
    "trainer": _TRAINER,
    "trainer.strategy": _PARALLEL,
    "trainer.strategy.ddp": _same("use_distributed_optimizer"),
    "data": {**_BATCHES, "seq_length": "seq_length"},
    "dataset": {
        "sequence_length": "seq_length",
        **_same("seq_length", "eod_mask_loss", "reset_attention_mask", "reset_position_ids"),
    },
    "optim.config": _ADAM,
    "optim.lr_scheduler": _SCHEDULE,
    "model.optim": {**_ADAM, "name": "optimizer"},
    "model.optim.sched": _SCHEDULE,
    "model.data": _same("eod_mask_loss", "reset_attention_mask", "reset_position_ids"),
    "model.config": {**_SHAPE, **_PARALLEL},
    "model": {**_SHAPE, **_PARALLEL, **_BATCHES, **_FP8_OF_MODEL, "seed": "seed"},
    "optimizer": _ADAM,
    "scheduler": _SCHEDULE,
    "ddp": _same("use_distributed_optimizer"),
    "train": {
        **_BATCHES,
        "train_iters": "train_iters",
        "eval_interval": "val_check_interval",
        "eval_iters": "limit_val_batches",
    },
    "validation": {"eval_interval": "val_check_interval", "eval_iters": "limit_val_batches"},
    "rng": _same("seed"),
    "checkpoint": _same("save_interval"),
    "logger": {"log_interval": "log_every_n_steps"},
    "log": {"log_dir": "log_dir", "name": "run_name"},
    # Arguments of a recipe function.
    "": {
        "name": "run_name",
        "dir": "log_dir",
        "num_nodes": "num_nodes",
        "num_gpus_per_node": "devices",
        "tensor_parallelism": "tensor_model_parallel_size",
        "pipeline_parallelism": "pipeline_model_parallel_size",
        "virtual_pipeline_parallelism": "virtual_pipeline_model_parallel_size",
        "context_parallelism": "context_parallel_size",
        "max_steps": "train_iters",
        "gradient_clip_val": "clip_grad",
        "warmup_steps": "lr_warmup_iters",
        "lr_warmup_iters": "lr_warmup_iters",
        "train_iters": "train_iters",
        **_same(
            "global_batch_size",
            "micro_batch_size",
            "seq_length",
            "lr",
            "min_lr",
            "sequence_parallel",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "limit_val_batches",
            "val_check_interval",
            "log_every_n_steps",
        ),
    },
}
"""Keys of each section, with their names in the table. Of two keys of one name the section that
comes first counts, as the projects do it: the strategy before the model's own fields."""


_SECTIONS = list(PLACES)
_FP8_ONLY = frozenset(_FP8_OF_MODEL.values()) | {"precision"}


def place(key: str) -> str | None:
    """Returns the name in the table of a key with its section; None for a key that is not read."""
    section, _, leaf = key.rpartition(".")
    return PLACES.get(section, {}).get(leaf)


def _rank(key: str) -> int:
    section = key.rpartition(".")[0]
    return _SECTIONS.index(section) if section in PLACES else len(_SECTIONS)


def job(flat: Mapping[str, Any], plugin: str | None = None) -> Said:
    """Splits the keys of a job into those that are read and the rest.

    Args:
        flat: Values by keys with their sections.
        plugin: Section of the precision fields, which are read by their leaves. Precision fields
            elsewhere are not read then; None if the job has no plugin.
    """
    data: dict[str, Any] = {}
    read: set[str] = set()
    values: dict[str, Any] = {}  # by names in the table
    for key in sorted(flat, key=_rank):
        if plugin and key.startswith(f"{plugin}."):
            data[key.removeprefix(f"{plugin}.")] = flat[key]
            read.add(key)
            continue
        name = place(key)
        if name is None or (plugin and name in _FP8_ONLY):
            continue
        if flat[key] is None or values.setdefault(name, flat[key]) == flat[key]:
            data[key] = flat[key]
            read.add(key)
    return Said(data, items=tuple(flat), read=frozenset(read))


def run_config(data: Mapping[str, Any]) -> Said:
    """Reads a file of NeMo or Megatron-Bridge: fields of the precision plugin, or a whole job.

    The plugin is under `mixed_precision` or `plugins`, or the file itself. NeMo 1 has no plugin but
    `trainer.precision` and fields of `model`.
    """
    cleaned = _without_classes(data)
    plugin: str | None = next(
        (key for key in ("mixed_precision", "plugins") if key in cleaned), None
    )
    trainer = cleaned.get("trainer")
    if isinstance(trainer, Mapping) and "plugins" in trainer:
        plugin = "trainer.plugins"
    is_job = any(isinstance(value, Mapping) for key, value in cleaned.items() if key != plugin)
    if not plugin and not is_job:
        return Said(cleaned)
    flat = flattened(cleaned)
    preset = None
    if plugin:
        value = flat.get(plugin)
        if isinstance(value, list) and len(value) == 1:  # as a Trainer's plugins may be
            value = value[0]
        if isinstance(value, Mapping):
            flat.pop(plugin)
            flat |= flattened(_without_classes(value), f"{plugin}.")
        elif value is not None:
            preset = str(value)
    # Top-level values name nothing of a job.
    sections = {key: value for key, value in flat.items() if "." in key}
    fp8_of_model = _fp8_switches(sections) if not plugin else frozenset()
    said = job(sections, plugin)
    if "model.hidden_size" in sections:
        said.data["whole_model"] = True
    read = said.read | fp8_of_model | ({plugin} if plugin else frozenset())
    return said._replace(items=tuple(flat), read=read, preset=preset)


def _fp8_switches(flat: dict[str, Any]) -> frozenset[str]:
    """Makes one format of NeMo 1's switches. Returns the keys that are read by this."""
    keys = ("model.fp8_e4m3", "model.fp8_hybrid", "model.transformer_engine")
    if flat.get("model.fp8") is True:
        flat["model.fp8"] = "e4m3" if flat.get("model.fp8_e4m3") else "hybrid"
    return frozenset(key for key in keys if key in flat)


def _without_classes(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `data` without the names of classes. An object without fields is its class's name."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        if key.startswith("their_"):
            continue
        if isinstance(value, Mapping) and "their_target" in value:
            fields = [name for name in value if not name.startswith("their_")]
            value = _without_classes(value) if fields else value["their_target"].rpartition(".")[2]
        elif isinstance(value, Mapping):
            value = _without_classes(value)
        out[key] = value
    return out


def prepare(theirs: dict[str, Any]) -> list[str]:
    """Makes one activation of Bridge's two keys, and a shape of the fields of a whole model."""
    lines: list[str] = []
    gated = theirs.pop("gated_linear_unit", None)
    function = theirs.pop("activation_func", None)
    if function is not None:
        names = {"silu": "swiglu", "gelu": "geglu"} if gated else {"squared_relu": "squared-relu"}
        theirs["activation"] = names.get(str(function), str(function))
    if str(theirs.get("normalization")).lower() == "layernorm1p":
        theirs["layernorm_zero_centered_gamma"] = True
    if theirs.pop("whole_model", False):
        lines += shape(theirs)
    else:
        betas(theirs)
    return lines
