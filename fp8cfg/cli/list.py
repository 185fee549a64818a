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
        origin: File or module of a user's or plugin's entry, for printing. "" for shipped ones.
    """

    name: str
    about: str
    file: Path
    origin: str = ""

    @property
    def line(self) -> str:
        """Text after the name."""
        return ": ".join(part for part in (self.origin, self.about) if part)

    def as_data(self) -> dict[str, str]:
        """Returns the content for --json."""
        return {"name": self.name, "about": self.about, "file": str(self.file.resolve())}


def run(argv: list[str]) -> int:
    """Prints the groups and returns the exit code."""
    arguments = split(argv, ("--config-dir",), ("--json",))
    names = [_PLURAL.get(word, word) for word in arguments.plain]
    config_dir = arguments.one("--config-dir")
    folder = Path(config_dir) if config_dir else None
    groups = list(GROUPS)
    if folder:
        groups += _user_groups(folder)
    problems = []
    for name in names:
        if name not in groups:
            problems.append(f"list {name}: no such group{suggest(name, groups)}")
    problems += [f"list: takes no values, drop {word!r}" for word in arguments.words]
    refuse_if(problems)
    if folder and not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: no such folder")
    entries_by_group = {}
    for group in groups:
        if not names or group in names:
            entries_by_group[group] = entries(group, folder)

    if "--json" in arguments.flags:
        data = {
            group: [entry.as_data() for entry in group_entries]
            for group, group_entries in entries_by_group.items()
        }
        print(json.dumps(data, indent=1))
    elif len(entries_by_group) == 1:
        [group_entries] = entries_by_group.values()
        print("\n".join(_full_lines(group_entries)))
    elif has_color(sys.stdout):
        print_sections(
            [
                Section(group, _overview(group_entries))
                for group, group_entries in entries_by_group.items()
            ]
        )
    else:
        blocks = []
        for group, group_entries in entries_by_group.items():
            blocks.append("\n".join([group, *_overview(group_entries)]))
        print("\n\n".join(blocks))
    return 0


def _user_groups(folder: Path) -> list[str]:
    """Returns the groups in `folder` that are not shipped."""
    from fp8cfg.composition.config_groups import Library

    if not folder.is_dir():
        return []
    return Library(folder).groups()[len(GROUPS) :]  # shipped groups come first


def entries(group: str, folder: Path | None) -> list[Entry]:
    """Returns the entries of a group, sorted by name.

    Args:
        group: Name of the group.
        folder: The user's config folder. Its files override shipped ones of the same name.
    """
    result = {}
    if group == "recipe":
        result = {entry.name: entry for entry in _recipes()}
    for file in (help.root("conf") / group).glob("*.yaml"):
        result[file.stem] = Entry(file.stem, _comment(file), file)
    if folder:
        from fp8cfg.schema.safe_files import NAME

        for file in (folder / group).glob("*.yaml"):
            if NAME.fullmatch(file.stem) and file.is_file():
                origin = printable(str(file))
                result[file.stem] = Entry(file.stem, _comment(file), file, origin)
    return sorted(result.values(), key=lambda entry: entry.name)


def _overview(entries: list[Entry]) -> list[str]:
    """Formats one line per entry, cut to the width of the terminal."""
    width = max(len(entry.name) for entry in entries)
    room = output_width() - 4 - width
    return [f"  {entry.name:{width}}  {cut(entry.line, room)}" for entry in entries]


def _full_lines(entries: list[Entry]) -> list[str]:
    """Formats the entries with complete descriptions."""
    width = max(len(entry.name) for entry in entries) + 2
    return [wrapped(f"{entry.name:{width}}{entry.line}", more=" " * width) for entry in entries]


def _recipes() -> list[Entry]:
    """Returns the recipes of fp8cfg and of plugins."""
    shipped = {}
    for name, (about, file) in help.shipped_recipes().items():
        shipped[name] = Entry(name, about, file)
    # Plugins register recipes by entry points. Their sources may have any form, so import them.
    if not metadata.entry_points(group="fp8cfg.recipes"):
        return list(shipped.values())
    from fp8cfg.schema.recipe_registry import recipes

    result = []
    for name, make in recipes().items():
        entry = shipped.get(name)
        if entry is None:
            about = (make.__doc__ or "").strip().partition("\n")[0]
            file = Path(inspect.unwrap(make).__code__.co_filename)
            entry = Entry(name, about, file, make.__module__)
        result.append(entry)
    return result


def _comment(file: Path) -> str:
    """Returns the first comment of a YAML file, "" without one."""
    # Comments for Hydra and for editors are skipped.
    try:
        with open_regular(file) as lines:
            for line in iter(lambda: lines.readline(500).decode(errors="replace").strip(), ""):
                if not line.startswith("#"):
                    break
                if not line.startswith(("# @package", "# yaml-language-server")):
                    # No escape sequences: the text goes to a terminal.
                    return "".join(char for char in line.lstrip("# ") if char.isprintable())
    except (OSError, ConfigError):
        pass
    return ""
