"""Checks before a run: data, parallel layout and memory of this machine.

Errors of `check_run` end with working command lines for this machine. `local_problems` lists the
missing files, GPUs and libraries of a recipe.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from fp8cfg.backends import registry
from fp8cfg.backends.choice import Choice, Hardware, choose
from fp8cfg.models.weight_files import missing_weights
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


def check_layout(recipe: Recipe, ranks: int, is_custom_model: bool = False) -> None:
    """Raises ConfigError if training does not support the parallel layout on `ranks` ranks.

    The layout is never changed automatically.

    Args:
        recipe: The recipe.
        ranks: Number of ranks.
        is_custom_model: Whether the model is a custom model.
    """
    refuse_if(layout.layout_violations(recipe, ranks, is_custom_model))


def check_run(
    recipe: Recipe,
    hardware: Hardware,
    whole_line: CommandLine,
    problems_of_layout: Sequence[Violation] = (),
    ranks: int | None = None,
    is_resumable: IsResumable | None = None,
) -> None:
    """Checks data, layout and memory before a run folder or a process exists.

    Args:
        recipe: The recipe.
        hardware: Device of this machine.
        whole_line: Formats a recipe as a command line for the message.
        problems_of_layout: Violations of the recipe's own layout, found before.
        ranks: Number of ranks to start here. Defaults to the ranks of this run.
        is_resumable: Whether `resume` accepts a changed recipe. None for a new run.

    Raises:
        ConfigError: The data is missing, or the layout or the memory does not suffice. The
            message ends with working command lines.
    """
    refuse_if([*missing_data(recipe), *training_data.unintended_data(recipe)])
    lines: list[str] = []
    if not problems_of_layout:
        # Without a launcher, check the recipe on its own number of GPUs, as `fp8cfg check` does.
        started = ranks
        if not ranks and _launched():
            started = sharding.ranks()
        problems = violations(recipe, hardware, started)
        # Another number of ranks may fix a layout, but not a broken rule or a missing backend.
        if problems and all(violation.source != "layout" for violation in problems):
            raise ConfigError(problems)
        lines = [str(violation) for violation in problems]
    lines = lines or _problems(recipe, hardware, problems_of_layout, ranks)
    if lines:
        raise ConfigError(append_runs(lines, recipe, hardware, whole_line, ranks, is_resumable))


def append_runs(
    problems: Sequence[str],
    recipe: Recipe,
    hardware: Hardware,
    whole_line: CommandLine,
    ranks: int | None = None,
    is_resumable: IsResumable | None = None,
) -> list[str]:
    """Appends working command lines to the last problem.

    These are the nearest fit and a smoke run. A resumed run gets no smoke run, because its
    checkpoint has the full size.

    Args:
        problems: Error lines.
        recipe: The recipe.
        hardware: Device of this machine.
        whole_line: Formats a recipe as a command line.
        ranks: Number of ranks to start here. Defaults to the ranks of this run.
        is_resumable: Whether `resume` accepts a changed recipe. None for a new run.

    Returns:
        A new list of error lines.
    """
    free = free_memory(hardware.device, ranks)
    fit = _nearest(recipe, hardware, free, ranks, is_resumable)
    if fit and fit.peak > free:
        problems = append_smallest_peak(problems, fit)
        fit = None
    elif fit and fit.ranks:
        # It runs, but needs more GPUs. Only the smoke run is left for this machine.
        problems = append_commands(problems, fit.where("here"), [whole_line(fit)])
        fit = None
    fits = [fit]
    if not is_resumable:
        fits.append(smoke_run_here(recipe, hardware, ranks))
    return append_commands(problems, "here", [whole_line(fit) for fit in fits if fit])


def _problems(
    recipe: Recipe,
    hardware: Hardware,
    problems_of_layout: Sequence[Violation],
    ranks: int | None,
) -> list[str]:
    """Lists layout problems on these ranks. If there are none, checks the memory.

    Args:
        recipe: The recipe.
        hardware: Device of this machine.
        problems_of_layout: Violations of the recipe's own layout.
        ranks: Number of ranks to start here. Defaults to the ranks of this run.
    """
    if problems_of_layout and not ranks and not _launched():
        return [str(violation) for violation in problems_of_layout]
    started = ranks or sharding.ranks()
    lines: Sequence[str | Violation] = layout.layout_violations(recipe, started)
    if not lines:
        lines = problems_of_layout
    if not lines:
        lines = layout.uneven_batch(recipe, started)
    if lines:
        # Prefer the message for the ranks of a command on this machine.
        search_ranks = ranks or _search_ranks(recipe, hardware.device)
        lines = layout.layout_violations(recipe, search_ranks) or lines
        return [str(line) for line in lines]
    free = free_memory(hardware.device, ranks)
    choice = choose_backend(recipe, hardware, layout.rank_part(recipe, started))
    line = memory_problem(recipe, hardware.device, free, choice.backend, started)
    if not line:
        return []
    return [line]


def _nearest(
    recipe: Recipe,
    hardware: Hardware,
    free: int,
    ranks: int | None,
    is_resumable: IsResumable | None,
) -> Fit | None:
    """Finds the nearest recipe that fits on these ranks."""
    num_ranks = ranks or _search_ranks(recipe, hardware.device)
    if not ranks and not _launched():
        # Without a launcher the recipe runs on this machine only. trainer.devices stays if it is
        # a multiple of the started ranks. Otherwise the layout might not divide it.
        devices = recipe.trainer.devices
        if devices % num_ranks:
            devices = num_ranks
        recipe = place_on_gpus(recipe, 1, devices)

    def backend(candidate: Recipe, world: int) -> str:
        return choose_backend(candidate, hardware, layout.rank_part(candidate, world)).backend

    return Search(hardware.device, free, backend, is_resumable).nearest(recipe, num_ranks)


def smoke_run_here(recipe: Recipe, hardware: Hardware, ranks: int | None = None) -> Fit | None:
    """Returns the smoke run of a recipe if it runs on this machine and fits into its memory.

    Args:
        recipe: The recipe.
        hardware: Device of this machine.
        ranks: Number of ranks to start here. Defaults to the launched ranks. Without a launcher
            the default is the number of GPUs, up to trainer.devices.
    """
    free = free_memory(hardware.device, ranks)
    if not ranks and _starts_here(hardware.device):
        ranks = min(count_gpus(), recipe.trainer.devices)
    elif not ranks:
        ranks = sharding.ranks()

    def backend(candidate: Recipe, world: int) -> str:
        return choose_backend(candidate, hardware, layout.rank_part(candidate, world)).backend

    fit = smoke_run(recipe, ranks, backend)
    if fit is None:
        return None
    small = smoke.cut_recipe(fit.recipe, ranks)
    if memory_problem(small, hardware.device, free, backend(small, ranks), ranks):
        return None
    return fit


def choose_backend(
    recipe: Recipe,
    hardware: Hardware,
    part: layout.Part,
    here: bool = True,
    is_custom_model: bool = False,
) -> Choice:
    """Chooses the backend of a recipe.

    Args:
        recipe: The recipe.
        hardware: Hardware of the run.
        part: A rank's part of the layout, with the resolved precision.
        here: Whether `hardware` is this machine. Otherwise a named backend need not be installed.
        is_custom_model: Whether the model is a custom model. Then no layout needs support.

    Raises:
        ConfigError: No backend runs the recipe on this hardware.
    """
    return choose(
        part.state.precision,
        hardware,
        statistics=recipe.log.fp8_stats_every_n_steps,
        here=here,
        strategy=None if is_custom_model else recipe.trainer.strategy,
        adapters=recipe.lora.enabled,
    )


def _search_ranks(recipe: Recipe, device: str) -> int:
    """Number of ranks for a search on this machine."""
    if not _starts_here(device):
        return sharding.ranks()
    # A command without a launcher starts at most one rank per GPU. The search may change layout
    # and microbatch, so that any number of ranks is possible that divides the batch. count_ranks
    # in cli/launch_run.py is stricter: it starts a recipe with its own layout and microbatch.
    trainer = recipe.trainer
    num_ranks = min(count_gpus(), trainer.devices)
    while trainer.global_batch_size % num_ranks:
        num_ranks -= 1
    return num_ranks


def _starts_here(device: str) -> bool:
    """Whether the command starts one rank per GPU by itself, without a launcher."""
    return device == "cuda" and not _launched()


def _launched() -> bool:
    """Whether a launcher such as torchrun has started this process."""
    return bool({"RANK", "WORLD_SIZE"} & os.environ.keys())


BYTES = 256
"""Vocabulary of text without a tokenizer, besides the end mark."""
GPUS = Path("/proc/driver/nvidia/gpus")
"""NVIDIA's driver has a folder for each GPU here. Counting them does not load torch."""


