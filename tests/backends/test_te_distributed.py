"""Two ranks: amaxes are reduced over the process group, by Transformer Engine's own code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8cfg.training.distributed.world import World
from tests.support import te_standin
from tests.support.ranks import on_ranks
from tests.support.te_small import converted, tokens
from tests.support.te_table import node

pytestmark = pytest.mark.slow


def scales(world: World) -> dict[str, dict[str, torch.Tensor]]:
    """Two passes over the rank's own tokens, with amaxes reduced and not: the scales that follow."""
    found = {}
    for reduce_amax in (True, False):
        with te_standin.transformer_engine():
            from fp8cfg.backends.te import backend as te
            from fp8cfg.numerics.stored_form import stored_state_dict

            model = converted(node({"reduce_amax": reduce_amax}))
            for step in range(2):
                with te.autocast(model):
                    (model(tokens(10 * step + world.rank), tokens(world.rank)) * (1 + world.rank)).backward()
            found[str(reduce_amax)] = {n: t for n, t in stored_state_dict(model).items() if n.endswith("fp8_scale")}
    return found


def test_scales_are_those_of_all_ranks(tmp_path: Path) -> None:
    first, second = on_ranks(2, scales, tmp_path)
    for reduce_amax in (True, False):
        a, b = first[str(reduce_amax)], second[str(reduce_amax)]
        same = [torch.equal(a[n], b[n]) for n in a]
        assert len(same) == 8 and all(same) == reduce_amax and any(same) == reduce_amax
        assert all((t != 1).all() for t in a.values()), "every scale has moved"
