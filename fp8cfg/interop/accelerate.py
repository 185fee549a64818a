"""Accelerate configuration file, in every spelling in use: the wizard's, the launcher's and the documentation's."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from fp8cfg.interop.key_table import (
    AMAX_COMPUTE_ALGOS,
    FORMATS,
    SILENT,
    Dialect,
    Entry,
    NotHere,
    Read,
    Unsaid,
    Values,
    Written,
    boolean,
    delayed,
    integer,
    is_on,
    not_read,
    number,
    one_of,
    option,
    read_only,
    runs_fp8,
    same,
    shown,
    write_only,
)
from fp8cfg.interop.python_items import rest_of_call
from fp8cfg.interop.source_files import call_in
from fp8cfg.interop.torchao import TORCHAO, fields_of, made
from fp8cfg.interop.translation import read, write
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS

_OUTPUT = {"fp8.output_layer": True}
BACKENDS: dict[str, dict[str, Any]] = {
    "te": {"backend": "te", **_OUTPUT},
    "ao": {"backend": "torchao", "fp8.scaling": "current"},
    "msamp": {"backend": "msamp", **_OUTPUT},
    "transformer_engine": {"backend": "te", **_OUTPUT},
    "torchao": {"backend": "torchao", "fp8.scaling": "current"},
    "ms-amp": {"backend": "msamp", **_OUTPUT},
}
"""Accelerate's TE and MS-AMP convert every linear layer, the output layer too; its torchao leaves the first and the last one."""
LEVELS = {"o1": "O1", "o2": "O2"}


def _level(value: Any) -> dict[str, Any]:
    """Raises ValueError for another one; of O3, which Accelerate does not have, with what to write."""
    if str(value).lower() == "o3":
        raise ValueError(
            "Accelerate has only O1 and O2; O3 is here: leave it out there, and add opt_level=O3"
        )
    return {"opt_level": one_of(value, LEVELS)}


FIRST_LAYER = "Accelerate's torchao leaves the model's first linear layer in high precision too"
HELD = "under DeepSpeed MS-AMP holds weights in E4M3 with FP16 masters at every level"
"""msamp.deepspeed: FP8Optimizer and FP8DeepSpeedZeroOptimizer have them whatever the level, which says the moments alone."""


def engine(ours: Values) -> str:
    """The backend of Accelerate that multiplies as this recipe says; empty where it runs no FP8."""
    if not runs_fp8(ours):
        return ""
    if ours["backend"] == "msamp" or (ours["backend"] == "auto" and ours["opt_level"]):
        return "MSAMP"
    return SCALINGS[ours["fp8.scaling"]].accelerate or "TE"


def te(ours: Values) -> bool:
    """Of recipes that Transformer Engine runs under Accelerate."""
    return engine(ours) == "TE"


def te_delayed(ours: Values) -> bool:
    """Of those, the ones with delayed scaling."""
    return te(ours) and delayed(ours)


def override(value: Any) -> dict[str, Any]:
    """override_linear_precision: three truth values, or the string that YAML makes of `(false, false, false)`."""
    parts = value if isinstance(value, (list, tuple)) else str(value).strip("()[] ").split(",")
    if len(parts) == 1:  # the wizard's first question
        parts = list(parts) * 3
    if len(parts) != 3:
        raise ValueError("expected three of true and false, for fprop, dgrad and wgrad")
    gemms = ("fprop", "dgrad", "wgrad")
    return {
        f"fp8.override_linear_precision.{gemm}": boolean(part)
        for gemm, part in zip(gemms, parts, strict=True)
    }


def overridden(ours: Values) -> list[bool]:
    """The three values of override_linear_precision."""
    return [ours[f"fp8.override_linear_precision.{gemm}"] for gemm in ("fprop", "dgrad", "wgrad")]


def fp8_format(value: Any) -> dict[str, Any]:
    """HYBRID or E4M3. E5M2 is a choice of Accelerate's that Transformer Engine refuses once the model is prepared."""
    if str(value).strip().lower() == "e5m2":
        raise ValueError("Transformer Engine trains in HYBRID or E4M3, never in plain E5M2")
    return {"fp8.format": one_of(value, FORMATS)}


