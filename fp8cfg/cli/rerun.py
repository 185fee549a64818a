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
    first = RunFolder.reading(arguments.plain[0])
    if not first.files.kind(RECIPE):
        RunFolder.open(first.path, lock=False)  # raises an error with the missing file
    before = first.read_recipe()
    before.log.folder, before.log.resume = None, "never"  # the first run's folder is taken

    def settle(words: Sequence[str]) -> ResolvedRecipe:
        """Composes the recipe of overrides on top of the first run's."""
        return resolve_on_ranks(words, arguments.one("--config-dir"), base=before)

    found, whole_line = settle(arguments.words), command_lines(arguments, settle, "rerun")
    refuse_if([] if found.layout_alone else found.problems)
    if (ended := launch_run.start_ranks(found, ["rerun", *argv], whole_line)) is not None:
        return ended
    say_notes([*found.notes, *idle_folder(arguments.words, arguments.one("--config-dir"))])
    recipe = launch_run.cut_to_ranks(found.recipe)
    missing = list[str]()
    then = _compared_or(lambda: _losses(first), "losses", missing)
    if os.environ.get("RANK", "0") == "0":
        print(f"rerun of {printable(str(first.path))}")
        changed = [f"changed: {line}" for line in _changes(first, before, recipe, missing)]
        changed += _stages(first, before, missing)
        if not changed + missing:
            changed = ["nothing that is recorded has changed"]
        print(
            *(wrapped(printable(line), more="  ") for line in changed + missing),
            sep="\n",
            end="\n\n",
        )
    now, made = datetime.now(), list[RunFolder]()
    exactly = Path(recipe.log.folder) if recipe.log.folder else None

    def folder() -> RunFolder:
        """Creates the run folder. Only the first rank calls it."""
        key = "log.folder" if exactly else "log.dir"
        made.append(
            RunFolder.create(
                Path(recipe.log.dir), recipe.name, now, to_yaml(recipe), exactly, key=key
            )
        )
        return made[0]

    code = launch_run.launch(recipe, folder, None, whole_line)
    if then and made:  # on the first rank
        print(*compared(then, _losses(made[0])), sep="\n")
    return code


def _compared_or(read: Callable[[], T], what: str, missing: list[str]) -> T | None:
    """Returns the result of `read`. After an error, adds a line to `missing` and returns None."""
    try:
        return read()
    except ConfigError as e:
        missing.append(f"cannot compare {what}: {e}")
    return None


def _changes(first: RunFolder, before: Recipe, recipe: Recipe, missing: list[str]) -> list[str]:
    """Lists the differences from the first run: keys, environment, data."""
    from fp8cfg.training.data import run_data

    keys = changes(before, recipe)
    lines = [f"{key}: {spelled(_at(before, key))} -> {spelled(_at(recipe, key))}" for key in keys]
    then = _compared_or(lambda: read_object(first.files, ENVIRONMENT), "versions", missing)
    if then is not None:
        then.pop("run_format", None)  # about the folder, not the machine
        lines += compare_environments(then, collect_environment())
    digest = _compared_or(lambda: _data_digest(first), "data", missing)
    if (
        digest
        and not any(key.startswith("data.") for key in keys)
        and run_data(recipe)[0].sha256 != digest
    ):
        lines.append("data: the text or tokens to train on differ from the first run's")
    return lines


UNIMPORTANT = ("name", "log.*", "checkpoint.*", "trainer.timeout.*")
"""Keys without an effect on losses."""


def _stages(first: RunFolder, before: Recipe, missing: list[str]) -> list[str]:
    """Lists the parts of the first run with another recipe than its last one."""
    # A resume can change the recipe, but a rerun has one recipe from start to end.
    lines = []
    for step, recipe in _compared_or(first.past_recipes, "earlier recipes", missing) or []:
        keys = [key for key in changes(before, recipe) if not matches(key, UNIMPORTANT)]
        if keys:
            values = ", ".join(f"{key}={spelled(_at(recipe, key))}" for key in keys)
            lines.append(
                f"not repeated: up to step {step} the first run had {values}; this run has the last"
                " recipe from its first step, and losses can differ"
            )
    return lines


def _at(recipe: Recipe, key: str) -> Any:
    """Returns the value of a key."""
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _data_digest(first: RunFolder) -> str:
    """Returns the fingerprint of the first run's data. Raises ConfigError without a checkpoint."""
    from fp8cfg.checkpoint.load import STATE

    root = first.files.folder(CHECKPOINTS) if first.files.kind(CHECKPOINTS) == "folder" else None
    states = [name for _, name in list_steps(root) if root.folder(name).kind(STATE)] if root else []
    if not root or not states:
        raise ConfigError("the first run has no checkpoint")
    data = read_object(root.folder(states[0]), STATE).get("data")
    found = data.get("corpus_sha256") if isinstance(data, dict) else None
    if not isinstance(found, str):
        raise ConfigError(f"{root.path / states[0] / STATE}: does not have data.corpus_sha256")
    return found


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
    except (OSError, StrangeFile, ValueError) as e:
        raise ConfigError(str(e)) from None
    return {
        name: {r["step"]: r[key] for r in rows if isinstance(r.get(key), float)}
        for name, key in (("training loss", "loss"), ("validation loss", "val_loss"))
    }


def compared(then: Losses, now: Losses) -> list[str]:
    """Compares the losses of two runs over their common steps.

    Args:
        then: Losses of the first run.
        now: Losses of this run.

    Returns:
        Lines to print.
    """
    ends = [max(losses["training loss"], default=0) for losses in (then, now)]
    short = [
        f"compared up to step {min(ends)}; the first run has {ends[0]} steps, this one {ends[1]}"
    ]
    return (short if ends[0] != ends[1] else []) + [
        _compared(name, then[name], now[name]) for name in now
    ]


def _compared(name: str, then: dict[int, float], now: dict[int, float]) -> str:
    """Compares one kind of loss, in one line."""
    common = sorted(then.keys() & now.keys())
    if not common:
        return f"{name}: the two runs have none in common"
    last = common[-1]
    # hex() compares bits. With ==, NaN would differ from itself, and 0.0 would equal -0.0.
    different = [step for step in common if then[step].hex() != now[step].hex()]
    if not different:
        equal = (
            f"all {len(common)} values, the last {now[last]!r}"
            if common[1:]
            else f"its one value, {now[last]!r}"
        )
        return f"{name}: equal bit for bit in {equal}"
    apart = f"{abs(now[last] - then[last]):.3g} apart"
    return (
        f"{name}: {now[last]:.7g}, was {then[last]:.7g} at step {last}: {apart}, from step"
        f" {different[0]}"
    )
