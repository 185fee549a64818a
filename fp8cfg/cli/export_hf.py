"""`export hf`: the weights of a run as a Hugging Face checkpoint, in BF16 or FP8."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.cli.argv import Arguments
from fp8cfg.cli.new_folder import new_folder, refuse_what_is_there
from fp8cfg.config.errors import ConfigError, printable

if TYPE_CHECKING:
    from fp8cfg.config.hugging_face import Family
    from fp8cfg.training.run_weights import RunWeights


def run(arguments: Arguments) -> int:
    """Write the folder that `arguments` name: hf, the run, and where to. Returns the exit code."""
    if len(arguments.plain) != 3 or arguments.words:
        raise ConfigError(
            "export hf: needs a run folder and a new folder, as in: fp8cfg export hf runs/NAME OUT"
            " --fp8 block"
        )
    fp8, out = arguments.one("--fp8"), Path(arguments.plain[2])
    if fp8 not in (None, "block", "tensor"):
        raise ConfigError(
            f"--fp8 {fp8}: not an option; write --fp8 block or --fp8 tensor, or leave it out for"
            " BF16"
        )
    refuse_what_is_there(out)
    from fp8cfg.config import hugging_face
    from fp8cfg.training.run_weights import RunWeights

    found = RunWeights(Path(arguments.plain[1]), print)
    _refuse_unless_merged(found, arguments)
    family = hugging_face.of_model(found.recipe.model)
    with new_folder(out) as made:
        _write(found, family, made, fp8)
    what = f"FP8 with {fp8} scales" if fp8 else "BF16"
    print(
        f"wrote {printable(str(out))}: {family.architecture}, {what}, the weights of step"
        f" {found.step}"
    )
    return 0


def _refuse_unless_merged(found: RunWeights, arguments: Arguments) -> None:
    """Raise ConfigError for adapters without --merge, which has no effect without them."""
    from fp8cfg.layer_plan import adapted

    merge, named = "--merge" in arguments.flags, arguments.plain[1]
    if merge and not found.recipe.lora.enabled:
        raise ConfigError(f"--merge: has no effect, {named} has no adapters; drop it")
    if found.recipe.lora.enabled and not merge:
        raise ConfigError(
            f"{named}: its adapters stand beside weights that were not trained; write --merge to"
            f" add them to these, or: fp8cfg export peft {named} OUT"
        )
    tied = found.recipe.model.share_embeddings_and_output_weights
    if merge and tied and any(p.module == "output_layer" for p in adapted(found.recipe)):
        raise ConfigError(
            "--merge: the output layer has adapters and the embedding, whose weight it has, none;"
            f" write: fp8cfg export peft {named} OUT"
        )


def _write(found: RunWeights, family: Family, out: Path, fp8: str | None) -> None:
    from fp8cfg.job_weights import hf_layout
    from fp8cfg.layer_plan import transformer_config
    from fp8cfg.models import hf_export

    if fp8 and family.conv1d:
        raise ConfigError(
            f"--fp8 {fp8}: {family.architecture} multiplies by Conv1D, for which there is no FP8"
            " layout; write BF16"
        )
    planned = {p.name for p in found.plan if p.fp8} or {p.name for p in found.plan}
    hf_export.write(
        out,
        transformer_config(found.recipe),
        family.write(found.recipe.model),
        hf_layout(family),
        found.read,
        fp8,
        planned - {"output_layer"},
    )
