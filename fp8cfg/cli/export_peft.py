"""`export peft`: the adapters of a run in PEFT's format."""

from __future__ import annotations

from pathlib import Path

from fp8cfg.cli.argv import Arguments
from fp8cfg.cli.new_folder import new_folder, refuse_what_is_there
from fp8cfg.config.errors import ConfigError, printable


def run(arguments: Arguments) -> int:
    """Write the folder that `arguments` name: peft, the run, and where to. Returns the exit code."""
    if len(arguments.plain) != 3 or arguments.words or arguments.flags or arguments.one("--fp8"):
        raise ConfigError(
            "export peft: needs a run folder and a new folder, as in: fp8cfg export peft"
            " runs/NAME OUT"
        )
    run_folder, out = arguments.plain[1], Path(arguments.plain[2])
    refuse_what_is_there(out)
    from fp8cfg.config import hub, hugging_face
    from fp8cfg.layer_plan import transformer_config
    from fp8cfg.models import peft
    from fp8cfg.models.lora_shapes import projections
    from fp8cfg.training.run_weights import RunWeights

    found = RunWeights(Path(run_folder), print)
    node = found.recipe.lora
    if not node.enabled:
        raise ConfigError(
            f"{run_folder}: has no adapters, all weights were trained; write: fp8cfg export hf"
            f" {run_folder} OUT"
        )
    family, every = (
        hugging_face.of_model(found.recipe.model),
        projections(transformer_config(found.recipe)),
    )
    base, revision = found.recipe.model.weights, None
    if base and base.startswith(hub.PREFIX):
        base, revision = hub.split(base)
    try:
        with new_folder(out) as made:
            adapters = {module: found.adapter(module) for module in found.adapted}
            count = peft.write(
                made,
                adapters,
                every,
                family.names,
                node.rank,
                node.alpha,
                node.dropout,
                base,
                revision,
            )
    except ValueError as e:
        raise ConfigError(f"export peft: {e}") from None
    print(
        f"wrote {printable(str(out))}: {count} adapters of rank {node.rank}, of step {found.step},"
        f" for {family.architecture}"
    )
    return 0
