"""Key names: the full name of every key of a recipe, and the short ones that stand for parts of the precision plugin.

`fp8.margin` is `trainer.plugins.fp8.margin`. The names stand below the schema, whose error lines show short ones.
"""

from __future__ import annotations

PLUGIN = "trainer.plugins"
ALIASES = {
    "precision": PLUGIN,
    "fp8": f"{PLUGIN}.fp8",
    "storage": f"{PLUGIN}.storage",
    "backend": f"{PLUGIN}.backend",
    "opt_level": f"{PLUGIN}.opt_level",
}
"""Short names, at every door, of nodes and keys of the precision plugin."""
_BY_LENGTH = sorted(ALIASES.items(), key=lambda item: -len(item[1]))


def short(key: str) -> str:
    """The short name of a full key: `trainer.plugins.fp8.margin` is `fp8.margin`."""
    for alias, full in _BY_LENGTH if key.startswith(PLUGIN) else ():
        if key == full or key.startswith(full + "."):
            return alias + key[len(full) :]
    return key


def full(key: str) -> str:
    """The full name of a key that may be short: `fp8.margin` is `trainer.plugins.fp8.margin`."""
    head, dot, rest = key.partition(".")
    return ALIASES.get(head, head) + dot + rest
