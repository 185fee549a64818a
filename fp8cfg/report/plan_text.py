"""Plan as text: the output of `plan`, at most 80 columns wide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fp8cfg.backends.backend_choice import Choice
from fp8cfg.report import chart, speedups
from fp8cfg.report.communication.collectives import Collective
from fp8cfg.report.memory.fsdp_gather import gather_line
from fp8cfg.report.memory.layout import refused
from fp8cfg.report.memory.peak import NOT_PARAMETERS, memory_table
from fp8cfg.report.tables import amount, size, table, wrapped
from fp8cfg.scalings import SCALINGS

if TYPE_CHECKING:
    from fp8cfg.report.plan_report import Plan


def text(p: Plan) -> str:
    """The sections of the plan."""
    sections = [
        _runs(p),
        str(p.coverage),
        chart.text(p.recipe, p.widest.part.shards),
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


def _runs(p: Plan) -> str:
    where = p.gpu.name if p.gpu else "a CPU (name a GPU: --gpu h100)"
    if p.choice:
        lines = [wrapped(f"backend on {where}: {p.choice.backend}, {p.choice.why}", more="  ")]
        return "\n".join([*lines, *passed_over(p.choice)])
    return "\n".join(wrapped(f"cannot run on {where}: {line}", more="  ") for line in p.refusals)


def _verdict(p: Plan) -> str:
    lines = [wrapped(f"does not run as it stands: {line}", more="  ") for line in p.problems]
    offered = [
        f"runs with: {' '.join(p.write)}",
        *([f"or with: {' '.join(p.alternative)}"] if p.alternative else []),
    ]
    return "\n".join([*lines, *(wrapped(line, more="  ") for line in offered)])


def passed_over(choice: Choice) -> list[str]:
    """A line for each backend that would have gone first on this hardware; none where FP8 is emulated or off."""
    lines = choice.passed_over if choice.product == "scaled_mm" else ()
    return [wrapped(f"passed over {line}", "  ", "    ") for line in lines]


def _layout(p: Plan) -> str:
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
    if refused(p.recipe, p.world):
        lines.append("planned for, not run: training in this version has no such layout")
    if len(p.ranks) > 1:
        rows = [
            [r.part.name, str(len(r.part.layers)), amount(r.parameters), size(r.total)]
            for r in p.ranks
        ]
        lines.append(table(["", "layers", "parameters", "memory"], rows, right=(1, 2, 3)))
    return "\n".join(lines)


def _memory(p: Plan) -> str:
    lines = [memory_table(p.recipe, p.hardware.device, p.widest.part, p.backend)]
    lines += _beyond_the_chart(p)
    if p.backend and (gathered := gather_line(p.recipe, p.widest.part.shards, p.backend)):
        lines.append(gathered)
    if len(p.ranks) > 1:
        lines.append(f"of the {p.widest.part.name}, which takes most")
    none, selective, full = (
        size(p.recomputing(granularity)) for granularity in ("none", "selective", "full")
    )
    lines.append(f"activations, backward: none {none}, selective {selective}, full {full}")
    if p.gpu:
        left = p.gpu.memory - p.widest.total
        gpu = f"{p.gpu.name}, {size(p.gpu.memory)}"
        if refused(p.recipe, p.world):
            gpu += ", as planned for"
        lines.append(
            f"fits {gpu}: {size(left)} to spare"
            if left >= 0
            else f"does not fit {gpu}: {size(-left)} too much"
        )
    return "\n".join(lines)


NUMBERS = ("amaxes", "losses and norms", "scales")
"""What is a number of a tensor or of a token."""


def _sent(p: Plan) -> str:
    """What the rank sends that sends most."""
    rank, rows = max(p.ranks, key=lambda rank: rank.sent_bytes), dict[str, list[Collective]]()
    for one in sorted(rank.sent, key=lambda one: one.what in NUMBERS):
        rows.setdefault(
            "amaxes, norms, losses" if one.what in NUMBERS else f"{one.axis}: {one.what}", []
        ).append(one)
    shown = [
        [said, _ways(every), size(sum(one.bytes for one in every))] for said, every in rows.items()
    ]
    shown.append([f"total, {rank.part.name}", "", size(rank.sent_bytes)])
    return table(["sent by a rank in a step", "collectives", "size"], shown, right=(2,))


def _ways(every: Sequence[Collective]) -> str:
    counts = Counter[str]()
    for one in every:
        counts[one.how] += one.count
    return (
        " + ".join(f"{n} {how}" for how, n in counts.items())
        if len(counts) < 3
        else f"{counts.total()}"
    )


def _beyond_the_chart(p: Plan) -> list[str]:
    """Why the lines of memory come to more bytes a parameter than the chart has; nothing where they do not."""
    rank, shard = p.widest, p.shard
    kinds = {
        kind: n / rank.parameters
        for kind, n in rank.memory.items()
        if n and kind not in NOT_PARAMETERS
    }
    chart_has, together = (
        chart.bytes_per_parameter(chart.row(p.recipe), shard, rank.part.shards),
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


def _gains(p: Plan) -> str:
    gpu = p.gpu
    if gpu is None or (p.choice and p.choice.product == "emulate"):
        return "gains: none, FP8 is emulated here: the same values, no faster than bf16"
    if gpu.fp8 is None:
        return f"gains: none, {gpu.name} has no FP8 units"
    found = speedups.published(p.recipe, gpu.capability)
    lines = ["published gains of FP8 over BF16, not measured here"]
    lines += [f"  {g.times:.2f}x  {g.what}, {g.where}\n         {g.source}" for g in found]
    if not found:
        lines.append(f"  none at hand for fp8.scaling={p.recipe.fp8.scaling}")
    lines.append(wrapped(f"sizes here: {speedups.sizes(p.recipe, p.widest.part)}", more="  "))
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
