"""`rerun`: repeats a run in a new run folder, lists changes, and compares the losses."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from fp8cfg.checkpoint.manifest import list_steps
from fp8cfg.checkpoint.resume_rules import changes, matches
from fp8cfg.cli import launch_run
from fp8cfg.cli.argv import VERBOSE, add_verbose, split
from fp8cfg.cli.recipe_arguments import command_lines, idle_folder, resolve_on_ranks, say_notes
from fp8cfg.cli.run_models import read_object
from fp8cfg.composition import to_yaml
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.run_folder import metrics_file
from fp8cfg.run_folder.environment import collect_environment, compare_environments
from fp8cfg.run_folder.file_names import CHECKPOINTS, ENVIRONMENT, METRICS, RECIPE
from fp8cfg.run_folder.files import StrangeFile
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError, printable, refuse_if
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import wrapped

T = TypeVar("T")
MAX_METRICS = 1 << 30
"""Maximum size of metrics.jsonl in bytes. A step takes about 300."""
USAGE = """
fp8cfg rerun RUN_FOLDER [key=value ...] [--verbose] [--config-dir FOLDER]

Train the recipe of a run again, and compare the losses bit for bit.

Examples:
  fp8cfg rerun runs/mine
  fp8cfg rerun runs/mine backend=native
  fp8cfg rerun runs/mine trainer.max_steps=20

First it reports changes in code, versions, hardware, environment variables,
data and the keys you pass. At the end it reports whether the losses are equal,
or how much they differ. It only needs the folder's recipe.yaml. If a resume
changed the recipe, the last one is used.

Options:
  --config-dir FOLDER  your own recipes and presets
  --verbose            print the planned and the observed tables too
"""


def run(argv: list[str]) -> int:
    """Repeats a run and returns the exit code."""
    arguments = split(argv, ("--config-dir",), (VERBOSE,))
    add_verbose(arguments)
    if len(arguments.plain) != 1:
        raise ConfigError("rerun: needs one run folder, as in: fp8cfg rerun runs/NAME")
    first_run = RunFolder.reading(arguments.plain[0])
    if not first_run.files.kind(RECIPE):
        RunFolder.open(first_run.path, lock=False)  # raises an error with the missing file
    first_recipe = first_run.read_recipe()
    # The first run's folder is taken.
    first_recipe.log.folder = None
    first_recipe.log.resume = "never"
    config_dir = arguments.one("--config-dir")

    def resolve(words: Sequence[str]) -> ResolvedRecipe:
        """Composes the recipe of overrides on top of the first run's."""
        return resolve_on_ranks(words, config_dir, base=first_recipe)

    resolved = resolve(arguments.words)
    write_command = command_lines(arguments, resolve, "rerun")
    # `start_ranks` handles layout problems.
    if not resolved.layout_alone:
        refuse_if(resolved.problems)
    exit_code = launch_run.start_ranks(resolved, ["rerun", *argv], write_command)
    if exit_code is not None:
        return exit_code
    say_notes([*resolved.notes, *idle_folder(arguments.words, config_dir)])
    recipe = launch_run.cut_to_ranks(resolved.recipe)
    missing: list[str] = []
    first_losses = _read_or_report(lambda: _losses(first_run), "losses", missing)
    if os.environ.get("RANK", "0") == "0":
        _print_changes(first_run, first_recipe, recipe, missing)

    start_time = datetime.now()
    runs: list[RunFolder] = []

    def create_folder() -> RunFolder:
        """Creates the run folder. Only the first rank calls it."""
        exact_path = Path(recipe.log.folder) if recipe.log.folder else None
        run = RunFolder.create(
            Path(recipe.log.dir),
            recipe.name,
            start_time,
            to_yaml(recipe),
            exact_path,
            key="log.folder" if exact_path else "log.dir",
        )
        runs.append(run)
        return run

    exit_code = launch_run.launch(recipe, create_folder, None, write_command)
    if first_losses and runs:  # on the first rank
        print(*compare_losses(first_losses, _losses(runs[0])), sep="\n")
    return exit_code


def _print_changes(
    first_run: RunFolder, first_recipe: Recipe, recipe: Recipe, missing: list[str]
) -> None:
    """Prints the differences from the first run, and then the records that are missing."""
    lines = [f"changed: {line}" for line in _changes(first_run, first_recipe, recipe, missing)]
    lines += _stages(first_run, first_recipe, missing)
    if not lines and not missing:
        lines = ["nothing that is recorded has changed"]
    print(f"rerun of {printable(str(first_run.path))}")
    for line in lines + missing:
        print(wrapped(printable(line), more="  "))
    print()


def _read_or_report(read: Callable[[], T], subject: str, missing: list[str]) -> T | None:
    """Returns the result of `read`. After an error, adds a line to `missing` and returns None."""
    try:
        return read()
    except ConfigError as error:
        missing.append(f"cannot compare {subject}: {error}")
    return None


