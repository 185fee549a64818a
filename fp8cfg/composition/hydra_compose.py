"""Hydra composition: a complete recipe node, preset nodes merged over it, then the overrides in their order.

The nodes are stored for as long as Hydra works with them and taken out again, so that fp8cfg can be used inside a Hydra
application and leaves nothing behind. Hydra reads no file here: every file has been read, bounded and checked before.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fp8cfg.composition.config_groups import GROUPS, LEAVES
from fp8cfg.composition.flatten import flat_data
from fp8cfg.composition.parsed_words import parser
from fp8cfg.config.errors import ConfigError, nearest
from fp8cfg.config.files import primary_config

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

Nodes = dict[str, dict[str, dict[str, Any]]]
"""Complete nodes by group and name."""

NAME = "fp8cfg_config"
"""What the primary config is called inside Hydra."""
GIVEN = "given_file"
"""The choice of `recipe` that stands for a recipe that is given whole."""
_LOCK = threading.RLock()
_COMPOSED: dict[str, DictConfig] = {}
"""What Hydra composed of the last choices, without values."""
_PLUGINS = {
    "hydra/launcher/submitit": "'fp8cfg[slurm]'",
    "hydra/launcher/joblib": "hydra-joblib-launcher",
    "hydra/sweeper/optuna": "hydra-optuna-sweeper",
    "hydra/sweeper/ax": "hydra-ax-sweeper",
}
"""What brings choices of Hydra's own groups."""
_CHOICE = re.compile(r"Could not find '(hydra/\w+)/(\w+)'")
_OVERRIDE = re.compile(r"\s*Could not override '(hydra\.[\w.]+)'")


def merge(
    nodes: dict[str, dict[str, Any]], chosen: dict[str, str], values: list[str]
) -> dict[str, Any]:
    """The composed recipe as plain data.

    `nodes` holds a complete node for each group that is chosen, `chosen` their names, `values` Hydra overrides on full keys.
    Choices are composed once in a process: values, merged as Hydra merges them, take a tenth of that time.
    """
    from hydra._internal.config_loader_impl import (
        ConfigLoaderImpl,
    )  # the merge itself has no public name (1.3)
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    with _one_line_errors():
        config = _composed(nodes, chosen)
        if values:
            config = copy.deepcopy(config)
            overrides = parser().parse_overrides(values)
            ConfigLoaderImpl.validate_sweep_overrides_legal(
                overrides, RunMode.RUN, from_shell=False
            )
            ConfigLoaderImpl._apply_overrides_to_config(overrides, config)
        container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(k): v for k, v in container.items()}


def _composed(nodes: dict[str, dict[str, Any]], chosen: dict[str, str]) -> DictConfig:
    """What Hydra composes of the choices alone; not to be changed."""
    with _LOCK:
        if (key := repr((nodes, chosen))) not in _COMPOSED:
            names = {group: chosen.get(group, GIVEN) for group in nodes}
            choices = [
                f"{'' if group in GROUPS else '+'}{group}={name}" for group, name in names.items()
            ]
            with application(
                {group: {names[group]: node} for group, node in nodes.items()}
            ) as hydra:
                _COMPOSED[key] = _loaded(hydra, choices)
            if len(_COMPOSED) > 64:
                del _COMPOSED[next(iter(_COMPOSED))]
        return _COMPOSED[key]


def _loaded(hydra: Hydra, choices: list[str]) -> DictConfig:
    """What hydra.compose gives, which would first compose Hydra's own config, of a dozen groups, and take it out in the end: three
    quarters of its time. Whether the defaults list begins with that is an argument of functions without a public name (1.3).
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.defaults_list import create_defaults_list
    from omegaconf import OmegaConf

    loader = hydra.config_loader
    assert isinstance(loader, ConfigLoaderImpl)
    overrides, repo = loader._parse_overrides_and_create_caching_repo(NAME, choices)
    listed = create_defaults_list(repo, NAME, overrides, prepend_hydra=False, skip_missing=False)
    config = loader._compose_config_from_defaults_list(listed.defaults, repo)
    OmegaConf.set_struct(config, True)
    return config


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
