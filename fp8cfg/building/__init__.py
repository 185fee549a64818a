"""From a recipe to a job: the Fiddle graph and the builders of a job's parts."""

from __future__ import annotations
