"""One thread, so that results do not depend on the machine's cores; GPU tests are skipped without a GPU."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Weights that a test leaves to chance are the same in every run, whichever test went before."""
    import sys

    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> object:
    """Tests build many configurations of one class in one process; dynamo would stop compiling after eight."""
    import sys

    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()


@pytest.fixture(autouse=True)
def no_process_group_left() -> object:
    """A job whose weights are split has a process group, of one rank in a test; the next test is to find none."""
    import sys

    yield
    dist = sys.modules.get("torch.distributed")
    if dist and dist.is_initialized():
        dist.destroy_process_group()
