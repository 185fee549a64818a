"""The rules between keys: what would do nothing is refused, and the line says what to write instead."""

from __future__ import annotations

import pytest

import fp8cfg
from fp8cfg.recipes import llama_tiny
from fp8cfg.schema.fp8 import FP8, ONLY_UNDER
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.presets import choices

OTHER_VALUES = {
    "margin": 1,
    "interval": 2,
    "amax_history_len": 16,
    "amax_compute_algo": "most_recent",
    "reduce_amax": False,
    "tp_only_amax_red": True,
    "first_step": "te",
    "granularity": "row",
    "use_power_2_scales": True,
    "enable_2d_quantization": True,
    "random_hadamard_transform": False,
    "stochastic_rounding": False,
}


def lines(preset: str, **assignments: object) -> list[str]:
    r = llama_tiny()
    r.precision = preset
    for key, value in assignments.items():
        node, _, leaf = key.replace("__", ".").rpartition(".")
        target = r
        for part in node.split("."):
            target = getattr(target, part)
        setattr(target, leaf, value)
    try:
        r.check()
    except fp8cfg.ConfigError as e:
        return e.problems
    return []


def test_shipped_presets_break_no_rule() -> None:
    for name in choices():
        r = llama_tiny()
        r.precision = name
        r.model.num_layers = 32
        r.check()


PRESET_OF = {
    "delayed": "bf16_fp8",
    "current": "bf16_fp8_current",
    "block": "bf16_fp8_block",
    "mxfp8": "bf16_mxfp8",
    "nvfp4": "bf16_nvfp4",
}


def test_the_table_of_other_values_is_complete() -> None:
    assert set(OTHER_VALUES) == set(ONLY_UNDER)


@pytest.mark.parametrize("scaling", PRESET_OF)
@pytest.mark.parametrize("key", ONLY_UNDER)
def test_keys_of_one_scaling_are_refused_under_the_others(key: str, scaling: str) -> None:
    found = lines(PRESET_OF[scaling], **{f"fp8__{key}": OTHER_VALUES[key]})
    own = ONLY_UNDER[key]
    assert found == (
        []
        if scaling in own
        else [
            f"fp8.{key}={spelled(OTHER_VALUES[key])}: has no effect with fp8.scaling={scaling}; remove it or set "
            f"fp8.scaling={' or '.join(own)}"
        ]
    )


@pytest.mark.parametrize(
    "key", [k for k in FP8.model_fields if k not in ("enabled", "override_linear_precision")]
)
def test_every_fp8_key_is_refused_while_fp8_is_off(key: str) -> None:
    default = FP8.model_fields[key].get_default(call_default_factory=True)
    value = {
        bool: True,
        int: 2,
        float: 0.5,
        tuple: ("x",),
        str: {
            "scaling": "current",
            "format": "e4m3",
            "amax_compute_algo": "most_recent",
            "first_step": "te",
            "granularity": "row",
        }.get(key),
        type(None): True,
    }[type(default)]
    value = not default if isinstance(default, bool) else value
    assert any(
        f"fp8.{key}=" in line and "has no effect" in line
        for line in lines("bf16", **{f"fp8__{key}": value})
    )


