"""Accelerate: its file in every spelling, its own loader and launcher on what is written, and its handler objects."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg import interop
from fp8cfg.interop.accelerate import ACCELERATE
from fp8cfg.schema.errors import ConfigError

TE = {"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}


def imported(**fp8_config: Any) -> interop.Read:
    return interop.from_mapping(
        "accelerate", {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", **fp8_config}}
    )


@pytest.mark.parametrize(
    ("key", "given", "ours", "value"),
    [
        ("amax_history_len", 16, "fp8.amax_history_len", 16),
        ("amax_history_length", 16, "fp8.amax_history_len", 16),
        ("fp8_amax_history_len", "16", "fp8.amax_history_len", 16),
        ("AMAX_HISTORY_LEN", 16.0, "fp8.amax_history_len", 16),
        ("amax_compute_algo", "MAX", "fp8.amax_compute_algo", "max"),
        ("amax_compute_algorithm", "most_recent", "fp8.amax_compute_algo", "most_recent"),
        ("fp8_format", "e4m3", "fp8.format", "e4m3"),
        ("format", "Hybrid", "fp8.format", "hybrid"),
        ("margin", 2, "fp8.margin", 2),
        ("fp8_margin", "2", "fp8.margin", 2),
        ("interval", 4, "fp8.interval", 4),
        ("use_autocast_during_eval", "yes", "fp8.use_autocast_during_eval", True),
        (
            "override_linear_precision",
            "(false, false, true)",
            "fp8.override_linear_precision.wgrad",
            True,
        ),
        (
            "override_linear_precision",
            "False,True,False",
            "fp8.override_linear_precision.dgrad",
            True,
        ),
        (
            "override_linear_precision",
            [True, False, False],
            "fp8.override_linear_precision.fprop",
            True,
        ),
        ("override_linear_precision", False, "fp8.override_linear_precision.fprop", False),
        ("use_mxfp8_block_scaling", True, "fp8.scaling", "mxfp8"),
        ("backend", "te", "backend", "te"),
        ("backend", "ao", "fp8.scaling", "current"),
    ],
)
def test_every_spelling(key: str, given: Any, ours: str, value: Any) -> None:
    found = interop.from_mapping(
        "accelerate", {"mixed_precision": "FP8", "fp8_config": {"backend": "TE"} | {key: given}}
    )
    from fp8cfg.interop.translation import effective_values

    assert effective_values(found.recipe)[ours] == value and found.unknown == ()
    found.recipe.check()


@pytest.mark.parametrize(
    "data",
    [
        {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP", "opt_level": "O1"}},
        {"mixed_precision": "fp8", "fp8_config": {"backend": "msamp", "optimization_level": "o1"}},
        {
            "mixed_precision": "fp8",
            "deepspeed_config": {"enable_msamp": True, "msamp_opt_level": "O1"},
        },
        {"mixed_precision": "fp8", "fp8_config": {"fp8_backend": "MSAMP", "fp8_opt_level": "O1"}},
    ],
)
def test_ms_amp_in_every_spelling(data: dict[str, Any]) -> None:
    recipe = interop.from_mapping("accelerate", data).recipe
    assert (recipe.backend, recipe.opt_level, recipe.fp8.enabled, recipe.precision.compute) == (
        "msamp",
        "O1",
        True,
        "bf16",
    )
    recipe.check()


@pytest.mark.parametrize(
    ("given", "compute"), [("no", "fp32"), (False, "fp32"), ("bf16", "bf16"), ("fp16", "fp16")]
)
def test_precisions_without_fp8(given: Any, compute: str) -> None:
    found = interop.from_mapping(
        "accelerate", {"mixed_precision": given, "fp8_config": {"backend": "TE", "margin": 3}}
    )
    assert (found.recipe.precision.compute, found.recipe.fp8.enabled, found.recipe.fp8.margin) == (
        compute,
        False,
        0,
    )
    assert "fp8_config.margin=3: has no effect, FP8 is off" in found.lost


@pytest.mark.parametrize(
    ("data", "lost"),
    [
        (
            {"amax_compute_algo": "most_recent"},
            "fp8_config.amax_compute_algo=most_recent: imported, but Accelerate does not pass most_recent on to Transformer Engine, so TE uses max",
        ),
        (
            {"interval": 3},
            "fp8_config.interval=3: imported, but Transformer Engine 2 ignores it without a message",
        ),
        ({"opt_level": "O1"}, "fp8_config.opt_level=O1: has no effect with backend=TE"),
        (
            {"use_mxfp8_block_scaling": True, "margin": 2},
            "fp8_config.margin=2: has no effect under mxfp8 scaling",
        ),
        ({"backend": "AO", "margin": 2}, "fp8_config.margin=2: has no effect with backend=AO"),
        (
            {"backend": "AO", "enable_fsdp_float8_all_gather": True},
            "fp8_config.enable_fsdp_float8_all_gather=True: has no effect without backend=AO and distributed_type=FSDP",
        ),
        (
            {"backend": "AO", "pad_inner_dim": True},
            "fp8_config.pad_inner_dim=True: layers with sizes that are not multiples of 16 stay in high precision here",
        ),
    ],
)
def test_what_is_not_taken_over_is_said(data: dict[str, Any], lost: str) -> None:
    assert lost in imported(**data).lost
    imported(**data).recipe.check()


@pytest.mark.parametrize(
    ("data", "compute", "lost"),
    [
        ({"fp16": True}, "fp16", ()),
        ({"fp16": "no"}, "fp32", ()),
        ({"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}, "fp16": False}, "bf16", ()),
        (
            {"mixed_precision": "bf16", "fp16": True},
            "bf16",
            ("fp16: has no effect, Accelerate reads mixed_precision=bf16",),
        ),
        ({"mixed_precision": "fp16", "fp16": True}, "fp16", ()),
    ],
)
def test_the_switch_of_fp16_of_old_files(
    data: dict[str, Any], compute: str, lost: tuple[str, ...]
) -> None:
    found = interop.from_mapping("accelerate", data)
    assert (found.recipe.precision.compute, found.lost, found.unknown) == (compute, lost, ())


@pytest.mark.filterwarnings("ignore")
def test_no_key_of_its_own_is_called_a_typing_error() -> None:
    """Neither the fields of its file nor, in their sections, the options of its launcher."""
    launch, config_args = (
        pytest.importorskip("accelerate.commands.launch"),
        pytest.importorskip("accelerate.commands.config.config_args"),
    )
    sections = {
        "fsdp": "fsdp_config",
        "zero": "deepspeed_config",
        "deepspeed": "deepspeed_config",
        "offload": "deepspeed_config",
        "gradient": "deepspeed_config",
        "dynamo": "dynamo_config",
        "megatron": "megatron_lm_config",
        "parallelism": "parallelism_config",
    }
    options = {action.dest for action in launch.launch_command_parser()._actions}
    keys = {
        f"{section}.{option}"
        for option in options
        for head, section in sections.items()
        if option.startswith(head)
    }
    keys |= {
        f.name
        for cls in (config_args.ClusterConfig, config_args.SageMakerConfig)
        for f in dataclasses.fields(cls)
        if not f.name.endswith("_config")
    }
    given = {k: "x" for k in keys if not ACCELERATE.has_entry(k)}
    assert (
        len(given) > 60
        and interop.from_mapping("accelerate", {"mixed_precision": "no", **given}).unknown == ()
    )


def test_what_stands_around_fp8() -> None:
    found = interop.from_mapping(
        "accelerate",
        {
            "mixed_precision": "bf16",
            "distributed_type": "FSDP",
            "use_cpu": True,
            "dynamo_config": {"dynamo_backend": "AOT_EAGER"},
            "same_network": True,
            "machine_rank": 0,
            "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 0.5},
            "fsdp_config": {
                "fsdp_activation_checkpointing": True,
                "fsdp_version": 2,
                "fsdp_offload_params": True,
            },
        },
    )
    assert (
        found.recipe.trainer.accelerator,
        found.recipe.trainer.gradient_clip_val,
        found.recipe.model.recompute_granularity,
        found.recipe.trainer.compile,
    ) == ("cpu", 0.5, "full", "auto")
    assert found.recipe.storage.shard == "fsdp"
    assert found.lost == (
        "dynamo_config.dynamo_backend=AOT_EAGER: not supported; trainer.compile=on compiles with inductor",
        "deepspeed_config.zero_stage=3: imported as FSDP2 (storage.shard=fsdp)",
        "fsdp_config.fsdp_offload_params=True: FSDP's wrapping, offload and saving; storage.shard=fsdp shards each layer",
    )
    assert (
        interop.from_mapping(
            "accelerate", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}
        ).recipe.trainer.compile
        == "on"
    )
    for backend in ("TE", "MSAMP"):
        found = interop.from_mapping(
            "accelerate",
            {
                "mixed_precision": "fp8",
                "fp8_config": {"backend": backend},
                "dynamo_config": {"dynamo_backend": "INDUCTOR"},
            },
        )
        assert found.recipe.trainer.compile == "auto"
        assert (
            f"dynamo_config.dynamo_backend=INDUCTOR: layers of backend={backend.lower()} are not compiled here"
            in found.lost
        )
    assert (
        interop.from_mapping("accelerate", {"distributed_type": "NO"}).recipe.precision.compute
        == "fp32"
    )  # Accelerate's default


FIRST = (
    "Accelerate's torchao also keeps the model's first linear layer out of FP8; here it runs in FP8, see fp8cfg plan for the "
    "layers and set fp8.exclude"
)
FIRST_WRITTEN = (
    "fp8.scaling=current: exported, but Accelerate's torchao also keeps the model's first linear layer out of FP8; pass your own filter to "
    "change it (AORecipeKwargs.module_filter_func)"
)


def test_the_first_layer_that_accelerates_torchao_leaves_out_is_said() -> None:
    """By its own code, of two like models: it leaves out the first layer, the recipe does not."""
    utils = pytest.importorskip("accelerate.utils.ao")
    import torch

    recipe = interop.from_mapping(
        "accelerate", {"mixed_precision": "fp8", "fp8_config": {"backend": "ao"}}
    ).recipe
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(32, 32) for name in ("first", "middle", "output_layer")}
    )
    theirs, _ = utils.find_first_last_linear_layers(model)
    ours = {p.name for p in fp8cfg.convert_model(model, recipe).plan if p.fp8}
    assert theirs == "first" and ours == {"first", "middle"}
    assert interop.from_words("accelerate", ["AORecipeKwargs()"]).lost == (f"backend=AO: {FIRST}",)
    assert interop.from_mapping(
        "accelerate", {"mixed_precision": "bf16", "fp8_config": {"backend": "AO"}}
    ).lost == ("fp8_config.backend=AO: has no effect, FP8 is off",)
    for words, said in (
        ("precision=bf16_fp8_current", True),
        ("precision=bf16_fp8", False),
        ("precision=bf16_mxfp8", False),
        ("precision=bf16", False),
    ):
        assert (
            FIRST_WRITTEN in interop.to_mapping("accelerate", fp8cfg.compose([words])).lost
        ) == said


@pytest.mark.parametrize(
    ("deepspeed", "said"),
    [
        ({"enable_msamp": True}, "deepspeed_config.enable_msamp=True"),
        (
            {"enable_msamp": True, "zero_stage": 1, "msamp_opt_level": "O2"},
            "deepspeed_config.enable_msamp=True",
        ),
        ({"zero_stage": 2}, "fp8_config.backend=MSAMP"),
        ({}, ""),
    ],
)
def test_the_weights_that_ms_amp_holds_under_deepspeed_are_said(
    deepspeed: dict[str, Any], said: str
) -> None:
    fp8 = {} if "enable_msamp" in deepspeed else {"fp8_config": {"backend": "MSAMP"}}
    lost = interop.from_mapping(
        "accelerate", {"mixed_precision": "fp8", "deepspeed_config": deepspeed, **fp8}
    ).lost
    held = [line for line in lost if "E4M3" in line]
    assert held == [
        f"{said}: under DeepSpeed MS-AMP stores E4M3 weights and FP16 masters at every level; without DeepSpeed, as here, O1 and O2 use scaled FP16"
    ] * bool(said)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "opt_level=O1 storage.shard=zero1",
            "opt_level=O1: exported, but under DeepSpeed MS-AMP stores E4M3 weights and FP16 masters at every level, not in scaled FP16",
        ),
        (
            "opt_level=O2 storage.shard=zero2",
            "opt_level=O2: exported, but under DeepSpeed MS-AMP stores E4M3 weights and FP16 masters at every level, not in scaled FP16; opt_level=O3 is the same here",
        ),
        ("opt_level=O2", ""),
        ("storage.shard=zero1", ""),
    ],
)
def test_and_where_a_recipe_is_written(words: str, line: str) -> None:
    lost = interop.to_mapping(
        "accelerate", fp8cfg.compose(["precision=bf16_fp8", *words.split()])
    ).lost
    assert [said for said in lost if "DeepSpeed" in said] == [line] * bool(line)


@pytest.mark.parametrize(
    ("given", "gather", "in_force"),
    [
        ({}, "auto", "fp8"),
        ({"enable_fsdp_float8_all_gather": True}, "fp8", "fp8"),
        ({"enable_fsdp_float8_all_gather": "no"}, "bf16", "bf16"),
    ],
)
def test_fsdp_and_its_fp8_all_gather_both_ways(
    given: dict[str, Any], gather: str, in_force: str
) -> None:
    found = interop.from_mapping(
        "accelerate",
        {
            "mixed_precision": "fp8",
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2},
            "fp8_config": {"backend": "AO", **given},
        },
    )
    storage = found.recipe.storage
    assert (storage.shard, storage.gather, found.lost, found.unknown) == (
        "fsdp",
        gather,
        (f"fp8_config.backend=AO: {FIRST}",),
        (),
    )
    found.recipe.check()
    written = interop.to_mapping("accelerate", found.recipe)
    assert written.value["distributed_type"] == "FSDP" and written.value["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
    }
    assert written.value["fp8_config"]["enable_fsdp_float8_all_gather"] is (
        in_force == "fp8"
    ) and not any(line.startswith("storage.") for line in written.lost)


def test_typos_are_reported_and_values_refused_all_at_once() -> None:
    found = imported(marginn=4, totally_bogus=1)
    assert found.unknown == (
        "fp8_config.marginn: no such key of Accelerate; did you mean 'fp8_config.margin'?",
        "fp8_config.totally_bogus: no such key of Accelerate",
    )
    with pytest.raises(ConfigError) as e:
        imported(
            margin="x",
            fp8_format="E5M2",
            override_linear_precision="(false, false)",
            amax_compute_algo="mxa",
        )
    assert e.value.problems == [
        "fp8_config.fp8_format=E5M2: Transformer Engine trains with HYBRID or E4M3, never with E5M2 only",
        "fp8_config.margin=x: expected an integer",
        "fp8_config.amax_compute_algo=mxa: not an option; did you mean 'max'?",
        "fp8_config.override_linear_precision=(false, false): expected three of true and false, for fprop, dgrad and wgrad",
    ]
    with pytest.raises(ConfigError) as e:  # those of types, of bounds and of names
        imported(fp8_format="E5M2", margin=-4, marginn=4)
    assert e.value.problems == [
        "fp8_config.fp8_format=E5M2: Transformer Engine trains with HYBRID or E4M3, never with E5M2 only",
        "fp8_config.margin=-4: must be at least 0",
        "fp8_config.marginn: no such key of Accelerate; did you mean 'fp8_config.margin'?",
    ]
    with pytest.raises(
        ConfigError,
        match=r"amax_history_length=2: the same key as fp8_config.amax_history_len=16; remove one",
    ):
        imported(amax_history_len=16, amax_history_length=2)


WORDS = [
    [
        "precision=bf16_fp8",
        "fp8.margin=3",
        "fp8.amax_history_len=16",
        "fp8.format=e4m3",
        "fp8.override_linear_precision.wgrad=true",
    ],
    [
        "precision=bf16_fp8",
        "fp8.use_autocast_during_eval=true",
        "fp8.amax_compute_algo=most_recent",
        "fp8.interval=2",
    ],
    ["precision=bf16_mxfp8"],
    ["precision=bf16_fp8", "opt_level=O1", "backend=msamp"],
    ["precision=bf16_fp8_current"],
    ["precision=bf16"],
    ["precision=fp32"],
    ["precision=fp16"],
    ["precision=bf16_fp8", "storage.shard=zero1"],
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_accelerate_itself_reads_the_file_to_the_same_values(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader, then its launcher's environment, then the handler that it builds from that: every value arrives."""
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import MSAMPRecipeKwargs, TERecipeKwargs
    from accelerate.utils.launch import setup_fp8_env

    recipe = fp8cfg.compose([*words, "trainer.accelerator=cpu"])
    file = tmp_path / "config.yaml"
    file.write_text(interop.to_text("accelerate", recipe)[0])
    loaded = load_config_from_file(str(file))
    assert (
        loaded.mixed_precision
        == {"fp32": "no"}.get(recipe.precision.compute, recipe.precision.compute)
        if not recipe.fp8.enabled
        else "fp8"
    )
    args = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    )[0]
    environment = setup_fp8_env(args, {})
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    if environment.get("ACCELERATE_FP8_BACKEND") == "TE":
        handler = TERecipeKwargs()
        assert handler.override_linear_precision == tuple(
            getattr(recipe.fp8.override_linear_precision, g) for g in ("fprop", "dgrad", "wgrad")
        )
        assert (
            handler.fp8_format,
            handler.use_autocast_during_eval,
            handler.use_mxfp8_block_scaling,
        ) == (
            recipe.fp8.format.upper(),
            recipe.fp8.use_autocast_during_eval,
            recipe.fp8.scaling == "mxfp8",
        )
        if recipe.fp8.scaling == "delayed":
            assert (
                handler.margin,
                handler.interval,
                handler.amax_history_len,
                handler.amax_compute_algo,
            ) == (
                recipe.fp8.margin,
                recipe.fp8.interval,
                recipe.fp8.amax_history_len,
                recipe.fp8.amax_compute_algo,
            )
    elif environment.get("ACCELERATE_FP8_BACKEND") == "MSAMP":
        assert MSAMPRecipeKwargs().opt_level == recipe.opt_level
    else:
        assert environment.get("ACCELERATE_FP8_BACKEND") == ("AO" if recipe.fp8.enabled else None)


