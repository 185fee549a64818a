"""`export`: writes a recipe, another project's configuration, weights or a Slurm script."""

from __future__ import annotations

import os
import shlex
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from fp8cfg.cli.argv import Arguments, is_recipe_file, split, wrong_words
from fp8cfg.cli.launch import settings
from fp8cfg.cli.output import print_or_write
from fp8cfg.cli.recipe_arguments import compose_recipe, recipe_file, resolve_recipe, say_notes
from fp8cfg.composition.layers import shipped_choices
from fp8cfg.execution.slurm import batch_script
from fp8cfg.interop.projects import PROJECTS, to_text
from fp8cfg.models.config import projections
from fp8cfg.planning import training_data
from fp8cfg.planning.layer_plan import adapted_projections, transformer_config
from fp8cfg.report import recipe_export
from fp8cfg.schema import hub, hugging_face
from fp8cfg.schema.errors import ConfigError, NotWritable, nearest, printable, refuse_if
from fp8cfg.schema.hugging_face import Family
from fp8cfg.schema.messages import say, say_on_stderr
from fp8cfg.schema.recipe import Recipe

if TYPE_CHECKING:
    from fp8cfg.training.trained_model import RunWeights

FORMS = ("--yaml", "--json", "--python")
WEIGHT_DTYPES = ("bf16", "fp16", "fp32")
SCHEMA = "fp8cfg.schema.json"
USAGE = f"""
fp8cfg export [recipe=NAME | FILE.yaml] [precision=NAME] [key=value ...]
              [--yaml | --json | --python] [--full] [--output FILE]
fp8cfg export PROJECT [recipe=NAME | FILE.yaml] [key=value ...] [--output FILE]
fp8cfg export hf RUN_FOLDER OUT [--dtype bf16 | fp16 | fp32]
              [--fp8 block | tensor] [--merge]
fp8cfg export peft RUN_FOLDER OUT
fp8cfg export slurm [recipe=NAME | FILE.yaml] [key=value ...]
              [--slurm KEY=VALUE,...] [--output FILE]

Write a recipe, another project's configuration, weights or a batch script.

Examples:
  fp8cfg export recipe=llama_8b precision=bf16_fp8 --output mine.yaml
  fp8cfg export megatron recipe=llama_8b precision=bf16_fp8
  fp8cfg export hf runs/mine served --fp8 block
  fp8cfg export slurm mine.yaml --slurm partition=gpu,time=04:00:00

Options for a recipe:
  --yaml               for `fp8cfg FILE.yaml`; the default
  --json               as JSON
  --python             as a Python script that makes and trains the recipe
  --full               every value instead of names and differences
  --output FILE        write a new FILE. If {SCHEMA} is in its folder,
                       from `fp8cfg schema > {SCHEMA}`, YAML
                       begins with the line for editors
  --config-dir FOLDER  your own recipes and presets

PROJECT is accelerate, deepspeed, nemo, bridge, megatron or te. Settings without
a counterpart become comments.

hf writes the newest checkpoint of a run for transformers into the new folder
OUT, tensor by tensor, without a GPU:
  --dtype NAME         dtype of the weights; default precision.compute
  --fp8 block | tensor
                       linear weights in FP8 with scales for 128x128 blocks,
                       which vLLM reads too, or with one scale each. Embeddings,
                       norms, the output layer and layers that the run kept in
                       high precision stay in --dtype
  --merge              add the adapters of a LoRA run to its weights

peft writes the adapters of a LoRA run for PEFT.

slurm writes a script for sbatch, with one rank per GPU of the recipe:
  --slurm KEY=VALUE,...
                       sbatch settings. setup="source ENV/bin/activate" runs
                       before the ranks start, container-image=IMAGE and other
                       container-* settings go to srun, output=FILE replaces
                       NAME-JOB.out. Before its time limit the job saves, is
                       requeued and resumes in log.folder, or runs/NAME
"""


