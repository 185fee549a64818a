"""Refusals before a run: of data, layout and memory that are not here, with whole lines that run here in its place."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from fp8cfg.backends import registry
from fp8cfg.backends.choice import Choice, Hardware, choose
from fp8cfg.models.weight_files import no_weights
from fp8cfg.parallel import sharding
from fp8cfg.planning import layout, smoke, training_data
from fp8cfg.planning.fit_search import (
    CommandLine,
    Fit,
    IsResumable,
    Search,
    append_commands,
    append_smallest_peak,
    memory_problem,
    smoke_run,
)
from fp8cfg.planning.hardware import count_gpus, free_memory
from fp8cfg.planning.layout import place_on_gpus
from fp8cfg.planning.violations import violations
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.hub import PREFIX, chosen_tokenizer
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules import missing_data
from fp8cfg.schema.violation import Violation


def check_layout(recipe: Recipe, ranks: int, given: bool = False) -> None:
    """Raise ConfigError for a parallel layout, which is never changed for the user, that training does not have, or not on so many
    `ranks`, or not of a model that is `given`."""
    refuse_if(layout.layout_violations(recipe, ranks, given))


def check_run(
    recipe: Recipe,
    hardware: Hardware,
    whole_line: CommandLine,
    problems_of_layout: Sequence[Violation] = (),
    ranks: int | None = None,
    takes: IsResumable | None = None,
) -> None:
    """Raise ConfigError, before anything is made, for a recipe without data, for one with `problems_of_layout`, and for one whose
    layout or memory the ranks here, or `ranks` that are to be started here, do not have. Its line ends with those that run here, as
    `whole_line` has them."""
    refuse_if([*missing_data(recipe), *training_data.unintended_data(recipe)])
    lines: list[str] = []
    if not problems_of_layout:
        # Without a launcher the recipe is judged on the GPUs that it is meant for, as `check` does.
        started = ranks or (sharding.ranks() if _launched() else None)
        found = violations(recipe, hardware, started)
        if found and all(violation.source != "layout" for violation in found):
            raise ConfigError(found)
        lines = [str(violation) for violation in found]
    lines = lines or _problems(recipe, hardware, problems_of_layout, ranks)
    if lines:
        raise ConfigError(append_runs(lines, recipe, hardware, whole_line, ranks, takes))


def append_runs(
    problems: Sequence[str],
    recipe: Recipe,
    hardware: Hardware,
    whole_line: CommandLine,
    ranks: int | None = None,
    takes: IsResumable | None = None,
) -> list[str]:
    """`problems`, the last of which ends with lines that run: the nearest fit on `ranks` ranks to
    start, or on the ranks of this run; and a smoke run, which `resume` does not take."""
    free = free_memory(hardware.device, ranks)
    fit = _nearest(recipe, hardware, free, ranks, takes)
    if fit and fit.peak > free:
        problems = append_smallest_peak(problems, fit)
        fit = None
    elif fit and fit.ranks:
        problems = append_commands(problems, fit.where("here"), [whole_line(fit)])
        fit = None
    fits = [fit, None if takes else smoke_run_here(recipe, hardware, ranks)]
    return append_commands(problems, "here", [whole_line(fit) for fit in fits if fit])


def _problems(
    recipe: Recipe, hardware: Hardware, of_layout: Sequence[Violation], ranks: int | None
) -> list[str]:
    """Why the ranks of this run, or `ranks` that are to be started, do not train `recipe`: what of the layout they do not have,
    the problems `of_layout` of the recipe itself, or memory."""
    if of_layout and not ranks and not _launched():
        return [str(violation) for violation in of_layout]
    started = ranks or sharding.ranks()
    lines: Sequence[str | Violation] = (
        layout.layout_violations(recipe, started)
        or of_layout
        or layout.uneven_batch(recipe, started)
    )
    if lines:
        lines = layout.layout_violations(recipe, ranks or _ranks(recipe, hardware.device)) or lines
        return [str(line) for line in lines]
    free, backend = (
        free_memory(hardware.device, ranks),
        choose_backend(recipe, hardware, started).backend,
    )
    line = memory_problem(recipe, hardware.device, free, backend, started)
    return [line] if line else []


def _nearest(
    recipe: Recipe, hardware: Hardware, free: int, ranks: int | None, takes: IsResumable | None
) -> Fit | None:
    """The nearest fit on `ranks` ranks to start, or on those of this run."""
    here = ranks or _ranks(recipe, hardware.device)
    if not ranks and not _launched():
        # Without a launcher the recipe is for this machine alone. Its layout might not divide
        # trainer.devices, unless these are a multiple of the ranks.
        devices = recipe.trainer.devices
        recipe = place_on_gpus(recipe, 1, here if devices % here else devices)

    def backend(other: Recipe, world: int) -> str:
        return choose_backend(other, hardware, world).backend

    return Search(hardware.device, free, backend, takes).nearest(recipe, here)


def smoke_run_here(recipe: Recipe, hardware: Hardware, ranks: int | None = None) -> Fit | None:
    """The smoke run of `recipe` on `ranks` that are to be started here, or those that start by themselves, if there is one that
    has the memory."""
    there = ranks or (
        min(count_gpus(), recipe.trainer.devices)
        if _starts_here(hardware.device)
        else sharding.ranks()
    )
    free = free_memory(hardware.device, ranks)

    def backend(other: Recipe, world: int) -> str:
        return choose_backend(other, hardware, world).backend

    fit = smoke_run(recipe, there, backend)
    if fit is None:
        return None
    small = smoke.cut_recipe(fit.recipe, there)
    problem = memory_problem(small, hardware.device, free, backend(small, there), there)
    return None if problem else fit


def choose_backend(recipe: Recipe, hardware: Hardware, ranks: int) -> Choice:
    """Who multiplies `recipe` on so many ranks of that hardware. Raises ConfigError as `choose` does."""
    return choose(
        layout.rank_part(recipe, ranks).state.precision,
        hardware,
        statistics=recipe.log.fp8_stats_every_n_steps,
        adapters=recipe.lora.enabled,
        strategy=recipe.trainer.strategy,
    )


def _ranks(recipe: Recipe, device: str) -> int:
    """The ranks of this run; outside of a launcher, those that a line for this machine starts on its GPUs."""
    if not _starts_here(device):
        return sharding.ranks()
    t = recipe.trainer
    return next(
        n for n in range(min(count_gpus(), t.devices), 0, -1) if t.global_batch_size % n == 0
    )


def _starts_here(device: str) -> bool:
    """Whether a line for this machine starts ranks on its GPUs: outside of a launcher."""
    return device == "cuda" and not _launched()


def _launched() -> bool:
    return bool({"RANK", "WORLD_SIZE"} & os.environ.keys())


BYTES = 256
"""Tokens of text without a tokenizer, but for the end mark."""
GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU that NVIDIA's driver has, by which they are counted without loading torch."""


