"""Who multiplies: which backend runs a recipe here, and what each linear layer will do. No torch in the package itself."""

SHIPPED = ("native", "te", "torchao", "msamp")
"""The backends of this version, each a folder, in the order in which they are listed."""
REFERENCE = "native"
"""The one that has every key and runs everywhere: where FP8 is emulated it goes first, and where none is asked for it is taken."""
