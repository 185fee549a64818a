"""Run header: what runs where, in at most 15 lines, before the first step."""

from __future__ import annotations

from math import prod
from typing import Any

from fp8cfg.backends.choice import Choice, Hardware
from fp8cfg.composition.recipe_yaml import listed
from fp8cfg.models.config import parameter_shapes
from fp8cfg.parallel import sharding
from fp8cfg.planning import layout, remarks
from fp8cfg.planning.coverage import planned_coverage
from fp8cfg.planning.fsdp_memory import gather_line
from fp8cfg.planning.layer_plan import plan_layers, transformer_config
from fp8cfg.planning.peak_memory import memory_table, plan_memory, widest_part
from fp8cfg.planning.plan_report import passed_over_lines
from fp8cfg.schema import __version__
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.keys import shown
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS, title
from fp8cfg.schema.tables import amount, labeled, size


def header(recipe: Recipe, hardware: Hardware, choice: Choice) -> str:
    """Returns the header of a new run, without the lines on run folder and data.

    Args:
        recipe: The recipe, as it runs here.
        hardware: The device of this rank.
        choice: The backend.
    """
    # Pipeline stages have different sizes. The header shows the rank with the most memory.
    part = widest_part(recipe, hardware.device, sharding.ranks(), choice.backend)
    columns = remarks.chart_row(recipe, part.state)
    memory = sum(plan_memory(recipe, hardware.device, part, choice.backend).values())
    storage = (
        f"weights {columns['weight']}, masters {columns['master_weight']}, gradients"
        f" {columns['weight_grad']}, moments {remarks.moments_text(columns)}"
    )
    lines = {
        "recipe": f"{recipe.name}, fp8cfg {__version__}",
        "size": _size(recipe),
        "precision": _precision(recipe),
        "storage": storage,
        "backend": f"{choice.backend} ({choice.why})",
        "ranks": _ranks(recipe),
        "memory": f"{size(memory)} planned for each rank",
    }
    return "\n".join(labeled(label, text) for label, text in lines.items())


def short_header(recipe: Recipe, choice: Choice) -> str:
    """Returns the one-line header of a resumed run or of a job in a sweep.

    Args:
        recipe: The recipe, as it runs here.
        choice: The backend.
    """
    precision: str = recipe.precision.compute
    if recipe.fp8.enabled:
        precision += f" with {title(recipe.fp8.scaling)}"
    ranks = sharding.ranks()
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    text = f"{recipe.name}, {_parameters(recipe)}, {precision}, {choice.backend}, {count}"
    return labeled("recipe", text)


def planned_tables(recipe: Recipe, hardware: Hardware, choice: Choice) -> str:
    """Returns the composed precision, and the tables of planned coverage and memory.

    Args:
        recipe: The recipe, as it runs here.
        hardware: The device of this rank.
        choice: The backend.
    """
    parts = ["\n".join(_precision_nodes(recipe))]
    if recipe.fp8.enabled:
        coverage = planned_coverage(recipe, plan_layers(recipe, choice.backend))
        lines = ["planned coverage", *passed_over_lines(choice), str(coverage)]
        parts.append("\n".join(lines))
    gathered = gather_line(recipe, layout.rank_part(recipe, sharding.ranks()), choice.backend)
    memory = [memory_table(recipe, hardware.device, backend=choice.backend), gathered]
    parts.append("\n".join(line for line in memory if line))
    return "\n" + "\n\n".join(parts) + "\n"


def _size(recipe: Recipe) -> str:
    """Formats the number of parameters and of training tokens."""
    trainer = recipe.trainer
    return (
        f"{_parameters(recipe)}, {trainer.max_steps} steps of"
        f" {trainer.global_batch_size} x {recipe.model.seq_length} tokens"
    )


def _parameters(recipe: Recipe) -> str:
    """Formats the number of parameters."""
    shapes = parameter_shapes(transformer_config(recipe))
    return f"{amount(sum(map(prod, shapes.values())))} parameters"