def local_problems(recipe: Recipe, config_dir: str | None = None) -> list[str]:
    """Lists backends, GPUs, files and presets missing on this machine, one line each.

    Args:
        recipe: The recipe.
        config_dir: Folder with the user's presets, from --config-dir.
    """
    return [
        *_backend_problems(recipe),
        *_gpu_problems(recipe),
        *_path_problems(recipe),
        *_preset_problems(config_dir),
    ]


def _backend_problems(recipe: Recipe) -> list[str]:
    """Returns a line if the library of the backend is not installed."""
    name = recipe.precision.backend
    if name == "auto" or not recipe.fp8.enabled or not registry.exists(name):
        return []
    rules = registry.rules(name)
    problem = rules.unavailable()
    if not problem:
        return []
    return [f"backend={name}: {problem}; set {rules.instead(recipe.precision)}"]


def _gpu_problems(recipe: Recipe) -> list[str]:
    """Returns a line if this machine has fewer GPUs than trainer.devices."""
    trainer = recipe.trainer
    try:
        gpus = sum(1 for _ in GPUS.iterdir())
    except OSError:  # no driver
        gpus = 0
    if trainer.accelerator == "cuda" and gpus == 0:
        return ["trainer.accelerator=cuda: this machine has no NVIDIA GPU"]
    if trainer.accelerator == "cpu" or trainer.devices <= max(1, gpus):
        return []
    meant_for = f"{trainer.devices} GPUs"
    if trainer.num_nodes > 1:
        meant_for = f"{trainer.num_nodes} x {trainer.devices} GPUs"
    return [
        f"trainer.devices={trainer.devices}: needs {meant_for}, this machine has"
        f" {gpus or 'none'}; you can still run fp8cfg plan here"
    ]