def held_otherwise(said: str) -> str:
    """The line on the weights of MS-AMP's levels, where `said` has one of them under DeepSpeed."""
    return f"{said}: {HELD}; here O1 and O2 have scaled FP16 without"


def differs_under_deepspeed(ours: Values) -> list[str]:
    """Lines for recipes of MS-AMP's levels."""
    if (level := ours["opt_level"]) not in LEVELS.values():
        return []
    cure = "; opt_level=O3 is that" if level == "O2" else ""
    return [f"opt_level={level}: is written, but {HELD}, not in scaled FP16{cure}"]


def first_layer_runs(said: str) -> str:
    """The line on what Accelerate's own filter leaves out, where `said` has torchao."""
    return (
        f"{said}: {FIRST_LAYER}; here it runs in FP8, and `fp8cfg plan` lists layers for"
        " fp8.exclude"
    )


def differs_under_torchao() -> list[str]:
    """Lines for recipes that torchao runs under Accelerate."""
    return [
        f"fp8.scaling=current: is written, but {FIRST_LAYER}; a filter of your own says otherwise "
        "(AORecipeKwargs.module_filter_func)"
    ]


HANDLER = (
    Entry("fp8_format", fp8_format, lambda ours: ours["fp8.format"].upper(), te),
    same("margin", "fp8.margin", integer, te_delayed),
    same("interval", "fp8.interval", integer, te_delayed),
    same("amax_history_len", "fp8.amax_history_len", integer, te_delayed),
    option(
        "amax_compute_algo",
        "fp8.amax_compute_algo",
        AMAX_COMPUTE_ALGOS,
        te_delayed,
    ),
    Entry("override_linear_precision", override, overridden, te),
    same("use_autocast_during_eval", "fp8.use_autocast_during_eval", boolean, te),
    Entry(
        "use_mxfp8_block_scaling",
        lambda value: {"fp8.scaling": "mxfp8"} if boolean(value) else {},
        lambda ours: ours["fp8.scaling"] == "mxfp8" or SILENT,
        te,
    ),
    Entry(
        "opt_level",
        _level,
        lambda ours: ours["opt_level"] if ours["opt_level"] in LEVELS.values() else SILENT,
        lambda ours: engine(ours) == "MSAMP",
    ),
)
"""What fp8_config, and the handler objects, say besides the backend."""


def without_effect(theirs: dict[str, Any], under: str = "") -> list[str]:
    """Take out of `theirs` what its backend does not read; a line for each. `under` stands before each key."""
    word = str(theirs.get(f"{under}backend", "")).strip().lower()
    ours = BACKENDS.get(word, {}).get("backend")
    levels = [f"{under}opt_level"]
    kept = {
        "te": [f"{under}{e.theirs}" for e in HANDLER if e.theirs != "opt_level"],
        "msamp": levels,
        "torchao": [],
    }
    if ours is None:
        return []
    idle = [
        key for e in HANDLER if (key := f"{under}{e.theirs}") in theirs and key not in kept[ours]
    ]
    return [
        f"{shown(key, theirs.pop(key))}: has no effect with backend={word.upper()}" for key in idle
    ]


_GONE = "Transformer Engine 2 knows it no more and drops it without a word"
DOUBTS = {
    "fp8.amax_compute_algo": (
        "Accelerate drops most_recent on the way to Transformer Engine, which takes max"
    ),
    "fp8.interval": _GONE,
    **dict.fromkeys(
        (f"fp8.override_linear_precision.{gemm}" for gemm in ("fprop", "dgrad", "wgrad")), _GONE
    ),
}
"""What Accelerate says and does not carry out."""