def _precision(recipe: Recipe) -> str:
    """Formats the compute dtype, the scaling, and the keys with an effect."""
    precision = recipe.precision
    parts: list[str] = [precision.compute]
    if recipe.fp8.enabled:
        keys = _fp8_keys(recipe)
        # The text already has these three in words.
        del keys["enabled"], keys["scaling"], keys["format"]
        values = " ".join(f"{key}={shown(value)}" for key, value in keys.items())
        parts.append(f"{title(recipe.fp8.scaling)} {recipe.fp8.format}, {values}")
    parts += [f"{key}={shown(value)}" for key, value in _loss_scaling(recipe).items()]
    return ", ".join(parts)


def _precision_nodes(recipe: Recipe) -> list[str]:
    """Returns the composed precision as lines of YAML, with auto resolved."""
    import yaml

    from fp8cfg.schema.storage import resolved

    nodes: dict[str, Any] = {"fp8": {"enabled": False}}
    if recipe.fp8.enabled:
        nodes["fp8"] = _fp8_keys(recipe)
    nodes["storage"] = resolved(recipe.precision)
    if recipe.precision.compute == "fp16":
        nodes["loss scaling"] = _loss_scaling(recipe)
    lines = ["precision", f"  compute: {recipe.precision.compute}"]
    for name, node in nodes.items():
        text = yaml.safe_dump(node, sort_keys=False, default_flow_style=True, width=48)
        lines.append(f"  {name}: " + text.strip().replace("\n", "\n   "))
    return lines


def _loss_scaling(recipe: Recipe) -> dict[str, Any]:
    """Returns the keys with an effect on the loss scale. Empty without loss scaling."""
    precision = recipe.precision
    # Only fp16 needs it: bf16 has the exponent range of fp32.
    if precision.compute != "fp16":
        return {}
    names = ["loss_scale"]
    # A fixed scale makes the keys of the dynamic one unused.
    if precision.loss_scale is None:
        names = ["initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"]
    return {name: getattr(precision, name) for name in names}


def _fp8_keys(recipe: Recipe) -> dict[str, Any]:
    """Returns the main keys of the fp8 node, and other keys unless they have their defaults."""
    fp8 = recipe.fp8
    names = ["enabled", "scaling", "format"]
    # These keys only affect scalings with an amax history (delayed).
    if SCALINGS[fp8.scaling].history:
        names += ["margin", "amax_history_len", "amax_compute_algo"]
    names.append("params")
    values, defaults = listed(fp8), listed(FP8())
    names += [key for key in values if key not in names and values[key] != defaults[key]]
    return {key: values[key] for key in names}


def _ranks(recipe: Recipe) -> str:
    """Formats the ranks, their layout and microbatches, and the GPUs that the recipe asks for."""
    trainer, strategy = recipe.trainer, recipe.trainer.strategy
    num_ranks = sharding.ranks()
    count = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    data_parallel_size = num_ranks // strategy.size
    if strategy.size > 1:
        sizes = {
            "tensor": strategy.tensor_model_parallel_size,
            "pipeline": strategy.pipeline_model_parallel_size,
            "context": strategy.context_parallel_size,
        }
        split = " x ".join(f"{axis} {ranks}" for axis, ranks in sizes.items() if ranks > 1)
        count += f" = {split} x data {data_parallel_size}"
    # Data-parallel ranks split the batch. Tensor, pipeline and context ranks share a microbatch.
    samples = trainer.micro_batch_size * data_parallel_size
    microbatches = trainer.global_batch_size / samples
    plural = "" if microbatches == 1 else "es"
    text = f"{count}, {microbatches:g} microbatch{plural} a step on each"
    num_gpus = trainer.num_nodes * trainer.devices
    if num_gpus != num_ranks:
        plural = "" if num_gpus == 1 else "s"
        text += f" (meant for {num_gpus} GPU{plural})"
    return text
