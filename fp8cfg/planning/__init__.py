"""Memory estimate: bytes of a run on one rank, by kind, computed from shapes alone."""

from __future__ import annotations
