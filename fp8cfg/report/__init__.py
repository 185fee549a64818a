"""Reports: coverage, memory, the machine, plans and explanations of keys. Loads no torch on import."""

from __future__ import annotations
