"""`doctor`: reports the installation, and the precisions and backends that run on this machine."""

from __future__ import annotations

import json
from typing import Any

from fp8cfg.cli.argv import split
from fp8cfg.run_folder.environment import describe_machine
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.sections import Section, print_sections
from fp8cfg.schema.tables import size, table, wrapped

USAGE = """
fp8cfg doctor [--json]

Show what this machine can run: hardware, versions, presets by backend.

Examples:
  fp8cfg doctor
  fp8cfg doctor --json

It prints GPUs, compute capability, CUDA, driver, compilers, library versions
and environment variables that change results. For each precision preset and
backend it prints: runs, emulated, or the reason why not.

Options:
  --json               print JSON
"""


def run(argv: list[str]) -> int:
    """Prints the inventory and returns the exit code."""
    arguments = split(argv, (), ("--json",))
    extra = [*arguments.words, *arguments.plain]
    if extra:
        raise ConfigError(
            f"{extra[0]}: doctor looks at the machine, and takes no recipe; fp8cfg plan does"
        )
    machine = describe_machine()
    if "--json" in arguments.flags:
        print(json.dumps(machine, indent=1))
    else:
        print_sections(report(machine))
    return 0


def report(machine: dict[str, Any]) -> list[Section]:
    """Formats the inventory.

    Args:
        machine: Result of `describe_machine`.
    """
    facts = [
        ("fp8cfg", f"{machine['fp8cfg']}, Python {machine['python']}"),
        ("system", machine["os"]),
        ("CPU", f"{machine['cores']} cores, {size(machine['free_memory'])} free"),
    ]
    for gpu in machine["gpus"]:
        text = f"{gpu['name']}, compute capability {gpu['capability']}, {size(gpu['memory'])}"
        facts.append(("GPU", text))
    if not machine["gpus"]:
        facts.append(("GPU", "none"))
    cuda = machine["cuda"] or "none in torch"
    facts.append(("CUDA", f"{cuda}, driver {machine['driver'] or 'none'}"))
    triton = machine["packages"]["triton"] or "not installed"
    facts.append(("compiler", f"{machine['compiler'] or 'no g++'}; triton {triton}"))
    if machine["torch_problem"]:
        facts.append(("torch", machine["torch_problem"]))
    packages = [
        [name, version or "not installed"]
        for name, version in machine["packages"].items()
        if name != "triton"
    ]
    lines = [wrapped(value, f"{name:<9} ", " " * 10) for name, value in facts]
    return [
        Section("machine", lines),
        Section("packages", [table(["package", "version"], packages)]),
        Section("environment", [_variables(machine["variables"])]),
        Section("precisions", _precisions(machine["precision"])),
    ]


def _variables(variables: dict[str, dict[str, str]]) -> str:
    """Formats environment variables with their effects."""
    if not variables:
        return "environment variables that change results: none is set"
    lines = ["environment variables that change results"]
    for name, variable in variables.items():
        text = f"{name}={variable['value']}"
        if variable["effect"]:
            text += f": {variable['effect']}"
        lines.append(wrapped(text, "  ", "    "))
    return "\n".join(lines)


def _precisions(presets: dict[str, dict[str, str]]) -> list[str]:
    """Formats the table of precisions and backends, with numbered reasons below."""
    # Many cells share a reason, so each is printed once.
    reasons: list[str] = []

    def cell(answer: str) -> str:
        """Formats a cell. A reason becomes its number."""
        if answer in ("runs", "emulated"):
            return answer
        if answer not in reasons:
            reasons.append(answer)
        return f"no [{reasons.index(answer) + 1}]"

    rows = [[name, *map(cell, backends.values())] for name, backends in presets.items()]
    lines = [table(["precision", *next(iter(presets.values()))], rows)]
    notes = (wrapped(reason, f"[{i}] ", "    ") for i, reason in enumerate(reasons, 1))
    return [*lines, *notes]
