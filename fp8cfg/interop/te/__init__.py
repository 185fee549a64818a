"""Transformer Engine recipes: classes, objects and printed text."""
