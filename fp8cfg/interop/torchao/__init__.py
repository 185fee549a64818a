"""torchao: its Float8LinearConfig."""
