"""Two ranks: amaxes are reduced over the process group, by Transformer Engine's own code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group is made, see fp8cfg/training/distributed/world.py
import torch.multiprocessing as mp

from tests.support import te_standin
from tests.support.te_small import converted, tokens
from tests.support.te_table import node

pytestmark = pytest.mark.slow


def one_rank(rank: int, folder: str, reduce_amax: bool) -> None:
    """Two passes over the rank's own tokens; leaves the scales that follow."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        with te_standin.transformer_engine():
            from fp8cfg.backends.te import backend as te

            model = converted(node({"reduce_amax": reduce_amax}))
            for step in range(2):
                with te.autocast(model):
                    (model(tokens(10 * step + rank), tokens(rank)) * (1 + rank)).backward()
            torch.save({n: t for n, t in model.state_dict().items() if n.endswith("fp8_scale")}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("reduce_amax", [True, False])
def test_scales_are_those_of_all_ranks(reduce_amax: bool, tmp_path: Path) -> None:
    mp.spawn(one_rank, (str(tmp_path), reduce_amax), nprocs=2)
    a, b = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    same = [torch.equal(a[n], b[n]) for n in a]
    assert len(same) == 8 and all(same) == reduce_amax and any(same) == reduce_amax
    assert all((t != 1).all() for t in a.values()), "every scale has moved"
