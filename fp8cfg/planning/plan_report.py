"""Report of a plan: GEMM formats, backend, memory and communication of a recipe on any GPUs.

`fp8cfg plan` prints `str()` of the report. `fp8cfg plan --json` prints `data()`. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8cfg.backends.choice import Choice, Hardware
from fp8cfg.planning import remarks, speedups, training_data
from fp8cfg.planning.communication import Sent
from fp8cfg.planning.coverage import Coverage
from fp8cfg.planning.fit_search import Fit
from fp8cfg.planning.fsdp_memory import gather_line
from fp8cfg.planning.hardware import GPU
from fp8cfg.planning.layout import Part, layout_violations, rank_part
from fp8cfg.planning.peak_memory import (
    COMING,
    NOT_PARAMETERS,
    count_parameters,
    memory_table,
    part_linears,
    plan_memory,
)
from fp8cfg.planning.reserve import reserve
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.sections import Section, plain_text, sections_html
from fp8cfg.schema.tables import amount, size, table, wrapped

GRANULARITIES = ("none", "selective", "full")
"""Values of model.recompute_granularity."""


@dataclass(frozen=True)
class Rank:
    """Memory and communication of a rank. Represents all ranks with the same layers and shards."""

    part: Part
    """Layers and shards of the rank."""
    parameters: int
    """Number of parameters of these layers."""
    memory: dict[str, int]
    """Bytes by kind, such as weights, masters, gradients, moments and activations."""

    sent: Sequence[Sent] = ()
    """Messages of a step by axis of the layout. Empty with one rank."""

    @property
    def total(self) -> int:
        """Peak memory in bytes, the sum of all kinds."""
        return sum(self.memory.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes sent in a step."""
        return sum(message.bytes for message in self.sent)


