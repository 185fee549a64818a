"""torchao's Float8LinearConfig."""
