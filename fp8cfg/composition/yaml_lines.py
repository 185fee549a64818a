"""YAML line numbers: the line of each key in a file."""

from __future__ import annotations

from pathlib import Path

import yaml

from fp8cfg.config.files import read_text


def key_lines(path: Path) -> dict[str, int]:
    """The line of each dotted key in the file `path`, which `read_yaml` has accepted; the entries of a list have their index
    for a name."""
    found: dict[str, int] = {}

    def walk(node: yaml.Node | None, at: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in sorted(
                node.value, key=lambda item: item[0].value == "<<"
            ):  # own keys before merged ones
                if key.value == "<<":
                    for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                        walk(merged, at)
                elif at + key.value not in found:
                    found[at + key.value] = key.start_mark.line + 1
                    walk(value, f"{at}{key.value}.")
        elif isinstance(node, yaml.SequenceNode):
            for index, entry in enumerate(node.value):
                found[f"{at}{index}"] = entry.start_mark.line + 1
                walk(entry, f"{at}{index}.")

    walk(
        yaml.compose(read_text(path).replace("\t", " "), yaml.SafeLoader), ""
    )  # JSON has tabs between its values
    return found
