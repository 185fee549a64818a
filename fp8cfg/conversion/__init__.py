"""Converts the linear layers of a given model to FP8 and back, for any training loop."""

from __future__ import annotations
