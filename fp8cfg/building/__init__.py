"""Communication of a training step, computed from the recipe: what one rank sends over each axis of the layout."""

from __future__ import annotations