_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp8": {"precision.compute": "bf16", "fp8.enabled": True},
    "no": {"precision.compute": "fp32"},
    "bf16": {"precision.compute": "bf16"},
    "fp16": {"precision.compute": "fp16"},
    "false": {"precision.compute": "fp32"},
    "none": {"precision.compute": "fp32"},
}
_GATHER = "fp8_config.enable_fsdp_float8_all_gather"
_MSAMP, _LEVEL = "deepspeed_config.enable_msamp", "deepspeed_config.msamp_opt_level"
_DYNAMO, _COMPILED = "dynamo_config.dynamo_backend", {"inductor": "on", "no": "off", "false": "off"}
_RANKS = ("no", "false", "multi_gpu", "multi_cpu", "deepspeed", "fsdp")
SHARDS = {"0": "none", "1": "zero1", "2": "zero2", "3": "fsdp"}
"""By the stage of ZeRO; what its third splits too, weights, torch's FSDP2 splits here."""
STAGES = {shard: int(stage) for stage, shard in SHARDS.items()}


def world(ours: Values) -> int:
    """Processes of the whole run."""
    return int(ours["trainer.num_nodes"] * ours["trainer.devices"])


def _distributed_type(ours: Values) -> str:
    if ours["storage.shard"] != "none":
        return "FSDP" if _fsdp(ours) else "DEEPSPEED"
    return "MULTI_GPU" if world(ours) > 1 else "NO"


def _clipping(value: Any) -> dict[str, Any]:
    return {} if value == "auto" else {"trainer.gradient_clip_val": number(value)}


def _zero(ours: Values) -> bool:
    return bool(ours["storage.shard"] in ("zero1", "zero2"))


def _fsdp(ours: Values) -> bool:
    return bool(ours["storage.shard"] == "fsdp")


_PARALLEL = {
    "parallelism_config.parallelism_config_tp_size": "trainer.strategy.tensor_model_parallel_size",
    "parallelism_config.parallelism_config_cp_size": "trainer.strategy.context_parallel_size",
    "parallelism_config.parallelism_config_dp_replicate_size": "trainer.strategy.data_parallel_replicate_size",
}


def _parallel(ours: Values) -> bool:
    """Of recipes with tensor or context parallelism, or with replicas of shards."""
    return any(ours[key] > 1 for key in _PARALLEL.values())


