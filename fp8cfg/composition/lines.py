"""Where the keys of a YAML file stand."""

from __future__ import annotations

from pathlib import Path

import yaml


def key_lines(path: Path) -> dict[str, int]:
    """The line of each dotted key in the file `path`, which `read_yaml` has accepted."""
    found: dict[str, int] = {}

    def walk(node: yaml.Node | None, at: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found[at + key.value] = key.start_mark.line + 1
                walk(value, f"{at}{key.value}.")

    walk(yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader), "")
    return found
