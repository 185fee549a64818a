"""`plan`: predicts GEMM formats, memory and speedup of a recipe, for any GPU."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence

from fp8cfg.building.builder import lower
from fp8cfg.cli.argv import split, wrong_words
from fp8cfg.cli.recipe_arguments import command_lines, recipe_file, resolve_recipe, say_notes
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.parallel.sharding import ranks as ranks_here
from fp8cfg.planning import graph_text
from fp8cfg.planning.coverage import check_min_coverage, min_coverage_problem
from fp8cfg.planning.fit_search import Fit, append_commands
from fp8cfg.planning.hardware import GPUS, find_gpu
from fp8cfg.planning.layout import place_on_gpus, split_into_nodes
from fp8cfg.planning.plan_recipe import check_accelerator, report_plan
from fp8cfg.planning.plan_report import PlanReport, report_sections
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.sections import print_sections

USAGE = f"""
fp8cfg plan [recipe=NAME | FILE.yaml] [key=value ...] [--gpu NAME] [--gpus N]
            [--measure] [--json] [--tree | --dot | --code] [--config-dir FOLDER]

Predict formats, memory and FLOPs of a run, without a GPU.

Examples:
  fp8cfg plan recipe=llama_8b precision=bf16_fp8 --gpu h100
  fp8cfg plan recipe=llama_70b precision=bf16_fp8 --gpu h100 --gpus 64
  fp8cfg plan recipe=llama_tiny precision=bf16_fp8 --measure

It prints the formats of the three GEMMs of each linear layer, the reason for
each layer in high precision, the storage of each kind of state, the memory of
the fullest rank, traffic, and published gains at such sizes.

Options:
  --gpu NAME           {textwrap.fill(", ".join(GPUS), 57, subsequent_indent=" " * 23)};
                       default a CPU, which emulates FP8
  --gpus N             number of ranks; default the ranks that torchrun started,
                       or trainer.num_nodes x trainer.devices
  --measure            build the job here, run one microbatch, and print the
                       measured memory; with several ranks run it in torchrun
  --json               print JSON
  --tree, --dot, --code
                       print the Fiddle graph instead: as paths, for Graphviz,
                       or as Python
  --config-dir FOLDER  your own recipes and presets

Exit code: 0 if training runs. With --gpu or --gpus, a command that starts it
follows; replace its PATH and FOLDER. 2 if training does not run, because it
needs too much memory or the layout is not supported. A command that runs
follows, with recomputation, shards, a smaller microbatch, more GPUs or another
layout, unless the GPU cannot run the precision. 3 if the FP8 share is below
fp8.min_coverage.
"""
_OUTPUTS = ("--json", "--tree", "--dot", "--code")


def run(argv: list[str]) -> int:
    """Prints the plan of a recipe.

    Args:
        argv: Arguments after the verb.

    Returns:
        The exit code.

    Raises:
        ConfigError: The recipe is wrong. Or it cannot run on this hardware, after the plan is
            printed.
        NotFP8Error: The planned coverage is below fp8.min_coverage.
    """
    arguments = split(argv, ("--config-dir", "--gpu", "--gpus"), (*_OUTPUTS, "--measure"))
    try:
        folder, ranks, name = (
            arguments.one("--config-dir"),
            _count(arguments.one("--gpus")),
            arguments.one("--gpu"),
        )
        gpu, file = find_gpu(name) if name else None, recipe_file(arguments.plain, ())
        if len(arguments.flags) > 1:
            raise ConfigError(
                f"{' '.join(f for f in (*_OUTPUTS, '--measure') if f in arguments.flags)}:"
                " choose one"
            )
        if name and "--measure" in arguments.flags:
            raise ConfigError(f"--measure: runs on this machine; drop --gpu {name}")
    except ConfigError as e:
        raise ConfigError(e.problems + wrong_words(arguments)) from None

    def settle(words: Sequence[str]) -> ResolvedRecipe:
        """Composes the recipe of overrides and the file."""
        return resolve_recipe(words, folder, file)

    found = settle(arguments.words)
    started = ranks or _launched()
    if found.problems and started is not None:
        # The layout may need the GPUs of --gpus or of the launcher, not num_nodes x devices.
        nodes, devices = split_into_nodes(started)
        found = settle(
            [*arguments.words, f"trainer.num_nodes={nodes}", f"trainer.devices={devices}"]
        )
    refuse_if([] if found.layout_alone else found.problems)
    say_notes(found.notes)
    recipe = found.recipe
    check_accelerator(recipe, name, "--gpu ")
    world = started or recipe.trainer.num_nodes * recipe.trainer.devices
    whole_line = command_lines(arguments, settle, has_blanks=True)
    plan = report_plan(recipe, world, gpu, whole_line, found.problems)
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        if arguments.flags - {"--measure"}:
            print(_shown(plan, *arguments.flags), flush=True)
        else:
            print_sections(report_sections(plan))
    where = plan.offered.where("there") if plan.offered else "there"
    if plan.refusals:
        refuse_if(append_commands([*plan.refusals, *plan.problems], where, plan.lines))
    if (
        not {"--tree", "--dot", "--code"} & arguments.flags
    ):  # a graph can be used for other purposes, so a recipe without enough memory is no error
        if list(plan.problems) == [min_coverage_problem(recipe, plan.coverage)]:
            check_min_coverage(recipe, plan.coverage)
        refuse_if(append_commands(plan.problems, where, plan.lines) if plan.problems else [])
        if (
            is_first
            and not arguments.flags
            and (name or ranks)
            and (line := whole_line(Fit(_there(recipe, world), ())))
        ):
            say_notes([f"runs there: {line}"])
    if "--measure" in arguments.flags:
        _measure(recipe, is_first)
    return 0


def _measure(recipe: Recipe, is_first: bool) -> None:
    """Trains a step on the ranks of this launch. The first rank prints the measured memory."""
    from fp8cfg.parallel.process_group import world
    from fp8cfg.planning.hardware import find_hardware
    from fp8cfg.training.memory_measurement import measured_table

    with world(find_hardware(recipe.trainer.accelerator).device, recipe.trainer):
        text = measured_table(recipe)
    if is_first:
        print(f"\n{text}")


def _launched() -> int | None:
    """Returns the number of ranks that torchrun or another launcher started. None without one."""
    return ranks_here() if "WORLD_SIZE" in os.environ else None


def _there(recipe: Recipe, ranks: int) -> Recipe:
    """Returns the recipe with num_nodes and devices for this number of ranks."""
    t = recipe.trainer
    return (
        recipe
        if ranks == t.num_nodes * t.devices
        else place_on_gpus(recipe, *split_into_nodes(ranks))
    )


def _shown(plan: PlanReport, output: str) -> str:
    """Formats the plan as JSON, or its graph as text."""
    if output == "--json":
        return json.dumps(plan.data(), indent=1)
    if plan.choice is None:  # without a backend there is no graph
        raise ConfigError(plan.refusals)
    lowered = lower(plan.recipe, plan.hardware, choice=plan.choice)
    return {
        "--tree": graph_text.tree_text,
        "--dot": graph_text.dot_text,
        "--code": graph_text.code_text,
    }[output](lowered).rstrip()


def _count(text: str | None) -> int | None:
    """Parses --gpus. Raises ConfigError."""
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 7 or int(text) < 1:
        raise ConfigError(f"--gpus {text}: expected a number of GPUs, 1 to 9999999")
    return int(text)