@dataclass(frozen=True)
class PlanReport:
    """Report on a recipe: GEMM formats, memory and communication of each rank.

    `fp8cfg plan` prints `str()` of it.
    """

    recipe: Recipe
    """The planned recipe. A smoke run is already cut to size."""
    world: int
    """Number of ranks, one GPU each."""
    gpu: GPU | None
    """GPU of each rank. None is a CPU with emulated FP8."""
    hardware: Hardware
    """Device and compute capability of the GPU or CPU."""
    choice: Choice | None
    """The backend and the reason for its choice. None if no backend runs the recipe."""
    refusals: Sequence[str]
    """Reasons why no backend runs the recipe. Empty if one does."""
    coverage: Coverage
    """Formats of the three GEMMs of each linear layer, and the share of FLOPs in FP8."""
    ranks: Sequence[Rank]
    """One rank of each kind: first, middle and last pipeline stage."""
    problems: Sequence[str] = ()
    """Reasons other than the backend why training fails: layout, memory or coverage."""
    offered: Fit | None = None
    """A recipe that runs instead, with its overrides. None without `problems`."""
    lines: Sequence[str] = ()
    """Command line of that recipe. In Python only its overrides."""
    built: Mapping[str, Mapping[str, Any]] | None = None
    """Parts of the job: autocast context, optimizer, schedule and loss scaler. Each has a "name"
    and its arguments. None without a backend."""

    @property
    def write(self) -> Sequence[str]:
        """Overrides to get a recipe that runs. Empty without `problems`.

        The recipe may need more ranks, or only its own number. If the model fits nowhere, it is a
        smoke run.
        """
        if self.offered is None:
            return ()
        return self.offered.words

    @property
    def backend(self) -> str | None:
        """Name of the backend. None if no backend runs the recipe."""
        return self.choice.backend if self.choice else None

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return count_parameters(self.recipe, rank_part(self.recipe)).total

    @property
    def shard(self) -> str:
        """Value of storage.shard on these ranks, with auto resolved."""
        return self.widest.part.shard

    @property
    def widest(self) -> Rank:
        """The rank with the most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def reserve(self) -> int:
        """Bytes for the CUDA context, NCCL buffers and fragmentation on the widest rank.

        0 on a CPU.
        """
        if self.gpu is None:
            return 0
        return reserve(self.recipe, self.widest.part, self.world, self.widest.total)

    @property
    def tight(self) -> bool:
        """Whether the widest rank fits its GPU, but leaves less than the reserve free."""
        if self.gpu is None:
            return False
        free_bytes = self.gpu.memory - self.widest.total
        return 0 <= free_bytes < self.reserve

    def recomputing(self, granularity: str) -> int:
        """Returns the bytes of activations with another model.recompute_granularity.

        Includes logits and backward temporaries of the widest rank. Gradients that do not exist
        yet at the peak are subtracted.

        Args:
            granularity: "none", "selective" or "full".
        """
        model = self.recipe.model.model_copy(update={"recompute_granularity": granularity})
        changed = self.recipe.model_copy(deep=True, update={"model": model})
        kinds = plan_memory(changed, self.hardware.device, self.widest.part, self.backend)
        return kinds["activations"] + kinds["logits"] + kinds["backward"] + kinds.get(COMING, 0)

    def too_small(self) -> dict[str, tuple[int, int]]:
        """Returns the FP8 layers that are probably slower than BF16, because they are small.

        Returns:
            The in and out features on one rank, by layer name.
        """
        part = self.widest.part
        return speedups.too_small_layers(self.recipe, part_linears(self.recipe, part), part)

    def data(self) -> dict[str, Any]:
        """Returns the report as plain data in a stable order, for `fp8cfg plan --json`."""
        part = self.widest.part
        row = remarks.chart_row(self.recipe, part.state)
        per_parameter = remarks.bytes_per_parameter(row, self.shard, part.shards)
        gains = speedups.published_gains(self.recipe, self.hardware.capability)
        return {
            "recipe": self.recipe.name,
            "data": training_data.summarize_data(self.recipe),
            "gpu": asdict(self.gpu) if self.gpu else None,
            "gpus": self.world,
            "runs": asdict(self.choice) if self.choice else None,
            "refusals": self.refusals,
            "coverage": self.coverage.data(),
            "chart": {"name": remarks.row_name(row), **row, "bytes_per_parameter": per_parameter},
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
                        {"axis": sent.axis, "what": sent.content, "bytes": sent.bytes}
                        for sent in rank.sent
                    ],
                }
                for rank in self.ranks
            ],
            "widest": self.widest.part.name,
            "fits": self.gpu and self.widest.total <= self.gpu.memory,
            "reserve": self.reserve,
            "tight": self.tight,
            "problems": self.problems,
            "write": self.write,
            "lines": self.lines,
            "recompute": {
                granularity: self.recomputing(granularity) for granularity in GRANULARITIES
            },
            "published": [asdict(gain) for gain in gains],
            "measured_here": False,
            "too_small": [
                {"name": name, "in": inputs, "out": outputs}
                for name, (inputs, outputs) in self.too_small().items()
            ],
            "built": self.built,
        }

    def __str__(self) -> str:
        return plain_text(report_sections(self))

    def _repr_html_(self) -> str:
        device = self.gpu.name if self.gpu else "CPU"
        ranks = "1 rank" if self.world == 1 else f"{self.world} ranks"
        title = f"Plan of {self.recipe.name} on {ranks}, {device}"
        folded = ("storage", "communication", "speed", "job")
        return sections_html(title, report_sections(self), folded)


# Text of the report.


def report_sections(report: PlanReport) -> list[Section]:
    """Returns the report in sections, one for each topic."""
    sections = [
        Section("backend and data", [_backend_section(report), _data_section(report)]),
        Section("coverage", report.coverage.blocks()),
        Section("storage", remarks.chart_blocks(report.recipe, report.widest.part)),
        Section("layout", _layout_section(report)),
        Section("memory", _memory_section(report)),
    ]
    if any(rank.sent for rank in report.ranks):
        sections.append(Section("communication", [_communication_table(report)]))
    if report.recipe.fp8.enabled:
        sections.append(Section("speed", [_speedup_section(report)]))
    if report.problems:
        sections.append(Section("problems", [_problem_section(report)]))
    if report.built:
        calls = [_call_text(kind, **part) for kind, part in report.built.items()]
        sections.append(Section("job", ["will be built", *calls]))
    return sections


def _backend_section(report: PlanReport) -> str:
    """The chosen backend, or the reasons why no backend runs the recipe."""
    device = report.gpu.name if report.gpu else "a CPU (name a GPU: --gpu h100)"
    if report.choice is None:
        refusals = [f"cannot run on {device}: {line}" for line in report.refusals]
        return "\n".join(wrapped(line, more="  ") for line in refusals)
    backend = f"backend on {device}: {report.choice.backend}, {report.choice.why}"
    return "\n".join([wrapped(backend, more="  "), *passed_over_lines(report.choice)])


def _data_section(report: PlanReport) -> str:
    """The `data:` line, and the error of a run with unintended data."""
    # A plan needs no data. The error is a warning here.
    lines = [training_data.data_line(report.recipe)]
    for problem in training_data.unintended_data(report.recipe):
        lines.append(f"before a run: {problem}")
    return "\n".join(wrapped(line, more="  ") for line in lines)


def _problem_section(report: PlanReport) -> str:
    """The problems, and the overrides of a recipe that runs instead."""
    lines = [f"does not run: {problem}" for problem in report.problems]
    if report.offered:
        line = "runs"
        if report.offered.ranks:
            line += f" {report.offered.where('')}"
        if report.write:
            line += f" with: {' '.join(report.write)}"
        lines.append(line)
    return "\n".join(wrapped(line, more="  ") for line in lines)


def passed_over_lines(choice: Choice) -> list[str]:
    """Returns a line for each backend that has priority but cannot run here.

    Empty if FP8 is emulated or off.
    """
    # Emulation has another order of preference. There the line would be misleading.
    if choice.product != "scaled_mm":
        return []
    return [wrapped(f"passed over {line}", "  ", "    ") for line in choice.passed_over]


def _layout_section(report: PlanReport) -> list[str]:
    """The model's size, the parallel layout and a table of the pipeline stages."""
    strategy = report.recipe.trainer.strategy
    count = report.parameters
    model = f"model: {amount(count)} parameters ({count:,})"
    if report.world == 1:
        return [model, "layout: 1 rank"]
    sizes = {
        "tensor": strategy.tensor_model_parallel_size,
        "pipeline": strategy.pipeline_model_parallel_size,
        "context": strategy.context_parallel_size,
        "data": report.widest.part.data,
    }
    # The product of the axes is the number of ranks. HSDP groups are part of the data axis.
    product = " x ".join(f"{axis} {ranks}" for axis, ranks in sizes.items())
    layout = f"layout: {report.world} ranks = {product}"
    groups = strategy.data_parallel_replicate_size
    if groups > 1:
        layout += f", {groups} groups with full state"
    lines = [model, layout]
    if layout_violations(report.recipe, report.world):
        lines.append("plan only: training does not support this layout")
    if len(report.ranks) > 1:
        rows = []
        for rank in report.ranks:
            layers = str(len(rank.part.layers))
            rows.append([rank.part.name, layers, amount(rank.parameters), size(rank.total)])
        lines.append(table(["", "layers", "parameters", "memory"], rows, right=(1, 2, 3)))
    return lines


