"""Configuration schema: typed nodes, rules between keys, presets and recipes by name, errors. Loads no torch and no Hydra."""

from __future__ import annotations

__version__ = "0.1.0"
