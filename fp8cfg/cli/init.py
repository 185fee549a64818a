"""`init`: writes a commented recipe file as a starting point."""

from __future__ import annotations

import os
import shlex
import uuid
from contextlib import suppress
from pathlib import Path

from fp8cfg.cli.argv import split, wrong_words
from fp8cfg.cli.recipe_arguments import resolve_recipe, say_notes
from fp8cfg.composition.layers import shipped_choices
from fp8cfg.planning import training_data
from fp8cfg.schema.errors import ConfigError, NotWritable, printable, refuse_if
from fp8cfg.schema.messages import say, say_on_stderr

USAGE = """
fp8cfg init NAME [recipe=NAME] [precision=NAME] [key=value ...] [--force]
            [--config-dir FOLDER]

Write NAME.yaml: a recipe file with a line of help on each key.

Examples:
  fp8cfg init mine
  fp8cfg init mine recipe=llama_8b precision=bf16_fp8 optim.lr=1e-4
  fp8cfg init configs/big recipe=llama_70b precision=bf16_mxfp8 --force

The values that you pass are set. All other keys are comments with the values
that they have now. Train the file with: fp8cfg NAME.yaml

Options:
  --force              replace an existing file
  --config-dir FOLDER  your own recipes and presets
"""
SUFFIXES = (".yaml", ".yml")


def run(argv: list[str]) -> int:
    """Writes the recipe file of `argv`. Returns the exit code."""
    arguments = split(argv, ("--config-dir",), ("--force",))
    if len(arguments.plain) != 1:
        problem = "init: needs one name, as in: fp8cfg init mine recipe=llama_8b"
        raise ConfigError([problem, *wrong_words(arguments)])
    path = _to_path(arguments.plain[0])
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; choose another name")
    # lexists: a broken link would be replaced too.
    if os.path.lexists(path) and "--force" not in arguments.flags:
        raise ConfigError(f"{path}: exists already; choose another name, or add --force")
    result = resolve_recipe(arguments.words, arguments.one("--config-dir"))
    refuse_if(result.problems)
    say_notes(result.notes)

    from fp8cfg.report.recipe_template import commented_yaml

    text = commented_yaml(result.recipe, shipped_choices(result.layers), str(path))
    _write(path, text)
    name = printable(str(path))
    quoted_name = shlex.quote(name)
    say(f"wrote {name}; next: fp8cfg check {quoted_name}, then fp8cfg {quoted_name}")
    for line in training_data.unintended_data(result.recipe):
        say_on_stderr(f"note: {printable(str(line))}")
    return 0


def _to_path(name: str) -> Path:
    """Returns the path of the file. Raises ConfigError for an unusable name."""
    # "-" is standard output in other tools, and a shell can't show unprintable names.
    if not name.strip() or name == "-" or not name.isprintable():
        raise ConfigError(f"init {name!r}: not a name of a file; as in: fp8cfg init mine")
    if name.endswith(".json"):
        raise ConfigError(f"{name}: a commented file is YAML; write {name[:-5]}.yaml")
    return Path(name if name.endswith(SUFFIXES) else f"{name}.yaml")


def _write(path: Path, text: str) -> None:
    """Writes the file and its parent folders. Raises NotWritable."""
    # Under a new name first: after an interrupt, an existing file is old or new but never cut.
    new = path.with_name(f".fp8cfg-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise NotWritable(f"{path}: cannot be written ({error.strerror})") from None
