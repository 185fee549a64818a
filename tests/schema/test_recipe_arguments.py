"""Recipe functions with arguments, as NeMo's have them, and the answers to nodes that NeMo has and fp8cfg does not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.recipes import llama_8b, llama_tiny
from fp8cfg.schema import recipe_registry


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    recipe_registry.recipes()
    monkeypatch.setattr(recipe_registry, "_RECIPES", dict(recipe_registry._RECIPES))
    yield


def test_each_argument_is_a_key(tmp_path: Path) -> None:
    made = llama_8b(
        name="mine",
        dir=tmp_path,
        num_nodes=2,
        num_gpus_per_node=4,
        precision=fp8cfg.bf16_with_mxfp8_mixed(),
    )
    assert made == fp8cfg.compose(
        [
            "recipe=llama_8b",
            "name=mine",
            f"log.dir={tmp_path}",
            "trainer.num_nodes=2",
            "trainer.devices=4",
            "precision=bf16_mxfp8",
        ]
    )
    assert llama_8b(name=None, dir=None, precision=None) == llama_8b()
    for precision in ("bf16-mixed", "fp16_mixed", {"compute": "fp16"}):
        assert llama_8b(precision=precision).precision.compute == (
            "bf16" if precision == "bf16-mixed" else "fp16"
        )


def test_parts_are_combined() -> None:
    optim, data = fp8cfg.Optim(lr=1e-3, warmup_steps=10), fp8cfg.Data(name="tiny")
    made = llama_tiny(
        optim=optim, data=data, trainer={"max_steps": 20}, num_nodes=2, precision="bf16_fp8"
    )
    assert (
        made.optim,
        made.data,
        made.trainer.max_steps,
        made.trainer.num_nodes,
        made.fp8.enabled,
    ) == (optim, data, 20, 2, True)
    assert made.trainer.val_check_interval == llama_tiny().trainer.val_check_interval, (
        "a mapping merges"
    )
    optim.lr = 5.0
    assert made.optim.lr == 1e-3


def test_every_mistake_is_said() -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        llama_8b(nme="mine", num_nodes="two", precision="bf16_pf8")  # type: ignore[arg-type]
    assert e.value.problems == [
        "nme: no such key; did you mean 'name'?",
        "trainer.num_nodes=two: expected an integer, got str",
        "precision=bf16_pf8: no such precision preset; did you mean 'bf16_fp8'?",
    ]


def test_a_recipe_function_of_ones_own_has_them_too_and_its_own_go_first(registered: None) -> None:
    @fp8cfg.recipe
    def mine_with_layers(layers: int = 2, name: str = "mine") -> fp8cfg.Recipe:
        """A function with arguments."""
        made = llama_tiny(name=f"{name}_{layers}")
        made.model.num_layers = layers
        return made

    made = mine_with_layers(layers=3, name="yours", num_gpus_per_node=2)
    assert (made.name, made.model.num_layers, made.trainer.devices) == ("yours_3", 3, 2)
    assert list(inspect.signature(mine_with_layers).parameters)[:3] == ["layers", "name", "dir"]
    assert fp8cfg.compose(["recipe=mine_with_layers"]).model.num_layers == 2
    assert list(inspect.signature(llama_8b).parameters) == [
        "name",
        "dir",
        "num_nodes",
        "num_gpus_per_node",
        "precision",
        "task",
        "parts",
    ]
    assert llama_8b.__doc__ == "Short for llama31_8b."


@pytest.mark.parametrize(
    ("key", "where"),
    [
        ("optim.config", "optim itself, as in optim.lr"),
        ("optim.config.lr", "optim.lr"),
        ("model.config", "model itself"),
        ("model.config.num_layers", "model.num_layers"),
        (
            "resume",
            "log.resume=auto with log.folder, or fp8cfg resume FOLDER, in Python fp8cfg.resume(folder)",
        ),
        ("log.ckpt", "checkpoint: checkpoint.every_n_steps"),
        ("log.ckpt.save_top_k", "checkpoint: "),
        ("trainer.callbacks", "fp8cfg.fit(job, callbacks"),
        ("trainer.logger", "log.loggers"),
        ("optim.lr_scheduler.constant_steps", "optim: "),
        ("trainer.strategy.ddp.grad_reduce_in_fp32", "storage.comm"),
        ("trainer.strategy.ddp", "trainer.devices, storage.comm and"),
        ("callbacks", "fp8cfg.fit(job, callbacks"),
        ("clone", "copy.deepcopy(recipe)"),
        ("walk", "fiddle.selectors on fp8cfg.lower(recipe)"),
        ("to_yaml", "fp8cfg.to_yaml(recipe)"),
    ],
)
def test_nodes_of_nemo_are_answered_at_each_door(key: str, where: str) -> None:
    line = f"{key}: no such key; it belongs to {where}"
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.compose([f"{key}=1"])
    assert str(e.value).startswith(line)
    *nodes, leaf = key.split(".")
    node: object = fp8cfg.Recipe()
    if len(nodes) < 2:
        for name in nodes:
            node = getattr(node, name)
        with pytest.raises(fp8cfg.ConfigError) as e:
            getattr(node, leaf)
        assert str(e.value).startswith(line)
        with pytest.raises(fp8cfg.ConfigError) as e:
            setattr(node, leaf, 1)
        assert str(e.value).startswith(line)


def test_what_is_no_key_is_no_attribute_either() -> None:
    recipe = fp8cfg.Recipe()
    assert not hasattr(recipe.fp8, "margn") and getattr(recipe, "nothing", 3) == 3
    with pytest.raises(
        AttributeError, match=r"fp8\.margn: no such key; did you mean 'fp8\.margin'\?"
    ):
        recipe.fp8.margn  # type: ignore[attr-defined]  # noqa: B018
