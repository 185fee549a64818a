"""DeepSpeed JSON configuration: ZeRO, bf16 state, and the section that MS-AMP reads."""

from __future__ import annotations

import math
from typing import Any

from fp8cfg.interop.accelerate import SHARDS, STAGES, differs_under_deepspeed, held_otherwise
from fp8cfg.interop.key_table import (
    SILENT,
    Dialect,
    Entry,
    Unsaid,
    Values,
    boolean,
    integer,
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
)
from fp8cfg.interop.megatron import fp16, refuse_both

_LEVELS = {"o1": "O1", "o2": "O2", "o3": "O3"}
_NUMBERS = {
    "gradient_clipping": "trainer.gradient_clip_val",
    "train_batch_size": "trainer.global_batch_size",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_size",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.eps": "optim.eps",
    "optimizer.params.weight_decay": "optim.weight_decay",
}
_TENSOR_PARALLEL = "trainer.strategy.tensor_model_parallel_size"
_SWITCHES = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
_HALF_MASTERS = {"storage.master_weight": "bf16", "storage.weight_grad": "bf16"}
_HALF_MOMENTS = {"storage.exp_avg": "bf16", "storage.exp_avg_sq": "bf16"}


def _levelled(ours: Values) -> bool:
    return runs_fp8(ours) and ours["opt_level"] is not None


def _all_of(theirs: str, columns: dict[str, Any]) -> Entry:
    """A switch of bf16 state, which stands for several columns."""
    return Entry(
        theirs,
        lambda on: dict(columns) if boolean(on) else {},
        lambda ours: (
            (ours["precision.compute"] == "bf16" and all(ours[k] == v for k, v in columns.items()))
            or SILENT
        ),
    )


def _computes(dtype: str) -> Entry:
    """The switch of a compute dtype; `auto` leaves it to the caller, and to our default."""
    on = switch(f"{dtype}.enabled", "precision.compute", dtype)
    return Entry(on.theirs, lambda value: {} if value == "auto" else on.read(value), on.write)


def _power(ours: Values) -> Any:
    power = math.log2(ours["precision.initial_loss_scale"])
    return int(power) if power.is_integer() and power >= 0 else SILENT


def _scale(value: Any) -> dict[str, Any]:
    if (power := integer(value)) > 127:
        raise ValueError("expected at most 127, float32 has no larger power of two")
    return {"precision.initial_loss_scale": 2.0**power}


def _prepare(theirs: dict[str, Any]) -> list[str]:
    """What is `auto` is left to the caller, and here to the defaults; without bf16 and fp16 there is float32."""
    lines = []
    left = [key for key, value in theirs.items() if value == "auto"]
    if left:
        lines.append(f"{', '.join(left)}: auto, which the Trainer's arguments set; not read")
    for key in left:
        if key not in _AUTO_COMPUTE:
            del theirs[key]
    if str(theirs.get("zero_optimization.stage")) == "3":
        lines.append("zero_optimization.stage=3: weights are split by torch's FSDP2 here")
    if "msamp.enabled" in theirs and boolean(theirs["msamp.enabled"]):
        if str(theirs.setdefault("msamp.opt_level", "O1")).lower() != "o3":
            lines.append(held_otherwise(shown("msamp.opt_level", theirs["msamp.opt_level"])))
    else:
        theirs.pop("msamp.opt_level", None)
    if "auto" in [theirs.get(key) for key in _AUTO_COMPUTE]:
        lines.append("precision.compute=bf16: not given there; pass precision.compute=fp16 or fp32")
    on = [
        dtype
        for dtype in ("bf16", "fp16")
        if theirs.get(f"{dtype}.enabled") == "auto" or is_on(theirs.get(f"{dtype}.enabled"))
    ]
    if not on:
        theirs["FP32"] = True
    idle = [key for key in _SWITCHES if "bf16" not in on and is_on(theirs.pop(key, None))]
    lines += [f"{', '.join(idle)}: has no effect without bf16.enabled"] if idle else []
    refuse_both({dtype: theirs.get(f"{dtype}.enabled") for dtype in ("bf16", "fp16")})
    return lines


