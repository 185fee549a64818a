"""Rows of the tools that run on a GPU: each in a process with a time budget, and what the fake GPU cannot prove left out."""
