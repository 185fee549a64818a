"""`import`: converts another project's configuration into a recipe.

`import` is a keyword, so this module is loaded with importlib.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from fp8cfg.cli.argv import Arguments, split, wrong_words
from fp8cfg.cli.output import print_or_write
from fp8cfg.cli.recipe_arguments import compose_recipe, resolve_recipe
from fp8cfg.composition.layers import shipped_choices
from fp8cfg.interop.imported_values import NOT_IN_SOURCE
from fp8cfg.interop.projects import (
    PROJECTS,
    comments,
    find_project,
    from_file,
    from_words,
    recipe_of_file,
)
from fp8cfg.report import recipe_export
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import recipes
from fp8cfg.schema.safe_files import default_recipe

OPTIONS = ("--config-dir", "--output")
FORMS = ("--yaml", "--json", "--python")
USAGE = """
fp8cfg import PROJECT FILE [recipe=NAME] [key=value ...]
              [--yaml | --json | --python] [--output FILE]
fp8cfg import PROJECT [recipe=NAME] [key=value ...] -- ARGUMENTS

Convert the configuration of another project into a recipe.

Examples:
  fp8cfg import nemo bf16_with_fp8_mixed
  fp8cfg import megatron pretrain.sh --output mine.yaml
  fp8cfg import te -- 'DelayedScaling(margin=1)'

Files are read and never run. The recipe starts from recipe=NAME (llama_tiny),
and your values are set last. What has no counterpart becomes a comment. An
unknown key is an error in arguments and in a call of Python, and a warning in
files, which may be from another version.

  accelerate  its configuration file, or a handler:
              -- 'TERecipeKwargs(margin=1)'
  deepspeed   its JSON
  nemo        YAML of NeMo 1 or of MegatronMixedPrecision's fields, Python with
              a plugin or a recipe function, a preset, or fields after --
  bridge      Megatron-Bridge's run_config.yaml, Python, fields or a preset
  megatron    a shell script with its flags, or flags after --. Precision flags
              must not depend on a condition in the script
  torchtitan  a Python configuration, FILE.py:NAME for one function of it
  te          Python with a recipe of Transformer Engine, or a printed recipe

Options:
  --yaml, --json, --python
                       as in `fp8cfg export`
  --output FILE        write a new FILE
  --config-dir FOLDER  your own recipes
"""


def run(argv: list[str]) -> int:
    """Prints or writes the imported recipe and returns the exit code."""
    cut = argv.index("--") if "--" in argv else len(argv)
    arguments = _split(argv[:cut])
    source_words = argv[cut + 1 :]
    forms = [form for form in FORMS if form in arguments.flags] or ["--yaml"]
    if len(forms) > 1:
        raise ConfigError(f"import: {' and '.join(forms)}; choose one")
    project, file = _find_source(arguments, source_words)
    config_dir = arguments.one("--config-dir")
    output = arguments.one("--output")

    chosen = [word for word in arguments.words if word.startswith("recipe=")]
    remarks: list[str] = []
    # A NeMo script may build on a recipe that is shipped here too.
    source_recipe = None
    if file:
        source_recipe = recipe_of_file(project, file)
    if source_recipe and not chosen:
        chosen = [f"recipe={source_recipe}"]
    elif source_recipe and chosen != [f"recipe={source_recipe}"]:
        remarks.append(f"{source_recipe}: the source builds on it; {chosen[0]} takes its place")

    base = resolve_recipe(chosen, config_dir)
    try:
        if file:
            translation = from_file(project, file, base.recipe)
        else:
            translation = from_words(project, source_words, base.recipe)
    except ConfigError as error:
        raise ConfigError(error.problems + wrong_words(arguments)) from None
    _say("warning", translation.unknown)

    title = find_project(project).key_table.name
    # Choices that the exported YAML may refer to, instead of all their values.
    choices = shipped_choices(base.layers)
    export_choices = {}
    if "recipe" in choices:
        export_choices["recipe"] = choices["recipe"]
    # The source sets another model, so the default recipe's name would be wrong.
    if not chosen and translation.recipe.model.hidden_size != base.recipe.model.hidden_size:
        remarks += _name_shape(translation.recipe, base.recipe)
        name = translation.recipe.name
        export_choices = {"recipe": name} if name in recipes() else {}
    recipe = _apply_overrides(arguments, base.recipe, translation.recipe)
    export = {
        "--yaml": recipe_export.yaml_text,
        "--json": recipe_export.json_text,
        "--python": recipe_export.python_text,
    }[forms[0]]
    text = export(recipe, export_choices, False)

    remarks = _without_overridden([*remarks, *translation.lost], arguments)
    if forms == ["--json"]:  # JSON has no comments
        _say("note", remarks)
    elif remarks or translation.unknown:
        headline = f"Imported from {title}. Settings dropped or with another meaning:"
        text = comments([headline, *remarks, *translation.unknown]) + text
    code = print_or_write(text, output)
    if output and text.startswith("# Imported"):
        _say("note", [f"some settings were dropped or mean something else: see {output}"])
    return code


def _split(argv: list[str]) -> Arguments:
    """Splits the arguments before --. Raises ConfigError for the project's own among them."""
    project = next((arg for arg in argv if arg in PROJECTS), "")
    # Not torchtitan: it has no arguments after --.
    if project and project != "torchtitan":
        table = PROJECTS[project].key_table
        for position, arg in enumerate(argv):
            if arg.startswith("--") and table.has_entry(arg.partition("=")[0]):
                raise _misplaced(project, argv[:position], argv[position:])
    return split(argv, OPTIONS, FORMS)


