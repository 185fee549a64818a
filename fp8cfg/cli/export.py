"""`export`: writes a recipe as YAML, JSON or Python, to keep and to edit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.cli.argv import Arguments, is_recipe_file, recipe_file, split, wrong_words
from fp8cfg.cli.output import print_or_write
from fp8cfg.config.errors import ConfigError, nearest, refuse_if

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe

FORMS = ("--yaml", "--json", "--python")
SCHEMA = "fp8cfg.schema.json"
USAGE = f"""
fp8cfg export [recipe=NAME | FILE.yaml] [precision=NAME] [key=value ...]
              [--yaml | --json | --python] [--full] [--output FILE]
fp8cfg export PROJECT [recipe=NAME | FILE.yaml] [key=value ...] [--output FILE]
fp8cfg export hf RUN_FOLDER OUT [--fp8 block | tensor] [--merge]
fp8cfg export peft RUN_FOLDER OUT
fp8cfg export slurm [recipe=NAME | FILE.yaml] [key=value ...]
              [--slurm KEY=VALUE,...] [--output FILE]

A composed recipe, to keep and to edit: the names of a shipped recipe and of
shipped presets, and the values that differ from them. It reads back equal.

  --yaml         for `fp8cfg FILE.yaml`, the default
  --json         the same as JSON
  --python       a script that makes the recipe, and trains it when it is run
  --full         every value, without names
  --output FILE  write FILE, which must not exist yet. Where {SCHEMA}
                 is beside it, from `fp8cfg schema > {SCHEMA}`,
                 YAML begins with the line by which editors find it
  --config-dir FOLDER  recipes and presets of your own; the export does without

PROJECT is accelerate, deepspeed, nemo, bridge, megatron, torchtitan or te: a
file as that project reads it, which `fp8cfg import PROJECT` reads too. What it
cannot say stands in it as comments, and their number on standard error.

hf writes the weights of the newest checkpoint of a run into the new folder OUT
as transformers loads them: BF16, or FP8 with scales of 128x128 blocks, which
vLLM reads too, or of whole weights. Embeddings, norms and output layer stay
BF16, and of a run in FP8 the layers that did not run in it. --merge adds the
adapters of a LoRA run to the weights that they stand beside. A tensor is read
and written at a time: no GPU, and memory of about two of the largest matrices.

peft writes the adapters of a LoRA run as PEFT loads them.

slurm writes a script for sbatch, with its settings from --slurm: a rank for
each GPU of the recipe. Before the job's time is over it saves, goes back into
the queue, and goes on with its run folder, log.folder or runs/NAME.
"""


def run(argv: list[str]) -> int:
    """Export the recipe of `argv`. Returns the exit code."""
    from fp8cfg.cli.composed import say
    from fp8cfg.composition.provenance import trace
    from fp8cfg.report import recipe_export

    arguments = split(
        argv, ("--config-dir", "--output", "--fp8", "--slurm"), (*FORMS, "--full", "--merge")
    )
    if arguments.plain[:1] == ["hf"]:
        from fp8cfg.cli import export_hf

        return export_hf.run(arguments)
    if arguments.plain[:1] == ["peft"]:
        from fp8cfg.cli import export_peft

        return export_peft.run(arguments)
    if arguments.plain[:1] == ["slurm"]:
        from fp8cfg.cli import export_slurm

        return export_slurm.run(arguments)
    if arguments.one("--slurm"):
        raise ConfigError("--slurm: of export slurm alone")
    if arguments.one("--fp8") or "--merge" in arguments.flags:
        raise ConfigError(f"{'--fp8' if arguments.one('--fp8') else '--merge'}: of export hf alone")
    project = _project(arguments)
    forms = [form for form in FORMS if form in arguments.flags] or ["--yaml"]
    try:
        if len(forms) > 1:
            raise ConfigError(f"export: {' and '.join(forms)}; choose one")
        output, file = arguments.one("--output"), recipe_file(arguments.plain, ())
    except ConfigError as e:
        raise ConfigError(e.problems + wrong_words(arguments)) from None
    traced = trace(arguments.words, arguments.one("--config-dir"), file)
    refuse_if(traced.settled.problems)
    say(traced.settled.notes)
    write = {
        "--yaml": recipe_export.yaml_text,
        "--json": recipe_export.json_text,
        "--python": recipe_export.python_text,
    }[forms[0]]
    text = (
        _of(project, traced.recipe)
        if project
        else write(traced.recipe, traced.named, "--full" in arguments.flags)
    )
    if output and forms == ["--yaml"] and not project and (Path(output).parent / SCHEMA).is_file():
        text = f"# yaml-language-server: $schema={SCHEMA}\n{text}"
    return print_or_write(text, output)


def _project(arguments: Arguments) -> str | None:
    """Take the project out of the words without a value; None where the recipe is exported for fp8cfg itself."""
    from fp8cfg.interop.projects import DOORS

    if not arguments.plain or is_recipe_file(arguments.plain[0]):
        return None
    name = arguments.plain[0]
    if name not in DOORS:
        near = nearest(name, [*DOORS, "hf", "peft", "slurm"])
        if near:
            raise ConfigError(
                [f"{name}: no such project; did you mean {near!r}?", *wrong_words(arguments)]
            )
        return None
    if arguments.flags:
        raise ConfigError(
            f"{sorted(arguments.flags)[0]}: not with {name}, whose files have one form"
        )
    return arguments.plain.pop(0)


def _of(project: str, recipe: Recipe) -> str:
    """The recipe as that project's text; what is lost is counted on standard error, and told there where no comment can be."""
    from fp8cfg.interop.projects import DOORS, to_text

    text, lost = to_text(project, recipe)
    name = DOORS[project].dialect.name
    if lost and DOORS[project].remarks:
        print(
            f"note: {len(lost)} of its keys {name} cannot say; they stand in the text as comments",
            file=sys.stderr,
        )
    for line in () if DOORS[project].remarks else lost:
        print(f"note: {line}", file=sys.stderr)
    return text
