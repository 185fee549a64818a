"""What a user types from the documents that this project follows, Accelerate's guide to low precision, MS-AMP's chart and NeMo's page
on mixed precision, and the recipe that it gives. Each snippet is written anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.interop.projects import from_file
from fp8cfg.planning import remarks
from fp8cfg.recipes import llama3_8b, llama_8b, llama_tiny
from tests.support.small import chart_row

ACCELERATOR = "from accelerate import Accelerator\nfrom accelerate.utils import FP8RecipeKwargs\n"
HANDED = 'accelerator = Accelerator(mixed_precision="fp8", kwarg_handlers=kwargs)\n'
TE = {"fp8.enabled": True, "fp8.first_step": "te", "fp8.output_layer": True, "backend": "te"}
MSAMP = {
    "fp8.enabled": True,
    "fp8.amax_history_len": 16,
    "fp8.reduce_amax": False,
    "fp8.output_layer": True,
    "storage.accumulate": "stored",
    "backend": "msamp",
}
SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "the old handler, MS-AMP": (
        ACCELERATOR + 'kwargs = [FP8RecipeKwargs(backend="msamp")]\n' + HANDED,
        MSAMP,
    ),
    "the old handler, MS-AMP O2": (
        ACCELERATOR
        + 'kwargs = [FP8RecipeKwargs(backend="msamp", optimization_level="O2")]\n'
        + HANDED,
        {**MSAMP, "opt_level": "O2"},
    ),
    "the old handler, TE": (
        ACCELERATOR + 'kwargs = [FP8RecipeKwargs(backend="te")]\n' + HANDED,
        TE,
    ),
    "the old handler, all of TE's": (  # those that TE 2 knows no more leave the backend to be chosen
        ACCELERATOR
        + 'kwargs = [FP8RecipeKwargs(backend="te", margin=2, interval=4, fp8_format="E4M3", amax_history_len=32,\n'
        '    amax_compute_algo="most_recent", override_linear_precision=(False, False, True), use_autocast_during_eval=True)]\n'
        + HANDED,
        {
            "fp8.enabled": True,
            "fp8.output_layer": True,
            "fp8.margin": 2,
            "fp8.interval": 4,
            "fp8.format": "e4m3",
            "fp8.amax_history_len": 32,
            "fp8.amax_compute_algo": "most_recent",
            "fp8.override_linear_precision.wgrad": True,
            "fp8.use_autocast_during_eval": True,
        },
    ),
    "the old handler, no backend": (
        ACCELERATOR + "kwargs = [FP8RecipeKwargs(margin=1)]\n" + HANDED,
        {**TE, "fp8.margin": 1},
    ),
    "an Accelerator alone": (
        'from accelerate import Accelerator\naccelerator = Accelerator(mixed_precision="fp8")\n',
        {"fp8.enabled": True},
    ),
    "an Accelerator in bf16": (
        'from accelerate import Accelerator\naccelerator = Accelerator(gradient_accumulation_steps=n, mixed_precision="bf16")\n',
        {},
    ),
}
NEMO = "import nemo_run as run\nfrom nemo import lightning as nl\nfrom nemo.collections.llm.recipes.precision.mixed_precision import *\n"
PLUGINS = {
    name: f"{NEMO}trainer = run.Config(nl.Trainer, plugins={name}(), **trainer_args)\n"
    for name in ("bf16_mixed", "fp16_mixed", "bf16_with_fp8_mixed", "fp16_with_fp8_mixed")
}


def imported(project: str, text: str, folder: Path, name: str = "script.py") -> Any:
    (folder / name).write_text(text)
    return from_file(project, folder / name, llama_tiny())


def precision(words: list[str]) -> fp8cfg.Precision:
    return fp8cfg.compose(words).precision


@pytest.mark.parametrize("name", SCRIPTS)
def test_accelerate_in_python(name: str, tmp_path: Path) -> None:
    text, want = SCRIPTS[name]
    found = imported("accelerate", text, tmp_path)
    assert {key: mine for key, (mine, _) in found.recipe.diff(llama_tiny()).items()} == want
    assert ("backend is missing" in str(found.lost)) == (
        name in ("the old handler, no backend", "an Accelerator alone")
    )


def test_accelerate_in_its_file(tmp_path: Path) -> None:
    assert imported(
        "accelerate", "mixed_precision: fp8\n", tmp_path, "a.yaml"
    ).recipe.precision == precision(["precision=bf16_fp8", "fp8.params=false"])
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"fp8_config\.opt_level=O3: Accelerate has only O1 and O2; remove it there, and set opt_level=O3",
    ):
        imported(
            "accelerate",
            "mixed_precision: fp8\nfp8_config: {backend: MSAMP, opt_level: O3}\n",
            tmp_path,
            "b.yaml",
        )


@pytest.mark.parametrize("name", PLUGINS)
def test_nemo_in_python_gives_the_preset_that_the_same_line_gives_here(
    name: str, tmp_path: Path
) -> None:
    recipe = llama3_8b()
    recipe.trainer.plugins = getattr(fp8cfg, name)()
    assert imported("nemo", PLUGINS[name], tmp_path).recipe.precision == recipe.precision


def test_nemos_recipe_is_changed_in_place(tmp_path: Path) -> None:
    text = (
        "from functools import partial\nfrom nemo.collections import llm\n"
        + NEMO
        + "recipe = partial(llm.llama3_8b.pretrain_recipe)()\nrecipe.trainer.plugins = fp16_mixed()\nrecipe.trainer.plugins.fp8_margin = 1\n"
    )
    found = imported("nemo", text, tmp_path)
    recipe = llama3_8b()
    recipe.trainer.plugins = fp8cfg.fp16_mixed()
    assert found.recipe.precision == recipe.precision
    assert found.lost == ("fp8_margin=1: has no effect, FP8 is off",)


def test_what_stands_beside_the_plugin_is_not_lost_without_a_word(tmp_path: Path) -> None:
    text = f"{NEMO}trainer = run.Config(nl.Trainer, plugins=bf16_with_fp8_mixed(), fp8_margin=2, max_steps=5000, **fp8_args)\n"
    found = imported("nemo", text, tmp_path)
    assert found.recipe.fp8.margin == 0
    assert found.recipe.trainer.max_steps == 5000
    assert found.lost == ("trainer.fp8_margin=2, trainer.**fp8_args: not read",)


def test_nemos_page_shows_two_precisions_and_a_function_names_one(tmp_path: Path) -> None:
    both = PLUGINS["bf16_mixed"] + PLUGINS["fp16_mixed"]
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"has 2 precisions, bf16_mixed, fp16_mixed; add the name of a function",
    ):
        imported("nemo", both, tmp_path)
    (tmp_path / "two.py").write_text(
        "def one():\n    return run.Config(nl.Trainer, plugins='bf16-mixed')\n\n"
        "def two():\n    return nl.Trainer(plugins=run.Config(MegatronMixedPrecision, precision='bf16-mixed',"
        " fp8='hybrid', fp8_margin=2, fp8_params=True))\n"
    )
    assert from_file("nemo", tmp_path / "two.py:one").recipe.precision == fp8cfg.bf16_mixed()
    found = from_file("nemo", tmp_path / "two.py:two").recipe.precision
    assert (found.fp8.enabled, found.fp8.margin, found.fp8.params) == (True, 2, True)
    with pytest.raises(fp8cfg.ConfigError, match="three: the file has no such function"):
        from_file("nemo", tmp_path / "two.py:three")
    with pytest.raises(fp8cfg.ConfigError, match="has no precision, such as plugins="):
        imported("nemo", "import nemo_run as run\n", tmp_path)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_trainer_is_made_with_its_plugins(name: str) -> None:
    """The trainer of NeMo's page, in this project's Python: a node of its own, and a part of a recipe."""
    trainer_args = {"num_nodes": 2, "devices": 8, "max_steps": 50}
    trainer = fp8cfg.Trainer(plugins=getattr(fp8cfg, name)(), **trainer_args)
    assert trainer.plugins == getattr(fp8cfg, name)() and (
        trainer.num_nodes,
        trainer.devices,
        trainer.max_steps,
    ) == (2, 8, 50)
    assert llama3_8b(trainer=trainer).precision == trainer.plugins
    config = fdl.build(
        fdl.Config(fp8cfg.Trainer, plugins=fdl.Config(getattr(fp8cfg, name)), **trainer_args)
    )
    assert config == trainer, "run.Config is Fiddle's"


def test_the_missions_lines(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = llama_8b()
    recipe.trainer.plugins = fp8cfg.fp16_mixed()
    assert (
        recipe == fp8cfg.compose(["recipe=llama_8b", "precision=fp16"])
        and recipe.precision.compute == "fp16"
    )
    recipe.trainer.plugins = fp8cfg.bf16_with_fp8_mixed()
    recipe.fp8.margin = 1
    words = ["recipe=llama_8b", "precision=bf16_fp8", "fp8.margin=1"]
    assert fp8cfg.compose(words) == recipe and fp8cfg.compose(words[::-1]) == recipe
    assert main(["check", *words, "data.tokenizer=bytes"]) == 0
    assert "llama_8b" in capsys.readouterr().out


def test_fp8_arguments_stand_where_nemo_has_them() -> None:
    """NeMo's page gives them to the trainer, and they are fields of the plugin; a preset takes them here."""
    made = fp8cfg.bf16_with_fp8_mixed(
        fp8={
            "format": "hybrid",
            "margin": 1,
            "amax_history_len": 8,
            "amax_compute_algo": "most_recent",
            "params": True,
        }
    )
    assert made == precision(
        [
            "precision=bf16_fp8",
            "fp8.margin=1",
            "fp8.amax_history_len=8",
            "fp8.amax_compute_algo=most_recent",
        ]
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("FP16 AMP", ["precision=fp16_amp"]),
        ("TE", ["precision=bf16_fp8_amp"]),
        ("O1", ["precision=bf16_fp8", "opt_level=O1"]),
        ("O2", ["precision=bf16_fp8", "opt_level=O2"]),
        ("O3", ["precision=bf16_fp8", "opt_level=O3"]),
    ],
)
def test_each_row_of_the_chart(row: str, words: list[str]) -> None:
    assert remarks.row_name(chart_row(fp8cfg.compose(words))) == row


def test_a_preset_of_the_chart_trains() -> None:
    from tests.support.small import losses

    for preset in ("fp16_amp", "bf16_fp8_amp"):
        found = losses(f"precision={preset}", count=2)
        assert len(found) == 2 and all(4 < loss < 7 for loss in found)
