"""Transformer Engine's recipes: classes, objects and printed text."""
