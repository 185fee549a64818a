"""The Transformer Engine backend."""
