"""Key table of DeepSpeed's JSON configuration: ZeRO, bf16 state, and the section of MS-AMP."""

from __future__ import annotations

import math
from typing import Any

from fp8cfg.interop.accelerate_backends import (
    SHARDS,
    ZERO_STAGES,
    list_level_remarks,
    other_weights_remark,
)
from fp8cfg.interop.imported_values import NOT_IN_SOURCE
from fp8cfg.interop.key_table import (
    OMIT,
    Entry,
    KeyTable,
    Unsupported,
    Values,
    format_setting,
    is_on,
    parse_bool,
    parse_choice,
    parse_float,
    parse_floats,
    parse_int,
    read_only,
    renamed_choice,
    runs_fp8,
    same_value,
    switch_for,
)
from fp8cfg.interop.megatron_core import computes_in_fp16, reject_conflicts

_LEVELS = {"o1": "O1", "o2": "O2", "o3": "O3"}
_NUMBERS = {
    "gradient_clipping": "trainer.gradient_clip_val",
    "train_batch_size": "trainer.global_batch_size",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_size",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.eps": "optim.eps",
    "optimizer.params.weight_decay": "optim.weight_decay",
}
_TENSOR_PARALLEL_SIZE = "trainer.strategy.tensor_model_parallel_size"
_COMPUTE_SWITCHES = ("bf16.enabled", "fp16.enabled")
# Each switch sets two columns.
_BF16_STATE = {
    "bf16.bf16_master_weights_and_grads": {
        "storage.master_weight": "bf16",
        "storage.weight_grad": "bf16",
    },
    "bf16.bf16_optimizer_states": {"storage.exp_avg": "bf16", "storage.exp_avg_sq": "bf16"},
}
_DTYPES = {"fp32": "fp32", "bf16": "bf16", "bfp16": "bf16", "fp16": "fp16"}


def _has_level(values: Values) -> bool:
    return runs_fp8(values) and values["opt_level"] is not None


def _bf16_state_entry(key: str, columns: dict[str, str]) -> Entry:
    def write(values: Values) -> Any:
        has_columns = all(values[column] == dtype for column, dtype in columns.items())
        return (has_columns and values["precision.compute"] == "bf16") or OMIT

    return Entry(key, lambda setting: columns if parse_bool(setting) else {}, write)


def _compute_entry(dtype: str) -> Entry:
    """Returns the switch of a compute dtype. `auto` leaves it to the Trainer's arguments."""
    switch = switch_for(f"{dtype}.enabled", "precision.compute", dtype)
    return Entry(
        switch.key,
        lambda setting: {} if setting == "auto" else switch.read(setting),
        switch.write,
    )


def _read_scale_power(value: Any) -> dict[str, Any]:
    power = parse_int(value)
    if power > 127:
        raise ValueError("expected at most 127, the largest power of two in float32")
    return {"precision.initial_loss_scale": 2.0**power}


def _write_scale_power(values: Values) -> Any:
    # DeepSpeed has only integer powers of two.
    power = math.log2(values["precision.initial_loss_scale"])
    return int(power) if power.is_integer() and power >= 0 else OMIT


def _read_msamp(value: Any) -> dict[str, Any]:
    if not parse_bool(value):
        return {}
    # MS-AMP converts every linear layer, including the output layer.
    return {"fp8.enabled": True, "backend": "msamp", "fp8.output_layer": True}


def _write_optimizer(values: Values) -> Any:
    # Other optimizers of a recipe have no type in DeepSpeed.
    return {"adamw": "AdamW", "adam": "Adam"}.get(values["optim.name"], OMIT)


def _write_tensor_parallel_size(values: Values) -> Any:
    size = values[_TENSOR_PARALLEL_SIZE]
    return size if size > 1 else OMIT


def _prepare(settings: dict[str, Any]) -> list[str]:
    remarks = []
    # transformers' Trainer replaces auto by its own arguments.
    auto_keys = [key for key, setting in settings.items() if setting == "auto"]
    if auto_keys:
        remarks.append(
            f"{', '.join(auto_keys)}: not read, because auto means the Trainer's arguments"
        )
    for key in auto_keys:
        if key not in _COMPUTE_SWITCHES:
            del settings[key]

    if str(settings.get("zero_optimization.stage")) == "3":
        remarks.append("zero_optimization.stage=3: imported as FSDP2 (storage.shard=fsdp)")
    if "msamp.enabled" in settings and parse_bool(settings["msamp.enabled"]):
        level = settings.setdefault("msamp.opt_level", "O1")  # MS-AMP's default
        if str(level).lower() != "o3":
            remarks.append(other_weights_remark(format_setting("msamp.opt_level", level)))
    else:
        level = settings.pop("msamp.opt_level", None)
        if level is not None and "msamp.enabled" not in settings:
            remarks.append(f"msamp.opt_level={level}: has no effect without msamp.enabled")

    compute_settings = {dtype: settings.get(f"{dtype}.enabled") for dtype in ("bf16", "fp16")}
    if "auto" in compute_settings.values():
        remarks.append(
            f"precision.compute=bf16: {NOT_IN_SOURCE}; set precision.compute=fp16 or fp32 for"
            " another dtype"
        )
    enabled = [
        dtype for dtype, setting in compute_settings.items() if setting == "auto" or is_on(setting)
    ]
    if not enabled:
        settings["FP32"] = True
    if "bf16" not in enabled:
        ineffective = [key for key in _BF16_STATE if is_on(settings.pop(key, None))]
        if ineffective:
            remarks.append(f"{', '.join(ineffective)}: has no effect without bf16.enabled")
    reject_conflicts(compute_settings)
    return remarks


