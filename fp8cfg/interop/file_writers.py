"""File writers: a recipe as the text of another project's configuration file."""

from __future__ import annotations

import json as json_module
import textwrap
from collections.abc import Iterable
from typing import Any

from fp8cfg import __version__
from fp8cfg.composition.flatten import nested as tree
from fp8cfg.config.files import dump_yaml
from fp8cfg.interop.key_table import Written
from fp8cfg.interop.shell import flags as flag_words
from fp8cfg.interop.te import objects as te_objects


def comments(lines: Iterable[str]) -> str:
    """Each line as a comment of at most 80 columns."""
    wrapped = [
        textwrap.fill(
            " ".join(line.split()),
            80,
            initial_indent="# ",
            subsequent_indent="#   ",
            break_on_hyphens=False,
        )
        for line in lines
    ]
    return "".join(f"{line}\n" for line in wrapped)


def headed(project: str, lost: Iterable[str]) -> str:
    """The head of a file for `project`: what it cannot say stands first."""
    said = list(lost)
    return comments(
        [
            f"Exported by fp8cfg {__version__} for {project}.",
            *(["What it cannot say:"] if said else []),
            *said,
        ]
    )


def nested(data: dict[str, Any]) -> dict[str, Any]:
    """A table by dotted keys as mappings."""
    return tree(data)


def yaml(written: Written) -> str:
    """A YAML file."""
    return dump_yaml(nested(written.value))


def bridge(written: Written) -> str:
    """The section of a run's YAML file that Megatron-Bridge reads precision from."""
    return dump_yaml({"mixed_precision": written.value})


def json(written: Written) -> str:
    """A JSON file."""
    return json_module.dumps(nested(written.value), indent=2) + "\n"


def flags(written: Written) -> str:
    """An array of a shell, a flag a line."""
    words = flag_words.line(written.value)
    lines = "".join(f"\n    {word}" if word.startswith("--") else f" {word}" for word in words)
    return f"FP8CFG_ARGS=({lines}\n)\n"


def toml(written: Written) -> str:
    """A TOML file of sections with plain values, as torchtitan read it."""
    found: dict[str, list[str]] = {}
    for key, value in written.value.items():
        section, _, name = key.rpartition(".")
        found.setdefault(section, []).append(
            f"{name} = {json_module.dumps(value)}"
        )  # strings, lists and truth are alike in both
    until = comments(
        [
            "torchtitan reads TOML up to February 2026 (pytorch/torchtitan#2386), and Python"
            " configurations since."
        ]
    )
    return until + "\n".join(
        f"[{section}]\n" + "".join(f"{line}\n" for line in lines)
        for section, lines in found.items()
    )


def te(written: Written) -> str:
    """Python that makes Transformer Engine's recipe."""
    return te_objects.python_text(written.value)
