"""Plan of a recipe for GPUs not at hand: which GEMMs run in which format on which backend, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fp8cfg.backends.choice import BLOCK_CUDA, Choice, Hardware, choose
from fp8cfg.planning import graph_text, job_plan, remarks, smoke, training_data
from fp8cfg.planning import hardware as speedups
from fp8cfg.planning.communication import Sent, step_traffic
from fp8cfg.planning.coverage import Coverage, min_coverage_problem
from fp8cfg.planning.coverage import planned_coverage as planned_coverage
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
from fp8cfg.planning.fsdp_memory import gather_line
from fp8cfg.planning.hardware import GPU, GPUS, find_gpu
from fp8cfg.planning.layer_plan import plan_layers as plan_layers
from fp8cfg.planning.layout import (
    Part,
    checked_parts,
    largest_rank_count,
    layout_violations,
    place_on_gpus,
    rank_part,
    split_into_nodes,
)
from fp8cfg.planning.peak_memory import (
    COMING,
    NOT_PARAMETERS,
    count_parameters,
    memory_table,
    part_linears,
    plan_memory,
    planned_backend,
)
from fp8cfg.planning.reserve import reserve
from fp8cfg.planning.violations import violations
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.tables import amount, size, table, wrapped
from fp8cfg.schema.violation import Violation


def text(p: PlanReport) -> str:
    """The sections of the plan."""
    sections = [
        f"{_runs(p)}\n{_data(p)}",
        str(p.coverage),
        remarks.chart_text(p.recipe, p.widest.part),
        _layout(p),
        _memory(p),
    ]
    if any(rank.sent for rank in p.ranks):
        sections.append(_sent(p))
    if p.recipe.fp8.enabled:
        sections.append(_gains(p))
    if p.problems:
        sections.append(_verdict(p))
    if p.built:
        sections.append(
            "will be built\n" + "\n".join(_call(kind, **part) for kind, part in p.built.items())
        )
    return "\n\n".join(sections)


def _runs(p: PlanReport) -> str:
    where = p.gpu.name if p.gpu else "a CPU (name a GPU: --gpu h100)"
    if p.choice:
        lines = [wrapped(f"backend on {where}: {p.choice.backend}, {p.choice.why}", more="  ")]
        return "\n".join([*lines, *passed_over_lines(p.choice)])
    return "\n".join(wrapped(f"cannot run on {where}: {line}", more="  ") for line in p.refusals)


def _data(p: PlanReport) -> str:
    """The `data:` line, and the error of a run on data that nobody meant."""
    lines = [wrapped(training_data.data_line(p.recipe), more="  ")]
    lines += [
        wrapped(f"before a run: {line}", more="  ")
        for line in training_data.unintended_data(p.recipe)
    ]
    return "\n".join(lines)


def _verdict(p: PlanReport) -> str:
    lines = [wrapped(f"does not run as it stands: {line}", more="  ") for line in p.problems]
    if p.offered:
        more = f"on {p.offered.ranks} GPUs " if p.offered.ranks else ""
        lines.append(wrapped(f"runs {more}with: {' '.join(p.write)}", more="  "))
    return "\n".join(lines)


def passed_over_lines(choice: Choice) -> list[str]:
    """A line for each backend that would have gone first on this hardware; none where FP8 is emulated or off."""
    lines = choice.passed_over if choice.product == "scaled_mm" else ()
    return [wrapped(f"passed over {line}", "  ", "    ") for line in lines]


def _layout(p: PlanReport) -> str:
    s = p.recipe.trainer.strategy
    model = f"model: {amount(p.parameters)} parameters ({p.parameters:,})"
    if p.world == 1:
        return f"{model}\nlayout: 1 rank"
    ways = (
        ("tensor", s.tensor_model_parallel_size),
        ("pipeline", s.pipeline_model_parallel_size),
        ("context", s.context_parallel_size),
        ("data", p.widest.part.data),
    )
    groups = (
        f", {s.data_parallel_replicate_size} groups with all state each"
        if s.data_parallel_replicate_size > 1
        else ""
    )
    lines = [
        model,
        f"layout: {p.world} ranks = {' x '.join(f'{way} {n}' for way, n in ways)}{groups}",
    ]
    if layout_violations(p.recipe, p.world):
        lines.append("planned for, not run: training in this version has no such layout")
    if len(p.ranks) > 1:
        rows = [
            [r.part.name, str(len(r.part.layers)), amount(r.parameters), size(r.total)]
            for r in p.ranks
        ]
        lines.append(table(["", "layers", "parameters", "memory"], rows, right=(1, 2, 3)))
    return "\n".join(lines)


def _memory(p: PlanReport) -> str:
    lines = [memory_table(p.recipe, p.hardware.device, p.widest.part, p.backend)]
    lines += _beyond_the_chart(p)
    if p.backend and (gathered := gather_line(p.recipe, p.widest.part, p.backend)):
        lines.append(gathered)
    if len(p.ranks) > 1:
        lines.append(f"of the {p.widest.part.name}, which takes most")
    none, selective, full = (
        size(p.recomputing(granularity)) for granularity in ("none", "selective", "full")
    )
    lines.append(f"activations, backward: none {none}, selective {selective}, full {full}")
    if p.gpu and p.choice:
        lines.append(_room(p, p.gpu))
    return "\n".join(lines)


def _room(p: PlanReport, gpu: GPU) -> str:
    """Whether the widest rank fits `gpu`, and whether it leaves the reserve free."""
    left = gpu.memory - p.widest.total
    name = f"{gpu.name}, {size(gpu.memory)}"
    if layout_violations(p.recipe, p.world):
        name += ", as planned for"
    if left < 0:
        return f"does not fit {name}: {size(-left)} too much"
    if not p.tight:
        return f"fits {name}: {size(left)} to spare"
    return wrapped(
        f"fits {name}, tight: {size(left)} to spare, and the CUDA context, NCCL's buffers and"
        f" fragmentation may take {size(p.reserve)}",
        more="  ",
    )


def _sent(p: PlanReport) -> str:
    """The table of what the rank sends that sends most."""
    rank = max(p.ranks, key=lambda rank: rank.sent_bytes)
    rows = [[f"{each.axis}: {each.what}", size(each.bytes)] for each in rank.sent]
    rows.append([f"total, {rank.part.name}", size(rank.sent_bytes)])
    return table(["sent by a rank in a step", "size"], rows, right=(1,))


def _beyond_the_chart(p: PlanReport) -> list[str]:
    """Why the lines of memory come to more bytes a parameter than the chart has; nothing where they do not."""
    rank, shard = p.widest, p.shard
    kinds = {
        kind: n / rank.parameters
        for kind, n in rank.memory.items()
        if n and kind not in NOT_PARAMETERS
    }
    chart_has, together = (
        remarks.bytes_per_parameter(
            remarks.chart_row(p.recipe, rank.part.state), shard, rank.part.shards
        ),
        sum(kinds.values()),
    )
    if together < chart_has + 0.5:
        return []
    more = {
        kind: n for kind, n in kinds.items() if kind in ("gathered", "FP8 copies", "accumulation")
    }
    wider = together - chart_has - sum(more.values())
    said = [f"{kind} {n:.1f}" for kind, n in more.items()] + [
        f"other parameters, in wider formats, {wider:.1f}"
    ] * (wider > 0.05)
    return [
        wrapped(
            f"together {together:.1f} B/param; the chart's {chart_has:.3g} is what a parameter of a"
            f" linear layer keeps from step to step, and beside that: {', '.join(said)}",
            more="  ",
        )
    ]


def _gains(p: PlanReport) -> str:
    gpu = p.gpu
    if gpu is None or (p.choice and p.choice.product == "emulate"):
        return "gains: none, FP8 is emulated here: the same values, no faster than bf16"
    if gpu.fp8 is None:
        return f"gains: none, {gpu.name} has no FP8 units"
    found = speedups.published_gains(p.recipe, gpu.capability)
    lines = ["published gains of FP8 over BF16, not measured here"]
    lines += [f"  {g.times:.2f}x  {g.what}, {g.where}\n         {g.source}" for g in found]
    if not found:
        lines.append(f"  none at hand for fp8.scaling={p.recipe.fp8.scaling}")
    lines.append(
        wrapped(f"sizes here: {speedups.compare_sizes(p.recipe, p.widest.part)}", more="  ")
    )
    if SCALINGS[p.recipe.fp8.scaling].bits == 8:  # not of four, whose products have another peak
        bound = 1 / (1 - p.coverage.share * (1 - gpu.bf16 / gpu.fp8))
        lines.append(f"all matrix products at the peaks of {gpu.name}: at most {bound:.2f}x")
    small = ", ".join(f"{name} {k} -> {n}" for name, (k, n) in p.too_small().items())
    lines += [wrapped(f"too small to win: {small or 'none'}", more="  "), f"  by {speedups.FILTER}"]
    return "\n".join(lines)


def _call(kind: str, name: str, **arguments: Any) -> str:
    values = ", ".join(f"{k}={_value(v)}" for k, v in arguments.items())
    return wrapped(f"{kind:<12}  {name}({values})", "  ", " " * 16)


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


UNBOUNDED = 1 << 62
"""Bytes where no GPU is named: the layout alone is looked at."""


@dataclass(frozen=True)
class Rank:
    """A rank that differs from others in what it holds."""

    part: Part
    """Part of the model that it holds: layers, and ways in which they are split."""
    parameters: int
    """Parameters of that part."""
    memory: dict[str, int]
    """Bytes by kind: weights, masters, gradients, moments, activations, and others."""

    sent: Sequence[Sent] = ()
    """What it sends in a step, by axis of the layout and by what it carries; nothing if there is one rank."""

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.memory.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes that it sends in a step."""
        return sum(one.bytes for one in self.sent)


