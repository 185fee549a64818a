"""Every cell of backend_table.py: what each backend does with each key is read back from a built job, or is refused so.

Transformer Engine's own Python runs over a stand-in for its kernels, MS-AMP is a stand-in of its public API; nothing here has run on
a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

import fp8cfg
from fp8cfg.backends import registry
from fp8cfg.backends.choice import Choice, backend_violations, choose
from fp8cfg.parallel import gradient_sync
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.hardware import find_hardware
from fp8cfg.schema.recipe import short_keys
from fp8cfg.training.data import run_data
from fp8cfg.training.evaluation import evaluate
from fp8cfg.training.step import train_step
from tests.support import msamp_standin, te_standin, te_table
from tests.support.backend_cells import ALL, BASE, PLAIN, WHERE, Applied, Refused, refusal
from tests.support.backend_table import BACKENDS, keys, lines, markdown, text
from tests.support.small import small


class Built:
    """A job, and what cells read of it."""

    def __init__(self, cell: Applied, folder: Path, device: str = "cpu") -> None:
        self.recipe, self.hardware, self.folder = (
            small(*cell.words, f"backend={cell.backend}", f"trainer.accelerator={device}"),
            cell.hardware,
            folder,
        )

    @cached_property
    def choice(self) -> Choice:
        return choose(self.recipe.precision, self.hardware)

    @cached_property
    def job(self) -> fp8cfg.Job:
        return fp8cfg.build(self.recipe)

    @property
    def backend(self) -> Any:
        return registry.backend(self.job.choice.backend)

    @property
    def converted(self) -> list[str]:
        return [
            name
            for name in self.backend.observed(self.job.model)
            if not name.endswith("core_attention")
        ]

    @property
    def layer(self) -> nn.Module:
        return self.job.model.get_submodule(self.converted[0])

    @property
    def weight(self) -> nn.Parameter:
        return dict(self.job.model.named_parameters())[f"{self.converted[0]}.weight"]

    @property
    def gathered(self) -> Any:
        """The layer's weight as FSDP2 lets its product read it."""
        self.job.model.layers[0].unshard()
        return self.layer.weight

    @property
    def columns(self) -> Any:
        """The codecs of the layer's weight in the low-bit optimizer."""
        return next(
            g["columns"]
            for g in self.job.optimizer.param_groups
            if any(p is self.weight for p in g["params"])
        )

    @property
    def optimizer_state(self) -> Any:
        if self.job.choice.backend == "msamp":
            return SimpleNamespace(**self.job.optimizer.inner.state[self.weight])
        state = self.job.optimizer.state[self.weight]
        return SimpleNamespace(
            **{name: stored[0] for name, stored in state.items() if isinstance(stored, tuple)}
        )

    @property
    def moments(self) -> list[str]:
        return [
            str(moment.dtype)
            for moment in (self.optimizer_state.exp_avg, self.optimizer_state.exp_avg_sq)
        ]

    def step(self) -> None:
        train_step(self.job, run_data(self.recipe)[0], 0, World())

    @property
    def stored_grad(self) -> Any:
        self.step()
        return self.job.optimizer.stored_grads[self.weight][0]

    @property
    def weight_grad(self) -> Any:
        self.step()
        return self.weight.grad

    @property
    def output(self) -> Any:
        seen: list[Any] = []
        self.layer.register_forward_hook(lambda module, args, out: seen.append(out))
        self.step()
        return seen[0]

    @property
    def stored_after(self) -> list[bool]:
        """Whether the layer's gradient is in its codec after each microbatch."""
        seen: list[bool] = []
        backward = self.job.backward

        def watched(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            seen.append(self.weight in self.job.optimizer.stored_grads)

        with mock.patch.object(self.job, "backward", watched):
            self.step()
        return seen

    @property
    def sent(self) -> set[str]:
        with mock.patch.object(gradient_sync, "sum_over_ranks") as sums:
            for p in self.job.model.parameters():
                p.grad_dtype, p.grad = None, p.detach()
            gradient_sync.sum_gradients(self.job.prepared, self.job.optimizer, World(0, 2))
        return {call.args[1] for call in sums.call_args_list}

    @property
    def owners(self) -> set[int]:
        with mock.patch("fp8cfg.parallel.process_group.current", lambda: World(0, 2)):
            return set(self.job.prepared.owner.values())

    @property
    def amax_group(self) -> Any:
        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder}/store", rank=0, world_size=1
        )
        try:
            with mock.patch.object(self.backend, "after_step") as after:
                self.step()
        finally:
            dist.destroy_process_group()
        return after.call_args.args[1]

    @property
    def evaluation(self) -> Any:
        self.backend.forget_observed(self.job.model)
        evaluate(self.job, [run_data(self.recipe)[0].batch(0)], World())
        return self.backend.observed(self.job.model)[self.converted[0]]["fprop"]

    @property
    def proof(self) -> str:
        self.step()
        with pytest.raises(fp8cfg.NotFP8Error) as e:
            self.job.prove()
        return str(e.value)