def _list_export_remarks(values: Values) -> list[str]:
    if not _has_level(values):
        return []
    # MS-AMP implements O3 in its ZeRO optimizer.
    if values["opt_level"] == "O3" and values["storage.shard"] == "none":
        return [
            "opt_level=O3: exported, but MS-AMP needs ZeRO for it; set storage.shard=zero1 or zero2"
        ]
    return list_level_remarks(values)


_UNSUPPORTED_KEYS = (
    "zero_optimization.",
    "scheduler.",
    "fp16.",
    "bf16.",
    "activation_checkpointing.",
    "flops_profiler.",
    "optimizer.",
    "amp.",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "prescale_gradients",
    "comms_logger.",
    "data_types.",
    "torch_autocast.",
    "aio.",
    "seq_parallel_communication_data_type",
    "zero_force_ds_cpu_optimizer",
    "compile.",
    "tensor_parallel.",
    "sequence_parallel_size",
    "checkpoint.",
    "dataloader_drop_last",
    "data_efficiency.",
    "curriculum_learning.",
    "elasticity.",
    "autotuning.",
    "sparse_attention.",
    "sparse_gradients",
    "gradient_predivide_factor",
    "disable_allgather",
    "dump_state",
    "memory_breakdown",
    "tensorboard.",
    "wandb.",
    "csv_monitor.",
    "comet.",
    "monitor_config.",
    "hybrid_engine.",
    "compression_training.",
    "zero_allow_comm_data_type_fp32",
    "graph_harvesting",
    "use_node_local_storage",
    "load_universal_checkpoint",
    "pipeline.",
    "nebula.",
    "weight_quantization.",
    "zenflow.",
)
DEEPSPEED = KeyTable(
    "DeepSpeed",
    (
        _compute_entry("bf16"),
        _compute_entry("fp16"),
        read_only("FP32", lambda setting: {"precision.compute": "fp32"}),
        # DeepSpeed's 0 is a dynamic scale.
        Entry(
            "fp16.loss_scale",
            lambda setting: {"precision.loss_scale": parse_float(setting) or None},
            lambda values: values["precision.loss_scale"] or 0,
            computes_in_fp16,
        ),
        Entry("fp16.initial_scale_power", _read_scale_power, _write_scale_power, computes_in_fp16),
        same_value(
            "fp16.loss_scale_window", "precision.loss_scale_window", parse_int, computes_in_fp16
        ),
        same_value("fp16.hysteresis", "precision.hysteresis", parse_int, computes_in_fp16),
        same_value(
            "fp16.min_loss_scale", "precision.min_loss_scale", parse_float, computes_in_fp16
        ),
        *(_bf16_state_entry(key, columns) for key, columns in _BF16_STATE.items()),
        renamed_choice("communication_data_type", "storage.comm", _DTYPES),
        Entry("msamp.enabled", _read_msamp, lambda values: True, _has_level),
        Entry(
            "msamp.opt_level",
            lambda setting: {"opt_level": parse_choice(setting, _LEVELS)},
            lambda values: values["opt_level"],
            _has_level,
        ),
        Entry(
            "msamp.use_te",
            lambda setting: {"backend": "te"} if parse_bool(setting) else {},
            lambda values: values["backend"] == "te" or OMIT,
            _has_level,
        ),
        Entry(
            "zero_optimization.stage",
            lambda setting: {"storage.shard": parse_choice(setting, SHARDS)},
            lambda values: ZERO_STAGES[values["storage.shard"]],
        ),
        *(same_value(key, recipe_key, parse_float) for key, recipe_key in _NUMBERS.items()),
        Entry(
            "tensor_parallel.autotp_size",
            lambda setting: {_TENSOR_PARALLEL_SIZE: max(parse_int(setting), 1)},  # 0 is off
            _write_tensor_parallel_size,
        ),
        Entry(
            "optimizer.type",
            lambda setting: {
                "optim.name": parse_choice(setting, {"adamw": "adamw", "adam": "adam"})
            },
            _write_optimizer,
        ),
        Entry(
            "optimizer.params.betas",
            lambda setting: {"optim.betas": parse_floats(setting)},
            lambda values: list(values["optim.betas"]),
        ),
    ),
    aliases={"bfloat16.enabled": "bf16.enabled"},
    unsupported={
        **dict.fromkeys(
            _UNSUPPORTED_KEYS, Unsupported("only for DeepSpeed, no key here", (False, None))
        ),
        "gradient_accumulation_steps": Unsupported(
            "follows from the batch sizes and the ranks", (1,)
        ),
    },
    prepare=_prepare,
    export_remarks=_list_export_remarks,
    reasons={
        "fp8.": (
            "DeepSpeed's only FP8 keys are MS-AMP's; for Transformer Engine configure the model"
        ),
        "fp8.output_layer": "MS-AMP converts every linear layer",
        "fp8.params": "MS-AMP's opt_level sets how weights are stored",
        "storage.": (
            "DeepSpeed has one switch for bf16 masters with gradients, and one for bf16 moments"
        ),
        "backend": "DeepSpeed has MS-AMP, with use_te or without",
        "optim.name": "DeepSpeed's types are AdamW and Adam",
    },
    extra_keys=(*_NUMBERS.values(), _TENSOR_PARALLEL_SIZE, "optim.betas", "optim.name"),
)
