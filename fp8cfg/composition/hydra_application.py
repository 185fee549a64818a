"""Hydra's session for sweeps and Hydra's own flags, with our recipes and presets to choose from.

A single run needs only Hydra's grammar (overrides.py). A sweep needs Hydra's sweeper and launcher.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8cfg.composition.config_groups import LEAVES, Library
from fp8cfg.composition.layers import Rank, default_layer, fold
from fp8cfg.composition.recipe_layers import file_layers, part_of, preset_node
from fp8cfg.composition.recipe_yaml import flat_data, listed
from fp8cfg.schema import recipe_registry
from fp8cfg.schema.errors import ConfigError, nearest
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import primary_config

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

Nodes = dict[str, dict[str, dict[str, Any]]]
"""Complete nodes by group and name."""

NAME = "fp8cfg_config"
"""What the primary config is called inside Hydra."""
GIVEN = "given_file"
"""The choice of `recipe` that stands for a recipe that is given whole."""
_LOCK = threading.RLock()
_PLUGINS = {
    "hydra/launcher/submitit": "'fp8cfg[slurm]'",
    "hydra/launcher/joblib": "hydra-joblib-launcher",
    "hydra/sweeper/optuna": "hydra-optuna-sweeper",
    "hydra/sweeper/ax": "hydra-ax-sweeper",
}
"""What brings choices of Hydra's own groups."""
_CHOICE = re.compile(r"Could not find '(hydra/\w+)/(\w+)'")
_OVERRIDE = re.compile(r"\s*Could not override '(hydra\.[\w.]+)'")


@contextlib.contextmanager
def application(nodes: Nodes, settings: dict[str, Any] | None = None) -> Iterator[Hydra]:
    """A Hydra session with `nodes` to choose from, and `settings` as the `hydra` node of the primary config. Its errors, and
    those of the body, are raised as ConfigError."""
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path

    with _LOCK, _stored(nodes, settings):
        # hydra.initialize without a path comes to this, after reading the source of all functions on the stack for its caller.
        hydra = Hydra.create_main_hydra2("fp8cfg", create_config_search_path(None))
        with _one_line_errors():
            yield hydra


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Errors of Hydra and OmegaConf are raised as ConfigError."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as e:
        raise ConfigError(_one_line(e)) from None


def _one_line(error: BaseException) -> str:
    """Hydra's first line, and the options that it lists further down."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:  # Hydra raises an empty error over OmegaConf's own
        return _one_line(error.__cause__) if error.__cause__ else type(error).__name__
    options = [
        line.strip() for line in lines[1:] if line.startswith("\t") and "provider=" not in line
    ]
    listed = any(line.startswith("Available options") for line in lines)
    if lines[0].startswith("Error merging override") and error.__cause__:
        return f"{lines[0]}: {_one_line(error.__cause__)}"
    if (wrong := _OVERRIDE.match(lines[0])) and (instead := _instead(wrong[1])):
        return lines[0].strip().rstrip(".") + instead
    if "INTERVAL_SWEEP" in lines[0]:
        return f"{lines[0].strip()}; one that searches does: hydra/sweeper=optuna"
    if (wrong := _CHOICE.search(lines[0])) and (
        instead := _choice_instead(wrong[1], wrong[2], options)
    ):
        return f"{wrong[1]}={wrong[2]}: no such choice{instead}"
    missing = next(
        (f"; pip install {package}" for name, package in _PLUGINS.items() if name in lines[0]), ""
    )
    return (
        lines[0].strip()
        + (f"; choose from {', '.join(options)}" if listed and options else "")
        + missing
    )


def _choice_instead(group: str, name: str, options: list[str]) -> str:
    """The choice of Hydra's `group` that `name` is meant for; empty for one that can be installed, and for none."""
    plugins = [of.rpartition("/")[2] for of in _PLUGINS if of.startswith(f"{group}/")]
    near = None if name in plugins else nearest(name, [*options, *plugins])
    return f"; did you mean {near!r}?" if near else ""


def _instead(key: str) -> str:
    """What may be meant by a setting that Hydra has not with its launcher and its sweeper; empty where nothing is."""
    from hydra.conf import HydraConf
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    known = dict.fromkeys(
        flat_data({"hydra": OmegaConf.to_container(OmegaConf.structured(HydraConf))}), ""
    )
    for kind in ("launcher", "sweeper"):
        del known[f"hydra.{kind}"]
        for file, said in ConfigStore.instance().repo["hydra"].get(kind, {}).items():
            if file.endswith(".yaml"):
                known |= {
                    f"hydra.{kind}.{name}": f"hydra/{kind}={file.removesuffix('.yaml')}"
                    for name in said.node
                }
    near = nearest(key, known, 0.8)
    return (
        ""
        if near is None
        else f"; it is of {known[key]}"
        if near == key
        else f"; did you mean {near!r}?"
    )


@contextlib.contextmanager
def _stored(nodes: Nodes, settings: dict[str, Any] | None) -> Iterator[None]:
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase, setbase

    store, running, base = (
        ConfigStore.instance(),
        GlobalHydra.instance().hydra,
        VersionBase.instance().version_base,
    )
    before = {key: store.repo.get(key) for key in (*nodes, f"{NAME}.yaml")}
    for key in before:
        store.repo.pop(key, None)
    GlobalHydra.instance().clear()
    setbase("1.3")
    try:
        primary = primary_config()
        store.store(
            NAME, {**primary, "hydra": settings} if settings else primary, provider="fp8cfg"
        )
        for group, named in nodes.items():
            package = LEAVES[group][1] if group in LEAVES else "_global_"
            for name, node in named.items():
                store.store(name, node, group=group, package=package, provider="fp8cfg")
        yield
    finally:
        for key, value in before.items():
            store.repo.pop(key, None)
            if value is not None:
                store.repo[key] = value
        GlobalHydra.instance().hydra = running
        VersionBase.instance().version_base = base


def node(group: str, name: str, library: Library) -> dict[str, Any]:
    """Returns the choice `name` of `group` as plain data.

    For a recipe or a preset that is a complete node. For a task or a user's group, it is the keys
    that it sets, with the choices that it makes as Hydra's `defaults`.

    Raises:
        ConfigError: If the choice is wrong, with the file's name.
    """
    if group == "recipe":
        path = library.file(group, name)
        recipe = recipe_from(path, library) if path else recipe_registry.named(name)
        return listed(recipe)
    if group in LEAVES:
        path = library.file(group, name)
        assert path is not None, f"{group}={name} is no choice"
        return listed(preset_node(group, path, library))
    choice = part_of(group, name, library)
    overrides = [{f"override /{other}": chosen} for other, chosen in choice.chosen.items()]
    if not overrides:
        return choice.data
    return {"defaults": ["_self_", *overrides], **choice.data}


def recipe_from(path: Path, library: Library) -> Recipe:
    """The recipe in the file `path`, before conflicts are resolved."""
    return fold([default_layer(), *file_layers(path, library, Rank.USER)]).recipe
