"""Planning of a recipe for any GPUs, without the GPUs: `fp8cfg plan` and `fp8cfg.plan`.

Chooses the backend, checks the layout, plans each rank, and searches an alternative for a recipe
that does not run. The result is a report (plan_report.py). Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fp8cfg.backends.choice import BLOCK_CUDA, Choice, Hardware
from fp8cfg.planning import graph_text, job_plan, smoke
from fp8cfg.planning.communication import Sent, step_traffic
from fp8cfg.planning.coverage import min_coverage_problem, planned_coverage
from fp8cfg.planning.fit_search import (
    CommandLine,
    Fit,
    Search,
    append_commands,
    append_smallest_peak,
    changed_overrides,
    overrides_only,
    smoke_run,
)
from fp8cfg.planning.hardware import GPU, GPUS, find_gpu
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.planning.layout import (
    Part,
    checked_parts,
    largest_rank_count,
    layout_violations,
    place_on_gpus,
    rank_part,
    split_into_nodes,
)
from fp8cfg.planning.peak_memory import count_parameters, plan_memory, planned_backend
from fp8cfg.planning.plan_report import PlanReport, Rank
from fp8cfg.planning.preflight import choose_backend
from fp8cfg.planning.violations import violations
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import size
from fp8cfg.schema.violation import Violation

MAX_RANKS = 9_999_999
"""Largest number of ranks in a plan."""
UNBOUNDED = 1 << 62
"""Memory in bytes if no GPU is named. Only the layout is checked then."""


def plan(recipe: Recipe, gpu: str | None = None, gpus: int | None = None) -> PlanReport:
    """Plans a recipe for any GPUs. Loads no torch.

    Args:
        recipe: The recipe.
        gpu: Name of the GPU of each rank, such as "h100". Defaults to a CPU with emulated FP8.
        gpus: Number of ranks. Defaults to trainer.num_nodes x trainer.devices.

    Returns:
        The report. If no backend runs the recipe on the GPU, `refusals` has the reasons.

    Raises:
        ConfigError: The recipe breaks rules, the GPU is unknown, or the layout does not fit the
            ranks. If only the layout is wrong, the message has overrides that run.
    """
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"plan: expected a Recipe, got {type(recipe).__name__}; compose(['recipe=llama_8b'])"
            " returns one"
        )
    if gpu is not None and not isinstance(gpu, str):
        raise ConfigError(f"gpu={gpu!r}: expected a name; there are {', '.join(GPUS)}")
    if gpus is not None and (type(gpus) is not int or not 1 <= gpus <= MAX_RANKS):
        raise ConfigError(f"gpus={gpus!r}: expected a number of GPUs, 1 to {MAX_RANKS}")
    table_gpu = find_gpu(gpu, "gpu=") if gpu else None
    recipe, recipe_violations = _check_with_gpus(recipe, gpus)
    check_accelerator(recipe, gpu, "gpu=")
    copy = recipe.model_copy(deep=True)
    return report_plan(copy, gpus, table_gpu, recipe_violations=recipe_violations)


def report_plan(
    recipe: Recipe,
    world: int | None,
    gpu: GPU | None,
    command_line: CommandLine = overrides_only,
    recipe_violations: Sequence[Violation] = (),
) -> PlanReport:
    """Plans a checked recipe.

    Args:
        recipe: The recipe. A smoke run is cut to size here.
        world: Number of ranks. Defaults to the recipe's own number of GPUs.
        gpu: The GPU of each rank. None is a CPU.
        command_line: Formats an alternative recipe as a command line for messages.
        recipe_violations: Violations of the recipe's own layout. If there are any, the function
            raises an error with an alternative recipe.

    Returns:
        The report. If no backend runs the recipe, `refusals` has the reasons.

    Raises:
        ConfigError: A layer pattern matches nothing, the layout does not divide the ranks, or the
            ranks do not divide the batch. The message ends with command lines that run.
    """
    if world is None:
        world = recipe.trainer.num_nodes * recipe.trainer.devices
    if not recipe_violations:
        recipe = smoke.cut_recipe(recipe, world)

    hardware = Hardware("cpu")
    memory_per_rank = UNBOUNDED
    if gpu:
        # Assume a CUDA version with support for block scaling, the newest feature in use.
        hardware = Hardware("cuda", gpu.capability, BLOCK_CUDA)
        memory_per_rank = gpu.memory
    all_violations = violations(recipe, hardware, world, here=gpu is None)
    if any(violation.source == "rule" for violation in all_violations):
        raise ConfigError(all_violations)

    # A plan without a backend still has memory and coverage, so this error is only recorded.
    choice: Choice | None = None
    refusals: list[str] = []
    try:
        # Installed libraries count only for a plan on a CPU, this machine.
        choice = choose_backend(recipe, hardware, rank_part(recipe, world), here=gpu is None)
    except ConfigError as error:
        refusals = error.problems

    try:
        refuse_if(recipe_violations)
        layout = checked_parts(recipe, world)
    except ConfigError as error:
        lines: Sequence[str] = error.problems
        if choice or recipe.backend != "auto":
            lines, fit = _find_alternative(lines, recipe, world, hardware, memory_per_rank)
            if fit:
                lines = append_commands(lines, fit.where("there"), [command_line(fit)])
        raise ConfigError([*refusals, *lines]) from None

    backend = choice.backend if choice else None
    ranks = _plan_ranks(recipe, layout, world, hardware.device, backend)
    coverage = planned_coverage(recipe, plan_layers(recipe, backend))

    layout_problems = [str(violation) for violation in layout_violations(recipe, world)]
    problems: Sequence[str]
    # Each problem is reported once. `refusals` may already have a line on the layout.
    if choice:
        problems = layout_problems or _memory_problems(recipe, ranks, gpu)
    else:
        problems = [line for line in layout_problems if line not in refusals]
    offered = None
    if problems or layout_problems:
        problems, offered = _find_alternative(problems, recipe, world, hardware, memory_per_rank)
    command_lines = []
    if offered:
        command = command_line(offered)
        if command:
            command_lines.append(command)
    low_coverage = min_coverage_problem(recipe, coverage)
    if low_coverage:
        problems = [*problems, low_coverage]

    built = None
    if choice:
        plan_of_job = job_plan.make_plan(recipe, hardware, choice=choice, world=world)
        built = graph_text.planned_parts(plan_of_job)
    return PlanReport(
        recipe=recipe,
        world=world,
        gpu=gpu,
        hardware=hardware,
        choice=choice,
        refusals=refusals,
        coverage=coverage,
        ranks=ranks,
        problems=problems,
        offered=offered,
        lines=command_lines,
        built=built,
    )


def _plan_ranks(
    recipe: Recipe, layout: Sequence[Part], world: int, device: str, backend: str | None
) -> list[Rank]:
    """Plans memory and communication of each kind of rank."""
    ranks = []
    for part in layout:
        sent: Sequence[Sent] = ()
        if world > 1:
            sent = step_traffic(recipe, part, backend or planned_backend(recipe))
        memory = plan_memory(recipe, device, part, backend)
        ranks.append(Rank(part, count_parameters(recipe, part).total, memory, sent))
    return ranks


def _memory_problems(recipe: Recipe, ranks: Sequence[Rank], gpu: GPU | None) -> list[str]:
    """Returns a line if the widest rank does not fit the GPU. A CPU is not checked."""
    need = max(rank.total for rank in ranks)
    if gpu is None or need <= gpu.memory:
        return []
    return [
        f"recipe={recipe.name}: needs {size(need)} on each rank, {gpu.name} has {size(gpu.memory)}"
    ]


def _find_alternative(
    problems: Sequence[str], recipe: Recipe, world: int, hardware: Hardware, free: int
) -> tuple[Sequence[str], Fit | None]:
    """Searches for a recipe that runs instead.

    Tries `world` ranks, then the largest usable number of ranks below, then a smoke run.

    Returns:
        `problems`, with the smallest peak if nothing fits. And the alternative, None if there is
        none.
    """

    def backend(candidate: Recipe, ranks: int) -> str:
        part = rank_part(candidate, ranks)
        return choose_backend(candidate, hardware, part, here=hardware.device == "cpu").backend

    search = Search(hardware.device, free, backend)
    recipe_ranks = recipe.trainer.num_nodes * recipe.trainer.devices
    closest = None
    for ranks in dict.fromkeys([world, largest_rank_count(recipe, world)]):
        if ranks == 0:  # no number of ranks divides the batch
            continue
        placed = recipe
        if ranks != recipe_ranks:
            placed = place_on_gpus(recipe, *split_into_nodes(ranks))
        fit = search.nearest(placed, ranks)
        if fit and fit.peak <= free:
            fit = replace(fit, words=changed_overrides(recipe, fit.recipe))
            # The overrides don't name the recipe's own number of ranks.
            if ranks == recipe_ranks != world:
                fit = replace(fit, ranks=fit.ranks or ranks)
            return problems, fit
        closest = closest or fit
    if closest and problems:
        problems = append_smallest_peak(problems, closest)
    return problems, smoke_run(recipe, world, backend)


def _check_with_gpus(recipe: Recipe, gpus: int | None) -> tuple[Recipe, Sequence[Violation]]:
    """Checks the recipe. If its layout does not fit its own GPUs, checks it with `gpus` GPUs.

    Returns:
        The recipe, and its violations if all of them concern the layout.

    Raises:
        ConfigError: The recipe breaks other rules.
    """
    candidates = [recipe]
    if gpus is not None:
        nodes, devices = split_into_nodes(gpus)
        trainer = {"num_nodes": nodes, "devices": devices}
        candidates.append(recipe.model_copy(update={"trainer": trainer}))
    for candidate in candidates:
        try:
            return job_plan.checked_recipe(candidate), ()
        except ConfigError as error:
            recipe_violations = error.violations
            if not recipe_violations or any(
                violation.source != "layout" for violation in recipe_violations
            ):
                raise
    return candidates[-1], recipe_violations


def check_accelerator(recipe: Recipe, gpu: str | None, option: str) -> None:
    """Raises ConfigError if trainer.accelerator contradicts the GPU named by `option`."""
    accelerator = recipe.trainer.accelerator
    if gpu and accelerator == "cpu":
        raise ConfigError(f"{option}{gpu}: trainer.accelerator=cpu uses no GPU; remove one of them")
    if accelerator == "cuda" and not gpu:
        raise ConfigError(
            f"trainer.accelerator=cuda: name the GPU, as in {option}h100; there are"
            f" {', '.join(GPUS)}"
        )