def _path_problems(recipe: Recipe) -> list[str]:
    """Lists missing files and folders, and folders with missing contents."""
    data, weights = recipe.data, recipe.model.weights
    problems = [str(violation) for violation in missing_data(recipe)]
    for key, path in data.paths.items():
        problem = _missing_data_files(data.name, path)
        if problem:
            problems.append(f"{key}={path}: {problem}")
    if weights and Path(weights).expanduser().is_dir():
        problem = missing_weights(Path(weights).expanduser())
        if problem:
            problems.append(f"model.weights={weights}: {problem}")
    problems += _tokenizer_problems(recipe)
    paths: dict[str, str | None] = {}
    if data.tokenizer:
        paths["data.tokenizer"] = chosen_tokenizer(recipe)
    paths["model.weights"] = weights
    paths["lora.weights"] = recipe.lora.weights
    for key, value in paths.items():
        if value and not value.startswith(PREFIX) and not Path(value).expanduser().exists():
            problems.append(f"{key}={value}: no such file or folder here")
    return problems + _run_folder_problems(recipe)


def _tokenizer_problems(recipe: Recipe) -> list[str]:
    """Lists a missing tokenizer, and a vocabulary too small for bytes."""
    data, tokenizer = recipe.data, chosen_tokenizer(recipe)
    problems = []
    # Without data.tokenizer the tokenizer comes from the model's folder.
    is_local = tokenizer is not None and not tokenizer.startswith(PREFIX)
    if is_local and not data.tokenizer and not Path(str(tokenizer), "tokenizer.json").is_file():
        problems.append(
            f"data.tokenizer=null: {tokenizer} has no tokenizer.json; set data.tokenizer=FOLDER,"
            " or data.tokenizer=bytes"
        )
    rows = recipe.model.vocab_size
    if tokenizer is None and data.name != "tokens" and rows <= BYTES:
        problems.append(
            f"model.vocab_size={rows}: too small for bytes and the end token, which"
            f" data={data.name} uses without data.tokenizer; set it to {BYTES + 16} or more"
        )
    return problems


def _run_folder_problems(recipe: Recipe) -> list[str]:
    """Returns a line if the run folder cannot be created."""
    key, folder = "log.dir", recipe.log.dir
    if recipe.log.folder:
        key, folder = "log.folder", recipe.log.folder
    parent = Path(folder).absolute()
    # The run creates missing folders, so the nearest existing one must be writable.
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        return [f"{key}={folder}: {parent} is not a folder"]
    if not os.access(parent, os.W_OK | os.X_OK):
        return [f"{key}={folder}: {parent} is not writable"]
    return []


def _missing_data_files(source: str, path: str) -> str:
    """Returns the reason if the data files at `path` are missing, else ""."""
    if source != "tokens":
        if Path(path).exists() or any(glob.iglob(path, recursive=True)):
            return ""
        return "no such file or folder here"
    # Megatron's token files are a pair, PREFIX.bin and PREFIX.idx. The path may name either one.
    prefix = path.removesuffix(".idx").removesuffix(".bin")
    files = [f"{prefix}.bin", f"{prefix}.idx"]
    missing = [name for name in files if not Path(name).is_file()]
    if not missing:
        return ""
    return f"{' and '.join(missing)} not found"


def _preset_problems(config_dir: str | None) -> list[str]:
    """Returns a line if --config-dir has no presets."""
    if config_dir is None or any(Path(config_dir).glob("*/**/*.yaml")):
        return []
    return [f"--config-dir {config_dir}: has no presets, such as precision/mine.yaml"]
