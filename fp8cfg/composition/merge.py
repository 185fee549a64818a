"""Recipe resolution: a base recipe, presets and values are merged in that order. Rules between keys are not checked here.

Words of the command line are merged by Hydra; a recipe's file is merged key by key onto the recipe that it builds on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fp8cfg.composition.config_groups import (
    GROUPS,
    LEAVES,
    PARTS,
    SELF,
    Library,
    Part,
    Step,
    part,
    refuse_package,
    steps,
    taken,
)
from fp8cfg.composition.overrides import parse, parser
from fp8cfg.composition.recipe_yaml import (
    deep_merge,
    flat,
    flat_data,
    full_names,
    key_lines,
    listed,
    nested,
)
from fp8cfg.schema import foreign_names, recipe_registry
from fp8cfg.schema.errors import ConfigError, nearest, refuse_if
from fp8cfg.schema.hugging_face import FROM_HF, shaped
from fp8cfg.schema.keys import full
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import STDIN, default_recipe, primary_config

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


T = TypeVar("T")


def unchecked(
    words: Sequence[str], library: Library, file: Path | None = None, base: Recipe | None = None
) -> Recipe:
    """The Recipe of `words`, as `compose` takes them; its rules between keys are not checked. Raises ConfigError with every
    problem of a word or a file."""
    given = recipe_from(file, library) if file else base
    chosen, values = parse(words, library, given is not None)
    for group in [group for group in chosen if library.own(group)]:
        for other, name in part_of(group, chosen[group], library).chosen.items():
            if other == "recipe" and given is not None:
                raise ConfigError(
                    f"{group}={chosen[group]}: chooses recipe={name}, and the recipe is given"
                    " already"
                )
            chosen.setdefault(other, name)
    if given is None and "recipe" not in chosen:
        chosen["recipe"] = default_recipe()
    in_order = sorted(
        chosen.items(),
        key=lambda choice: (library.own(choice[0]) is not None) + (choice[0] not in GROUPS),
    )
    nodes = {group: node(group, stem, library) for group, stem in in_order}
    if given is not None:
        nodes = {"recipe": listed(given), **nodes}
    _fit_parts(nodes, chosen, library)
    recipe = Recipe(**merge(nodes, chosen, values))
    path = recipe.model.path
    if given is None and chosen["recipe"] == FROM_HF:
        if path is None:
            raise ConfigError(
                f"recipe={FROM_HF}: needs model.path, the folder of a Hugging Face checkpoint"
            )
        nodes["recipe"] = listed(_from_hf(path))
        _fit_parts(nodes, chosen, library)
        recipe = Recipe(**merge(nodes, chosen, values))
    elif path is not None and path != (given or Recipe(**nodes["recipe"])).model.path:
        raise ConfigError(
            f"model.path={path}: gives a shape to recipe={FROM_HF} alone; of other recipes write "
            f"model.weights={path}"
        )
    return recipe


def _fit_parts(
    nodes: dict[str, dict[str, Any]], chosen: Mapping[str, str], library: Library
) -> None:
    """Let tasks say no more than goes over the recipe of `nodes`."""
    if any(group in chosen for group in PARTS):
        base = flat(Recipe(**nodes["recipe"]))
        nodes |= {
            group: part_of(group, chosen[group], library).over(group, base).data
            for group in PARTS
            if group in chosen
        }


def _from_hf(folder: str) -> Recipe:
    """The recipe from_hf with the shape that a folder has."""
    base = recipe_registry.named(FROM_HF)
    base.model.path = folder
    return shaped(base)


def node(group: str, stem: str, library: Library) -> dict[str, Any]:
    """The choice `stem` of `group`, which `library.problem` does not refuse, as plain data: a complete node; of a group of one's
    own the keys that it sets, from the recipe down, with the choices that it makes as Hydra's `defaults`. Raises ConfigError,
    naming the file where one is at fault."""
    path = library.file(group, stem)
    if group == "recipe":
        return listed(recipe_from(path, library) if path else recipe_registry.named(stem))
    assert path is not None, f"{group}={stem} is no choice"
    if group in LEAVES:
        return listed(_in_file(path, lambda: _whole(group, path, library)))
    said = part_of(group, stem, library)
    defaults = [{f"override /{other}": name} for other, name in said.chosen.items()]
    return {**({"defaults": ["_self_", *defaults]} if defaults else {}), **said.data}


def part_of(group: str, stem: str, library: Library) -> Part:
    """As `node`, of a group of one's own."""
    path = library.file(group, stem)
    assert path is not None, f"{group}={stem} is no choice"
    return _in_file(path, lambda: part(path, group, library))


