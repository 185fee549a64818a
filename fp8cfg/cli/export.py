"""`export`: a recipe as YAML, JSON or Python to keep and to edit."""

from __future__ import annotations

from pathlib import Path

from fp8cfg.cli.words import recipe_file, split, wrong_words
from fp8cfg.config.errors import ConfigError, Fp8cfgError

FORMS = ("--yaml", "--json", "--python")
SCHEMA = "fp8cfg.schema.json"
USAGE = f"""
fp8cfg export [recipe=NAME | FILE.yaml] [precision=NAME] [key=value ...]
              [--yaml | --json | --python] [--full] [--output FILE]

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
"""


class NotWritable(Fp8cfgError):
    """A file that cannot be written. Exit code 5."""

    exit_code = 5


def run(argv: list[str]) -> int:
    """Export the recipe of `argv`. Returns the exit code."""
    from fp8cfg.composition.provenance import trace
    from fp8cfg.report import exported

    arguments = split(argv, ("--config-dir", "--output"), (*FORMS, "--full"))
    forms = [form for form in FORMS if form in arguments.flags] or ["--yaml"]
    try:
        if len(forms) > 1:
            raise ConfigError(f"export: {' and '.join(forms)}; choose one")
        output, file = arguments.one("--output"), recipe_file(arguments.plain, ())
    except ConfigError as e:
        raise ConfigError(e.problems + wrong_words(arguments)) from None
    traced = trace(arguments.words, arguments.one("--config-dir"), file)
    traced.recipe.check()
    write = {"--yaml": exported.yaml_text, "--json": exported.json_text, "--python": exported.python_text}[forms[0]]
    text = write(traced.recipe, traced.named, "--full" in arguments.flags)
    if output is None:
        print(text, end="")
        return 0
    if forms == ["--yaml"] and (Path(output).parent / SCHEMA).is_file():
        text = f"# yaml-language-server: $schema={SCHEMA}\n{text}"
    _write(Path(output), text)
    print(f"wrote {output}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--output {path}: exists already; remove it or write to another") from None
    except OSError as e:
        raise NotWritable(f"--output {path}: cannot be written ({e.strerror})") from None
