"""Training runs: the loop and its steps, with data, metrics and signal handling."""

from __future__ import annotations