@dataclass(frozen=True)
class PlanReport:
    """Plan of a recipe's run: what multiplies in which format, and what each rank holds. `str()` is what `fp8cfg plan` prints."""

    recipe: Recipe
    """What is planned."""
    world: int
    """Ranks, each with one GPU."""
    gpu: GPU | None
    """GPU of each rank; None is a CPU, which emulates FP8."""
    hardware: Hardware
    """That GPU or CPU as backends see it."""
    choice: Choice | None
    """Who multiplies, and why; None where nobody does."""
    refusals: Sequence[str]
    """Why nobody multiplies; empty where somebody does."""
    coverage: Coverage
    """Formats of every linear layer's three GEMMs, and their share of the FLOPs."""
    ranks: Sequence[Rank]
    """Ranks that differ, one of each kind."""
    problems: Sequence[str] = ()
    """Why it does not run as it stands where somebody multiplies: its layout, its memory, or too little in FP8. Empty where it
    does run."""
    offered: Fit | None = None
    """Recipe that runs in its place, and the overrides that change it into that one; None without `problems`."""
    lines: Sequence[str] = ()
    """That as a whole command line, with every override that differs from what was typed, of machines and batch too; in Python
    the overrides alone."""
    built: Mapping[str, Mapping[str, Any]] | None = None
    """Autocast context, optimizer, schedule and loss scaler that will be built, each "name" and its arguments; None where
    nobody multiplies."""

    @property
    def write(self) -> Sequence[str]:
        """Overrides with which it runs on these ranks or on more; of a smoke run if the whole model does not fit. Empty without
        `problems`."""
        return self.offered.words if self.offered else ()

    @property
    def backend(self) -> str | None:
        """Who multiplies, where somebody does."""
        return self.choice.backend if self.choice else None

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, each once."""
        return count_parameters(self.recipe, rank_part(self.recipe)).total

    @property
    def shard(self) -> str:
        """What storage.shard comes to on these ranks."""
        return self.widest.part.shard

    @property
    def widest(self) -> Rank:
        """The rank that takes most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def reserve(self) -> int:
        """Bytes of its GPU to keep free on that rank: CUDA context, NCCL's buffers, fragmentation; 0 on a CPU."""
        if self.gpu is None:
            return 0
        return reserve(self.recipe, self.widest.part, self.world, self.widest.total)

    @property
    def tight(self) -> bool:
        """Whether that rank fits its GPU, and does not leave the reserve free."""
        left = self.gpu.memory - self.widest.total if self.gpu else 0
        return 0 <= left < self.reserve

    def recomputing(self, granularity: str) -> int:
        """Bytes of activations, logits and backward pass on the widest rank, less gradients that are to come, under that
        model.recompute_granularity."""
        other = self.recipe.model_copy(
            deep=True,
            update={
                "model": self.recipe.model.model_copy(update={"recompute_granularity": granularity})
            },
        )
        kinds = plan_memory(other, self.hardware.device, self.widest.part, self.backend)
        return kinds["activations"] + kinds["logits"] + kinds["backward"] + kinds.get(COMING, 0)

    def too_small(self) -> dict[str, tuple[int, int]]:
        """Layers that are too small to gain: name -> (in, out) on one rank."""
        part = self.widest.part
        return speedups.too_small_layers(self.recipe, part_linears(self.recipe, part), part)

    def data(self) -> dict[str, Any]:
        """All of the plan as plain data, in an order that stays, as `fp8cfg plan --json` prints it."""
        row = remarks.chart_row(self.recipe, self.widest.part.state)
        fits = self.gpu and self.widest.total <= self.gpu.memory
        each = remarks.bytes_per_parameter(row, self.shard, self.widest.part.shards)
        published = speedups.published_gains(self.recipe, self.hardware.capability)
        return {
            "recipe": self.recipe.name,
            "data": training_data.summarize_data(self.recipe),
            "gpu": asdict(self.gpu) if self.gpu else None,
            "gpus": self.world,
            "runs": asdict(self.choice) if self.choice else None,
            "refusals": self.refusals,
            "coverage": self.coverage.data(),
            "chart": {"name": remarks.row_name(row), **row, "bytes_per_parameter": each},
            "parameters": self.parameters,
            "shard": self.shard,
            "ranks": [
                {
                    "name": rank.part.name,
                    "layers": len(rank.part.layers),
                    "tensor": rank.part.tensor,
                    "context": rank.part.context,
                    "data": rank.part.data,
                    "parameters": rank.parameters,
                    "memory": rank.memory,
                    "total": rank.total,
                    "sent": [
                        {"axis": each.axis, "what": each.what, "bytes": each.bytes}
                        for each in rank.sent
                    ],
                }
                for rank in self.ranks
            ],
            "widest": self.widest.part.name,
            "fits": fits,
            "reserve": self.reserve,
            "tight": self.tight,
            "problems": self.problems,
            "write": self.write,
            "lines": self.lines,
            "recompute": {
                granularity: self.recomputing(granularity)
                for granularity in ("none", "selective", "full")
            },
            "published": [asdict(g) for g in published],
            "measured_here": False,
            "too_small": [
                {"name": name, "in": k, "out": n} for name, (k, n) in self.too_small().items()
            ],
            "built": self.built,
        }

    def __str__(self) -> str:
        return text(self)


