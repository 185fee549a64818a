"""Processes forked from one that has torch and fp8cfg imported: no import for each, no fork of a threaded pytest.

The server, which imports `tests.support.preloaded`, starts with the first of them and ends with pytest's process.
"""

import multiprocessing

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.support.preloaded"])
