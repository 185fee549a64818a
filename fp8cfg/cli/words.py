"""The command line split into options, a file and words."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fp8cfg.config.errors import ConfigError, suggest


@dataclass
class Arguments:
    """What stands on a command line beside the verb."""

    words: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)

    def one(self, option: str) -> str | None:
        """The value of an option that is given once, or None. Raises ConfigError where it is given more often."""
        values = self.options.get(option, [])
        if len(values) > 1:
            raise ConfigError(f"{option}: given {len(values)} times")
        return values[0] if values else None


def split(argv: list[str], known: tuple[str, ...], flags: tuple[str, ...] = ()) -> Arguments:
    """Options of `known` with their values, `flags` without, words with a '=' (or marked by + or ~), and the rest. Raises
    ConfigError for any other option, and for an option without a value."""
    out, left = Arguments(), list(argv)
    while left:
        arg = left.pop(0)
        if arg.startswith("-"):
            name, eq, value = arg.partition("=")
            if name in flags and not eq:
                out.flags.add(name)
                continue
            if name not in known:
                wrong = "takes no value" if name in flags else "no such option"
                raise ConfigError(f"{name}: {wrong}" + suggest(name, [*known, *flags, "--help", "--version"]))
            if not eq and not left:
                raise ConfigError(f"{name}: needs a value")
            given = value if eq else left.pop(0)
            if not given:
                raise ConfigError(f"{name}: needs a value")
            out.options.setdefault(name, []).append(given)
        elif "=" in arg or arg[:1] in "+~":
            out.words.append(arg)
        else:
            out.plain.append(arg)
    return out


def recipe_file(plain: list[str], verbs: tuple[str, ...]) -> Path | None:
    """The recipe file among arguments that are no words. Raises ConfigError for what is no file and no verb."""
    for arg in plain:
        if not arg.endswith((".yaml", ".yml")):
            from fp8cfg.composition.words import malformed

            if arg in verbs:
                raise ConfigError(f"{arg}: a command stands first, as in: fp8cfg {arg}")
            hint = suggest(arg, verbs)
            raise ConfigError(f"{arg}: no such command{hint}" if "did you mean" in hint else malformed(arg))
    if len(plain) > 1:
        raise ConfigError(f"{plain[1]}: a second recipe file; one builds on another with `recipe: NAME`")
    return Path(plain[0]) if plain else None
