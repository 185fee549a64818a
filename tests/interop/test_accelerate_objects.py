"""Accelerate's handlers, as calls in a script and as objects, read and written."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg import interop
from fp8cfg.schema.recipe import Recipe


@pytest.mark.parametrize(
    ("text", "ours"),
    [  # of the documentation, in each of its years
        (
            'kwargs = [FP8RecipeKwargs(backend="msamp", optimization_level="O2")]\naccelerator = Accelerator(mixed_precision="fp8", kwarg_handlers=kwargs)',
            ("msamp", "O2", 0),
        ),
        ('FP8RecipeKwargs(backend="te")', ("te", None, 0)),
        ('kwargs = TERecipeKwargs(fp8_format="HYBRID", margin=1)', ("te", None, 1)),
        ('accelerate.utils.MSAMPRecipeKwargs(opt_level="O1")', ("msamp", "O1", 0)),
    ],
)
def test_calls_of_handlers_are_read_and_not_run(
    text: str, ours: tuple[str, str | None, int], tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"import nothing_there\n{text}\n")
    for recipe in (
        interop.from_words("accelerate", [text]).recipe,
        interop.from_file("accelerate", file).recipe,
    ):
        assert (recipe.backend, recipe.opt_level, recipe.fp8.margin) == ours and recipe.fp8.enabled


def handler(name: str, **values: Any) -> Any:
    utils = pytest.importorskip("accelerate.utils")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(utils, name)(**values)


def test_handler_objects_are_read() -> None:
    te = interop.from_object(
        handler(
            "TERecipeKwargs",
            margin=2,
            fp8_format="e4m3",
            amax_history_len=16,
            amax_compute_algo="max",
            override_linear_precision=(False, False, True),
        )
    )
    assert (
        te.recipe.backend,
        te.recipe.fp8.margin,
        te.recipe.fp8.format,
        te.recipe.fp8.amax_history_len,
        te.recipe.fp8.override_linear_precision.wgrad,
    ) == ("auto", 2, "e4m3", 16, True)  # TE 2 has no such override
    old = interop.from_object(handler("FP8RecipeKwargs", backend="te", margin=3))
    assert (old.recipe.backend, old.recipe.fp8.margin) == ("te", 3)
    old = interop.from_object(handler("FP8RecipeKwargs", backend="msamp", opt_level="O1"))
    assert (old.recipe.backend, old.recipe.opt_level) == ("msamp", "O1")
    assert interop.from_object(handler("MSAMPRecipeKwargs")).recipe.opt_level == "O2"


@pytest.mark.filterwarnings("ignore")
def test_torchaos_handler_is_read_by_its_config() -> None:
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig

    for recipe, wanted in {
        "tensorwise": ("tensor", "hybrid", False, False),
        "rowwise": ("row", "e4m3", True, False),
        "rowwise_with_gw_hp": ("row", "e4m3", True, True),
    }.items():
        found = interop.from_object(
            handler("AORecipeKwargs", config=Float8LinearConfig.from_recipe_name(recipe))
        )
        fp8 = found.recipe.fp8
        assert (
            fp8.granularity,
            fp8.format,
            bool(fp8.use_power_2_scales),
            fp8.override_linear_precision.wgrad,
        ) == wanted
        assert (fp8.scaling, found.recipe.backend, found.unknown) == ("current", "torchao", ())
        assert (
            interop.from_object(Float8LinearConfig.from_recipe_name(recipe)).recipe == found.recipe
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "words",
    [
        ["precision=bf16_fp8", "fp8.margin=2", "fp8.override_linear_precision.dgrad=true"],
        ["precision=bf16_mxfp8"],
        ["precision=bf16_fp8", "opt_level=O1", "backend=msamp"],
        ["precision=bf16_fp8_current", "fp8.format=e4m3"],
        [
            "precision=bf16_fp8_current",
            "fp8={granularity: row, use_power_2_scales: true, override_linear_precision: {wgrad: true}}",
        ],
    ],
)
def test_handler_objects_are_written_and_read_back(words: list[str]) -> None:
    pytest.importorskip("accelerate")
    recipe: Recipe = fp8cfg.compose(words)
    written = interop.to_handler(recipe)
    back = interop.from_object(written.value).recipe
    lost = {line.partition("=")[0] for line in written.lost if ": exported" not in line}
    from fp8cfg.interop.translation import effective_values

    ours, theirs = effective_values(recipe), effective_values(back)
    follows = {"backend"} | {k for k in ours if k.startswith("storage.")}
    assert {
        k
        for k in ours
        if k.startswith(("fp8.", "precision.", "opt_level")) and ours[k] != theirs[k]
    } - follows == lost - follows
    of_library = (
        {"fp8.first_step"}
        if recipe.backend == "te"
        else {"fp8.amax_history_len", "fp8.reduce_amax", "storage.accumulate"}
        if recipe.backend == "msamp"
        else set()
    )
    assert (
        lost
        <= {
            "fp8.params",
            "fp8.output_layer",
            "fp8.high_precision_at_start",
            "fp8.high_precision_at_end",
        }
        | of_library
    )
