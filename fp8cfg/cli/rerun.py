"""`rerun`: repeats a run in a new run folder, lists what has changed since, and compares the losses."""

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
from fp8cfg.cli.recipe_arguments import idle_folder, say, settled_on_ranks, whole_lines
from fp8cfg.cli.run_models import read_object
from fp8cfg.composition import to_yaml
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.run_folder import metrics_file
from fp8cfg.run_folder.environment import differences, environment
from fp8cfg.run_folder.files import StrangeFile
from fp8cfg.run_folder.run_folder import CHECKPOINTS, ENVIRONMENT, METRICS, RECIPE, RunFolder
from fp8cfg.schema.errors import ConfigError, printable, refuse_if
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import wrapped

T = TypeVar("T")
MAX_METRICS = 1 << 30
"""Bytes of a metrics.jsonl, which has some 300 a step."""
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
    """Rerun the run folder of `argv`. Returns the exit code."""
    arguments = split(argv, ("--config-dir",), (VERBOSE,))
    add_verbose(arguments)
    if len(arguments.plain) != 1:
        raise ConfigError("rerun: needs one run folder, as in: fp8cfg rerun runs/NAME")
    first = RunFolder.reading(arguments.plain[0])
    if not first.files.kind(RECIPE):
        RunFolder.open(first.path, lock=False)  # says what is missing
    before = first.read_recipe()
    before.log.folder, before.log.resume = None, "never"  # which the first run has

    def settle(words: Sequence[str]) -> ResolvedRecipe:
        return settled_on_ranks(words, arguments.one("--config-dir"), base=before)

    found, whole_line = settle(arguments.words), whole_lines(arguments, settle, "rerun")
    refuse_if([] if found.layout_alone else found.problems)
    if (ended := launch_run.start_ranks(found, ["rerun", *argv], whole_line)) is not None:
        return ended
    say([*found.notes, *idle_folder(arguments.words, arguments.one("--config-dir"))])
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
    """What `read` gives; None, and a line in `missing`, where what is to be compared with cannot be read."""
    try:
        return read()
    except ConfigError as e:
        missing.append(f"cannot compare {what}: {e}")
    return None


def _changes(first: RunFolder, before: Recipe, recipe: Recipe, missing: list[str]) -> list[str]:
    """What differs from the first run, one line each: keys, environment, data; into `missing` what cannot be compared."""
    from fp8cfg.training.data import run_data

    keys = changes(before, recipe)
    lines = [f"{key}: {spelled(_at(before, key))} -> {spelled(_at(recipe, key))}" for key in keys]
    then = _compared_or(lambda: read_object(first.files, ENVIRONMENT), "versions", missing)
    if then is not None:
        then.pop("run_format", None)  # of the folder, not of the machine
        lines += differences(then, environment())
    digest = _compared_or(lambda: _data_digest(first), "data", missing)
    if (
        digest
        and not any(key.startswith("data.") for key in keys)
        and run_data(recipe)[0].sha256 != digest
    ):
        lines.append("data: the text or tokens to train on differ from the first run's")
    return lines


UNIMPORTANT = ("name", "log.*", "checkpoint.*", "trainer.timeout.*")
"""Keys that change no loss."""


def _stages(first: RunFolder, before: Recipe, missing: list[str]) -> list[str]:
    """Returns a line for each stage of the first run that had another recipe than its last."""
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
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _data_digest(first: RunFolder) -> str:
    """sha256 of the data that the first run trained on, from the state of its newest checkpoint. Raises ConfigError where it is
    not recorded."""
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
    try:
        if folder.files.size(METRICS) > MAX_METRICS:
            raise ConfigError(f"{folder.metrics}: larger than {MAX_METRICS >> 20} MB")
        rows: list[Any] = metrics_file.read(folder.files, METRICS)
    except FileNotFoundError:
        raise ConfigError(f"{folder.metrics}: is not there") from None
    except (OSError, StrangeFile, ValueError) as e:
        raise ConfigError(str(e)) from None
    return {
        name: {r["step"]: r[key] for r in rows if isinstance(r.get(key), float)}
        for name, key in (("training loss", "loss"), ("validation loss", "val_loss"))
    }


def compared(then: Losses, now: Losses) -> list[str]:
    """The lines that compare the losses of two runs, over the steps that both have."""
    ends = [max(losses["training loss"], default=0) for losses in (then, now)]
    short = [
        f"compared up to step {min(ends)}; the first run has {ends[0]} steps, this one {ends[1]}"
    ]
    return (short if ends[0] != ends[1] else []) + [
        _compared(name, then[name], now[name]) for name in now
    ]


def _compared(name: str, then: dict[int, float], now: dict[int, float]) -> str:
    common = sorted(then.keys() & now.keys())
    if not common:
        return f"{name}: the two runs have none in common"
    last = common[-1]
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
