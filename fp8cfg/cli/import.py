"""`import`: a recipe from what another project says about precision. Found by its name alone, which no statement can import."""

from __future__ import annotations

import sys
from pathlib import Path

from fp8cfg.cli.words import Arguments, split
from fp8cfg.config.errors import ConfigError

FORMS = ("--yaml", "--json", "--python")
USAGE = """
fp8cfg import PROJECT FILE [recipe=NAME] [key=value ...]
              [--yaml | --json | --python] [--output FILE]
fp8cfg import PROJECT [recipe=NAME] [key=value ...] -- WORDS

A recipe from what another project says about precision, on top of recipe=NAME
(llama_tiny), with the values of key=value on top. What it says and no recipe
can is a comment; a key that it does not have is a warning too.

  accelerate  its configuration file, or Python with one of its handlers, which
              is read and not run: -- 'TERecipeKwargs(margin=1)'
  deepspeed   its JSON
  nemo        a YAML file of MegatronMixedPrecision's fields, or these as words,
              or, in place of FILE, a preset: bf16_with_fp8_mixed
  bridge      a run_config.yaml of Megatron-Bridge's, its fields, or a preset
  megatron    a shell script with its flags, or these: -- --bf16 --fp8-margin 1
  torchtitan  its TOML
  te          Python that makes a recipe of Transformer Engine's, read and not
              run, or what one prints: -- 'DelayedScaling(margin=1)'

  --yaml, --json, --python  as in `fp8cfg export`
  --output FILE             write FILE, which must not exist yet
  --config-dir FOLDER       recipes of your own
"""


def run(argv: list[str]) -> int:
    """Print the recipe that is imported. Returns the exit code."""
    from fp8cfg.cli.export import write_new
    from fp8cfg.composition import compose
    from fp8cfg.composition.provenance import trace
    from fp8cfg.interop.doors import door, from_file, from_words
    from fp8cfg.interop.texts import comments
    from fp8cfg.report import exported

    cut = argv.index("--") if "--" in argv else len(argv)
    arguments, words = split(argv[:cut], ("--config-dir", "--output"), FORMS), argv[cut + 1:]
    forms = [form for form in FORMS if form in arguments.flags] or ["--yaml"]
    if len(forms) > 1:
        raise ConfigError(f"import: {' and '.join(forms)}; choose one")
    project, file = _source(arguments, words)
    name, folder, output = door(project).dialect.name, arguments.one("--config-dir"), arguments.one("--output")
    chosen = [word for word in arguments.words if word.startswith("recipe=")]
    base = trace(chosen, folder)
    found = from_file(project, file, base.recipe) if file else from_words(project, words, base.recipe)
    recipe = compose([word for word in arguments.words if word not in chosen], folder, base=found.recipe)
    write = {"--yaml": exported.yaml_text, "--json": exported.json_text, "--python": exported.python_text}[forms[0]]
    text = write(recipe, {k: v for k, v in base.named.items() if k == "recipe"}, False)
    remarks = [*found.lost, *found.unknown]
    if forms == ["--json"]:
        _say("note", found.lost)
    elif remarks:
        text = comments([f"Imported from {name}. What has no counterpart here, or is read otherwise:", *remarks]) + text
    _say("warning", found.unknown)
    if output is None:
        print(text, end="")
        return 0
    write_new(Path(output), text)
    print(f"wrote {output}")
    return 0


def _source(arguments: Arguments, words: list[str]) -> tuple[str, Path | None]:
    """The project and its file; no file where there are words."""
    from fp8cfg.interop.doors import DOORS, door

    if not arguments.plain:
        raise ConfigError(f"import: needs a project; choose from {', '.join(DOORS)}")
    project, *files = arguments.plain
    if door(project).presets and len(files) == 1 and not words and not Path(files[0]).suffix and not Path(files[0]).exists():
        words.append(files.pop())  # the name of a preset
    if any(word.partition("=")[0] in ("precision", "trainer.plugins") for word in arguments.words):
        raise ConfigError("precision=: is what is imported; drop one of the two")
    if len(files) + bool(words) != 1:
        more = f"{files[1]}: a second file" if len(files) > 1 else "a file, or words after --, and not both"
        raise ConfigError(f"import {project}: {more if files else 'needs a file, or words after --'}")
    return project, Path(files[0]) if files else None


def _say(kind: str, lines: tuple[str, ...]) -> None:
    for line in lines:
        print(f"{kind}: {line}", file=sys.stderr)