def _whole(group: str, path: Path, library: Library) -> Node:
    refuse_package(path, group, library)
    data = library.data(path)
    if "defaults" in data:
        raise ConfigError(
            f"defaults: a {group} preset builds on no other; write all its keys here, or '/{group}:"
            " NAME' in the defaults of a recipe's file, and there what differs"
        )
    return LEAVES[group][0](**data)


def recipe_from(path: Path, library: Library) -> Recipe:
    """The recipe in the file `path`."""
    data = library.data(path)
    return _in_file(path, lambda: recipe_of(data, path, library))


def recipe_of(data: dict[str, Any], path: Path, library: Library) -> Recipe:
    """The recipe that the file `path` with the content `data` says."""
    if project := foreign_names.project(data):
        raise ConfigError(f"has the keys of another project; write: fp8cfg import {project} {path}")
    _refuse_choices(data, library)
    found, made = list(steps(data, path, library)), dict[str, Any]()
    for step in found:
        after = functools.partial(_after, made, step, found, library)
        made = after() if step.path == path else _in_file(step.path, after)
    return Recipe(**made)


def _refuse_choices(data: Mapping[str, Any], library: Library) -> None:
    """Raise ConfigError for choices that there are not, and then at once for wrong values: these do not depend on the recipe that
    they change."""
    values = dict(data)
    chosen = [c for c in taken(values, library) if c.group != SELF and c.name and not c.optional]
    if problems := [p for c in chosen if (p := library.problem(c.group, c.name))]:
        try:
            Recipe(**deep_merge(listed(Recipe()), full_names(values)))
        except ConfigError as e:
            problems += e.problems
    refuse_if(problems)


def _after(
    made: dict[str, Any], step: Step, found: Sequence[Step], library: Library
) -> dict[str, Any]:
    """The recipe `made` by the steps before `step`, of those that are `found`, after it."""
    group, name = step.choice.group, step.choice.name
    if group == SELF:
        return listed(Recipe(**deep_merge(made, full_names(dict(step.values)))))
    if problem := library.problem(group, name):
        raise ConfigError(problem)
    if group == "recipe":
        folders = (
            [path for s in found if (path := _model_path(s.values))] if name == FROM_HF else []
        )
        return listed(_from_hf(folders[-1]) if folders else recipe_registry.named(name))
    if group not in LEAVES:
        said = part_of(group, name, library)
        refuse_if(
            [
                f"{group}={name}: chooses {other} itself, where it is a word;"
                f" write '/{other}: {its}' in this file too"
                for other, its in said.chosen.items()
            ]
        )
        return deep_merge(made, said.over(group, flat(Recipe(**made))).data)
    return deep_merge(
        made, nested({LEAVES[group][1]: node(group, library.stem(group, name), library)})
    )


def _model_path(values: Mapping[str, Any]) -> str | None:
    """What a file's own `values` say for model.path."""
    model = full_names(dict(values)).get("model")
    path = model.get("path") if isinstance(model, dict) else None
    return path if isinstance(path, str) else None


def _in_file(path: Path, build: Callable[[], T]) -> T:
    """`build()`, with the file's name before each line of a ConfigError, and the line of the key that it begins with."""
    try:
        return build()
    except ConfigError as e:
        lines = (
            {full(key): line for key, line in key_lines(path).items()}
            if path == STDIN or path.is_file()
            else {}
        )
        raise ConfigError(
            [p if p.startswith(str(path)) else f"{path}{_line(p, lines)}: {p}" for p in e.problems]
        ) from None


def _line(problem: str, lines: Mapping[str, int]) -> str:
    """`:4` for a problem of a key that stands in line 4; of a key that does not stand there nothing."""
    line = lines.get(full(re.split("[=:]", problem, maxsplit=1)[0]))
    return f":{line}" if line else ""