def _memory_section(report: PlanReport) -> list[str]:
    """The memory table of the widest rank, and whether it fits the GPU."""
    recipe, part = report.recipe, report.widest.part
    lines: list[str] = [memory_table(recipe, report.hardware.device, part, report.backend)]
    lines += _more_than_chart(report)
    if report.backend:
        gathers = gather_line(recipe, part, report.backend)
        if gathers:
            lines.append(gathers)
    if len(report.ranks) > 1:
        lines.append(f"of the {part.name}, the largest")
    sizes = []
    for granularity in GRANULARITIES:
        sizes.append(f"{granularity} {size(report.recomputing(granularity))}")
    lines.append(f"activations, backward: {', '.join(sizes)}")
    if report.gpu and report.choice:
        lines.append(_fit_line(report, report.gpu))
    return lines


def _fit_line(report: PlanReport, gpu: GPU) -> str:
    """A line on the free memory of the GPU, compared with the reserve."""
    free_bytes = gpu.memory - report.widest.total
    name = f"{gpu.name}, {size(gpu.memory)}"
    if layout_violations(report.recipe, report.world):
        name += ", as planned for"
    if free_bytes < 0:
        return f"does not fit {name}: {size(-free_bytes)} too much"
    if not report.tight:
        return f"fits {name}: {size(free_bytes)} to spare"
    return wrapped(
        f"fits {name}, tight: {size(free_bytes)} to spare, and the CUDA context, NCCL's buffers and"
        f" fragmentation may take {size(report.reserve)}",
        more="  ",
    )


