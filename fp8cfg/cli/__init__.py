"""Command line: one small file for each verb."""