def make_report(
    recipe: Recipe,
    world: int,
    gpu: GPU | None,
    whole_line: CommandLine = overrides_only,
    problems_of_layout: Sequence[Violation] = (),
) -> PlanReport:
    """The plan of `recipe`, on a GPU with a CUDA that is new enough for whatever the GPU can do. Raises ConfigError for layer
    patterns that match nothing; and for `problems_of_layout`, and a world that is no whole number of replicas or over which the
    batch does not divide, with what runs there, each fit as `whole_line` has it."""
    hardware = Hardware("cuda", gpu.capability, BLOCK_CUDA) if gpu else Hardware("cpu")
    found = violations(recipe, hardware, world, here=gpu is None)
    if any(violation.source == "rule" for violation in found):
        raise ConfigError(found)
    choice, refusals, memory_of_each = None, list[str](), gpu.memory if gpu else UNBOUNDED
    try:
        choice = _chosen(recipe, hardware, world)
    except ConfigError as e:
        refusals = e.problems
    try:
        refuse_if(problems_of_layout)
        layout = checked_parts(recipe, world)
    except ConfigError as e:  # there are no ranks of which to say more
        lines: Sequence[str] = e.problems
        if choice or recipe.backend != "auto":
            lines, fit = _instead(lines, recipe, world, hardware, memory_of_each)
            lines = append_commands(lines, fit.where("there"), [whole_line(fit)]) if fit else lines
        raise ConfigError([*refusals, *lines]) from None
    backend = choice.backend if choice else None
    ranks = [
        Rank(
            part,
            count_parameters(recipe, part).total,
            plan_memory(recipe, hardware.device, part, backend),
            step_traffic(recipe, part, backend or planned_backend(recipe)) if world > 1 else (),
        )
        for part in layout
    ]
    coverage = planned_coverage(recipe, plan_layers(recipe, backend))
    layout_problems = layout_violations(recipe, world)
    problems: Sequence[str] = []
    if choice:
        problems = [str(line) for line in layout_problems] or _too_large(recipe, ranks, gpu)
    else:
        lines = [str(line) for line in layout_problems]
        problems = [line for line in lines if line not in refusals]
    offered = None
    if problems or layout_problems:
        problems, offered = _instead(problems, recipe, world, hardware, memory_of_each)
    line = whole_line(offered) if offered else ""
    low = min_coverage_problem(recipe, coverage)
    problems = [*problems, *([low] if low else [])]
    return PlanReport(
        recipe,
        world,
        gpu,
        hardware,
        choice,
        refusals,
        coverage,
        ranks,
        problems,
        offered,
        [line] if line else [],
    )


