"""What users do with finished or several runs: lists, comparisons, report pages, parity, advice."""