CASES = [
    ("bf16_mxfp8", {"fp8__format": "hybrid"}, "fp8.format=hybrid: fp8.scaling=mxfp8 needs e4m3"),
    (
        "bf16_fp8",
        {"fp8__high_precision_at_start": 2, "fp8__high_precision_at_end": 2},
        "leave no layer",
    ),
    (
        "bf16_fp8",
        {"fp8__amax_history_len": 1, "fp8__amax_compute_algo": "most_recent"},
        "has no effect with fp8.amax_history_len=1",
    ),
    (
        "bf16_fp8",
        {"precision__hysteresis": 3},
        "has no effect with precision.compute=bf16; only fp16 has loss scaling",
    ),
    (
        "fp16",
        {"precision__loss_scale": 1024.0, "precision__hysteresis": 3},
        "with the constant precision.loss_scale=1024",
    ),
    ("bf16_fp8", {"fp8__multi_head_attention": True}, "needs fp8.dot_product_attention=true"),
    (
        "bf16_fp8_block",
        {"fp8__dot_product_attention": True},
        "fp8.scaling=block does not support FP8 attention",
    ),
    (
        "bf16_fp8",
        {"fp8__keep_transpose_cache": True, "fp8__params": False},
        "fp8.keep_transpose_cache=true: has no effect with fp8.params=false, which keeps both copies",
    ),
    (
        "bf16_fp8",
        {"fp8__keep_transpose_cache": True, "storage__shard": "fsdp"},
        "has no effect, storage.shard=fsdp frees weights after each pass",
    ),
    (
        "bf16_fp8",
        {"fp8__keep_transpose_cache": True, "precision__opt_level": "O1", "fp8__params": False},
        "has no effect, weights are stored in fp16_scaled",
    ),
    (
        "bf16_fp8",
        {"fp8__keep_transpose_cache": True, "fp8__override_linear_precision__dgrad": True},
        "dgrad=true reads no transpose; remove one of them",
    ),
    ("bf16_fp8", {"storage__weight": "bf16"}, "contradicts fp8.params=true"),
    ("bf16_fp8", {"storage__master_weight": "none"}, "storage.weight=fp8 needs master weights"),
    ("bf16", {"storage__comm": "none"}, "only storage.master_weight can be none"),
    (
        "bf16",
        {"precision__opt_level": "O2", "optim__name": "sgd"},
        "needs optim.name=adamw or adam",
    ),
    (
        "bf16",
        {"optim__name": "sgd", "storage__exp_avg": "fp8"},
        "has no effect with optim.name=sgd",
    ),
    ("bf16", {"precision__backend": "native"}, "backend=native: has no effect"),
    (
        "bf16",
        {"model__hidden_size": 250},
        "model.hidden_size=250: not a multiple of model.num_attention_heads=4; nearest is 248",
    ),
    ("bf16", {"model__num_query_groups": 3}, "must divide model.num_attention_heads=4; nearest is"),
    (
        "bf16",
        {"model__kv_channels": 33},
        "model.kv_channels=33: must be even for rotary positions; nearest is 34",
    ),
    (
        "bf16",
        {"model__hidden_size": 100},
        "model.hidden_size=100: gives heads of 25 channels, but rotary positions need an even number; nearest is 96, or set model.kv_channels",
    ),
    (
        "bf16",
        {"model__rope_scaling__low_freq_factor": 2.0},
        "has no effect with model.rope_scaling.factor=1",
    ),
    ("bf16", {"data__name": "text"}, "data=text: needs data.path"),
    ("bf16", {"data__path": "x"}, "data.path=x: has no effect with data=stdlib"),
    (
        "bf16",
        {"data__name": "jsonl", "data__mixture": ({"path": "hf://a/b", "weight": 1.0},)},
        "data.mixture[0].path=hf://a/b: is a URL, not a local path; download the files and set their path",
    ),
    ("bf16", {"optim__min_lr": 1.0}, "optim.min_lr=1: more than optim.lr=0.003"),
    ("bf16", {"optim__momentum": 0.5}, "optim.momentum=0.5: has no effect with optim.name=adamw"),
    (
        "bf16",
        {"optim__lr_decay_style": "constant", "optim__min_lr": 0.0},
        "has no effect with optim.lr_decay_style=constant",
    ),
    (
        "bf16",
        {"optim__warmup_steps": 500},
        "optim.warmup_steps=500: longer than trainer.max_steps=100; set it to 100 or less",
    ),
    ("bf16", {"optim__betas": (0.9, 1.0)}, "each must be at least 0 and less than 1"),
    (
        "bf16",
        {"trainer__global_batch_size": 17},
        "not a multiple of trainer.micro_batch_size=16; nearest is 16",
    ),
    ("bf16", {"trainer__val_check_interval": 0}, "trainer.limit_val_batches=4: has no effect"),
    (
        "bf16_fp8",
        {"trainer__compile": "on", "precision__backend": "te"},
        "trainer.compile=on: backend=te does not support torch.compile; set it to off",
    ),
    (
        "bf16",
        {"trainer__strategy__tensor_model_parallel_size": 2},
        "trainer.num_nodes x trainer.devices = 1: must be a multiple of tensor x pipeline x context "
        "parallel size = 2; set trainer.devices=2, or trainer.strategy.tensor_model_parallel_size=1",
    ),
    (
        "bf16",
        {"trainer__strategy__context_parallel_size": 4, "trainer__devices": 6},
        "set trainer.devices=8, or trainer.strategy.context_parallel_size=2",
    ),
    (
        "bf16",
        {"trainer__strategy__context_parallel_size": 16, "trainer__devices": 6},
        "set trainer.num_nodes=8, or trainer.strategy.context_parallel_size=2",
    ),
    (
        "bf16",
        {"trainer__strategy__sequence_parallel": True},
        "has no effect with tensor_model_parallel_size=1; set it to false",
    ),
    (
        "bf16",
        {
            "trainer__strategy__tensor_model_parallel_size": 3,
            "trainer__devices": 6,
            "trainer__micro_batch_size": 1,
        },
        "must divide model.num_attention_heads=4; nearest is 2",
    ),
    (
        "bf16",
        {
            "trainer__strategy__pipeline_model_parallel_size": 3,
            "trainer__devices": 6,
            "trainer__micro_batch_size": 1,
        },
        "must divide model.num_layers=4; nearest is 2",
    ),
    (
        "bf16",
        {"trainer__strategy__virtual_pipeline_model_parallel_size": 2},
        "has no effect with pipeline_model_parallel_size=1",
    ),
]