def _chosen(recipe: Recipe, hardware: Hardware, world: int) -> Choice:
    statistics = recipe.log.fp8_stats_every_n_steps
    return choose(
        rank_part(recipe, world).state.precision,
        hardware,
        statistics=statistics,
        here=hardware.device == "cpu",
        strategy=recipe.trainer.strategy,
        adapters=recipe.lora.enabled,
    )


def _too_large(recipe: Recipe, ranks: Sequence[Rank], gpu: GPU | None) -> list[str]:
    need = max(rank.total for rank in ranks)
    if gpu is None or need <= gpu.memory:
        return []
    return [
        f"recipe={recipe.name}: needs {size(need)} on each rank, {gpu.name} has {size(gpu.memory)}"
    ]


def _instead(
    problems: Sequence[str], recipe: Recipe, world: int, hardware: Hardware, free: int
) -> tuple[Sequence[str], Fit | None]:
    """`problems`, with the smallest peak if nothing fits, and what runs instead of `recipe`.

    That is a fit on `world` ranks, on as many of them as a launch would start, or a smoke run.
    """

    def backend(other: Recipe, ranks: int) -> str:
        return _chosen(other, hardware, ranks).backend

    search = Search(hardware.device, free, backend)
    trainer, closest = recipe.trainer, None
    for ranks in filter(None, dict.fromkeys([world, largest_rank_count(recipe, world)])):
        is_meant = ranks == trainer.num_nodes * trainer.devices
        here = recipe if is_meant else place_on_gpus(recipe, *split_into_nodes(ranks))
        fit = search.nearest(here, ranks)
        if fit and fit.peak <= free:
            return problems, replace(fit, words=changed_overrides(recipe, fit.recipe))
        closest = closest or fit
    if closest and problems:
        problems = append_smallest_peak(problems, closest)
    return problems, smoke_run(recipe, world, backend)