def _differs(ours: Values) -> list[str]:
    if not _levelled(ours):
        return []
    if ours["opt_level"] == "O3" and ours["storage.shard"] == "none":
        return [
            "opt_level=O3: is written, but MS-AMP wants ZeRO with it; write storage.shard=zero1 or"
            " zero2"
        ]
    return differs_under_deepspeed(ours)


_AUTO_COMPUTE = ("bf16.enabled", "fp16.enabled")
_OWN = Unsaid("DeepSpeed's own", (False, None))
DEEPSPEED = Dialect(
    "DeepSpeed",
    (
        *map(_computes, ("bf16", "fp16")),
        read_only("FP32", lambda _: {"precision.compute": "fp32"}),
        Entry(
            "fp16.loss_scale",
            lambda value: {"precision.loss_scale": number(value) or None},
            lambda ours: ours["precision.loss_scale"] or 0,
            fp16,
        ),
        Entry("fp16.initial_scale_power", _scale, _power, fp16),
        *(
            same(f"fp16.{name}", f"precision.{name}", kind, fp16)
            for name, kind in (
                ("loss_scale_window", integer),
                ("hysteresis", integer),
                ("min_loss_scale", number),
            )
        ),
        *map(_all_of, _SWITCHES, (_HALF_MASTERS, _HALF_MOMENTS)),
        option(
            "communication_data_type",
            "storage.comm",
            {"fp32": "fp32", "bf16": "bf16", "bfp16": "bf16", "fp16": "fp16"},
        ),
        Entry(
            "msamp.enabled",
            lambda on: (
                {"fp8.enabled": True, "backend": "msamp", "fp8.output_layer": True}
                if boolean(on)
                else {}
            ),
            lambda _: True,
            _levelled,
        ),
        Entry(
            "msamp.opt_level",
            lambda value: {"opt_level": one_of(value, _LEVELS)},
            lambda ours: ours["opt_level"],
            _levelled,
        ),
        Entry(
            "msamp.use_te",
            lambda on: {"backend": "te"} if boolean(on) else {},
            lambda ours: ours["backend"] == "te" or SILENT,
            _levelled,
        ),
        Entry(
            "zero_optimization.stage",
            lambda value: {"storage.shard": one_of(value, SHARDS)},
            lambda ours: STAGES[ours["storage.shard"]],
        ),
        *(same(theirs, ours, number) for theirs, ours in _NUMBERS.items()),
        Entry(
            "tensor_parallel.autotp_size",
            lambda value: {_TENSOR_PARALLEL: max(integer(value), 1)},  # 0 is off
            lambda ours: ours[_TENSOR_PARALLEL] if ours[_TENSOR_PARALLEL] > 1 else SILENT,
        ),
        Entry(
            "optimizer.type",
            lambda value: {"optim.name": one_of(value, {"adamw": "adamw", "adam": "adam"})},
            lambda ours: {"adamw": "AdamW", "adam": "Adam"}.get(ours["optim.name"], SILENT),
        ),
        Entry(
            "optimizer.params.betas",
            lambda both: {"optim.betas": numbers(both)},
            lambda ours: list(ours["optim.betas"]),
        ),
    ),
    {"bfloat16.enabled": "bf16.enabled"},
    unsaid={
        **dict.fromkeys(
            (
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
            ),
            _OWN,
        ),
        "gradient_accumulation_steps": Unsaid(
            "follows here from the batch sizes and the ranks", (1,)
        ),
    },
    prepare=_prepare,
    differs=_differs,
    why={
        "fp8.": (
            "DeepSpeed has no FP8 but MS-AMP's; under Transformer Engine's layers the model says it"
        ),
        "fp8.output_layer": "MS-AMP converts every linear layer",
        "fp8.params": "opt_level says how MS-AMP stores weights",
        "storage.": (
            "DeepSpeed has bf16 masters with gradients, and bf16 moments, each pair together"
        ),
        "backend": "DeepSpeed has MS-AMP, with use_te or without",
        "optim.name": "DeepSpeed's types are AdamW and Adam",
    },
    beyond=(*_NUMBERS.values(), _TENSOR_PARALLEL, "optim.betas", "optim.name"),
)
