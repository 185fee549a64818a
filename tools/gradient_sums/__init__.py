"""Sums of gradients between ranks that are threads, for compare_comm.py and tests."""