MOST = 9_999_999
"""Ranks that can be planned for."""


def plan(recipe: Recipe, gpu: str | None = None, gpus: int | None = None) -> PlanReport:
    """Plan of `recipe` on `gpus` ranks, by default trainer.num_nodes x trainer.devices, each with the GPU called `gpu`, such as
    "h100"; without a name on a CPU, which emulates FP8. Loads no torch. Where no backend can run the recipe on that GPU the plan's
    `refusals` say why.

    Raises ConfigError for a recipe that breaks its rules, a GPU that is not in the table, and ranks that do not divide: with the
    words that run there where the layout is all that is wrong.
    """
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"plan: expected a Recipe, got {type(recipe).__name__}; compose(['recipe=llama_8b'])"
            " gives one"
        )
    if gpu is not None and not isinstance(gpu, str):
        raise ConfigError(f"gpu={gpu!r}: expected a name; there are {', '.join(GPUS)}")
    if gpus is not None and (type(gpus) is not int or not 1 <= gpus <= MOST):
        raise ConfigError(f"gpus={gpus!r}: expected a number of GPUs, 1 to {MOST}")
    found = find_gpu(gpu, "gpu=") if gpu else None
    recipe, problems = _settled(recipe, gpus)
    check_accelerator(recipe, gpu, "gpu=")
    return report_plan(recipe.model_copy(deep=True), gpus, found, problems=problems)


