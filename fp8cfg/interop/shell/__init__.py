"""Shell scripts read as data: words, variables, conditions, flags."""
