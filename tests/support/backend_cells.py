"""Cells of the backend-by-key table (backend_table.py) for native, torchao and msamp, and for te where te_table.py has no row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import fp8cfg
from fp8cfg.backends.protocol import Hardware
from tests.building import test_every_key
from tests.support.small import small

Read = Callable[[Any], Any]
"""What stands in a Built (see test_backend_table.py)."""
CPU, H200, B200 = (
    Hardware("cpu"),
    Hardware("cuda", (9, 0), (12, 9)),
    Hardware("cuda", (10, 0), (13, 0)),
)
EVERYWHERE = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
CURRENT, PLAIN = ("precision=bf16_fp8_current", EVERYWHERE), "fp8.params=false"
MXFP8, FSDP = ("precision=bf16_mxfp8", PLAIN), "storage.shard=fsdp"
CACHE = "fp8.keep_transpose_cache=true"
PRESET = {
    "delayed": ("precision=bf16_fp8",),
    "current": CURRENT,
    "block": ("precision=bf16_fp8_block",),
    "mxfp8": ("precision=bf16_mxfp8",),
    "nvfp4": ("precision=bf16_nvfp4",),
}
BASE = {
    "native": PRESET["delayed"],
    "te": PRESET["delayed"],
    "torchao": (*CURRENT, PLAIN),
    "msamp": (
        *PRESET["delayed"],
        PLAIN,
        "fp8.amax_history_len=16",
        "fp8.reduce_amax=false",
        "storage.accumulate=stored",
    ),
}
"""What each backend runs, to which a cell adds its words."""


@dataclass(frozen=True)
class Applied:
    """`where` is a path in a Built, or says in words what `read` reads."""

    backend: str
    key: str
    words: tuple[str, ...]
    where: str
    want: Any
    read: Read | None = None
    hardware: Hardware = CPU

    def found(self, built: Any) -> Any:
        return (self.read or attrgetter(self.where))(built)

    @property
    def scaling(self) -> str:
        named = [word.partition("=")[2] for word in self.words if word.startswith("fp8.scaling=")]
        return (
            named
            or [scaling for scaling, words in PRESET.items() if words[0] in self.words]
            or ["delayed"]
        )[0]


@dataclass(frozen=True)
class Refused:
    """`line` is how the line that refuses begins."""

    backend: str
    key: str
    words: tuple[str, ...]
    line: str
    hardware: Hardware = CPU


Cell = Applied | Refused


@functools.cache
def refusal(cell: Refused) -> str:
    """The line with which `cell` is refused. Raises AssertionError where none begins as it says."""
    try:
        fp8cfg.lower(small(*cell.words, f"backend={cell.backend}"), cell.hardware)
    except fp8cfg.ConfigError as e:
        found = [line for line in e.problems if line.startswith(cell.line)]
        assert found and "; " in found[0], e.problems
        return found[0]
    raise AssertionError(f"{cell} is not refused")


WHERE = {
    "fp8.enabled": "number of FP8Linear",
    "fp8.scaling": "layer.scaling.kind",
    "fp8.format": "layer.scaling.backward.name",
    "fp8.margin": "layer.scaling.margin",
    "fp8.interval": "layer.scaling.interval",
    "fp8.amax_history_len": "rows of layer.fp8_amax_history",
    "fp8.amax_compute_algo": "layer.scaling.amax_compute_algo",
    "fp8.granularity": "layer.scaling.granularity",
    "fp8.use_power_2_scales": "layer.scaling.power_2_scales",
    "fp8.enable_2d_quantization": "layer.scaling.tile of the weight",
    "fp8.random_hadamard_transform": "layer.scaling.hadamard",
    "fp8.stochastic_rounding": "layer.scaling.stochastic",
    "fp8.first_step": "values of layer.fp8_scale",
    "fp8.params": "layer.parameter.dtype",
    "fp8.keep_transpose_cache": "layer.keeps_transpose",
    **{
        f"fp8.override_linear_precision.{g}": "layer.high_precision"
        for g in ("fprop", "dgrad", "wgrad")
    },
    **dict.fromkeys(
        (
            "fp8.high_precision_at_start",
            "fp8.high_precision_at_end",
            "fp8.include",
            "fp8.exclude",
            "fp8.output_layer",
        ),
        "which layers are FP8Linear",
    ),
    "fp8.dot_product_attention": "class of core_attention",
}
"""Where test_every_key.py reads what it sets; without a space, a path in a Built."""


def native() -> list[Cell]:
    cells: list[Cell] = []
    for key, where in WHERE.items():
        words, read, want = test_every_key.ACTS[key]
        cells.append(
            Applied(
                "native",
                key,
                tuple(words),
                where,
                want,
                (lambda b, read=read: read(b.job)) if " " in where else None,
            )
        )
    cells += [
        Applied("native", "fp8.scaling", words, "layer.scaling.kind", s)
        for s, words in PRESET.items()
    ]
    cells += [
        Applied(
            "native",
            "fp8.reduce_amax",
            (*BASE["native"], "fp8.reduce_amax=false"),
            "group that after_step gets",
            None,
            lambda b: b.amax_group,
        ),
        Applied(
            "native",
            "fp8.tp_only_amax_red",
            (*BASE["native"], "fp8.tp_only_amax_red=true"),
            "group that after_step gets",
            None,
            lambda b: b.amax_group,
        ),
        Applied(
            "native",
            "fp8.emulate",
            (*CURRENT, "fp8.emulate=true"),
            "choice.product",
            "emulate",
            hardware=H200,
        ),
        *(
            Refused(
                "native",
                "fp8.scaling",
                PRESET[s],
                f"fp8.scaling={s}: this GPU has compute capability 9.0, {s} scaling needs 10.0 (Blackwell)",
                H200,
            )
            for s in ("mxfp8", "nvfp4")
        ),
        Refused(
            "native",
            "fp8.dot_product_attention",
            (*CURRENT, "fp8.dot_product_attention=true"),
            "fp8.dot_product_attention=true: the native backend has it only by emulation",
            H200,
        ),
        Refused(
            "native",
            "fp8.dot_product_attention",
            ("precision=bf16_mxfp8", "fp8.dot_product_attention=true"),
            "fp8.dot_product_attention=true: the native backend has none under fp8.scaling=mxfp8",
        ),
        Refused(
            "native",
            "fp8.multi_head_attention",
            (*BASE["native"], "fp8.dot_product_attention=true", "fp8.multi_head_attention=true"),
            "fp8.multi_head_attention=true: needs FP8 outputs",
        ),
        Refused(
            "native",
            "storage.gather",
            (*CURRENT, PLAIN, FSDP, "storage.gather=fp8"),
            "storage.gather=fp8: backend=native gathers the FP8 weights of fp8.params",
        ),
    ]
    return cells


def torchao() -> list[Cell]:
    base = BASE["torchao"]
    casts = {
        "fprop": "cast_config_input",
        "dgrad": "cast_config_grad_output",
        "wgrad": "cast_config_grad_output_for_grad_weight",
    }
    delayed = {
        "margin": 2,
        "interval": 2,
        "amax_history_len": 4,
        "amax_compute_algo": "most_recent",
        "reduce_amax": "false",
        "tp_only_amax_red": "true",
        "first_step": "te",
    }

    def applied(
        key: str, words: tuple[str, ...], where: str, want: Any, read: Read | None = None
    ) -> Applied:
        return Applied("torchao", key, (*base, *words), where, want, read)

    return [
        Refused(
            "torchao",
            "precision.compute",
            (*base, "precision.compute=fp16", "fp8.granularity=row"),
            "fp8.granularity=row: torch's product",
            H200,
        ),
        applied("fp8.enabled", (), "number of layers converted", 8, lambda b: len(b.converted)),
        applied(
            "fp8.scaling",
            (),
            "class of the layer",
            "TorchaoLinear",
            lambda b: type(b.layer).__name__,
        ),
        Applied(
            "torchao",
            "fp8.scaling",
            MXFP8,
            "class of the layer",
            "TorchaoMXLinear",
            lambda b: type(b.layer).__name__,
        ),
        *(
            Refused(
                "torchao",
                "fp8.scaling",
                (*PRESET[s], PLAIN),
                f"fp8.scaling={s}: torchao has only current and mxfp8",
            )
            for s in ("delayed", "block", "nvfp4")
        ),
        applied(
            "fp8.format",
            ("fp8.format=e4m3",),
            "layer.config.cast_config_grad_output.target_dtype",
            "torch.float8_e4m3fn",
        ),
        *(
            Refused(
                "torchao",
                f"fp8.{k}",
                (*PRESET["delayed"], PLAIN, f"fp8.{k}={v}"),
                "fp8.scaling=delayed: torchao has",
            )
            for k, v in delayed.items()
        ),
        applied(
            "fp8.granularity",
            ("fp8.granularity=row",),
            "layer.config.cast_config_input.scaling_granularity.name",
            "AXISWISE",
        ),
        applied(
            "fp8.use_power_2_scales",
            ("fp8.use_power_2_scales=true",),
            "layer.config.round_scales_to_power_of_2",
            True,
        ),
        Refused(
            "torchao",
            "fp8.enable_2d_quantization",
            (*MXFP8, "fp8.enable_2d_quantization=true"),
            "fp8.enable_2d_quantization=true: torchao",
        ),
        *(
            Refused(
                "torchao",
                f"fp8.{k}",
                (*PRESET["nvfp4"], PLAIN, f"fp8.{k}=false"),
                "fp8.scaling=nvfp4: torchao has",
            )
            for k in ("random_hadamard_transform", "stochastic_rounding")
        ),
        Refused(
            "torchao",
            "fp8.params",
            (*CURRENT, "fp8.params=true"),
            "fp8.params=true: torchao does not multiply weights that are stored",
        ),
        Refused(
            "torchao",
            "fp8.keep_transpose_cache",
            (*base, CACHE),
            "fp8.keep_transpose_cache=true: has no effect with backend=torchao, which manages",
        ),
        *(
            applied(
                f"fp8.override_linear_precision.{g}",
                (f"fp8.override_linear_precision.{g}=true",),
                f"scaling_type of layer.config.{cast}",
                "DISABLED",
                lambda b, cast=cast: getattr(b.layer.config, cast).scaling_type.name,
            )
            for g, cast in casts.items()
        ),
        Applied(
            "torchao",
            "fp8.override_linear_precision.wgrad",
            (*MXFP8, "fp8.override_linear_precision.wgrad=true"),
            "layer.wgrad_with_hp",
            True,
        ),
        *(
            Refused(
                "torchao",
                f"fp8.override_linear_precision.{g}",
                (*MXFP8, f"fp8.override_linear_precision.{g}=true"),
                f"fp8.override_linear_precision.{g}=true: torchao",
            )
            for g in ("fprop", "dgrad")
        ),
        Refused(
            "torchao",
            "fp8.dot_product_attention",
            (*base, "fp8.dot_product_attention=true"),
            "fp8.dot_product_attention=true: torchao leaves",
        ),
        Refused(
            "torchao",
            "fp8.multi_head_attention",
            (
                *PRESET["delayed"],
                PLAIN,
                "fp8.dot_product_attention=true",
                "fp8.multi_head_attention=true",
            ),
            "fp8.multi_head_attention=true: torchao leaves",
        ),
        Applied(
            "torchao",
            "fp8.emulate",
            (*base, "fp8.emulate=true"),
            "choice.product",
            "emulate",
            hardware=H200,
        ),
        applied(
            "storage.gather",
            (FSDP, "storage.gather=fp8"),
            "layer.config.enable_fsdp_float8_all_gather",
            True,
        ),
        Refused(
            "torchao",
            "storage.gather",
            (*base, FSDP, "fp8.granularity=row", "storage.gather=fp8"),
            "storage.gather=fp8: needs fp8.granularity=tensor",
        ),
        Refused(
            "torchao",
            "storage.weight",
            (*base, "storage.weight=fp8"),
            "storage.weight=fp8: torchao does not multiply weights",
        ),
        Refused(
            "torchao",
            "opt_level",
            (*[word for word in base if word != "fp8.params=false"], "opt_level=O3"),
            "opt_level=O3: torchao does not multiply weights",
        ),
    ]


def which_layers(backend: str) -> list[Applied]:
    """The keys that choose layers."""
    chosen: list[tuple[str, tuple[str, ...], Any]] = [
        (
            "fp8.high_precision_at_start",
            ("fp8.high_precision_at_start=1",),
            (4, "layers.1.self_attention.linear_qkv"),
        ),
        (
            "fp8.high_precision_at_end",
            ("fp8.high_precision_at_end=1",),
            (4, "layers.0.self_attention.linear_qkv"),
        ),
        ("fp8.include", ("fp8.include=['*.linear_fc2']",), (2, "layers.0.mlp.linear_fc2")),
        (
            "fp8.exclude",
            ("fp8.exclude=['*.mlp.*','*qkv']",),
            (2, "layers.0.self_attention.linear_proj"),
        ),
        ("fp8.output_layer", ("fp8.output_layer=true",), (9, "layers.0.self_attention.linear_qkv")),
    ]
    return [
        Applied(
            backend,
            key,
            (*BASE[backend], *words),
            "which layers are converted",
            want,
            lambda b: (len(b.converted), b.converted[0]),
        )
        for key, words, want in chosen
    ]


def while_it_runs(backend: str) -> list[Applied]:
    """The keys that act in a step or an evaluation."""
    base = BASE[backend]
    return [
        Applied(
            backend,
            "fp8.use_autocast_during_eval",
            (*base, "fp8.use_autocast_during_eval=true"),
            "observed products of an evaluation",
            ("e4m3", "e4m3"),
            lambda b: b.evaluation,
        ),
        Applied(
            backend,
            "fp8.min_coverage",
            (*base, "fp8.min_coverage=1"),
            "NotFP8Error of the first step, exit code 3",
            "fp8.min_coverage=1",
            lambda b: b.proof.partition(":")[0],
        ),
    ]


def storage(backend: str) -> list[Applied]:
    """State is stored and sent in the same way whoever multiplies, MS-AMP apart."""
    rows: list[tuple[str, tuple[str, ...], str, Any, Read | None]] = [
        *(
            (
                "precision.compute",
                (f"precision.compute={c}",),
                "layer.weight.dtype",
                f"torch.{dtype}",
                None,
            )
            for c, dtype in (("fp16", "float16"), ("fp32", "float32"))
        ),
        ("storage.weight", ("storage.weight=fp16_scaled",), "layer.codec", "fp16 pow2", None),
        (
            "storage.master_weight",
            ("storage.master_weight=fp16_scaled",),
            "optimizer_state.master.dtype",
            "torch.float16",
            None,
        ),
        (
            "storage.weight_grad",
            ("storage.weight_grad=fp8",),
            "dtype in optimizer.stored_grads",
            "torch.float8_e4m3fn",
            lambda b: b.stored_grad.dtype,
        ),
        (
            "storage.comm",
            ("storage.comm=bf16",),
            "codec given to sum_over_ranks",
            {"bf16"},
            lambda b: b.sent,
        ),
        (
            "storage.exp_avg",
            ("storage.exp_avg=fp8",),
            "optimizer_state.exp_avg.dtype",
            "torch.float8_e4m3fn",
            None,
        ),
        (
            "storage.exp_avg_sq",
            ("storage.exp_avg_sq=fp16_scaled",),
            "optimizer_state.exp_avg_sq.dtype",
            "torch.float16",
            None,
        ),
        (
            "storage.accumulate",
            ("opt_level=O2", "storage.accumulate=stored", "trainer.micro_batch_size=4"),
            "optimizer.stored_grads after each microbatch",
            [True, True],
            lambda b: b.stored_after,
        ),
        (
            "storage.rounding",
            ("storage.master_weight=none", "storage.rounding=stochastic"),
            "columns.weight.rounding",
            "stochastic",
            None,
        ),
        (
            "storage.shard",
            ("storage.shard=zero1",),
            "ranks in job.prepared.owner",
            {0, 1},
            lambda b: b.owners,
        ),
        *(
            (
                (
                    "storage.shard",
                    (FSDP,),
                    "placements of layer.weight",
                    "(Shard(dim=0),)",
                    lambda b: b.layer.weight.placements,
                ),
                (
                    "storage.gather",
                    (FSDP, "storage.gather=bf16"),
                    "dtype of layer.weight once it is gathered",
                    "torch.bfloat16",
                    lambda b: b.gathered.dtype,
                ),
            )
            if backend != "te"
            else ()
        ),
        *(
            (
                "opt_level",
                (f"opt_level={level}",),
                "columns of the optimizer's group",
                f"fp16 pow2, None, e4m3 exact, {moments}",
                lambda b: ", ".join(map(str, b.columns)),
            )
            for level, moments in (("O1", "fp32, fp32"), ("O2", "e4m3 exact, fp16 pow2"))
        ),
    ]
    return [
        Applied(backend, key, (*BASE[backend], PLAIN, *words), where, want, read)
        for key, words, where, want, read in rows
    ]


def te() -> list[Cell]:
    weights = (*PRESET["current"], "precision.compute=fp32")
    return (
        [
            Refused(
                "te",
                "fp8.keep_transpose_cache",
                (*PRESET["delayed"], CACHE),
                "fp8.keep_transpose_cache=true: has no effect with backend=te, which manages",
                H200,
            )
        ]
        + [
            Refused(
                "te",
                key,
                (*weights, word),
                f"{word}: Transformer Engine's FP8 weights would pass for float32 ones",
                H200,
            )
            for key, word in (
                ("storage.weight", "storage.weight=fp8"),
                ("opt_level", "opt_level=O3"),
            )
        ]
        + [
            Refused(
                "te",
                "storage.shard",
                (*PRESET["current"], PLAIN, FSDP),
                "storage.shard=fsdp: not in this version with Transformer Engine's layers",
                H200,
            ),
            Refused(
                "te",
                "storage.gather",
                (*PRESET["current"], PLAIN, FSDP, "storage.gather=fp8"),
                "storage.gather=fp8: backend=te gathers weights in bf16",
                H200,
            ),
        ]
    )


def msamp() -> list[Cell]:
    base = BASE["msamp"]
    delayed = {
        "format": "e4m3",
        "margin": 2,
        "interval": 2,
        "amax_history_len": 32,
        "amax_compute_algo": "most_recent",
        "reduce_amax": "true",
        "first_step": "te",
        "dot_product_attention": "true",
        "emulate": "true",
        **{f"override_linear_precision.{g}": "true" for g in ("fprop", "dgrad", "wgrad")},
    }
    other = {
        f"fp8.{word.partition('=')[0]}": (scaling, *PRESET[scaling], f"fp8.{word}")
        for scaling, word in (
            ("current", "granularity=row"),
            ("current", "use_power_2_scales=true"),
            ("mxfp8", "enable_2d_quantization=true"),
            ("nvfp4", "random_hadamard_transform=false"),
            ("nvfp4", "stochastic_rounding=false"),
        )
    }
    columns = (
        "weight=bf16",
        "master_weight=fp32",
        "exp_avg=fp8",
        "exp_avg_sq=fp32",
        "rounding=stochastic",
        "shard=zero1",
        "accumulate=wide",
    )
    gradients = ("storage.weight_grad=fp8", "storage.comm=fp8")
    mha = (*base, "fp8.dot_product_attention=true", "fp8.multi_head_attention=true")

    def applied(key: str, word: str, where: str, want: Any, read: Read | None = None) -> Applied:
        return Applied("msamp", key, (*base, *([word] if word else [])), where, want, read)

    return [
        applied(
            "precision.compute",
            "precision.compute=fp16",
            "dtype of what the layer puts out",
            "torch.float16",
            lambda b: b.output.dtype,
        ),
        applied("fp8.enabled", "", "number of layers converted", 8, lambda b: len(b.converted)),
        applied(
            "fp8.scaling", "", "class of the layer", "MSAMPLinear", lambda b: type(b.layer).__name__
        ),
        *(
            Refused(
                "msamp",
                "fp8.scaling",
                (*PRESET[s],),
                f"fp8.scaling={s}: MS-AMP has only delayed scaling",
                H200,
            )
            for s in PRESET
            if s != "delayed"
        ),
        applied(
            "fp8.format",
            "",
            "qtype of layer.scaling_metas['ograd']",
            "kFloat8E5M2",
            lambda b: b.layer.scaling_metas["ograd"].qtype.name,
        ),
        applied(
            "fp8.amax_history_len",
            "",
            "window of layer.scaling_metas['input']",
            16,
            lambda b: b.layer.scaling_metas["input"].window_size,
        ),
        Refused(
            "msamp",
            "fp8.keep_transpose_cache",
            (*base, CACHE),
            "fp8.keep_transpose_cache=true: has no effect with backend=msamp, which manages",
            H200,
        ),
        Refused(
            "msamp",
            "fp8.params",
            (*base, "fp8.params=true"),
            "fp8.params=true: has no effect, opt_level=O2 stores weights in fp16_scaled",
            H200,
        ),
        *(
            Refused("msamp", f"fp8.{k}", (*base, f"fp8.{k}={v}"), f"fp8.{k}={v}: MS-AMP", H200)
            for k, v in delayed.items()
        ),
        *(
            Refused(
                "msamp", key, tuple(words), f"fp8.scaling={scaling}: MS-AMP has only delayed", H200
            )
            for key, (scaling, *words) in other.items()
        ),
        Refused(
            "msamp",
            "fp8.multi_head_attention",
            mha,
            "fp8.multi_head_attention=true: MS-AMP leaves attention",
            H200,
        ),
        *(
            Refused(
                "msamp",
                f"storage.{c.partition('=')[0]}",
                (*base, f"storage.{c}"),
                f"storage.{c}: MS-AMP",
                H200,
            )
            for c in columns
        ),
        *(
            Refused("msamp", word.partition("=")[0], (*base, *gradients), f"{word}: MS-AMP", H200)
            for word in gradients
        ),
        applied(
            "storage.weight", "storage.weight=fp16_scaled", "layer.weight.dtype", "torch.float16"
        ),
        applied(
            "storage.weight_grad",
            "storage.weight_grad=fp8_pow2",
            "qtype of layer.weight.grad",
            "kFloat8E4M3",
            lambda b: b.weight_grad.qtype.name,
        ),
        applied(
            "storage.exp_avg",
            "storage.exp_avg=fp8_pow2",
            "optimizer_state.exp_avg.qtype.name",
            "kFloat8E4M3",
        ),
        applied(
            "storage.exp_avg_sq",
            "storage.exp_avg_sq=fp16_scaled",
            "optimizer_state.exp_avg_sq.qtype.name",
            "kFloat16",
        ),
        *(
            applied(
                "opt_level",
                f"opt_level={level}",
                "dtypes of the optimizer's moments",
                want,
                lambda b: b.moments,
            )
            for level, want in (
                ("O1", ["torch.float32", "torch.float32"]),
                ("O2", ["torch.uint8", "torch.float16"]),
            )
        ),
        Refused(
            "msamp",
            "fp8.tp_only_amax_red",
            (*base, "fp8.tp_only_amax_red=true"),
            "fp8.tp_only_amax_red=true: has no effect with fp8.reduce_amax=false",
            H200,
        ),
        Refused(
            "msamp",
            "storage.gather",
            (*base, FSDP, "storage.gather=fp8"),
            "storage.gather=fp8: needs fp8.scaling=current",
            H200,
        ),
        Refused(
            "msamp",
            "opt_level",
            (*[word for word in base if word != "fp8.params=false"], "opt_level=O3"),
            "opt_level=O3: MS-AMP has it only through DeepSpeed",
            H200,
        ),
    ]


ALL: list[Cell] = [
    *native(),
    *te(),
    *torchao(),
    *msamp(),
    *(cell for backend in BASE for cell in while_it_runs(backend)),
    *(cell for backend in ("torchao", "msamp") for cell in which_layers(backend)),
    *(cell for backend in ("native", "te", "torchao") for cell in storage(backend)),
]