def _settled(recipe: Recipe, gpus: int | None) -> tuple[Recipe, Sequence[Violation]]:
    """`recipe`, checked, and on so many `gpus` where its layout is for more than it has itself; or as it is, with its problems,
    where these are of its layout alone."""
    every = [recipe]
    if gpus is not None:
        nodes, devices = split_into_nodes(gpus)
        every.append(
            recipe.model_copy(update={"trainer": {"num_nodes": nodes, "devices": devices}})
        )
    violations: Sequence[Violation] = ()
    for each in every:
        try:
            return job_plan.checked_recipe(each), ()
        except ConfigError as error:
            violations = error.violations
            if not violations or any(found.source != "layout" for found in violations):
                raise
    return every[-1], violations


def report_plan(
    recipe: Recipe,
    ranks: int | None,
    gpu: GPU | None,
    whole_line: CommandLine = overrides_only,
    problems: Sequence[Violation] = (),
) -> PlanReport:
    """Plan of a checked `recipe`, with what will be built. `whole_line` makes a command line of a fit that a refusal offers;
    without it its words stand alone. Of a recipe whose layout its own rules refuse, with these `problems`, there is no plan: raises
    ConfigError with what runs there."""
    world = ranks or recipe.trainer.num_nodes * recipe.trainer.devices
    recipe = recipe if problems else smoke.cut_recipe(recipe, world)
    found = make_report(recipe, world, gpu, whole_line, problems)
    if found.choice is None:
        return found
    return replace(
        found,
        built=graph_text.planned_parts(
            job_plan.make_plan(recipe, found.hardware, choice=found.choice, world=world)
        ),
    )


def check_accelerator(recipe: Recipe, gpu: str | None, option: str) -> None:
    """Raise ConfigError where trainer.accelerator and the name `gpu` contradict each other; `option` is what names one."""
    accelerator = recipe.trainer.accelerator
    if gpu and accelerator == "cpu":
        raise ConfigError(
            f"{option}{gpu}: trainer.accelerator=cpu runs on none; drop one of the two"
        )
    if accelerator == "cuda" and not gpu:
        raise ConfigError(
            f"trainer.accelerator=cuda: name the GPU, as in {option}h100; there are"
            f" {', '.join(GPUS)}"
        )