def _shards(ours: Values) -> Any:
    """Ranks that share the weights of one replica; 1 without FSDP."""
    if not _fsdp(ours):
        return SILENT
    replicas = 1
    for key in _PARALLEL.values():
        replicas *= ours[key]
    return max(world(ours) // replicas, 1)


_TOP = (
    Entry(
        "mixed_precision",
        lambda value: one_of(value, _PRECISIONS),
        lambda ours: (
            "fp8"
            if runs_fp8(ours)
            else {"fp32": "no"}.get(ours["precision.compute"], ours["precision.compute"])
        ),
    ),
    read_only("fp16", lambda value: {"precision.compute": "fp16"} if boolean(value) else {}),
    write_only("compute_environment", lambda _: "LOCAL_MACHINE"),
    Entry(
        "distributed_type",
        lambda value: {"storage.shard": "fsdp"} if str(value).lower() == "fsdp" else {},
        _distributed_type,
    ),
    write_only("fsdp_config.fsdp_version", lambda _: 2, _fsdp),
    write_only("fsdp_config.fsdp_reshard_after_forward", lambda _: True, _fsdp),
    write_only("num_machines", lambda ours: ours["trainer.num_nodes"]),
    write_only("num_processes", world),
    Entry(
        "use_cpu",
        lambda value: {"trainer.accelerator": "cpu"} if boolean(value) else {},
        lambda ours: ours["trainer.accelerator"] == "cpu" or SILENT,
    ),
    Entry(
        _DYNAMO,
        lambda value: {"trainer.compile": one_of(value, _COMPILED)},
        lambda ours: {"on": "INDUCTOR", "off": "NO"}.get(ours["trainer.compile"], SILENT),
    ),
    Entry(
        "deepspeed_config.zero_stage",
        lambda value: {"storage.shard": one_of(value, SHARDS)},
        lambda ours: STAGES[ours["storage.shard"]],
        _zero,
    ),
    Entry(
        "deepspeed_config.gradient_clipping",
        _clipping,
        lambda ours: ours["trainer.gradient_clip_val"],
        _zero,
    ),
    read_only(_LEVEL, lambda value: {"opt_level": one_of(value, LEVELS)}),
    read_only(_MSAMP, lambda value: dict(BACKENDS["msamp"]) if boolean(value) else {}),
    read_only(
        "fsdp_config.fsdp_activation_checkpointing",
        lambda value: {"model.recompute_granularity": "full" if boolean(value) else "none"},
    ),
    Entry("fp8_config.backend", lambda value: one_of(value, BACKENDS), engine, runs_fp8),
    Entry(
        _GATHER,
        lambda value: {"storage.gather": "fp8" if boolean(value) else "bf16"},
        lambda ours: ours["storage.gather"] == "fp8",
        lambda ours: engine(ours) == "AO",
    ),
    *(same(theirs, ours, integer, _parallel) for theirs, ours in _PARALLEL.items()),
    write_only("parallelism_config.parallelism_config_dp_shard_size", _shards, _parallel),
    read_only(
        "RANKS",
        lambda ranks: {"trainer.num_nodes": ranks[0], "trainer.devices": ranks[1]},
    ),
)
_LAUNCH = Unsaid(
    "how processes are started; torchrun says that",
    ("", None, 0, False, True, "main", "no", "static", "all"),
)
_SHARDING = Unsaid("how FSDP wraps, moves and saves; storage.shard=fsdp splits each layer by FSDP2")
_UNSAID = {
    **dict.fromkeys(
        (
            "machine_rank",
            "gpu_ids",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "rdzv_backend",
            "same_network",
            "debug",
            "enable_cpu_affinity",
            "downcast_bf16",
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "tpu_env",
            "command_file",
            "commands",
            "mpirun_config.",
            "ec2_instance_type",
            "iam_role_name",
            "image_uri",
            "profile",
            "region",
            "base_job_name",
            "pytorch_version",
            "py_version",
            "transformers_version",
            "sagemaker_inputs_file",
            "sagemaker_metrics_file",
            "additional_args",
        ),
        _LAUNCH,
    ),
    "fsdp_config.": _SHARDING,
    "fsdp_config.fsdp_activation_checkpointing_offload": _SHARDING,
    **dict.fromkeys(
        (
            "parallelism_config.",
            *(
                f"parallelism_config.parallelism_config_{name}"
                for name in (
                    "sp_size",
                    "sp_backend",
                    "sp_seq_length",
                    "sp_seq_length_is_variable",
                    "sp_attn_implementation",
                    "cp_backend",
                    "cp_comm_strategy",
                )
            ),
        ),
        Unsaid("Ulysses, and how context parallelism communicates, have no key here", (1, None)),
    ),
    "fsdp_config.fsdp_version": _SHARDING._replace(usual=(2,)),
    "fsdp_config.fsdp_reshard_after_forward": _SHARDING._replace(usual=(True, "FULL_SHARD")),
    "megatron_lm_config.": Unsaid("Megatron-LM's own; `fp8cfg import megatron` reads its flags"),
    "deepspeed_config.gradient_accumulation_steps": Unsaid(
        "follows here from trainer.global_batch_size, trainer.micro_batch_size and the ranks",
        (1, "auto"),
    ),
    "deepspeed_config.deepspeed_config_file": Unsaid("read with `fp8cfg import deepspeed FILE`"),
    "deepspeed_config.": Unsaid("DeepSpeed's own", ("none", False, None)),
    "dynamo_config.": Unsaid(
        "torch.compile's own; trainer.compile is on, off or auto", (False, None, "default")
    ),
    "fp8_config.pad_inner_dim": Unsaid(
        "layers whose sizes are not multiples of 16 stay in high precision here"
    ),
}
_HANDLED = {f"fp8_config.{e.theirs}": e.theirs for e in HANDLER}
_SPELLINGS = {
    **{f"fp8_config.fp8_{name}": key for key, name in _HANDLED.items()},
    "fp8_config.fp8_backend": "fp8_config.backend",
    "fp8_config.amax_history_length": "fp8_config.amax_history_len",
    "fp8_config.format": "fp8_config.fp8_format",
    "fp8_config.amax_compute_algorithm": "fp8_config.amax_compute_algo",
    "fp8_config.optimization_level": "fp8_config.opt_level",
    "dynamo_backend": "dynamo_config.dynamo_backend",
    **{
        f"parallelism_config.{name}": f"parallelism_config.parallelism_config_{name}"
        for name in ("tp_size", "cp_size", "dp_replicate_size", "dp_shard_size")
    },
}


def _msamp(theirs: dict[str, Any]) -> list[str]:
    """DeepSpeed's switch of MS-AMP is a backend of FP8; its level is nobody else's."""
    named = BACKENDS.get(str(theirs.get("fp8_config.backend")).lower(), {}).get("backend")
    if is_on(theirs.get(_MSAMP)):
        if named not in (None, "msamp") and str(theirs.get("mixed_precision")).lower() == "fp8":
            both = " and ".join(shown(key, theirs[key]) for key in (_MSAMP, "fp8_config.backend"))
            raise ConfigError(f"{both}: two backends of FP8; drop one")
        theirs.setdefault("fp8_config.backend", "MSAMP")
    elif named != "msamp" and _LEVEL in theirs:
        return [f"{shown(_LEVEL, theirs.pop(_LEVEL))}: has no effect without {_MSAMP}"]
    return []


def _prepare(theirs: dict[str, Any]) -> list[str]:
    """What has no effect where it stands is said and taken out."""
    lines = _msamp(theirs) + without_effect(theirs, "fp8_config.")
    if (
        "mixed_precision" in theirs
        and is_on(theirs.pop("fp16", None))
        and theirs["mixed_precision"] != "fp16"
    ):
        lines.append(
            f"fp16: Accelerate reads {shown('mixed_precision', theirs['mixed_precision'])} alone"
        )
    theirs.setdefault("mixed_precision", "no")
    started = [
        shown(key, theirs[key])
        for key in ("num_machines", "num_processes")
        if theirs.get(key, 1) not in (1, -1)
    ]
    parallel = any(theirs.get(key, 1) not in (1, "1") for key in _PARALLEL)
    if parallel and "num_processes" in theirs:
        machines = integer(theirs.get("num_machines", 1))
        theirs["RANKS"] = (machines, integer(theirs["num_processes"]) // max(machines, 1))
    elif started:
        lines.append(f"{', '.join(started)}: {_LAUNCH.why}")
    if str(theirs.get("distributed_type", "no")).lower() not in _RANKS:
        lines.append(
            f"{shown('distributed_type', theirs['distributed_type'])}: not read; storage.shard and"
            " trainer.strategy set how ranks share the work"
        )
    if str(theirs.get(_DYNAMO, "no")).lower() not in _COMPILED:
        lines.append(
            f"{shown(_DYNAMO, theirs.pop(_DYNAMO))}: trainer.compile=on compiles with inductor"
        )
    if str(theirs.get("deepspeed_config.zero_stage")) == "3":
        lines.append("deepspeed_config.zero_stage=3: weights are split by torch's FSDP2 here")
    backend = BACKENDS.get(str(theirs.get("fp8_config.backend")).lower(), {}).get("backend")
    if backend != "torchao" or str(theirs.get("distributed_type")).lower() != "fsdp":
        gathers = theirs.pop(_GATHER, False)
        lines += (
            [f"{_GATHER}={gathers}: has no effect without backend=AO and distributed_type=FSDP"]
            if is_on(gathers)
            else []
        )
    lines += (
        _held_otherwise(theirs, backend)
        if str(theirs.get("mixed_precision")).lower() == "fp8"
        else []
    )
    if str(theirs.get("mixed_precision")).lower() == "fp8" and "fp8_config.backend" not in theirs:
        lines.append(
            "fp8_config.backend is not given: Accelerate takes torchao (current scaling), TE"
            " (delayed) or MS-AMP, the first that is installed; fp8.scaling says it here"
        )
    return lines


def _held_otherwise(theirs: Values, backend: str | None) -> list[str]:
    """A line on what that backend has otherwise there, and no key of ours says."""
    if backend == "torchao":
        return [first_layer_runs(shown("fp8_config.backend", theirs["fp8_config.backend"]))]
    under = (
        str(theirs.get("distributed_type")).lower() == "deepspeed"
        or "deepspeed_config.zero_stage" in theirs
    )
    if backend == "msamp" and (under or is_on(theirs.get(_MSAMP))):
        return [
            held_otherwise(
                next(
                    shown(key, theirs[key])
                    for key in (_MSAMP, "fp8_config.backend")
                    if key in theirs
                )
            )
        ]
    return []


def _differs(ours: Values) -> list[str]:
    if engine(ours) == "AO":
        return differs_under_torchao()
    return differs_under_deepspeed(ours) if engine(ours) == "MSAMP" and _zero(ours) else []


def _refuse(ours: Values) -> list[str]:
    scaling = ours["fp8.scaling"]
    if engine(ours) == "MSAMP" and not delayed(ours):
        return [
            f"fp8.scaling={scaling}: MS-AMP has only delayed scaling; drop opt_level, or write"
            " fp8.scaling=delayed"
        ]
    if runs_fp8(ours) and not SCALINGS[scaling].accelerate:
        te, ao = (
            " and ".join(n for n, s in SCALINGS.items() if s.accelerate == engine)
            for engine in ("TE", "AO")
        )
        return [
            f"fp8.scaling={scaling}: Accelerate has no such scaling; it has {te} (TE) and {ao}"
            " (torchao)"
        ]
    return []


WHY = {
    "precision.compute": "under fp8 Accelerate computes the rest in bf16",
    "fp8.output_layer": (
        "Accelerate converts every linear layer with TE and MS-AMP, and not the last one with"
        " torchao"
    ),
    "fp8.include": "a filter is Python code there (AORecipeKwargs.module_filter_func)",
    "fp8.exclude": "a filter is Python code there (AORecipeKwargs.module_filter_func)",
    "fp8.granularity": "the file has only tensorwise; AORecipeKwargs(config=...) has rows",
    "opt_level": "Accelerate has only MS-AMP's O1 and O2",
    "storage.": (
        "Accelerate has no key for it; weights, gradients and moments have the dtype of the"
        " script's model"
    ),
}
_FP8 = tuple(replace(entry, theirs=key) for key, entry in zip(_HANDLED, HANDLER, strict=True))
ACCELERATE = Dialect(
    "Accelerate",
    (*_TOP, *_FP8),
    _SPELLINGS,
    {},
    _UNSAID,
    _prepare,
    _refuse,
    WHY,
    DOUBTS,
    differs=_differs,
    beyond=tuple(_PARALLEL.values()),
)

_CLASSES = {"TERecipeKwargs": "TE", "MSAMPRecipeKwargs": "MSAMP", "AORecipeKwargs": "AO"}
NAMES = ("FP8RecipeKwargs", *_CLASSES)
_GATHER_HANDLER = "enable_fsdp_float8_all_gather"
_NO_FSDP = "has no effect without FSDP, which a handler does not say; here storage.shard=fsdp does"


def _prepare_handler(theirs: dict[str, Any]) -> list[str]:
    own = str(theirs["backend"]).upper() == "AO" and "module_filter_func" not in theirs
    return without_effect(theirs) + (
        [first_layer_runs(shown("backend", theirs["backend"]))] if own else []
    )


def _refuse_handler(ours: Values) -> list[str]:
    off = (
        []
        if runs_fp8(ours)
        else ["fp8.enabled=False: a handler of Accelerate's is for FP8; write precision=bf16_fp8"]
    )
    return off or ACCELERATE.refuse(ours)


HANDLERS = Dialect(
    "Accelerate",
    (
        Entry("backend", lambda value: {"fp8.enabled": True, **one_of(value, BACKENDS)}, engine),
        *HANDLER,
    ),
    {
        "optimization_level": "opt_level",
        "amax_history_length": "amax_history_len",
        "amax_compute_algorithm": "amax_compute_algo",
    },
    unsaid={
        "pad_inner_dim": ACCELERATE.unsaid["fp8_config.pad_inner_dim"],
        _GATHER_HANDLER: Unsaid(_NO_FSDP, (False,)),
    },
    prepare=_prepare_handler,
    refuse=_refuse_handler,
    why=WHY,
    doubts=DOUBTS,
)


def from_handler(handler: Any, base: Recipe | None = None) -> Read:
    """The recipe that one of the four objects means, as `fp8cfg.interop.from_object` says."""
    name = type(handler).__name__
    backend = _CLASSES.get(name) or str(getattr(handler, "backend", None) or "TE").upper()
    if backend == "AO" and getattr(handler, "config", None) is not None:
        fields = fields_of(handler.config)
        gathers = fields.pop(_GATHER_HANDLER, False)
        found = read(TORCHAO, fields, base)
        code = getattr(handler, "module_filter_func", None)
        filtered = (
            "module_filter_func: Python code, which a recipe cannot name"
            if code
            else first_layer_runs("AORecipeKwargs")
        )
        lost = [
            *found.lost,
            filtered,
            *([f"{_GATHER_HANDLER}=True: {_NO_FSDP}"] if gathers else []),
        ]
        return found._replace(lost=tuple(lost))
    given = {
        e.theirs: value for e in HANDLER if (value := getattr(handler, e.theirs, None)) is not None
    }
    if name == "FP8RecipeKwargs" and backend == "MSAMP":  # it fills in what only TE reads
        given = {k: v for k, v in given.items() if k == "opt_level"}
    return _taken(
        read(HANDLERS, {"backend": backend, **given}, base), name, getattr(handler, "backend", None)
    )


def from_call(text: str, base: Recipe | None = None) -> Read:
    """The recipe of the one call of a handler in Python text, which is read and not run; where there is none, that of the mixed
    precision of an Accelerator. Raises ConfigError where there is neither, and for keywords that no handler takes.
    """
    if not any(name in text for name in NAMES) and "Accelerator" in text:
        given = call_in(text, ("Accelerator",), "class", ("mixed_precision",))
        found = read(ACCELERATE, {"mixed_precision": given.get("mixed_precision", "no")}, base)
        return _with_rest(found, rest_of_call(text, ("Accelerator",), ("mixed_precision",)))
    given = call_in(text, NAMES, "handler of Accelerate")
    name = given.pop("class")
    found = read(HANDLERS, {"backend": _CLASSES.get(name, "TE"), **given}, base)
    refuse_if(found.unknown)
    found = _taken(found, name, given.get("backend"))
    return _with_rest(found, rest_of_call(text, NAMES))


def _with_rest(found: Read, rest: list[str]) -> Read:
    return found._replace(lost=(*found.lost, *not_read(rest)))


def _taken(found: Read, name: str, backend: object) -> Read:
    """`found`, with a line on the backend that was taken where the old handler, which is for all three, says none."""
    if name in _CLASSES or backend is not None:
        return found
    line = (
        f"{name}.backend is not given: Accelerate takes the first that is installed; TE is taken"
        " here"
    )
    return found._replace(lost=(*found.lost, line))


def to_handler(recipe: Recipe) -> Written:
    """The handler that says what `recipe` does, as far as Accelerate can. Raises ConfigError as `to_accelerate` does, and
    NotHere where Accelerate, or the library that the handler is for, is not installed."""
    try:
        utils = importlib.import_module("accelerate.utils")
    except ImportError as e:
        raise NotHere(f"accelerate: cannot be imported here ({e})") from None
    written = write(HANDLERS, recipe)
    values = dict(written.value)
    backend = values.pop("backend")
    if backend == "AO":
        written = write(TORCHAO, recipe)
        values, written = (
            {"config": made(written.value)},
            written._replace(lost=(*written.lost, *differs_under_torchao())),
        )
    if "override_linear_precision" in values:
        values["override_linear_precision"] = tuple(values["override_linear_precision"])
    try:
        return Written(
            getattr(utils, next(name for name, of in _CLASSES.items() if of == backend))(**values),
            written.lost,
        )
    except ImportError as e:
        raise NotHere(f"accelerate: {e}") from None