_HF = "reads Hugging Face folders; write: fp8cfg export hf RUN_FOLDER OUT"
_GGUF = (
    "write fp8cfg export hf RUN_FOLDER OUT, and convert OUT with llama.cpp's convert_hf_to_gguf.py"
)
_INSTEAD = {
    **dict.fromkeys(("vllm", "sglang", "tensorrt-llm", "trtllm"), f"{_HF} --fp8 block"),
    **dict.fromkeys(("transformers", "huggingface", "tgi", "safetensors"), _HF),
    **dict.fromkeys(("gguf", "ollama", "llama.cpp"), _GGUF),
    "lora": "write: fp8cfg export peft RUN_FOLDER OUT",
    "adapters": "write: fp8cfg export peft RUN_FOLDER OUT",
    "sbatch": "write: fp8cfg export slurm",
    "onnx": "is not written; fp8cfg export hf writes weights as transformers loads them",
}
"""Advice for other names, such as programs with support for another export."""


def run(argv: list[str]) -> int:
    """Writes the export and returns the exit code."""
    arguments = split(
        argv,
        ("--config-dir", "--output", "--fp8", "--dtype", "--slurm"),
        (*FORMS, "--full", "--merge"),
    )
    form = next((word for word in arguments.plain[:1] if word in _OPTIONS), "")
    _refuse_other_options(arguments, form)
    if form == "hf":
        return run_hf(arguments)
    if form == "peft":
        return run_peft(arguments)
    if form == "slurm":
        return run_slurm(arguments)
    project = _project(arguments)
    forms = [form for form in FORMS if form in arguments.flags] or ["--yaml"]
    try:
        if len(forms) > 1:
            raise ConfigError(f"export: {' and '.join(forms)}; choose one")
        output, file = arguments.one("--output"), recipe_file(arguments.plain, ())
    except ConfigError as e:
        raise ConfigError(e.problems + wrong_words(arguments)) from None
    result = resolve_recipe(arguments.words, arguments.one("--config-dir"), file)
    refuse_if(result.problems)
    say_notes(result.notes)
    recipe = result.recipe
    write = {
        "--yaml": recipe_export.yaml_text,
        "--json": recipe_export.json_text,
        "--python": recipe_export.python_text,
    }[forms[0]]
    text = (
        _of(project, recipe)
        if project
        else write(recipe, shipped_choices(result.layers), "--full" in arguments.flags)
    )
    # Editors with the YAML language server read the schema's path from the first line.
    if output and forms == ["--yaml"] and not project and (Path(output).parent / SCHEMA).is_file():
        text = f"# yaml-language-server: $schema={SCHEMA}\n{text}"
    return print_or_write(text, output)


_OPTIONS = {
    "hf": ("--dtype", "--fp8", "--merge"),
    "peft": (),
    "slurm": ("--slurm", "--output", "--config-dir"),
    "": (*FORMS, "--full", "--output", "--config-dir"),
}
"""Options of each form of export. "" is a recipe, and also the file of another project."""


def _refuse_other_options(arguments: Arguments, form: str) -> None:
    """Raises ConfigError for options of another form of export. They would have no effect."""
    problems = []
    for option in sorted([*arguments.options, *arguments.flags]):
        if option in _OPTIONS[form]:
            continue
        forms = [
            f"export {name or 'of a recipe'}"
            for name, options in _OPTIONS.items()
            if option in options
        ]
        here = f"export {form or 'of a recipe'}"
        problems.append(f"{option}: has no effect on {here}, it is for {' and '.join(forms)}")
    refuse_if(problems)


def _project(arguments: Arguments) -> str | None:
    """Removes the project from `arguments.plain` and returns it. None without a project."""
    if not arguments.plain or is_recipe_file(arguments.plain[0]):
        return None
    name = arguments.plain[0]
    if name.lower() in _INSTEAD:
        raise ConfigError(f"export {name}: {_INSTEAD[name.lower()]}")
    if name not in PROJECTS:
        near = nearest(name, [*PROJECTS, "hf", "peft", "slurm"])
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
    """Returns the recipe in a project's format. Prints notes on settings without a counterpart."""
    # Formats with comments have the lost settings in the text, so here their number is enough.
    text, lost = to_text(project, recipe)
    name = PROJECTS[project].key_table.name
    if lost and PROJECTS[project].has_comments:
        say_on_stderr(
            f"note: {len(lost)} of its keys have no counterpart in {name}; they are comments in the text"
        )
    for line in () if PROJECTS[project].has_comments else lost:
        say_on_stderr(f"note: {line}")
    return text


