"""The loop and what surrounds it: ranks, checkpoints, run folders, metrics, signals."""