def _misplaced(project: str, before: list[str], source_words: list[str]) -> ConfigError:
    """Returns the error for arguments of the project before --, with the right command."""
    words = []
    for arg in source_words:
        if arg.partition("=")[0] in (*OPTIONS, *FORMS):
            break
        if not arg.startswith("recipe="):
            words.append(arg)
    recipe_words = [arg for arg in [*before, *source_words] if arg.startswith("recipe=")]
    # Other projects have KEY=VALUE after --, without dashes.
    if project != "megatron":
        words = _as_fields(words)
    problem = f"import {project}: its arguments go after --"
    try:
        from_words(project, words)
    except ConfigError as error:
        return ConfigError([problem, *error.problems])
    command = ["fp8cfg", "import", project, *recipe_words, "--", *words]
    return ConfigError(f"{problem}, as in: {shlex.join(command)}")


def _as_fields(flags: list[str]) -> list[str]:
    """Converts --KEY VALUE and --KEY=VALUE to KEY=VALUE. A flag without a value is true."""
    fields: list[str] = []
    for flag in flags:
        if flag.startswith("--"):
            fields.append(flag[2:])
        elif fields and "=" not in fields[-1]:
            fields[-1] += f"={flag}"
        else:
            fields.append(flag)
    return [field if "=" in field else f"{field}=true" for field in fields]


def _apply_overrides(arguments: Arguments, base: Recipe, imported: Recipe) -> Recipe:
    """Applies the overrides to the imported recipe and checks it."""
    words = [word for word in arguments.words if not word.startswith("recipe=")]
    try:
        return compose_recipe(words, arguments.one("--config-dir"), base=imported)
    except ConfigError as error:
        has_recipe_override = words != arguments.words
        if has_recipe_override or imported.model != base.model:
            raise
        # The model is the default recipe's. Errors about it should mention this.
        advice = f" (of {default_recipe()}, as no recipe is named); add recipe=NAME"
        override_keys = tuple(word.partition("=")[0] for word in words)
        problems = []
        for problem in error.problems:
            if "model." in problem and not problem.startswith(override_keys):
                problem += advice
            problems.append(problem)
        raise ConfigError(problems) from None


def _without_overridden(lines: Iterable[str], arguments: Arguments) -> list[str]:
    """Drops remarks on missing values that an override sets."""
    keys = [f"{word.partition('=')[0]}=" for word in arguments.words]
    remaining = []
    for line in lines:
        is_overridden = any(key in line for key in keys)
        if NOT_IN_SOURCE not in line or not is_overridden:
            remaining.append(line)
    return remaining


_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "activation",
    "normalization",
    "position_embedding_type",
)


def _name_shape(recipe: Recipe, base: Recipe) -> list[str]:
    """Names a recipe after the shipped one with this shape.

    Also copies the vocabulary if the source has none.

    Returns:
        A remark on the vocabulary, if it is a guess.
    """
    has_vocabulary = recipe.model.vocab_size != base.model.vocab_size
    recipe.name = "imported"
    origin = "of bytes"
    # By shape, because other projects use other names for the models.
    for name, make in recipes().items():
        shipped = make().model
        if all(getattr(shipped, key) == getattr(recipe.model, key) for key in _SHAPE):
            recipe.name = name
            origin = f"as in recipe={name}"
            if not has_vocabulary:
                recipe.model.vocab_size = shipped.vocab_size
            break
    if has_vocabulary:
        return []
    return [
        f"model.vocab_size={recipe.model.vocab_size}: {NOT_IN_SOURCE}, {origin}; set it to your"
        " tokenizer's"
    ]


def _find_source(arguments: Arguments, source_words: list[str]) -> tuple[str, Path | None]:
    """Returns the project and its file, None if arguments follow --.

    Adds the name of a preset to `source_words`. Raises ConfigError.
    """
    if not arguments.plain:
        raise ConfigError(f"import: needs a project; choose from {', '.join(PROJECTS)}")
    project, *files = arguments.plain
    if (
        find_project(project).has_presets
        and len(files) == 1
        and not source_words
        and _is_name(files[0])
    ):
        source_words.append(files.pop())
    for word in arguments.words:
        if word.partition("=")[0] in ("precision", "trainer.plugins"):
            raise ConfigError("precision=: is what is imported; drop one of the two")
    if len(files) == 1 and not source_words:
        return project, Path(files[0])
    if source_words and not files:
        return project, None
    if len(files) > 1:
        raise ConfigError(f"import {project}: {files[1]}: a second file")
    if files:
        raise ConfigError(f"import {project}: needs a file or arguments after --, not both")
    # Probably fields of the project without the --.
    recipe_words = [word for word in arguments.words if word.startswith("recipe=")]
    fields = [word for word in arguments.words if not word.startswith("recipe=")]
    command = shlex.join(["fp8cfg", "import", project, *recipe_words, "--", *fields])
    example = f", as in: {command}" if fields else ""
    raise ConfigError(f"import {project}: needs a file, or arguments after --{example}")


def _is_name(word: str) -> bool:
    """Returns whether an argument is a name and not a file."""
    return "/" not in word and not Path(word).suffix and not Path(word).exists()


def _say(kind: str, lines: Iterable[str]) -> None:
    """Prints lines to standard error as notes or warnings."""
    for line in lines:
        print(f"{kind}: {line}", file=sys.stderr)
