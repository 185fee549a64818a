"""Interactive use: completion, `dir` and `help` of recipe nodes, as rlcompleter, jedi and IPython read them."""

from __future__ import annotations

import copy
import inspect
import pydoc
import rlcompleter
import warnings

import jedi
import pydantic
import pytest

import fp8cfg
from fp8cfg.recipes import llama_tiny
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import Recipe

PYDANTIC = {
    "copy",
    "dict",
    "json",
    "parse_obj",
    "parse_raw",
    "construct",
    "schema",
    "from_orm",
    "validate",
    "update_forward_refs",
    "model_dump",
    "model_fields",
    "model_config",
}


def nodes(node: Node) -> list[Node]:
    inner = [getattr(node, name) for name in type(node).model_fields]
    return [node, *(below for value in inner if isinstance(value, Node) for below in nodes(value))]


def completed(code: str) -> list[str]:
    """What IPython completes: it asks jedi about the objects at hand."""
    found = jedi.Interpreter(code, [{"r": llama_tiny(), "fp8cfg": fp8cfg}]).complete()
    return [c.name for c in found if not c.name.startswith("_")]


def test_dir_of_a_node_has_its_keys_and_our_methods_alone() -> None:
    with warnings.catch_warnings():  # no deprecated name of pydantic's is touched
        warnings.simplefilter("error")
        for node in nodes(llama_tiny()):
            public = {name for name in dir(node) if not name.startswith("_")}
            assert (
                public >= {*type(node).model_fields, "merged", "model_copy"}
                and not public & PYDANTIC
            )
            assert all(hasattr(node, name) for name in public)
    assert {"precision", "fp8", "storage", "backend", "opt_level", "check"} <= set(
        dir(llama_tiny())
    )


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("r.fp8.ma", ["margin"]),
        ("r.trainer.plugins.fp8.ma", ["margin"]),
        ("r.storage.ma", ["master_weight"]),
        ("r.fp", ["fp8"]),
        ("r.opt", ["opt_level", "optim"]),
        ("r.back", ["backend"]),
        ("r.js", []),
        ("fp8cfg.An", []),
        ("fp8cfg.FP8.ma", ["margin"]),
    ],
)
def test_completion(code: str, names: list[str]) -> None:
    assert completed(code) == names


@pytest.mark.parametrize(
    "code",
    [
        "r",
        "r.fp8",
        "r.trainer.plugins.storage",
        "fp8cfg",
        "fp8cfg.FP8",
        "fp8cfg.Recipe",
        "fp8cfg.recipes",
    ],
)
def test_completion_of_pythons_own_prompt(code: str) -> None:
    """It lists the class of an object and every base, down to pydantic's; IPython without jedi lists the class."""
    names = {"r": llama_tiny(), "fp8cfg": fp8cfg}
    complete, found = rlcompleter.Completer(names).complete, list[str]()
    while (word := complete(f"{code}.", len(found))) is not None:
        found.append(word.removeprefix(f"{code}.").partition("(")[0])
    thing = eval(code, names)
    of_classes = {"mro", "register"} if isinstance(thing, type) else set()
    assert set(found) == {
        name for name in dir(thing) if not name.startswith("_")
    } | of_classes and not set(found) & {*PYDANTIC, "Any", "Path"}
    assert not {name for name in dir(type(thing)) if not name.startswith("_")} - set(found)


def test_what_the_class_of_nodes_hides_is_no_base() -> None:
    assert (
        issubclass(fp8cfg.FP8, pydantic.BaseModel)
        and fp8cfg.FP8.__mro__[1:3] == (Node, pydantic.BaseModel)
        and fp8cfg.FP8.__bases__ == (Node,)
    )


def test_every_key_is_documented_at_its_class() -> None:
    """IPython's `r.fp8.margin?` shows the text of a property of the class, and of nothing else."""
    for node in nodes(llama_tiny()):
        for name, field in type(node).model_fields.items():
            key = inspect.getattr_static(type(node), name)
            assert isinstance(key, property) and getattr(type(node), name) is key
            text = str(inspect.getdoc(key))
            assert text.startswith(f"{node.key(name)}: {' '.join(str(field.description).split())}")
    assert "Keys: path, weights, num_layers" in str(inspect.getdoc(Recipe.model))
    assert "fp8.margin: Delayed scaling: scales are divided by 2^margin" in pydoc.plain(
        pydoc.render_doc(fp8cfg.FP8)
    )


def test_a_key_at_the_class_changes_nothing_of_the_values() -> None:
    recipe = llama_tiny()
    recipe.fp8.margin = 3
    for other in (
        copy.copy(recipe.fp8),
        copy.deepcopy(recipe.fp8),
        recipe.fp8.model_copy(update={"interval": 1}),
    ):
        assert other.margin == 3 and other == recipe.fp8
    with pytest.raises(fp8cfg.ConfigError, match=r"fp8\.margin=-1: must be at least 0"):
        recipe.fp8.margin = -1
    with pytest.raises(fp8cfg.ConfigError, match=r"fp8\.margin: a key always has a value"):
        del recipe.fp8.margin
    with pytest.raises(
        AttributeError, match=r"fp8\.margn: no such key; did you mean 'fp8\.margin'"
    ):
        recipe.fp8.margn  # type: ignore[attr-defined]  # noqa: B018


def test_a_class_that_extends_a_node_has_its_defaults() -> None:
    class Mine(fp8cfg.FP8):
        """Of somebody else."""

        mine: int = 3

    assert (Mine().margin, Mine().mine, Mine(margin=2).margin) == (0, 3, 2)
    assert Mine.model_fields["margin"].default == 0