def refuse_what_is_there(out: Path) -> None:
    """Raises ConfigError if `out` exists and is not an empty folder."""
    try:
        empty = not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir()))
    except OSError as e:
        raise ConfigError(f"{str(out)[:60]}: cannot be looked at ({e.strerror})") from None
    if not empty:
        raise ConfigError(f"{out}: exists already; name a new folder")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Context manager for a new folder. It gets its name at the end of the block.

    After an error the folder is deleted, so an incomplete export never has the final name.

    Args:
        out: The new folder.

    Raises:
        NotWritable: The folder cannot be written.
    """
    # A sibling of `out`: a rename is atomic only within a file system.
    whole = out.resolve()
    made = whole.with_name(f".fp8cfg-{uuid.uuid4().hex}")
    try:
        made.mkdir(parents=True)
        yield made
        made.rename(whole)
    except (OSError, SafetensorError) as e:
        raise NotWritable(
            f"{out}: cannot be written ({getattr(e, 'strerror', None) or e})"
        ) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def run_hf(arguments: Arguments) -> int:
    """Writes a Hugging Face folder and returns the exit code.

    Args:
        arguments: "hf", the run folder and the new folder, with options.
    """
    if len(arguments.plain) != 3 or arguments.words:
        raise ConfigError(
            "export hf: needs a run folder and a new folder, as in: fp8cfg export hf runs/NAME OUT"
            " --fp8 block"
        )
    fp8, out = arguments.one("--fp8"), Path(arguments.plain[2])
    if fp8 not in (None, "block", "tensor"):
        raise ConfigError(
            f"--fp8 {fp8}: not an option; write --fp8 block or --fp8 tensor, or leave it out for plain --dtype"
        )
    asked = arguments.one("--dtype")
    if asked not in (None, *WEIGHT_DTYPES):
        raise ConfigError(f"--dtype {asked}: not a dtype; choose from {', '.join(WEIGHT_DTYPES)}")
    refuse_what_is_there(out)
    # Imported late: torch is slow to load, and all options are checked by now.
    from fp8cfg.models.hf_export import WeightOverflow
    from fp8cfg.training.trained_model import RunWeights

    found = RunWeights(Path(arguments.plain[1]), print)
    _refuse_unless_merged(found, arguments)
    family = hugging_face.family_of_model(found.recipe.model)
    dtype = asked or found.recipe.precision.compute
    try:
        with new_folder(out) as made:
            _write(found, family, made, fp8, dtype)
            _copy_tokenizer(found.recipe, made)
    except WeightOverflow as e:
        raise ConfigError(f"--dtype {dtype}: {e}; choose bf16 or fp32") from None
    what = f"FP8 with {fp8} scales, the rest {dtype.upper()}" if fp8 else dtype.upper()
    say(
        f"wrote {printable(str(out))}: {family.architecture}, {what}, the weights of step"
        f" {found.step}"
    )
    return 0


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def _copy_tokenizer(recipe: Recipe, out: Path) -> None:
    """Copies the tokenizer, chat template and generation config, so that AutoTokenizer works."""
    name = hub.tokenizer_path(hub.chosen_tokenizer(recipe))
    if name:
        tokenizer = Path(name)
        folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
        _copy(folder, _TOKENIZER_FILES, out)
        if tokenizer.is_file():
            shutil.copyfile(tokenizer, out / "tokenizer.json")
    pretrained = recipe.model.path or recipe.model.weights
    if pretrained:
        folder = hub.local_folder(pretrained, "model.path", hub.HUB_WEIGHTS)
        _copy(folder, ("generation_config.json",), out)


def _copy(folder: Path, names: Sequence[str], out: Path) -> None:
    """Copies files from `folder`. Missing ones are skipped."""
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def _refuse_unless_merged(found: RunWeights, arguments: Arguments) -> None:
    """Raises ConfigError if the run has adapters but not --merge, or the other way around."""
    merge, named = "--merge" in arguments.flags, arguments.plain[1]
    if merge and not found.recipe.lora.enabled:
        raise ConfigError(f"--merge: has no effect, {named} has no adapters; drop it")
    if found.recipe.lora.enabled and not merge:
        raise ConfigError(
            f"{named}: it trained only adapters, its other weights are the base model's; write --merge to"
            f" add them to these, or: fp8cfg export peft {shlex.quote(named)} OUT"
        )
    # Merging would change the shared weight, and so the embedding too. It had no adapter.
    tied = found.recipe.model.share_embeddings_and_output_weights
    if (
        merge
        and tied
        and any(p.module == "output_layer" for p in adapted_projections(found.recipe))
    ):
        raise ConfigError(
            "--merge: the output layer has adapters and the embedding, whose weight it has, none;"
            f" write: fp8cfg export peft {shlex.quote(named)} OUT"
        )


def _write(found: RunWeights, family: Family, out: Path, fp8: str | None, dtype: str) -> None:
    """Writes config and weights. `fp8` is None, "block" or "tensor"."""
    from fp8cfg.building.first_weights import hf_layout
    from fp8cfg.models import hf_export
    from fp8cfg.numerics.formats import DTYPES

    if fp8 and family.conv1d:
        raise ConfigError(
            f"--fp8 {fp8}: {family.architecture} multiplies by Conv1D, for which there is no FP8"
            " layout; write BF16"
        )
    # Quantize the FP8 layers of the run. After a run without FP8, quantize all layers.
    planned = {p.name for p in found.plan if p.fp8} or {p.name for p in found.plan}
    hf_export.write_model(
        out,
        transformer_config(found.recipe),
        family.write(found.recipe.model),
        hf_layout(family),
        found.read,
        fp8,
        planned - {"output_layer"},
        dtype=DTYPES[dtype],
    )


def run_peft(arguments: Arguments) -> int:
    """Writes the adapters of a LoRA run for PEFT and returns the exit code.

    Args:
        arguments: "peft", the run folder and the new folder.
    """
    if len(arguments.plain) != 3 or arguments.words:
        raise ConfigError(
            "export peft: needs a run folder and a new folder, as in: fp8cfg export peft"
            " runs/NAME OUT"
        )
    run_folder, out = arguments.plain[1], Path(arguments.plain[2])
    refuse_what_is_there(out)
    from fp8cfg.models import lora
    from fp8cfg.training.trained_model import RunWeights

    found = RunWeights(Path(run_folder), print)
    node = found.recipe.lora
    if not node.enabled:
        raise ConfigError(
            f"{run_folder}: has no adapters, all weights were trained; write: fp8cfg export hf"
            f" {shlex.quote(run_folder)} OUT"
        )
    family, every = (
        hugging_face.family_of_model(found.recipe.model),
        projections(transformer_config(found.recipe)),
    )
    base, revision = found.recipe.model.weights, None
    # PEFT loads the base model by name and revision.
    if base and base.startswith(hub.PREFIX):
        base, revision = hub.split_hub_id(base)
    try:
        with new_folder(out) as made:
            adapters = {module: found.adapter(module) for module in found.adapted}
            count = lora.write_peft(
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
    say(
        f"wrote {printable(str(out))}: {count} adapters of rank {node.rank}, of step {found.step},"
        f" for {family.architecture}"
    )
    return 0


def run_slurm(arguments: Arguments) -> int:
    """Prints an sbatch script, or writes it to --output. Returns the exit code.

    Args:
        arguments: "slurm", a recipe file if any, overrides and options.
    """
    folder, said = arguments.one("--config-dir"), arguments.plain[1:]
    recipe = compose_recipe(arguments.words, folder, recipe_file(said, ()))
    refuse_if(training_data.unintended_data(recipe))
    words = [*said, *arguments.words, *(["--config-dir", folder] if folder else [])]
    text = batch_script(recipe, words, settings(arguments.one("--slurm") or "", submitit=False))
    return print_or_write(text, arguments.one("--output"))
