"""Training: the loop, ranks, checkpoints, run folders, metrics and signals."""
