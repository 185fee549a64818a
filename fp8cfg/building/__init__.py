"""From a recipe to a job: the Fiddle graph, and the functions that build the parts of a job."""

from __future__ import annotations
