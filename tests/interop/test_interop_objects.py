"""Objects of other projects: Transformer Engine's genuine recipes, torchao's config, and plugins of NeMo's and Megatron-Bridge's."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fp8cfg
from fp8cfg import interop
from fp8cfg.interop.transformer_engine import UNUSED_SWITCH, read_recipe_text
from fp8cfg.interop.translation import effective_values
from fp8cfg.schema.errors import ConfigError

TE = "transformer_engine.common.recipe"
TE_WORDS = [
    ["precision=bf16_fp8"],
    [
        "precision=bf16_fp8",
        "fp8.margin=2",
        "fp8.amax_history_len=16",
        "fp8.amax_compute_algo=most_recent",
        "fp8.reduce_amax=false",
    ],
    ["precision=bf16_fp8", "fp8.format=e4m3", "fp8.dot_product_attention=true"],
    ["precision=bf16_fp8_current"],
    [
        "precision=bf16_fp8_current",
        "fp8.use_power_2_scales=true",
        "fp8.override_linear_precision={dgrad: true, wgrad: true}",
    ],
    ["precision=bf16_fp8_block"],
    [
        "precision=bf16_fp8_block",
        "fp8.use_power_2_scales=false",
        "fp8.enable_2d_quantization=false",
    ],
    ["precision=bf16_mxfp8", "fp8.enable_2d_quantization=true"],
    ["precision=bf16_nvfp4"],
    ["precision=bf16_nvfp4", "fp8.enable_2d_quantization=false"],
    ["precision=bf16_nvfp4", "fp8.random_hadamard_transform=false"],
    ["precision=bf16_nvfp4", "fp8.stochastic_rounding=false"],
]


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Transformer Engine's own file of recipes, which is plain Python, without the package around it."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        pytest.skip("transformer-engine is not installed")
    file = importlib.util.spec_from_file_location(
        TE, Path(spec.origin).parent / "common/recipe/__init__.py"
    )
    assert file and file.loader
    module = importlib.util.module_from_spec(file)
    monkeypatch.setitem(sys.modules, TE, module)
    file.loader.exec_module(module)
    return module


@pytest.mark.parametrize("words", TE_WORDS, ids=" ".join)
def test_tes_genuine_recipes_say_what_ours_does(words: list[str], te: ModuleType) -> None:
    recipe = fp8cfg.compose(words)
    written = interop.to_te(recipe)
    assert type(written.value).__module__ == TE
    back = interop.from_object(written.value)
    ours, theirs = effective_values(recipe), effective_values(back.recipe)
    lost = {line.partition("=")[0] for line in written.lost if UNUSED_SWITCH not in line}
    assert {k for k in ours if k.startswith("fp8.") and ours[k] not in ("auto", theirs[k])} == {
        k for k in lost if k.startswith("fp8.")
    }
    assert lost <= {
        "fp8.params",
        "fp8.first_step",
        "fp8.high_precision_at_start",
        "fp8.high_precision_at_end",
    }
    assert [line for line in back.lost if UNUSED_SWITCH not in line] == [] and back.unknown == ()


def test_a_switch_that_tes_layers_do_not_read_is_reported(te: ModuleType) -> None:
    words = ["precision=bf16_fp8_current", "fp8.use_power_2_scales=true"]
    written = interop.to_te(fp8cfg.compose(words))
    assert written.value == te.Float8CurrentScaling(use_power_2_scales=True)
    assert f"fp8.use_power_2_scales=True: exported, but {UNUSED_SWITCH}" in written.lost
    back = interop.from_object(written.value)
    assert back.recipe.fp8.use_power_2_scales
    assert back.lost == (f"use_power_2_scales=True: imported, but {UNUSED_SWITCH}",)
    block = interop.from_object(te.Float8BlockScaling(use_f32_scales=True))
    assert effective_values(block.recipe)["fp8.use_power_2_scales"] is False
    assert block.lost == (f"use_f32_scales=True: imported, but {UNUSED_SWITCH}",)
    for preset in ("bf16_fp8_current", "bf16_fp8_block", "bf16_mxfp8"):
        lost = interop.to_te(fp8cfg.compose([f"precision={preset}"])).lost
        assert UNUSED_SWITCH not in " ".join(lost)


def test_what_a_te_recipe_says_and_ours_cannot(te: ModuleType) -> None:
    assert interop.from_object(te.NVFP4BlockScaling(nvfp4_4over6="all")).lost == (
        "nvfp4_4over6=all: how kernels accumulate and round is not part of a recipe",
    )
    with pytest.raises(
        ConfigError, match=r"amax_compute_algo=.*: is a function, which a recipe cannot name"
    ):
        interop.from_object(te.DelayedScaling(amax_compute_algo=lambda history: history))
    with pytest.raises(ConfigError, match="class=CustomRecipe: its quantizers are Python code"):
        interop.from_object(te.CustomRecipe(qfactory=lambda role: None))
    with pytest.raises(ConfigError, match=r"backward_override=dequantized: not an option"):
        interop.from_object(te.MXFP8BlockScaling(backward_override="dequantized"))


@pytest.mark.parametrize("words", TE_WORDS, ids=" ".join)
def test_what_a_genuine_recipe_prints_is_read_as_it_is(words: list[str], te: ModuleType) -> None:
    """Without what a recipe prints of no switch: how tensors are quantized."""
    made = interop.to_te(fp8cfg.compose(words)).value
    found, want = interop.from_words("te", [repr(made)]), interop.from_object(made)
    silent = {
        te.DelayedScaling: ["fp8.amax_compute_algo"],
        te.Float8CurrentScaling: ["fp8.use_power_2_scales"],
        te.Float8BlockScaling: ["fp8.use_power_2_scales"],
        te.MXFP8BlockScaling: [],
        te.NVFP4BlockScaling: [
            "fp8.enable_2d_quantization",
            "fp8.random_hadamard_transform",
            "fp8.stochastic_rounding",
        ],
    }[type(made)]
    assert len(found.lost) == bool(silent)
    for line in found.lost:
        assert line.endswith(("not read; the defaults of the recipe apply", "imported as max"))
    ours, theirs = effective_values(want.recipe), effective_values(found.recipe)
    assert {k for k in ours if ours[k] != theirs[k]} <= {*silent} and found.unknown == ()


def test_products_that_accumulate_otherwise_are_reported(te: ModuleType) -> None:
    current = te.Float8CurrentScaling(fp8_gemm_fprop=te.MMParams(use_split_accumulator=True))
    (line,) = interop.from_object(current).lost
    assert line.startswith("fp8_gemm_fprop=") and "how kernels accumulate" in line


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "recipe_type=NVFP4BlockScalin",
            "recipe_type=NVFP4BlockScalin: not an option; did you mean 'nvfp4blockscaling'?",
        ),
    ],
)
def test_lines_that_no_recipe_prints(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as e:
        interop.from_words("te", [text])
    assert e.value.problems[0].startswith(problem) and len(e.value.problems) == 1


@pytest.mark.parametrize("words", TE_WORDS, ids=" ".join)
def test_exported_python_makes_the_same_object(words: list[str], te: ModuleType) -> None:
    """It is run here, as a user would, and equals the object that `to_te` makes; our reader, which runs nothing, agrees."""
    recipe = fp8cfg.compose(words)
    text, _ = interop.to_text("te", recipe)
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["recipe"] == interop.to_te(recipe).value
    assert (
        effective_values(interop.from_words("te", [text]).recipe)["fp8.scaling"]
        == recipe.fp8.scaling
    )


def test_a_version_without_a_switch_has_it_off_and_one_without_a_class_says_so(
    te: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MXFP8BlockScaling(
        make_dataclass(
            "_", [("margin", int), ("fp8_format", Any), ("fp8_dpa", bool), ("fp8_mha", bool)]
        )
    ):  # as of 2.8
        def __init__(
            self, enable_2d_quantization: bool, **given: Any
        ) -> None:  # pydantic drops what it does not know
            super().__init__(0, **given)

    monkeypatch.setattr(te, "MXFP8BlockScaling", MXFP8BlockScaling)
    assert interop.to_te(fp8cfg.compose(["precision=bf16_mxfp8"])).value.margin == 0
    with pytest.raises(
        ConfigError, match="enable_2d_quantization=True: Transformer Engine changed it to None"
    ):
        interop.to_te(fp8cfg.compose(["precision=bf16_mxfp8", "fp8.enable_2d_quantization=true"]))
    monkeypatch.delattr(te, "NVFP4BlockScaling")
    with pytest.raises(
        interop.NotHere, match="transformer_engine: this version has no NVFP4BlockScaling"
    ):
        interop.to_te(fp8cfg.compose(["precision=bf16_nvfp4"]))


@pytest.mark.parametrize("words", TE_WORDS[:5] + TE_WORDS[7:8], ids=" ".join)
def test_what_a_recipe_prints_is_read(words: list[str], te: ModuleType) -> None:
    recipe = fp8cfg.compose(words)
    made = interop.to_te(recipe).value
    back = interop.from_words("te", [repr(made)])
    assert (back.recipe.fp8.scaling, back.recipe.fp8.format, back.recipe.fp8.margin) == (
        recipe.fp8.scaling,
        recipe.fp8.format,
        recipe.fp8.margin,
    ) and back.unknown == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("DelayedScaling(2)", "DelayedScaling: positional arguments are not read; use keywords"),
        ("x = 1", "0 calls; expected one of DelayedScaling"),
        (
            "DelayedScaling(margin=__import__('os').getpid())",
            "margin: expected a literal, not __import__('os').getpid()",
        ),
        ("def (", "not valid Python; expected a call such as DelayedScaling(margin=1)"),
        (
            "recipe.DelayedScalng(margin=1)",
            "DelayedScalng: not a recipe of Transformer Engine; did you mean 'DelayedScaling'?",
        ),
        ("DelayedScaling(); MXFP8BlockScaling()", "2 calls"),
        ("(" * 500, "not valid Python"),
        ("DelayedScaling(margin=-1)", "margin=-1: must be at least 0"),
    ],
)
def test_texts_that_are_no_recipe(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as e:
        interop.from_words("te", [text])
    assert str(e.value).startswith(problem)


def test_old_te_calls_are_read() -> None:
    found = read_recipe_text(
        "fp8_recipe = recipe.DelayedScaling(fp8_format=recipe.Format.E4M3, interval=4, override_linear_precision=(False, False, True))"
    )
    fp8 = interop.from_mapping("te", found).recipe.fp8
    assert (fp8.format, fp8.interval, fp8.override_linear_precision.wgrad) == ("e4m3", 4, True)


def test_without_transformer_engine_the_line_says_so() -> None:
    if TE in sys.modules:
        pytest.skip("it is installed")
    with pytest.raises(interop.NotHere, match="transformer_engine: cannot be imported"):
        interop.to_te(fp8cfg.compose(["precision=bf16_fp8"]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "words",
    [
        ["fp8.format=e4m3"],
        ["fp8.use_power_2_scales=true"],
        ["fp8.emulate=true"],
        ["fp8.override_linear_precision.wgrad=true"],
        ["fp8.override_linear_precision.fprop=true"],
        ["fp8.granularity=row", "fp8.override_linear_precision.dgrad=true"],
        ["fp8.granularity=row"],
    ],
)
def test_torchaos_genuine_config_says_what_ours_does(words: list[str]) -> None:
    pytest.importorskip("torchao")
    recipe = fp8cfg.compose(["precision=bf16_fp8_current", *words])
    written = interop.to_torchao(recipe)
    assert type(written.value).__name__ == "Float8LinearConfig"
    back = interop.from_object(written.value)
    ours, theirs = effective_values(recipe), effective_values(back.recipe)
    assert {k for k in ours if k.startswith("fp8.") and ours[k] != theirs[k]} == {
        "fp8.params",
        "fp8.high_precision_at_start",
        "fp8.high_precision_at_end",
    }
    assert (back.lost, back.unknown) == ((), ())


@pytest.mark.filterwarnings("ignore")
def test_torchaos_fp8_all_gather_is_storage_gather_both_ways() -> None:
    config = pytest.importorskip("torchao.float8.config").Float8LinearConfig(
        enable_fsdp_float8_all_gather=True
    )
    found = interop.from_object(config)
    assert (found.recipe.storage.shard, found.recipe.storage.gather, found.lost) == (
        "fsdp",
        "fp8",
        (),
    )
    found.recipe.check()
    assert interop.to_torchao(found.recipe).value.enable_fsdp_float8_all_gather
    assert not interop.to_torchao(
        fp8cfg.compose(
            [
                "precision=bf16_fp8_current",
                "fp8.params=false",
                "storage={shard: fsdp, gather: bf16}",
            ]
        )
    ).value.enable_fsdp_float8_all_gather


def plugin(name: str, **fields: Any) -> Any:
    """An object of a class of that name with these attributes; neither NeMo nor Megatron-Bridge installs beside this torch."""
    return make_dataclass(name, list(fields))(**fields)


FIELDS = {
    "fp8": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_margin": 1,
    "fp8_amax_history_len": 32,
    "fp8_amax_compute_algo": "max",
    "fp8_wgrad": True,
    "fp8_param_gather": True,
    "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 0,
    "num_layers_at_end_in_bf16": 0,
    "grad_reduce_in_fp32": True,
}


@pytest.mark.parametrize(
    "obj",
    [
        plugin(
            "MixedPrecisionConfig",
            fp8_param=None,
            fp4=None,
            fp4_recipe="nvfp4",
            loss_scale=None,
            initial_loss_scale=2**32,
            bf16=True,
            fp16=False,
            fp32=False,
            params_dtype="torch.bfloat16",
            pipeline_dtype=None,
            autocast_enabled=False,
            **FIELDS,
        ),
        plugin("MegatronMixedPrecision", precision="bf16-mixed", **FIELDS),
        plugin(
            "MegatronMixedPrecision",
            precision="bf16-mixed",
            dtype_config=SimpleNamespace(
                bf16=True, fp16=False, fp32=False, loss_scale=(None,), **FIELDS
            ),
        ),
        plugin(
            "DtypeConfig", bf16=True, fp16=False, fp32=False, initial_loss_scale=(None,), **FIELDS
        ),
    ],
    ids=["bridge", "nemo", "nemo with dtype_config", "dtype_config"],
)
def test_plugins_are_read(obj: Any) -> None:
    found = interop.from_object(obj)
    assert found.recipe.precision == fp8cfg.compose(
        ["precision=bf16_fp8", "fp8.margin=1", "fp8.amax_history_len=32"]
    ).precision and found[1:] == ((), ())


def test_an_object_of_nobody_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^dict: is not a known class of another project; pass keys and values to from_mapping$",
    ):
        interop.from_object({})


def test_the_base_keeps_all_but_its_precision() -> None:
    base = fp8cfg.compose(["recipe=llama_8b", "precision=bf16_mxfp8"])
    found = interop.from_mapping("nemo", {"precision": "bf16-mixed", "fp8": "hybrid"}, base).recipe
    assert (found.model, found.fp8.scaling, base.fp8.scaling) == (base.model, "delayed", "mxfp8")
