"""`--help`, without loading anything that is slow to load."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from fp8cfg import __version__

_TEXT = """fp8cfg {version}: typed recipes for low-precision training

  fp8cfg [recipe=NAME | FILE.yaml] [precision=NAME] [data=NAME] [key=value ...]
  fp8cfg resume RUN_FOLDER [key=value ...] [--allow KEY ...]

  train, the default   compose a recipe, print its precision, planned coverage
                       and memory, and train it
  resume               go on from the newest checkpoint that verifies; a change
                       that would not continue the same run is refused unless
                       allowed by its key

Presets are chosen first, whatever their order, then values are set:
  recipe     {recipe}
  precision  {precision}
  data       {data}

Keys are the recipe's, by short names: fp8.margin is trainer.plugins.fp8.margin,
and so are precision.*, storage.*, backend and opt_level. A mapping sets several
at once: 'fp8={{margin: 1, amax_history_len: 16}}'.

Options:
  --config-dir FOLDER  recipes and presets of your own, in FOLDER/recipe/*.yaml,
                       FOLDER/precision/*.yaml and FOLDER/data/*.yaml
  --allow KEY          resume: let this key differ from the run's recipe; fp8 or
                       'fp8.*' for all of a node
  --help, --version

Everything works as `python -m fp8cfg` too. Several ranks:
  torchrun --nproc-per-node 2 -m fp8cfg recipe=llama_tiny precision=bf16_fp8

Exit codes: 0 done, 2 configuration, 3 asked for FP8 and did not get it, 4 no
usable checkpoint, 5 out of space or not writable, 6 run folder in use, 75
stopped by a signal after a checkpoint, 1 diverged, or a bug
"""


def usage(verb: str | None = None) -> str:
    """The help text of `verb`, its module's USAGE; or, with the names that can be chosen, that of all."""
    if verb and verb not in ("train", "help"):
        return str(importlib.import_module(f"fp8cfg.cli.{verb}").USAGE).strip()
    return _TEXT.format(version=__version__, recipe=_wrapped(_recipes()), precision=_wrapped(_stems("precision")),
                        data=_wrapped(_stems("data"))).rstrip()


def _root(name: str) -> Path:
    here = Path(__file__).resolve().parents[1]
    return here / name if (here / name).is_dir() else here.parent / name


def _stems(group: str) -> list[str]:
    return sorted(p.stem for p in (_root("conf") / group).glob("*.yaml"))


def _recipes() -> list[str]:
    """Names of the shipped recipes, read from `__all__` rather than imported: the schema takes a tenth of a second."""
    for node in ast.parse((_root("recipes") / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value))
    return []


def _wrapped(names: list[str], width: int = 66) -> str:
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) > width:
            lines.append("")
        lines[-1] += f"{name} "
    return ("\n" + " " * 13).join(line.rstrip() for line in lines)
