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
    flags = arguments.flags
    try:
        folder = arguments.one("--config-dir")
        num_gpus = _count(arguments.one("--gpus"))
        gpu_name = arguments.one("--gpu")
        gpu = find_gpu(gpu_name) if gpu_name else None
        file = recipe_file(arguments.plain, ())
        if len(flags) > 1:
            names = [flag for flag in (*_OUTPUTS, "--measure") if flag in flags]
            raise ConfigError(f"{' '.join(names)}: choose one")
        if gpu_name and "--measure" in flags:
            raise ConfigError(f"--measure: runs on this machine; drop --gpu {gpu_name}")
    except ConfigError as error:
        raise ConfigError(error.problems + wrong_words(arguments)) from None

    def resolve(words: Sequence[str]) -> ResolvedRecipe:
        """Composes the recipe of overrides and the file."""
        return resolve_recipe(words, folder, file)

    resolved = resolve(arguments.words)
    num_ranks = num_gpus or _launched_ranks()
    if resolved.problems and num_ranks is not None:
        # The layout may need the GPUs of --gpus or of the launcher, not num_nodes x devices.
        nodes, devices = split_into_nodes(num_ranks)
        size = [f"trainer.num_nodes={nodes}", f"trainer.devices={devices}"]
        resolved = resolve([*arguments.words, *size])
    # The plan reports layout problems, with a command that runs.
    if not resolved.layout_alone:
        refuse_if(resolved.problems)
    say_notes(resolved.notes)
    recipe = resolved.recipe
    check_accelerator(recipe, gpu_name, "--gpu ")
    num_ranks = num_ranks or recipe.trainer.num_nodes * recipe.trainer.devices
    write_command = command_lines(arguments, resolve, has_blanks=True)
    plan = report_plan(recipe, num_ranks, gpu, write_command, resolved.problems)
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        if flags - {"--measure"}:
            print(_format_plan(plan, *flags), flush=True)
        else:
            print_sections(report_sections(plan))

    place = plan.offered.where("there") if plan.offered else "there"
    if plan.refusals:
        refuse_if(append_commands([*plan.refusals, *plan.problems], place, plan.lines))
    # A graph has other uses than training, so a recipe without enough memory is no error.
    if not flags & {"--tree", "--dot", "--code"}:
        if list(plan.problems) == [min_coverage_problem(recipe, plan.coverage)]:
            check_min_coverage(recipe, plan.coverage)
        if plan.problems:
            refuse_if(append_commands(plan.problems, place, plan.lines))
        if is_first and not flags and (gpu_name or num_gpus):
            command = write_command(Fit(_sized_for(recipe, num_ranks), ()))
            if command:
                say_notes([f"runs there: {command}"])
    if "--measure" in flags:
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


def _launched_ranks() -> int | None:
    """Returns the number of ranks that torchrun or another launcher started. None without one."""
    if "WORLD_SIZE" not in os.environ:
        return None
    return ranks_here()


def _sized_for(recipe: Recipe, num_ranks: int) -> Recipe:
    """Returns the recipe with num_nodes and devices for this number of ranks."""
    if num_ranks == recipe.trainer.num_nodes * recipe.trainer.devices:
        return recipe
    return place_on_gpus(recipe, *split_into_nodes(num_ranks))


def _format_plan(plan: PlanReport, output: str) -> str:
    """Formats the plan as JSON, or its graph as text."""
    if output == "--json":
        return json.dumps(plan.data(), indent=1)
    if plan.choice is None:  # without a backend there is no graph
        raise ConfigError(plan.refusals)
    graph = lower(plan.recipe, plan.hardware, choice=plan.choice)
    format_graph = {
        "--tree": graph_text.tree_text,
        "--dot": graph_text.dot_text,
        "--code": graph_text.code_text,
    }[output]
    return format_graph(graph).rstrip()


def _count(text: str | None) -> int | None:
    """Parses --gpus. Raises ConfigError."""
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 7 or int(text) < 1:
        raise ConfigError(f"--gpus {text[:40]}: expected a number of GPUs, 1 to 9999999")
    return int(text)