def local_problems(recipe: Recipe, config_dir: str | None = None) -> list[str]:
    """A line for each need of `recipe`, composed with the presets of `config_dir`, that is not met here."""
    return [
        *_backend(recipe),
        *_gpus(recipe),
        *_paths(recipe),
        *_presets(config_dir),
    ]


def _backend(recipe: Recipe) -> list[str]:
    name = recipe.precision.backend
    if name == "auto" or not recipe.fp8.enabled or not registry.exists(name):
        return []
    rules = registry.rules(name)
    why = rules.unavailable()
    return [f"backend={name}: {why}; {rules.instead(recipe.precision)} runs here"] if why else []


def _gpus(recipe: Recipe) -> list[str]:
    t, there = recipe.trainer, _count()
    if t.accelerator == "cuda" and not there:
        return ["trainer.accelerator=cuda: this machine has no NVIDIA GPU"]
    if t.accelerator == "cpu" or t.devices <= max(1, there):
        return []
    meant = f"{t.num_nodes} x {t.devices} GPUs" if t.num_nodes > 1 else f"{t.devices} GPUs"
    return [
        f"trainer.devices={t.devices}: meant for {meant}, this machine has {there or 'none'};"
        " fp8cfg plan needs none"
    ]


def _count() -> int:
    try:
        return sum(1 for _ in GPUS.iterdir())
    except OSError:
        return 0


def _paths(recipe: Recipe) -> list[str]:
    d = recipe.data
    found = [str(violation) for violation in missing_data(recipe)]
    found += [
        f"{key}={path}: {line}" for key, path in d.paths.items() if (line := _absent(d.name, path))
    ]
    named = {
        "data.tokenizer": chosen_tokenizer(recipe) if d.tokenizer else None,
        "model.weights": recipe.model.weights,
        "lora.weights": recipe.lora.weights,
    }
    weights = recipe.model.weights
    if weights and Path(weights).expanduser().is_dir():
        found += [f"model.weights={weights}: {line}" for line in _no_weights(weights)]
    model_tokenizer = None if d.tokenizer else chosen_tokenizer(recipe)
    is_here = model_tokenizer and not model_tokenizer.startswith(PREFIX)
    if is_here and not Path(str(model_tokenizer), "tokenizer.json").is_file():
        found.append(
            f"data.tokenizer=null: {model_tokenizer} has no tokenizer.json; set"
            " data.tokenizer=FOLDER, or data.tokenizer=bytes"
        )
    if (
        chosen_tokenizer(recipe) is None
        and d.name != "tokens"
        and (rows := recipe.model.vocab_size) <= BYTES
    ):
        found.append(
            f"model.vocab_size={rows}: has no row for each byte and the end mark, which"
            f" data={d.name} has without data.tokenizer; write {BYTES + 16} or more"
        )
    found += [
        f"{key}={path}: no such file or folder here"
        for key, path in named.items()
        if path and not path.startswith(PREFIX) and not Path(path).expanduser().exists()
    ]
    key, folder = (
        ("log.folder", recipe.log.folder) if recipe.log.folder else ("log.dir", recipe.log.dir)
    )
    above = Path(folder).absolute()
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        found.append(f"{key}={folder}: {above} is no folder")
    elif not os.access(above, os.W_OK | os.X_OK):
        found.append(f"{key}={folder}: {above} cannot be written")
    return found


def _no_weights(weights: str) -> list[str]:
    """A line if there are no weights in the folder `weights`."""
    line = no_weights(Path(weights).expanduser())
    return [line] if line else []


def _absent(source: str, path: str) -> str:
    """What is not here of the data at `path`; empty where it is."""
    if source != "tokens":
        return (
            ""
            if Path(path).exists() or any(glob.iglob(path, recursive=True))
            else "no such file or folder here"
        )
    prefix = path.removesuffix(".idx").removesuffix(".bin")
    missing = [name for end in (".bin", ".idx") if not Path(name := prefix + end).is_file()]
    return f"no file {' and '.join(missing)} here" if missing else ""


def _presets(config_dir: str | None) -> list[str]:
    if config_dir is None or next(Path(config_dir).glob("*/**/*.yaml"), None):
        return []
    return [
        f"--config-dir {config_dir}: has no GROUP/NAME.yaml, such as precision/mine.yaml, and so no"
        " presets"
    ]
