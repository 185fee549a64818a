"""`diff`: lists the keys in which two recipes or runs differ."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.building import builder
from fp8cfg.cli.argv import Arguments, is_recipe_file, split
from fp8cfg.cli.recipe_arguments import compose_recipe, recipe_path
from fp8cfg.cli.run_models import read_object
from fp8cfg.planning import graph_text, job_plan
from fp8cfg.report import differences
from fp8cfg.run_folder.file_names import ENVIRONMENT
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.keys import shown
from fp8cfg.schema.messages import colored
from fp8cfg.schema.recipe import Recipe

USAGE = """
fp8cfg diff A ... -- B ... [--tree] [--json] [--config-dir FOLDER]
fp8cfg diff RUN_FOLDER RUN_FOLDER

List the keys in which two recipes or runs differ, with both values.

Examples:
  fp8cfg diff recipe=llama_8b -- recipe=llama_8b precision=bf16_mxfp8
  fp8cfg diff runs/llama_tiny-20260102-030405 -- mine.yaml
  fp8cfg diff runs/one runs/two

A and B are arguments of a recipe, a recipe file or a run folder, each with
overrides after it. An empty side is the default recipe. For two run folders,
library versions are compared too.

Options:
  --config-dir FOLDER  your own recipes and presets
  --tree               compare the Fiddle graphs instead; - marks a leaf that a
                       graph does not have
  --json               print JSON
"""


@dataclass
class _Side:
    """One side of the comparison. Only run folders have an environment record."""

    name: str
    recipe: Recipe
    environment: dict[str, Any] | None


def run(argv: list[str]) -> int:
    """Prints the differences and returns the exit code."""
    first, second, flags = _halves(argv)
    # Collect the problems of both sides before the error. --config-dir on one side is for both.
    sides, problems = list[_Side](), list[str]()
    for half, opposite in ((first, second), (second, first)):
        try:
            config_dir = half.one("--config-dir") or opposite.one("--config-dir")
            sides.append(_read_side(half, config_dir))
        except ConfigError as error:
            problems += error.problems
    refuse_if(problems)

    a, b = sides
    if "--tree" in flags:
        pairs = {"leaf": differences.pairs(_leaves(a), _leaves(b))}
    else:
        pairs = {"key": differences.keys(a.recipe, b.recipe)}
    if a.environment is not None and b.environment is not None:
        pairs["version"] = differences.versions(a.environment, b.environment)
    if "--json" in flags:
        plurals = {"key": "keys", "leaf": "leaves", "version": "versions"}
        data = {"a": a.name, "b": b.name}
        print(json.dumps(data | {plurals[kind]: rows for kind, rows in pairs.items()}, indent=1))
    else:
        print(colored(differences.text(a.name, b.name, pairs), sys.stdout))
    return 0


def _halves(argv: list[str]) -> tuple[Arguments, Arguments, set[str]]:
    """Returns the arguments before and after `--`, and all flags."""
    if argv.count("--") > 1:
        raise ConfigError("--: write it once, between the two sides")
    cut = argv.index("--") if "--" in argv else len(argv)
    first = split(argv[:cut], ("--config-dir",), ("--json", "--tree"))
    second = split(argv[cut + 1 :], ("--config-dir",), ("--json", "--tree"))
    # Two folders or files are clear without `--`. Overrides are not.
    if "--" not in argv:
        if len(first.plain) != 2 or first.words:
            raise ConfigError(
                "diff: needs -- between the two, as in: fp8cfg diff recipe=llama_8b --"
                " recipe=llama_70b"
            )
        second.plain.append(first.plain.pop())
    return first, second, first.flags | second.flags


def _leaves(side: _Side) -> dict[str, Any]:
    """Returns the leaves of a recipe's Fiddle graph by path."""
    # Without a check against this machine: the recipe may be for another one.
    graph = builder.import_graph()
    return graph_text.leaf_values(graph.make_graph(job_plan.checked_recipe(side.recipe)))


def _read_side(half: Arguments, config_dir: str | None) -> _Side:
    """Reads the recipe of one side. Raises ConfigError."""
    name = " ".join(map(shown, [*half.plain, *half.words])) or "the default recipe"
    problems = []
    for arg in half.plain:
        if not is_recipe_file(arg) and not Path(arg).is_dir():
            problems.append(f"{arg}: not a run folder, a recipe file or key=value")
    refuse_if(problems)
    if len(half.plain) > 1:
        raise ConfigError(f"{half.plain[1]}: one folder or file on each side of --")
    path = recipe_path(half.plain[0]) if half.plain else None
    if path is None or not path.is_dir():
        return _Side(name, compose_recipe(half.words, config_dir, path), None)
    run = RunFolder.open(path, lock=False)
    recipe = compose_recipe(half.words, config_dir, base=run.read_recipe(config_dir))
    return _Side(name, recipe, read_object(run.files, ENVIRONMENT))