def _changes(
    first_run: RunFolder, first_recipe: Recipe, recipe: Recipe, missing: list[str]
) -> list[str]:
    """Lists the differences from the first run: keys, environment, data."""
    from fp8cfg.training.data import run_data

    keys = changes(first_recipe, recipe)
    lines = []
    for key in keys:
        lines.append(
            f"{key}: {spelled(_value_of(first_recipe, key))} -> {spelled(_value_of(recipe, key))}"
        )
    first_environment = _read_or_report(
        lambda: read_object(first_run.files, ENVIRONMENT), "versions", missing
    )
    if first_environment is not None:
        first_environment.pop("run_format", None)  # about the folder, not the machine
        lines += compare_environments(first_environment, collect_environment())
    digest = _read_or_report(lambda: _data_digest(first_run), "data", missing)
    # A changed data key is listed above already.
    has_same_keys = not any(key.startswith("data.") for key in keys)
    if digest and has_same_keys and run_data(recipe)[0].sha256 != digest:
        lines.append("data: the text or tokens to train on differ from the first run's")
    return lines


UNIMPORTANT = ("name", "log.*", "checkpoint.*", "trainer.timeout.*")
"""Keys without an effect on losses."""


def _stages(first_run: RunFolder, first_recipe: Recipe, missing: list[str]) -> list[str]:
    """Lists the parts of the first run with another recipe than its last one."""
    # A resume can change the recipe, but a rerun has one recipe from start to end.
    past_recipes = _read_or_report(first_run.past_recipes, "earlier recipes", missing) or []
    lines = []
    for step, recipe in past_recipes:
        keys = [key for key in changes(first_recipe, recipe) if not matches(key, UNIMPORTANT)]
        if keys:
            values = ", ".join(f"{key}={spelled(_value_of(recipe, key))}" for key in keys)
            lines.append(
                f"not repeated: up to step {step} the first run had {values}; this run has the last"
                " recipe from its first step, and losses can differ"
            )
    return lines


def _value_of(recipe: Recipe, key: str) -> Any:
    """Returns the value of a key."""
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _data_digest(first_run: RunFolder) -> str:
    """Returns the fingerprint of the first run's data. Raises ConfigError without a checkpoint."""
    from fp8cfg.checkpoint.load import STATE

    checkpoints = []
    if first_run.files.kind(CHECKPOINTS) == "folder":
        root = first_run.files.folder(CHECKPOINTS)
        checkpoints = [root.folder(name) for _, name in list_steps(root)]
    checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.kind(STATE)]
    if not checkpoints:
        raise ConfigError("the first run has no checkpoint")
    checkpoint = checkpoints[0]
    data = read_object(checkpoint, STATE).get("data")
    digest = data.get("corpus_sha256") if isinstance(data, dict) else None
    if not isinstance(digest, str):
        raise ConfigError(f"{checkpoint.path / STATE}: does not have data.corpus_sha256")
    return digest


Losses = dict[str, dict[int, float]]
"""Training and validation losses by step."""


def _losses(folder: RunFolder) -> Losses:
    """Reads the losses of a run. Raises ConfigError."""
    try:
        if folder.files.size(METRICS) > MAX_METRICS:
            raise ConfigError(f"{folder.metrics}: larger than {MAX_METRICS >> 20} MB")
        rows: list[Any] = metrics_file.read_metrics(folder.files, METRICS)
    except FileNotFoundError:
        raise ConfigError(f"{folder.metrics}: is not there") from None
    except (OSError, StrangeFile, ValueError) as error:
        raise ConfigError(str(error)) from None
    losses: Losses = {"training loss": {}, "validation loss": {}}
    for row in rows:
        for name, key in (("training loss", "loss"), ("validation loss", "val_loss")):
            if isinstance(row.get(key), float):
                losses[name][row["step"]] = row[key]
    return losses


def compare_losses(first: Losses, second: Losses) -> list[str]:
    """Compares the losses of two runs over their common steps.

    Args:
        first: Losses of the first run.
        second: Losses of this run.

    Returns:
        Lines to print.
    """
    first_end = max(first["training loss"], default=0)
    second_end = max(second["training loss"], default=0)
    lines = []
    if first_end != second_end:
        lines.append(
            f"compared up to step {min(first_end, second_end)}; the first run has {first_end}"
            f" steps, this one {second_end}"
        )
    for name in second:
        lines.append(_compare_values(name, first[name], second[name]))
    return lines


def _compare_values(name: str, first: dict[int, float], second: dict[int, float]) -> str:
    """Compares one kind of loss, in one line."""
    common = sorted(first.keys() & second.keys())
    if not common:
        return f"{name}: the two runs have none in common"
    last = common[-1]
    # hex() compares bits. With ==, NaN would differ from itself, and 0.0 would equal -0.0.
    different = [step for step in common if first[step].hex() != second[step].hex()]
    if different:
        difference = abs(second[last] - first[last])
        return (
            f"{name}: {second[last]:.7g}, was {first[last]:.7g} at step {last}:"
            f" {difference:.3g} apart, from step {different[0]}"
        )
    if len(common) == 1:
        return f"{name}: equal bit for bit in its one value, {second[last]!r}"
    return f"{name}: equal bit for bit in all {len(common)} values, the last {second[last]!r}"
