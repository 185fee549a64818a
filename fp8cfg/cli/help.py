"""`--help`: prints usage texts, without slow imports."""

from __future__ import annotations

import ast
import importlib
from itertools import groupby
from pathlib import Path

from fp8cfg.cli import GROUPS, VERBS
from fp8cfg.schema import __version__

_TEXT = """fp8cfg {version}: typed recipes for FP8 training, proved after the first step

  fp8cfg [VERB] [recipe=NAME | FILE.yaml] [precision=NAME] [data=NAME]
         [task=NAME] [key=value ...] [--config-dir FOLDER]

Examples:
  fp8cfg recipe=llama_tiny precision=bf16_fp8      train a small model here
  fp8cfg plan recipe=llama_8b precision=bf16_fp8 --gpu h100
  fp8cfg mine.yaml fp8.margin=1                    train your recipe file

{verbs}

`fp8cfg VERB --help` has examples and options. FILE.yaml may be JSON; - reads
standard input. `python -m fp8cfg` and `torchrun ... -m fp8cfg` work too.

Presets (`fp8cfg list` describes them):
  recipe     {recipe}
  precision  {precision}
  data       {data}
  task       {task}

Keys: model.*, lora.*, data.*, optim.*, trainer.*, checkpoint.*, log.*, name,
and, short for trainer.plugins.*: precision.*, fp8.*, storage.*, backend,
opt_level. 'fp8={{margin: 1}}' sets several. `fp8cfg explain fp8` lists the keys
of a section, and `fp8cfg explain fp8.margin` explains one.

Options:
  -cd, --config-dir FOLDER   your own recipes and presets, FOLDER/GROUP/*.yaml
  -m, --multirun, -c, --cfg, -i, --info, --hydra-help
                             as in Hydra: fp8cfg train --help
  --help, --version

Exit codes: 0 done, 1 a bug, 2 configuration, 3 FP8 was asked for and did not
run or parity failed, 4 no usable checkpoint, 5 disk full or not writable, 6 run
folder in use, 7 diverged, 8 a rank was lost or stalled, 75 stopped by a signal
and saved
"""


def usage(verb: str | None = None) -> str:
    """Returns a help text.

    Args:
        verb: Name of the verb. None for the general text with all names of presets.
    """
    if verb and verb != "help":
        return str(importlib.import_module(f"fp8cfg.cli.{verb}").USAGE).strip()
    presets = {group: _wrap_names(choices(group)) for group in GROUPS if group != "recipe"}
    presets["recipe"] = _wrap_names(_by_family(choices("recipe")))
    sections = []
    for section, verbs in groupby(VERBS.items(), lambda item: item[1].section):
        lines = [f"  {name:<11} {verb.about}" for name, verb in verbs]
        sections.append("\n".join([f"{section}:", *lines]))
    return _TEXT.format(version=__version__, verbs="\n".join(sections), **presets).rstrip()


def choices(group: str) -> list[str]:
    """Returns the shipped names of a group, sorted.

    Args:
        group: "recipe", "precision", "data" or "task".
    """
    if group == "recipe":
        return sorted(shipped_recipes())
    return sorted(file.stem for file in (root("conf") / group).glob("*.yaml"))


def root(name: str) -> Path:
    """Returns the path of a shipped folder: "recipes" or "conf"."""
    # In a git checkout it is a link to the folder at the root.
    return (Path(__file__).parents[1] / name).resolve()


def shipped_recipes() -> dict[str, tuple[str, Path]]:
    """Returns description and file of each shipped recipe by name.

    The source code is parsed and not imported, because importing the schema takes 0.1 seconds.
    """
    result = {}
    for file in root("recipes").glob("*.py"):
        for name, about in recipes_in(file).items():
            result[name] = (about, file)
    return result


def recipes_in(file: Path) -> dict[str, str]:
    """Returns the description of each recipe in a Python file by name.

    Finds functions with the decorator `recipe`, and sizes of a family such as
    `llama_8b = size("llama_8b", ..., "Llama 3.1 8B.")`.

    Args:
        file: The Python file. It is parsed, not run.
    """
    descriptions = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if decorators & {"recipe", "fp8cfg.recipe"}:
                docstring = ast.get_docstring(node) or ""
                descriptions[node.name] = docstring.strip().partition("\n")[0]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            texts = []
            for argument in node.value.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    texts.append(argument.value)
            target = node.targets[0]
            # The first text must repeat the variable's name. Other calls at the top do not.
            if texts and isinstance(target, ast.Name) and texts[0] == target.id:
                descriptions[target.id] = texts[1] if len(texts) > 1 else ""
    return descriptions


def _by_family(names: list[str]) -> list[str]:
    """Joins names of a family with braces, as in a shell: `qwen3_{4b,8b}`."""
    suffixes_by_family: dict[str, list[str]] = {}
    for name in names:
        family, underscore, suffix = name.partition("_")
        suffixes_by_family.setdefault(family + underscore, []).append(suffix)
    families = []
    for family, suffixes in suffixes_by_family.items():
        text = suffixes[0]
        if len(suffixes) > 1:
            text = f"{{{','.join(suffixes)}}}"
        families.append(family + text)
    return families


def _wrap_names(names: list[str], width: int = 66) -> str:
    """Wraps names to `width` columns, indented below the first line."""
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) > width:
            lines.append("")
        lines[-1] += f"{name} "
    return ("\n" + " " * 13).join(line.rstrip() for line in lines)
