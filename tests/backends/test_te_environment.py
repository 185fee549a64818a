"""NVTE_* variables: those that contradict a recipe are refused by name, with the key; the others are left alone."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import fp8cfg
from fp8cfg.backends.te.attention import chosen_kernel
from fp8cfg.backends.te.rules import contradictions
from fp8cfg.numerics import Region
from tests.support import te_standin
from tests.support.te_small import planned, transformer
from tests.support.te_table import CURRENT, MXFP8, NVFP4, node

BLOCK, ATTENTION = {"scaling": "block"}, {"dot_product_attention": True}
BOTH = {"override_linear_precision": {"dgrad": True, "wgrad": True}}


@pytest.mark.parametrize(
    ("given", "name", "refused", "fine", "key"),
    [
        (BLOCK, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", "0", "fp8.use_power_2_scales=true"),
        (
            BLOCK | {"use_power_2_scales": False},
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
            "0",
            "1",
            "fp8.use_power_2_scales=false",
        ),
        (
            CURRENT,
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
            "1",
            "0",
            "fp8.use_power_2_scales=false",
        ),
        ({}, "NVTE_UNFUSED_FP8_UPDATE", "1", "0", "fp8.scaling=delayed"),
        (
            CURRENT,
            "NVTE_BACKWARD_OVERRIDE",
            "high_precision",
            None,
            "fp8.override_linear_precision.dgrad=false",
        ),
        (
            CURRENT | BOTH,
            "NVTE_BACKWARD_OVERRIDE",
            "dequantized",
            "high_precision",
            "fp8.override_linear_precision.dgrad=true",
        ),
        (NVFP4, "NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1", "0", "fp8.enable_2d_quantization=true"),
        (NVFP4, "NVTE_NVFP4_DISABLE_RHT", "1", "0", "fp8.random_hadamard_transform=true"),
        (
            NVFP4 | {"random_hadamard_transform": False},
            "NVTE_NVFP4_DISABLE_RHT",
            "0",
            "1",
            "fp8.random_hadamard_transform=false",
        ),
        (NVFP4, "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1", "0", "fp8.stochastic_rounding=true"),
        (NVFP4, "NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1", "0", "fp8.scaling=nvfp4"),
        (NVFP4, "NVTE_NVFP4_4OVER6", "weights", "none", "fp8.scaling=nvfp4"),
        (ATTENTION, "NVTE_DPA_FP8_RECIPE", "F16", "", "fp8.dot_product_attention=true"),
        (
            {},
            "NVTE_DPA_FP8_RECIPE",
            "Float8CurrentScaling",
            "F16",
            "fp8.dot_product_attention=false",
        ),
        (CURRENT, "NVTE_DPA_FP8_RECIPE_DPA", "1", "0", "fp8.dot_product_attention=false"),
        (MXFP8, "NVTE_DPA_FP8_RECIPE_MHA", "1", "0", "fp8.multi_head_attention=false"),
        (ATTENTION, "NVTE_FP8_DPA_BWD", "0", "1", "fp8.dot_product_attention=true"),
        (ATTENTION, "NVTE_UnfusedDPA_Emulate_FP8", "1", "0", "fp8.emulate=false"),
        (ATTENTION, "NVTE_FUSED_ATTN", "0", "1", "fp8.dot_product_attention=true"),
    ],
)
def test_a_variable_that_contradicts_is_refused(
    given: dict[str, Any], name: str, refused: str, fine: str | None, key: str
) -> None:
    (violation,) = contradictions(node(given), {name: refused, "HOME": "/"})
    line = str(violation)
    assert line.startswith(f"{name}={refused}: contradicts {key}") and "; unset it" in line
    assert not fine or line.endswith(f"or set it to {fine}")
    assert fine is None or contradictions(node(given), {name: fine}) == []


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (CURRENT, "NVTE_UNFUSED_FP8_UPDATE"),
        ({}, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
        (MXFP8, "NVTE_NVFP4_DISABLE_RHT"),
        ({}, "NVTE_FP8_DPA_BWD"),
        ({}, "NVTE_FLASH_ATTN"),
        (ATTENTION, "NVTE_FWD_LAYERNORM_SM_MARGIN"),
    ],
)
def test_a_variable_that_means_nothing_to_the_recipe_is_left_alone(
    given: dict[str, Any], name: str
) -> None:
    assert (
        contradictions(node(given), {name: "1"}) == []
        and contradictions(node(given), {name: "0"}) == []
    )


def test_conversion_refuses_before_it_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8cfg.backends.te import backend

    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    model = transformer()
    with (
        te_standin.transformer_engine(),
        pytest.raises(fp8cfg.ConfigError, match="NVTE_UNFUSED_FP8_UPDATE=1"),
    ):
        backend.convert(model, node({}), planned(node({}), model), Region(), "scaled_mm")
    assert not any(type(m).__module__.startswith("fp8cfg.backends") for m in model.modules())


def test_every_variable_that_the_library_reads_for_its_recipes_is_known() -> None:
    """A new version that reads another NVTE_* in its recipes has to be looked at."""
    import importlib.util
    import re
    from pathlib import Path

    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        pytest.skip("transformer-engine is not installed")
    source = (Path(spec.origin).parent / "common/recipe/__init__.py").read_text()
    read = set(re.findall(r'getenv\(\s*"(NVTE_\w+)"', source))
    names = {
        "NVTE_NVFP4_4OVER6_E4M3_USE_256",
        "NVTE_NVFP4_4OVER6_ERR_MODE",
    }  # mean nothing without NVTE_NVFP4_4OVER6
    for given in ({}, CURRENT, BLOCK, MXFP8, NVFP4):
        names |= {
            found.setting.split("=")[0]
            for found in contradictions(node(given), dict.fromkeys(read, "?"))
        }
    assert names == read


@pytest.mark.parametrize(
    ("chosen", "kernel"),
    [
        (
            {
                "use_flash_attention": False,
                "use_fused_attention": True,
                "use_unfused_attention": True,
            },
            "fused",
        ),
        ({"use_flash_attention": None}, ""),
    ],
)
def test_the_attention_kernel_that_te_chose(
    chosen: dict[str, bool | None], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(_attention_backends=chosen)
    monkeypatch.setitem(
        sys.modules,
        "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
        module,
    )
    assert chosen_kernel() == kernel
