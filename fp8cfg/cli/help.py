"""`--help`: usage texts, without loading anything that is slow to load."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from fp8cfg import __version__

_TEXT = """fp8cfg {version}: typed recipes for low-precision training

  fp8cfg [VERB] [recipe=NAME | FILE.yaml] [precision=NAME] [data=NAME]
         [key=value ...] [--config-dir FOLDER]

  train       train a recipe; also without a verb
  sweep       train every combination of key=a,b; also -m
  resume      go on with a run from its newest checkpoint that verifies
  rerun       the same run again; what has changed, and are the losses equal
  list        recipes and presets, with a line on each
  explain     a key: type, bounds, meaning, effect, every layer that set it
  diff        the keys in which two recipes or run folders differ
  plan        formats of every GEMM, memory and FLOPs of a run, without a GPU
  check       say what is wrong with a recipe, and run nothing
  doctor      this machine: hardware, versions, which precisions run here
  export      a recipe as YAML, JSON or Python, or as another project's file
  import      a recipe from Accelerate, NeMo, Megatron-LM, torchtitan and others
  schema      the JSON Schema of recipes, for editors
  completion  a script that makes bash, zsh or fish complete all of this
`fp8cfg VERB --help` says more.

Presets are chosen first, whatever their order, then values are set:
  recipe     {recipe}
  precision  {precision}
  data       {data}

Keys are the recipe's: model.*, data.*, optim.*, trainer.*, checkpoint.*, log.*,
name; and, short for trainer.plugins.*: precision.*, fp8.*, storage.*, backend,
opt_level. A mapping sets several: 'fp8={{margin: 1, amax_history_len: 16}}'.
`fp8cfg explain fp8` lists a node's keys, `fp8cfg explain fp8.margin` is on one.

Options:
  --config-dir FOLDER  recipes and presets of your own, in FOLDER/recipe/*.yaml,
                       FOLDER/precision/*.yaml and FOLDER/data/*.yaml
  -m, --multirun, -c, --cfg, -i, --info, --hydra-help
                       as in Hydra: fp8cfg train --help
  --help, --version

Everything works as `python -m fp8cfg` too, and under torchrun:
  torchrun --nproc-per-node 2 -m fp8cfg recipe=llama_tiny precision=bf16_fp8

Exit codes: 0 done, 2 configuration, 3 asked for FP8 and did not get it, 4 no
usable checkpoint, 5 out of space or not writable, 6 run folder in use, 75
stopped by a signal after a checkpoint, 1 diverged, or a bug
"""


def usage(verb: str | None = None) -> str:
    """The help text of `verb`, its module's USAGE; or, with the names that can be chosen, that of all."""
    if verb and verb != "help":
        return str(importlib.import_module(f"fp8cfg.cli.{verb}").USAGE).strip()
    named = {group: _wrapped(choices(group)) for group in ("recipe", "precision", "data")}
    return _TEXT.format(version=__version__, **named).rstrip()


def choices(group: str) -> list[str]:
    """The shipped choices of `group`, sorted."""
    return _recipes() if group == "recipe" else _stems(group)


def root(name: str) -> Path:
    """The shipped folder `name`, recipes or conf; in a checkout that is a link."""
    return (Path(__file__).parents[1] / name).resolve()


def _stems(group: str) -> list[str]:
    return sorted(p.stem for p in (root("conf") / group).glob("*.yaml"))


def _recipes() -> list[str]:
    """Names of the shipped recipes, read from `__all__` rather than imported: the schema takes a tenth of a second."""
    for node in ast.parse((root("recipes") / "__init__.py").read_text(encoding="utf-8")).body:
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
