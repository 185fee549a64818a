"""What holds for all tests: one thread, the quick and the slow ones, compiled code that is kept on disk, a clean process after each.

It imports pytest alone: tests/gpu and tests/fake_gpu run on machines that have fp8cfg's dependencies and pytest (tools/report_gpu.py).
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # results do not depend on the machine's cores

import pytest

SLOW = Path(__file__).with_name("slow.toml")
LONG = ("tests/training/", "tests/parallel/")
"""Folders whose files take longest: they go first, so that no worker ends with one of them while the others have nothing left."""
FEWER = 5
"""One of so many of a property's examples is drawn, the same in every run, where FP8CFG_ALL_EXAMPLES is not set."""


def pytest_configure(config: pytest.Config) -> None:
    for number, handler in (
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if (
            signal.getsignal(number) is signal.SIG_IGN
        ):  # under nohup or as a shell's background job, which children inherit
            signal.signal(number, handler)
    # Six programs that find out whether the compiler knows the CPU's instructions: ten seconds, and what is compiled then says it too.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # Kernels are compiled in the test's own process, not by a pool of others, of which each worker's would import torch.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Compiled graphs, kept by their source from one test, worker and run to the next.
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "inductor")
    )
    # Before a sweep Hydra closes every logging handler, and absl's (Fiddle's) closes what was sys.stderr when it was imported:
    # pytest's own file, were it imported in a test.
    if importlib.util.find_spec("absl"):
        importlib.import_module(
            "absl.logging"
        ).get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collection makes half a million objects that stay: the garbage collector, which would go through all of them again and again,
    a third of the time, rests meanwhile and leaves them out later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    _mark_slow(config, items)
    _set_examples(items)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _mark_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what slow.toml lists. Raises UsageError for a case to keep that a test, collected as a whole, does not have."""
    listed = {
        f"tests/{file}::{test}": set(kept)
        for file, tests in tomllib.loads(SLOW.read_text()).items()
        for test, kept in tests.items()
    }
    found: dict[str, set[str]] = {}
    for item in items:
        test, bracket, case = item.nodeid.partition("[")
        if test in listed:
            found.setdefault(test, set()).add(case.removesuffix("]"))
            if not bracket or case.removesuffix("]") not in listed[test]:
                item.add_marker("slow")
    if not any("::" in arg or arg == "--deselect" for arg in config.invocation_params.args):
        files = {item.nodeid.partition("::")[0] for item in items}
        wrong = [
            f"{test}: {sorted(kept - found.get(test, set()))}"
            for test, kept in listed.items()
            if test.partition("::")[0] in files and (test not in found or kept - found[test])
        ]
        if wrong:
            raise pytest.UsageError(f"{SLOW.name} lists what there is not: {'; '.join(wrong)}")


def _set_examples(items: list[pytest.Item]) -> None:
    """No example has a time limit, which a busy machine is over; where not all are drawn, they are the same in every run."""
    hypothesis = sys.modules.get("hypothesis")  # which tests of properties have imported
    if hypothesis is None:
        return
    for test in {getattr(item, "obj", None): None for item in items}:
        given = getattr(test, "_hypothesis_internal_use_settings", None)
        if given is not None:
            fewer = min(given.max_examples, max(FEWER, given.max_examples // FEWER))
            drawn = (
                {}
                if os.environ.get("FP8CFG_ALL_EXAMPLES")
                else {"max_examples": fewer, "derandomize": True}
            )
            checks = {*given.suppress_health_check, hypothesis.HealthCheck.too_slow}
            test._hypothesis_internal_use_settings = hypothesis.settings(
                given, deadline=None, suppress_health_check=checks, **drawn
            )


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Weights that a test leaves to chance are the same in every run, whichever test went before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Tests build many configurations of one class in one process; dynamo would stop compiling after eight."""
    yield
    if (
        "torch._dynamo.convert_frame" in sys.modules
        and sys.modules["torch._dynamo.convert_frame"].FRAME_COUNTER
    ):
        sys.modules["torch"]._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def no_accelerator_state_left() -> Iterator[None]:
    """The first Accelerator of a process says what every later one may be; those of the next file are their own."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A job whose weights are split has a process group, of one rank in a test; the next test is to find none."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist and dist.is_initialized():
        dist.destroy_process_group()
