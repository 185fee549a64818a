"""Studies of runs: lists, comparisons, report pages, parity of precisions, precision advice."""
