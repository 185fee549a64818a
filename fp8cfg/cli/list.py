"""`list`: prints recipes, presets and tasks with descriptions.

Files are parsed. Recipes are only imported if another package has some.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fp8cfg.cli import GROUPS, help
from fp8cfg.cli.argv import split
from fp8cfg.schema.errors import ConfigError, printable, refuse_if, suggest
from fp8cfg.schema.messages import has_color
from fp8cfg.schema.regular_file import open_regular
from fp8cfg.schema.sections import Section, print_sections
from fp8cfg.schema.tables import cut, output_width, wrapped

USAGE = """
fp8cfg list [recipe] [precision] [data] [task] [--config-dir FOLDER] [--json]

List recipes, presets and tasks with a line on each.

Examples:
  fp8cfg list
  fp8cfg list precision
  fp8cfg list recipe --config-dir conf --json

If you name one group, its complete descriptions are printed.

Options:
  --config-dir FOLDER  include your own recipes, presets and groups
  --json               print JSON
"""


_PLURAL = {"recipes": "recipe", "precisions": "precision"}


@dataclass(frozen=True)
class Entry:
    """A recipe, preset or task.

    Attributes:
        name: The name.
        about: Its description.
        file: The file.
        own: Printed place of a user's or plugin's entry. "" for shipped ones.
    """

    name: str
    about: str
    file: Path
    own: str = ""

    @property
    def line(self) -> str:
        """Text after the name."""
        return ": ".join(part for part in (self.own, self.about) if part)


def run(argv: list[str]) -> int:
    """Prints the groups and returns the exit code."""
    arguments = split(argv, ("--config-dir",), ("--json",))
    named = [_PLURAL.get(word, word) for word in arguments.plain]
    folder = arguments.one("--config-dir")
    groups = [*GROUPS, *(_own(Path(folder)) if folder else ())]
    wrong = [
        f"list {word}: no such group" + suggest(word, groups)
        for word in named
        if word not in groups
    ]
    refuse_if(wrong + [f"list: takes no values, drop {word!r}" for word in arguments.words])
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"--config-dir {folder}: no such folder")
    found = {
        g: entries(g, Path(folder) if folder else None) for g in groups if not named or g in named
    }
    if "--json" in arguments.flags:
        print(
            json.dumps(
                {
                    group: [
                        {"name": e.name, "about": e.about, "file": str(e.file.resolve())}
                        for e in those
                    ]
                    for group, those in found.items()
                },
                indent=1,
            )
        )
    elif len(found) == 1:
        print("\n".join(_whole(*found.values())))
    elif has_color(sys.stdout):
        print_sections([Section(group, _overview(those)) for group, those in found.items()])
    else:
        print("\n\n".join("\n".join([group, *_overview(those)]) for group, those in found.items()))
    return 0


def _own(folder: Path) -> list[str]:
    """Returns the groups in `folder` that are not shipped."""
    from fp8cfg.composition.config_groups import Library

    return Library(folder).groups()[len(GROUPS) :] if folder.is_dir() else []


def entries(group: str, folder: Path | None) -> list[Entry]:
    """Returns the entries of a group, sorted by name.

    Args:
        group: Name of the group.
        folder: The user's config folder. Its files override shipped ones of the same name.
    """
    shipped = {e.name: e for e in (_recipes() if group == "recipe" else [])}
    shipped |= {
        file.stem: Entry(file.stem, _comment(file), file)
        for file in sorted((help.root("conf") / group).glob("*.yaml"))
    }
    own: dict[str, Entry] = {}
    if folder:
        from fp8cfg.schema.safe_files import NAME

        own = {
            file.stem: Entry(file.stem, _comment(file), file, printable(str(file)))
            for file in (folder / group).glob("*.yaml")
            if NAME.fullmatch(file.stem) and file.is_file()
        }
    return sorted((shipped | own).values(), key=lambda e: e.name)


def _overview(those: list[Entry]) -> list[str]:
    """Formats one line per entry, cut to the width of the terminal."""
    width = max(len(e.name) for e in those)
    return [f"  {e.name:{width}}  {cut(e.line, output_width() - 4 - width)}" for e in those]


def _whole(those: list[Entry]) -> list[str]:
    """Formats the entries with complete descriptions."""
    width = max(len(e.name) for e in those) + 2
    return [wrapped(f"{e.name:{width}}{e.line}", more=" " * width) for e in those]


def _recipes() -> list[Entry]:
    """Returns the recipes of fp8cfg and of plugins."""
    read = {
        name: Entry(name, about, file) for name, (about, file) in help.shipped_recipes().items()
    }
    # Plugins register recipes by entry points. Their sources may have any form, so import them.
    if not metadata.entry_points(group="fp8cfg.recipes"):
        return list(read.values())
    from fp8cfg.schema.recipe_registry import recipes

    return [
        read.get(name)
        or Entry(
            name,
            _first(make.__doc__),
            Path(inspect.unwrap(make).__code__.co_filename),
            make.__module__,
        )
        for name, make in recipes().items()
    ]


def _first(doc: str | None) -> str:
    """Returns the first line of a docstring."""
    return (doc or "").strip().partition("\n")[0]


def _comment(file: Path) -> str:
    """Returns the first comment of a YAML file, "" without one."""
    # Comments for Hydra and for editors are skipped.
    try:
        with open_regular(file) as lines:
            for line in iter(lambda: lines.readline(500).decode(errors="replace").strip(), ""):
                if not line.startswith("#"):
                    break
                if not line.startswith(("# @package", "# yaml-language-server")):
                    return "".join(
                        c for c in line.lstrip("# ") if c.isprintable()
                    )  # no escape sequences: it goes to a terminal
    except (OSError, ConfigError):
        pass
    return ""
