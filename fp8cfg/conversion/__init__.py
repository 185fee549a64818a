"""Module swap on a given model: its linear layers to FP8 and back, for any training loop."""

from __future__ import annotations