@pytest.mark.parametrize(("preset", "change", "part"), CASES)
def test_a_broken_rule_is_named(preset: str, change: dict[str, object], part: str) -> None:
    found = lines(preset, **change)
    assert any(part in line for line in found), found


def test_all_three_products_in_high_precision_is_no_fp8() -> None:
    r = llama_tiny()
    r.precision = "bf16_fp8"
    r.fp8.override_linear_precision = fp8cfg.OverrideLinearPrecision(
        fprop=True, dgrad=True, wgrad=True
    )
    with pytest.raises(fp8cfg.ConfigError, match="so no GEMM runs in FP8"):
        r.check()


def test_many_broken_rules_come_at_once() -> None:
    found = lines("bf16", fp8__margin=1, trainer__global_batch_size=17, data__path="x")
    assert len(found) == 3


def test_keys_that_nothing_would_read() -> None:
    assert "has no effect with trainer.val_check_interval=0" in " ".join(
        lines("bf16_fp8", fp8__use_autocast_during_eval=True, trainer__val_check_interval=0)
    )
    assert lines("bf16", checkpoint__every_n_steps=0, checkpoint__keep=5) == [
        "checkpoint.keep=5: has no effect with checkpoint.every_n_steps=0 (saves only at the end)"
    ]


@pytest.mark.parametrize(
    ("word", "kept", "but"),
    [
        ("fp8.format=e4m3", "dgrad wgrad", "fp8.dot_product_attention=true"),
        ("fp8.format=hybrid", "dgrad wgrad", "fp8.dot_product_attention=true"),
        ("fp8.use_autocast_during_eval=true", "fprop", "fp8.dot_product_attention=true"),
        ("fp8.stochastic_rounding=false", "dgrad wgrad", None),
        ("fp8.random_hadamard_transform=false", "wgrad", None),
        ("fp8.enable_2d_quantization=false", "fprop dgrad", "fp8.params=true"),
    ],
)
def test_what_only_gemms_in_high_precision_would_read_is_refused(
    word: str, kept: str, but: str | None
) -> None:
    words = [
        "precision=bf16_nvfp4" if "=false" in word else "precision=bf16_fp8",
        "fp8.params=false",
        word,
    ]
    keys = [f"fp8.override_linear_precision.{gemm}=true" for gemm in kept.split()]
    with pytest.raises(fp8cfg.ConfigError, match=r"has no effect, no FP8 GEMM reads it with"):
        fp8cfg.compose([*words, *keys])
    fp8cfg.compose([*words, *keys[1:]])
    if but:  # something else reads it
        fp8cfg.compose([*words, *keys, but])


def test_weights_from_a_folder_are_not_drawn() -> None:
    words = ["model.weights=there", "model.init_method_std=0.02"]
    with pytest.raises(
        fp8cfg.ConfigError, match=r"init_method_std=0.02: has no effect with model.weights"
    ):
        fp8cfg.compose(words)
    fp8cfg.compose(
        [*words, "storage.master_weight=none", "storage.rounding=stochastic"]
    )  # whose rules read the size of weights
    written = fp8cfg.to_yaml(fp8cfg.compose(["recipe=nemotron4_340b", words[0]]))
    assert (
        fp8cfg.from_yaml(written).model.init_method_std
        == fp8cfg.compose(["recipe=nemotron4_340b"]).model.init_method_std
    )