@contextmanager
def at_hand(backend: str, folder: Path) -> Iterator[None]:
    """The library of `backend`, or a stand-in for what a CPU has not; its gates, which other tests hold, are open then."""
    if backend == "torchao":
        pytest.importorskip("torchao", minversion="0.18")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if backend in ("te", "msamp"):
            patch.setattr(registry.rules(backend), "_hardware_lacks", lambda *_: [])
        if backend == "te":
            patch.setattr(registry.rules(backend), "unavailable", lambda: "")
            stack.enter_context(te_standin.transformer_engine())
        if backend == "msamp":
            stack.enter_context(msamp_standin.msamp(folder, patch))
        yield


@pytest.mark.parametrize(
    "cell",
    [c for c in ALL if isinstance(c, Applied)],
    ids=lambda c: f"{c.backend} {c.key} {c.words[-1]}",
)
def test_a_cell_is_read_back(cell: Applied, tmp_path: Path) -> None:
    with at_hand(cell.backend, tmp_path):
        assert str(cell.found(Built(cell, tmp_path))) == str(cell.want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cell",
    [c for c in ALL if isinstance(c, Applied)],
    ids=lambda c: f"{c.backend} {c.key} {c.words[-1]}",
)
def test_a_cell_is_read_back_on_a_gpu(cell: Applied, tmp_path: Path) -> None:
    built = Built(cell, tmp_path, "cuda")
    if why := backend_violations(cell.backend, built.recipe.precision, find_hardware("cuda")):
        pytest.skip(str(why[0]))
    assert str(cell.found(built)) == str(cell.want)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "te", "torchao"])  # MS-AMP has one value of each
def test_it_is_not_read_back_without_the_cells_words(backend: str, tmp_path: Path) -> None:
    base = (*BASE[backend], PLAIN)
    for n, cell in enumerate(
        c
        for c in ALL
        if isinstance(c, Applied)
        and c.backend == backend
        and (backend != "native" or c.key not in WHERE)
    ):
        (folder := tmp_path / str(n)).mkdir()
        if set(cell.words) > set(base) or cell.words[0] not in base:
            with at_hand(backend, folder):
                try:
                    found = cell.found(Built(replace(cell, words=base), folder))
                except (AttributeError, KeyError, StopIteration, pytest.fail.Exception):
                    continue  # there is nothing to read
            assert str(found) != str(cell.want), cell


@pytest.mark.parametrize(
    "cell",
    [c for c in ALL if isinstance(c, Refused)],
    ids=lambda c: f"{c.backend} {c.key} {c.words[-1]} {c.hardware.device}",
)
def test_a_cell_is_refused(cell: Refused) -> None:
    refusal(cell)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_key_has_a_cell_and_no_cell_is_of_another_key(backend: str) -> None:
    assert [key for key in keys() if not lines(key, backend)] == []
    assert (
        {c.key for c in ALL} | {r.key for r in [*te_table.APPLIED, *te_table.REFUSED]}
        == set(keys())
        <= short_keys()
    )


def test_it_is_printed_at_80_columns_and_for_a_page() -> None:
    shown = text()
    assert max(map(len, shown.splitlines())) <= 80
    assert (
        "\nfp8.margin\n  native   applied  layer.scaling.margin (delayed)\n  te       applied  recipe.margin (delayed)\n"
        in shown
    )
    rows = markdown().splitlines()
    assert len(rows) == len(keys()) + 2 and all(
        row.count(" | ") == len(BACKENDS) for row in rows if row.startswith("| `")
    )
