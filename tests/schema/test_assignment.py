"""Assignment to nodes: copies, deletion, NumPy's numbers."""

from __future__ import annotations

import fiddle as fdl
import numpy as np
import pytest
from torch import nn

import fp8cfg
from fp8cfg.recipes import llama_tiny


def test_recipes_share_no_node() -> None:
    preset, recipes = fp8cfg.bf16_with_fp8_mixed(), [llama_tiny() for _ in range(3)]
    for margin, recipe in enumerate(recipes):
        recipe.trainer.plugins = preset
        recipe.fp8.margin = margin
    assert [r.fp8.margin for r in recipes] == [0, 1, 2] and preset.fp8.margin == 0
    first, second = recipes[:2]
    second.model = first.model
    second.model.hidden_size = 512
    assert first.model.hidden_size == llama_tiny().model.hidden_size
    assert first.precision is first.trainer.plugins


def test_a_recipe_made_of_nodes_has_its_own() -> None:
    model = llama_tiny().model
    one, other = fp8cfg.Recipe(model=model), fp8cfg.Recipe(model=model)
    one.model.num_layers = 2
    assert (other.model.num_layers, model.num_layers) == (4, 4)


@pytest.mark.parametrize(
    ("delete", "line"),
    [
        (
            "fp8.margin",
            "fp8.margin: a key always has a value and cannot be deleted; set fp8.margin=0, its default",
        ),
        ("model", "model: a key always has a value and cannot be deleted"),
        ("fp8", "fp8: a key always has a value and cannot be deleted"),
        ("opt_level", "opt_level: a key always has a value and cannot be deleted"),
        ("fp8.margn", "fp8.margn: no such key; did you mean 'fp8.margin'?"),
    ],
)
def test_a_key_cannot_be_deleted(delete: str, line: str) -> None:
    recipe = llama_tiny()
    with pytest.raises(fp8cfg.ConfigError) as refused:
        exec(f"del recipe.{delete}")
    assert refused.value.problems == [line] and recipe.fp8.margin == 0


def test_numbers_of_numpy_are_numbers() -> None:
    recipe = llama_tiny()
    recipe.trainer.max_steps, recipe.optim.lr, recipe.fp8.enabled = (
        np.int64(55),
        np.float64(1e-3),
        np.bool_(True),
    )
    assert (recipe.trainer.max_steps, recipe.optim.lr, recipe.fp8.enabled) == (55, 1e-3, True)
    assert type(recipe.trainer.max_steps) is int and type(recipe.fp8.enabled) is bool
    recipe.optim.betas = np.array([0.8, 0.9])
    assert recipe.optim.betas == (0.8, 0.9) and type(recipe.optim.betas[0]) is float
    assert fp8cfg.Recipe(trainer={"max_steps": np.int64(55)}).trainer.max_steps == 55
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"^fp8\.margin=\[1\]: expected an integer, got a list; write fp8\.margin=1$",
    ):
        recipe.fp8.margin = np.array([1])
    with pytest.raises(fp8cfg.ConfigError, match=r"trainer\.max_steps=-1: must be at least"):
        recipe.trainer.max_steps = np.int32(-1)


@pytest.mark.parametrize(
    "statement",
    [
        "recipe.trainer.max_steps = 10**5000",
        "recipe.trainer.max_steps = -10**5000",
        "recipe.model.hidden_size = 1e308",
        "recipe.model.seq_length = 2**63",
        "recipe.optim.lr = 10**400",
        "recipe.fp8.scaling = 10**5000",
        "recipe.name = 10**5000",
    ],
)
def test_numbers_that_nothing_counts_by_are_refused(statement: str) -> None:
    """Sizes above a float's range were a traceback of check and plan."""
    with pytest.raises(fp8cfg.ConfigError, match=r"^[a-z_.0-9]+: the number has too many digits$"):
        exec(statement, {"recipe": llama_tiny()})
    recipe = llama_tiny()
    with pytest.raises(
        fp8cfg.ConfigError, match=r"^optim\.betas=a number of many digits: expected a number"
    ):
        recipe.optim.betas = [10**5000, 0.9]  # type: ignore[assignment]
    for key in ("hidden_size", "vocab_size", "seq_length", "kv_channels", "ffn_hidden_size"):
        setattr(recipe.model, key, 2**62)
    fp8cfg.plan(recipe)


def test_a_data_source_by_its_name() -> None:
    recipe = fp8cfg.Recipe()
    recipe.data = "jsonl"
    assert recipe.data.name == "jsonl"
    with pytest.raises(fp8cfg.ConfigError, match=r"^data\.name=nope: not an option; choose from"):
        recipe.data = "nope"


def test_a_task_by_its_name() -> None:
    recipe = fp8cfg.compose(["recipe=llama_8b"])
    assert recipe.task == "pretrain"
    recipe.task = "lora"
    assert recipe.task == "lora"
    assert recipe == fp8cfg.compose(["recipe=llama_8b", "task=lora"])
    with pytest.raises(fp8cfg.ConfigError, match="task=nope: no such task; choose from lora, pre"):
        recipe.task = "nope"


def test_a_level_of_storage() -> None:
    recipe = fp8cfg.Recipe()
    recipe.storage = "o2"
    assert recipe.opt_level == "O2"
    with pytest.raises(fp8cfg.ConfigError, match="storage=nope: expected a mapping of keys"):
        recipe.storage = "nope"


def test_a_fiddle_config_of_a_preset() -> None:
    recipe = fp8cfg.Recipe()
    recipe.trainer.plugins = fdl.Config(fp8cfg.bf16_with_fp8_mixed, fp8={"margin": 1})
    assert recipe.fp8.enabled and recipe.fp8.margin == 1
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fp8 = fp8cfg.convert_model(model, fdl.Config(fp8cfg.bf16_with_fp8_mixed))
    assert fp8.plan[0].fp8