def _communication_table(report: PlanReport) -> str:
    """Table of the bytes per step on the rank with the most communication."""
    rank = max(report.ranks, key=lambda rank: rank.sent_bytes)
    rows = [[f"{sent.axis}: {sent.content}", size(sent.bytes)] for sent in rank.sent]
    rows.append([f"total, {rank.part.name}", size(rank.sent_bytes)])
    return table(["sent by a rank in a step", "size"], rows, right=(1,))


def _more_than_chart(report: PlanReport) -> list[str]:
    """A line if the memory table has at least 0.5 B/param more than the chart."""
    # The chart has the state of a linear layer. The table also has temporaries, and parameters
    # such as embeddings in wider dtypes.
    rank = report.widest
    per_parameter = {}
    for kind, num_bytes in rank.memory.items():
        if num_bytes and kind not in NOT_PARAMETERS:
            per_parameter[kind] = num_bytes / rank.parameters
    row = remarks.chart_row(report.recipe, rank.part.state)
    chart = remarks.bytes_per_parameter(row, report.shard, rank.part.shards)
    total = sum(per_parameter.values())
    if total < chart + 0.5:
        return []
    reasons = []
    transient = 0.0
    for kind, element_bytes in per_parameter.items():
        if kind in ("gathered", "FP8 copies", "accumulation"):
            reasons.append(f"{kind} {element_bytes:.1f}")
            transient += element_bytes
    wider_formats = total - chart - transient
    if wider_formats > 0.05:
        reasons.append(f"other parameters, in wider formats, {wider_formats:.1f}")
    line = (
        f"total {total:.1f} B/param: {chart:.3g} of the chart, for a parameter of a linear layer"
        f" between steps, and {', '.join(reasons)}"
    )
    return [wrapped(line, more="  ")]


def _speedup_section(report: PlanReport) -> str:
    """Published speedups of the scaling, a bound from peak FLOPs, and layers too small for FP8."""
    recipe, gpu = report.recipe, report.gpu
    if gpu is None or (report.choice and report.choice.product == "emulate"):
        return "speedup: none, this machine emulates FP8"
    if gpu.fp8 is None:
        return f"speedup: none, {gpu.name} has no FP8 units"
    lines = ["published speedups of FP8 over BF16, not measured here"]
    gains = speedups.published_gains(recipe, gpu.capability)
    for gain in gains:
        lines.append(f"  {gain.times:.2f}x  {gain.what}, {gain.where}\n         {gain.source}")
    if not gains:
        lines.append(f"  none for fp8.scaling={recipe.fp8.scaling}")
    sizes = speedups.compare_sizes(recipe, report.widest.part)
    lines.append(wrapped(f"sizes here: {sizes}", more="  "))
    if SCALINGS[recipe.fp8.scaling].bits == 8:  # the table has no peaks of FP4
        # Amdahl's law: FLOPs in FP8 take bf16 / fp8 of their BF16 time.
        bound = 1 / (1 - report.coverage.share * (1 - gpu.bf16 / gpu.fp8))
        lines.append(f"all matrix products at the peaks of {gpu.name}: at most {bound:.2f}x")
    small = []
    for name, (inputs, outputs) in report.too_small().items():
        small.append(f"{name} {inputs} -> {outputs}")
    lines.append(wrapped(f"too small to win: {', '.join(small) or 'none'}", more="  "))
    lines.append(f"  by {speedups.FILTER}")
    return "\n".join(lines)


def _call_text(kind: str, name: str, **arguments: Any) -> str:
    """A part of the job in the form of a Python call."""
    texts = []
    for key, value in arguments.items():
        if isinstance(value, float):
            value = f"{value:g}"
        texts.append(f"{key}={value}")
    return wrapped(f"{kind:<12}  {name}({', '.join(texts)})", "  ", " " * 16)