def test_the_wizards_own_file(tmp_path: Path) -> None:
    """As `accelerate config` writes it, through its own classes; its launcher ignores two of the keys, which are read here as meant."""
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    fp8 = {
        "backend": "TE",
        "use_autocast_during_eval": False,
        "margin": 1,
        "interval": 1,
        "fp8_format": "E4M3",
        "amax_history_length": 16,
        "amax_compute_algorithm": "max",
        "override_linear_precision": (False, False, False),
    }
    file = tmp_path / "config.yaml"
    config_args.ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="MULTI_GPU",
        mixed_precision="fp8",
        use_cpu=False,
        debug=False,
        num_processes=8,
        gpu_ids="all",
        same_network=True,
        fp8_config=copy.deepcopy(fp8),
    ).to_yaml_file(str(file))
    found = interop.from_file("accelerate", file)
    assert (
        found.recipe.fp8.margin,
        found.recipe.fp8.amax_history_len,
        found.recipe.fp8.format,
        found.unknown,
    ) == (1, 16, "e4m3", ())
    assert found.lost == ("num_processes=8: belongs to the launch; use torchrun's arguments",)


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ({"num_processes": "x"}, "num_processes=x: expected an integer"),
        ({"num_processes": 0}, "num_processes=0: must be at least 1"),
        (
            {"num_processes": 8, "num_machines": 3},
            "num_processes=8: is not a multiple of num_machines=3",
        ),
    ],
)
def test_no_process_is_lost(counts: dict[str, Any], problem: str) -> None:
    settings = {"mixed_precision": "bf16", "parallelism_config": {"tp_size": 2}, **counts}
    with pytest.raises(ConfigError, match=f"^Accelerate: {problem}$"):
        interop.from_mapping("accelerate", settings)
