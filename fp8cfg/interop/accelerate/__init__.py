"""Accelerate: its configuration file and its FP8 handler objects."""
