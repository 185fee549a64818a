"""Two ranks: amaxes are reduced over the process group, by Transformer Engine's own code; FSDP2 shards what its layers multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.backends.te import decoder, rules
from fp8cfg.parallel.process_group import World
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step
from tests.parallel.test_zero_shards import same
from tests.support import sharded_checkpoints, te_standin
from tests.support.ranks import on_ranks
from tests.support.small import small
from tests.support.te_small import converted, tokens
from tests.support.te_table import node
from tests.support.whole_tensors import WHOLE, shard_word, without_fsdp2

pytestmark = pytest.mark.slow


EVERYWHERE = "fp8.params=false fp8.high_precision_at_start=0 fp8.high_precision_at_end=0"
ROWS = {
    "delayed": f"precision=bf16_fp8 {EVERYWHERE}",
    "float32 weights": f"precision=bf16_fp8_current {EVERYWHERE} storage.weight=fp32 storage.exp_avg=fp8 model.share_embeddings_and_output_weights=true",
}
SHARDS = (WHOLE, "none", "zero1", "zero2")


def scales(world: World) -> dict[str, dict[str, torch.Tensor]]:
    """Two passes over the rank's own tokens, with amaxes reduced and not: the scales that follow."""
    found = {}
    for reduce_amax in (True, False):
        with te_standin.transformer_engine():
            from fp8cfg.backends.te import backend as te
            from fp8cfg.numerics.stored_state import stored_state_dict

            model = converted(node({"reduce_amax": reduce_amax}))
            for step in range(2):
                with te.autocast(model):
                    (
                        model(tokens(10 * step + world.rank), tokens(world.rank)) * (1 + world.rank)
                    ).backward()
            found[str(reduce_amax)] = {
                n: t for n, t in stored_state_dict(model).items() if n.endswith("fp8_scale")
            }
    return found


def sharded(world: World) -> dict[str, Any]:
    """Three steps of two microbatches, and the state after them, of each row and shard."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch, te_standin.transformer_engine() as te:
        patch.setattr(rules, "_hardware_lacks", lambda *_: [])
        patch.setattr(rules, "unavailable", lambda: "")
        for row, words in ROWS.items():
            for shard in SHARDS:
                te.FP8GlobalStateManager.reset()
                with without_fsdp2(shard == WHOLE):
                    job = fp8cfg.build(
                        small(
                            "backend=te",
                            *words.split(),
                            shard_word(shard),
                            "model.num_layers=1",
                            "trainer.micro_batch_size=2",
                            "optim.warmup_steps=0",
                            "trainer.gradient_clip_val=0",
                        )
                    )
                losses = [
                    train_step(job, run_data(job.recipe)[0], step, world).wait().loss
                    for step in range(3)
                ]
                found[f"{row} {shard}"] = {
                    "losses": losses,
                    "state": sharded_checkpoints.whole(job, world),
                    "fsdp2": job.prepared.fsdp2,
                    "coverage": str(job.prove()),
                    "modules": [*decoder.describe_decoder_layers(job.model).values()],
                }
    return found


def on_two(world: World) -> dict[str, Any]:
    return {"scales": scales(world), **sharded(world)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, on_two, tmp_path_factory.mktemp("two"))


def test_scales_are_those_of_all_ranks(two: list[dict[str, Any]]) -> None:
    first, second = (found["scales"] for found in two)
    for reduce_amax in (True, False):
        a, b = first[str(reduce_amax)], second[str(reduce_amax)]
        same = [torch.equal(a[n], b[n]) for n in a]
        assert len(same) == 8 and all(same) == reduce_amax and any(same) == reduce_amax
        assert all((t != 1).all() for t in a.values()), "every scale has moved"


@pytest.mark.parametrize("row", ROWS)
def test_a_sharded_run_has_the_bits_of_the_unsharded_one(
    row: str, two: list[dict[str, Any]]
) -> None:
    whole = two[0][f"{row} {WHOLE}"]
    assert (
        not whole["fsdp2"]
        and whole["losses"][-1] < whole["losses"][0]
        and whole["modules"] == ["te.TransformerLayer"]
    )
    for one, first, second in ([rank[f"{row} {shard}"] for shard in SHARDS[1:]] for rank in two):
        assert all(
            found["losses"] == whole["losses"] and same(found["state"], whole["state"]) == []
            for found in (one, first)
        )
        assert second["losses"] == pytest.approx(
            whole["losses"], rel=2e-5
        )  # which sums over ranks before it does over microbatches
        assert all(
            found["fsdp2"]
            and found["coverage"] == whole["coverage"]
            and found["modules"] == whole["modules"]
            for found in (one, first, second)
        )
