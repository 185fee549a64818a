"""Memory plan: bytes of a run on one rank, by kind, from shapes alone."""
