"""Hydra session for sweeps and Hydra's own flags, with fp8cfg's recipes and presets as choices.

A single run needs only Hydra's grammar (overrides.py). A sweep needs Hydra's sweeper and launcher.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8cfg.composition.config_groups import REPLACING_GROUPS, Library
from fp8cfg.composition.layers import Rank, default_layer, fold
from fp8cfg.composition.recipe_layers import file_layers, part_of, preset_node
from fp8cfg.composition.recipe_yaml import flat_data, listed
from fp8cfg.schema import recipe_registry
from fp8cfg.schema.errors import ConfigError, did_you_mean, nearest
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import primary_config

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

Nodes = dict[str, dict[str, dict[str, Any]]]
"""Complete nodes by group and name."""

NAME = "fp8cfg_config"
"""Name of the primary config in Hydra."""
GIVEN = "given_file"
"""Choice of `recipe` for a Recipe object."""
NULL = "null"
"""Choice that changes nothing, such as `precision='null'`. Hydra rejects null itself as a choice."""
_LOCK = threading.RLock()
_PLUGINS = {
    "hydra/launcher/submitit": "'fp8cfg[slurm]'",
    "hydra/launcher/joblib": "hydra-joblib-launcher",
    "hydra/sweeper/optuna": "hydra-optuna-sweeper",
    "hydra/sweeper/ax": "hydra-ax-sweeper",
}
"""Packages with choices of Hydra's own groups."""
_UNKNOWN_CHOICE = re.compile(r"Could not find '(hydra/\w+)/(\w+)'")
_UNKNOWN_SETTING = re.compile(r"\s*Could not override '(hydra\.[\w.]+)'")


@contextlib.contextmanager
def application(nodes: Nodes, settings: dict[str, Any] | None = None) -> Iterator[Hydra]:
    """Context manager of a Hydra session.

    Args:
        nodes: Complete nodes to choose from, by group and name.
        settings: The `hydra` node of the primary config.

    Yields:
        The session.

    Raises:
        ConfigError: Hydra or OmegaConf raised an error, in the body too.
    """
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path

    # Hydra's state is global to the process, so sessions exclude one another.
    with _LOCK, _stored(nodes, settings):
        # As hydra.initialize without a path, which would read the source of every function on the
        # stack to find its caller.
        hydra = Hydra.create_main_hydra2("fp8cfg", create_config_search_path(None))
        with _one_line_errors():
            yield hydra


@contextlib.contextmanager
def _stored(nodes: Nodes, settings: dict[str, Any] | None) -> Iterator[None]:
    """Puts the primary config and `nodes` into Hydra's store. Restores Hydra's state on exit."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase, setbase

    store = ConfigStore.instance()
    repository = store.repo
    running = GlobalHydra.instance().hydra
    base = VersionBase.instance().version_base
    ours = {group.split("/")[0] for group in nodes} | {f"{NAME}.yaml"}
    store.repo = {key: value for key, value in repository.items() if key not in ours}
    # Hydra allows one session. An application of the user may be running around this one.
    GlobalHydra.instance().clear()
    setbase("1.3")
    try:
        primary = primary_config()
        if settings:
            primary = {**primary, "hydra": settings}
        store.store(NAME, primary, provider="fp8cfg")
        for group, choices in nodes.items():
            package = REPLACING_GROUPS[group][1] if group in REPLACING_GROUPS else "_global_"
            for name, data in choices.items():
                store.store(name, data, group=group, package=package, provider="fp8cfg")
        yield
    finally:
        store.repo = repository
        GlobalHydra.instance().hydra = running
        VersionBase.instance().version_base = base


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Raises errors of Hydra and OmegaConf as ConfigError."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from None


def _one_line(error: BaseException) -> str:
    """Returns the first line of a Hydra error, with the available options or a suggestion."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        # Hydra raises an empty error over OmegaConf's own.
        if error.__cause__:
            return _one_line(error.__cause__)
        return type(error).__name__
    first = lines[0].strip()
    if first.startswith("Error merging override") and error.__cause__:
        return f"{lines[0]}: {_one_line(error.__cause__)}"
    setting = _UNKNOWN_SETTING.match(lines[0])
    if setting:
        hint = _setting_hint(setting[1])
        if hint:
            return first.rstrip(".") + hint
    if "INTERVAL_SWEEP" in first:
        return f"{first}; one that searches does: hydra/sweeper=optuna"
    # Hydra lists the options on indented lines below.
    options: list[str] = []
    for line in lines[1:]:
        if line.startswith("\t") and "provider=" not in line:
            options.append(line.strip())
    choice = _UNKNOWN_CHOICE.search(lines[0])
    if choice:
        group, name = choice.groups()
        hint = _choice_hint(group, name, options)
        if hint:
            return f"{group}={name}: no such choice{hint}"
    if options and any(line.startswith("Available options") for line in lines):
        first += f"; choose from {', '.join(options)}"
    for name, package in _PLUGINS.items():
        if name in lines[0]:
            return f"{first}; pip install {package}"
    return first


def _choice_hint(group: str, name: str, options: list[str]) -> str:
    """Returns a suggestion for an unknown choice.

    Empty if an installable plugin has the choice.
    """
    plugins = [plugin.rpartition("/")[2] for plugin in _PLUGINS if plugin.startswith(f"{group}/")]
    if name in plugins:
        return ""
    return did_you_mean(nearest(name, [*options, *plugins]))


def _setting_hint(key: str) -> str:
    """Returns a suggestion for an unknown setting of Hydra, or ""."""
    from hydra.conf import HydraConf
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    settings = flat_data({"hydra": OmegaConf.to_container(OmegaConf.structured(HydraConf))})
    choice_of: dict[str, str] = dict.fromkeys(settings, "")
    # Settings of launchers and sweepers depend on the chosen plugin.
    for kind in ("launcher", "sweeper"):
        del choice_of[f"hydra.{kind}"]
        for file, config in ConfigStore.instance().repo["hydra"].get(kind, {}).items():
            if file.endswith(".yaml"):
                choice = f"hydra/{kind}={file.removesuffix('.yaml')}"
                choice_of |= {f"hydra.{kind}.{name}": choice for name in config.node}
    if key in choice_of:
        return f"; it belongs to {choice_of[key]}"
    return did_you_mean(nearest(key, choice_of, 0.8))


def node(group: str, name: str, library: Library) -> dict[str, Any]:
    """Returns the choice `name` of `group` as plain data.

    Recipes and presets are complete nodes. A task or a user's group has only the keys that it sets,
    and its choices as Hydra's `defaults`.

    Raises:
        ConfigError: The choice is invalid. The message names the file.
    """
    if name == NULL:
        return {}
    path = library.file(group, name)
    if group == "recipe":
        if path is None:
            return listed(recipe_registry.named(name))
        return listed(recipe_from(path, library))
    if group in REPLACING_GROUPS:
        assert path is not None, f"{group}={name} is no choice"
        return listed(preset_node(group, path, library))
    choice = part_of(group, name, library)
    overrides = [{f"override /{key}": preset} for key, preset in choice.chosen.items()]
    if not overrides:
        return choice.data
    return {"defaults": ["_self_", *overrides], **choice.data}


def recipe_from(path: Path, library: Library) -> Recipe:
    """Returns the recipe of a file, before conflicts are resolved."""
    return fold([default_layer(), *file_layers(path, library, Rank.USER)]).recipe
