"""A fake GPU: torch's CUDA build over libraries that do nothing, and counts of what a program asks of it (README.md)."""
