"""What a person reads: coverage, memory, the machine. No torch at import."""
