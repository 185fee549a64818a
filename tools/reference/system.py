"""Exit code reference, from the error classes that have them, and the environment variables that are read or change results."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

from fp8cfg.run_folder.environment import INSTALL_VARIABLES as VARIABLES
from fp8cfg.schema.errors import Fp8cfgError
from tools.reference.markdown import code, plain, table

ROOT = Path(__file__).resolve().parents[2]
DEFINES = re.compile(r"^class \w+\(\w*(Error|Checkpoint|Folder)\w*(, \w+)*\):", re.MULTILINE)
"""Modules that define errors."""
OWN = {
    "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE": "set by torchrun: this rank and the number of ranks; without them there is one rank",
    "MASTER_ADDR, MASTER_PORT": "set by torchrun: the address where ranks meet; required for several ranks",
    "FP8CFG_FAILPOINT": "for tests: kills the process at a named point of a save",
}
"""Variables that fp8cfg reads. No key of a recipe comes from the environment."""
FIXED = {
    0: ["done"],
    1: ["a bug: a traceback is printed"],
    2: ["an unknown argument, key or file"],
    5: ["a disk is full"],
    130: ["interrupted by Ctrl-C before anything could be saved"],
}
"""Codes, or cases of one, that no class of errors has."""


def exit_codes() -> str:
    found: dict[int, list[str]] = {k: list(v) for k, v in FIXED.items()}
    for cls in _errors():
        if cls is not Fp8cfgError:
            said = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
            found.setdefault(cls.exit_code, []).append(
                f"`{cls.__name__}`: {plain(_without_code(said))}"
            )
    rows = [[str(number), "<br>".join(lines)] for number, lines in sorted(found.items())]
    return "\n\n".join(
        [
            "# Exit codes",
            "An error is one line on standard error: the key and its value, the problem and what to do. There is no traceback, "
            "except for a bug.",
            table(["code", "when"], rows),
            "torchrun always exits with 1 if a rank fails. Look for the error above its own report. A sweep exits with the largest code "
            "of its runs, or with 1 if one exited with 1. 75 is EX_TEMPFAIL: a scheduler may requeue the command.",
        ]
    )


def _errors() -> list[type[Fp8cfgError]]:
    for path in sorted((ROOT / "fp8cfg").rglob("*.py")):
        if DEFINES.search(path.read_text(encoding="utf-8")) and path.name != "__main__.py":
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found, queue = [], [Fp8cfgError]
    while queue:
        cls = queue.pop(0)
        found.append(cls)
        queue += [c for c in sorted(cls.__subclasses__(), key=lambda c: c.__name__) if _ours(c)]
    return found


def _ours(cls: type) -> bool:
    """Whether `cls` is what its module calls so; pytest makes subclasses of errors with their names."""
    return (
        cls.__module__.startswith("fp8cfg.")
        and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    )


def _without_code(text: str) -> str:
    return ". ".join(
        part for part in text.rstrip(".").split(". ") if not part.startswith("Exit code")
    )


def environment() -> str:
    return "\n\n".join(
        [
            "# Environment variables",
            "No value of a recipe is taken from the environment.",
            "## Read by fp8cfg",
            table(["variable", "use"], [[code(k), v] for k, v in OWN.items()]),
            "## Read by libraries",
            "These variables change results. `fp8cfg doctor` prints the ones that you have set. A run records every `NVTE_*`, `FP8CFG_*` and "
            "`TORCH*` variable and `OMP_NUM_THREADS` in `environment.json`, except names that look secret. With `backend=te`, an `NVTE_*` "
            "variable that contradicts the recipe is an error.",
            table(["variable", "effect"], [[code(k), v] for k, v in VARIABLES.items()]),
        ]
    )
