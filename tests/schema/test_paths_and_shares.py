"""Values with a meaning of their own: paths below the user's home, and floats that other projects read as shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fp8cfg


def assigned(key: str, value: object) -> fp8cfg.Recipe:
    recipe = fp8cfg.Recipe()
    node, name = key.split(".")
    setattr(getattr(recipe, node), name, value)
    return recipe


DOORS: dict[str, Callable[[str, object], fp8cfg.Recipe]] = {
    "command line": lambda key, value: fp8cfg.compose(
        ["data=text", "data.path=x", f"{key}={value}"]
    ),
    "YAML": lambda key, value: fp8cfg.from_yaml(f"data.name: text\ndata.path: x\n{key}: {value}\n"),
    "Python": assigned,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("key", ["log.dir", "log.folder", "data.tokenizer", "data.validation_path"])
def test_a_path_below_home_is_expanded(
    door: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    node, name = key.split(".")
    assert getattr(getattr(DOORS[door](key, "~/here"), node), name) == "/home/me/here"


def test_a_mixture_has_paths_below_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    data = fp8cfg.Data(
        mixture=[{"path": "~/a", "weight": 0.7}, {"path": Path("some") / "b", "weight": 0.3}]  # type: ignore[arg-type]
    )
    assert [part["path"] for part in data.mixture] == ["/home/me/a", "some/b"]


def test_a_path_object_is_text() -> None:
    recipe = fp8cfg.Recipe()
    recipe.data.path = Path("some") / "text"  # type: ignore[assignment]
    assert recipe.data.path == "some/text"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("key", ["trainer.val_check_interval", "trainer.limit_val_batches"])
def test_a_float_is_no_number_of_steps(door: str, key: str) -> None:
    with pytest.raises(fp8cfg.ConfigError, match=rf"{key}=1\.0: a float is a share of an epoch"):
        DOORS[door](key, 1.0)
