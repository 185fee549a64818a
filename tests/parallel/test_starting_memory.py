"""Memory of a start: a rank makes its own part of the model, and little beside it."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fp8cfg
from tests.support.forked import processes

RANKS = 4
SIZES = (
    "model.num_layers=4",
    "model.hidden_size=1024",
    "model.ffn_hidden_size=2816",
    "model.num_attention_heads=16",
    "model.num_query_groups=16",
    "model.vocab_size=8192",
)  # 280 MiB in float32
TINY = (
    "model.num_layers=4",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_attention_heads=4",
    "model.num_query_groups=4",
)
TP2, PP2 = (f"trainer.strategy.{way}_model_parallel_size=2" for way in ("tensor", "pipeline"))
WHOLE_MIB = 280


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak(threading.Thread):
    """The most of them, until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = resident(), threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.001):
            self.most = max(self.most, resident())


def start(words: list[str], file: str) -> None:
    """The peak of a start as rank 1 of 4, over what was there before, and the bytes of the parameters that it has then."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"] = str(RANKS)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)  # type: ignore[no-untyped-call]
    first, recipe = (
        fp8cfg.compose(
            ["recipe=llama_tiny", "data=tiny", f"trainer.devices={RANKS}", *sizes, *words]
        )
        for sizes in (TINY, SIZES)
    )
    fp8cfg.build(first)  # imports
    gc.collect()
    before, peak = resident(), Peak()
    peak.start()
    job = fp8cfg.build(recipe)
    peak.ended.set()
    peak.join()
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in job.model.parameters())
    Path(file).write_text(f"{peak.most - before} {sum(4 * p.numel() for p in parts)}")
    os._exit(0)  # the fake group does not end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "share"),
    [
        (["storage.shard=fsdp"], 1 / 4),
        (["storage.shard=zero1"], 1 / 4),
        ([TP2], 1 / 4),
        ([PP2, "trainer.micro_batch_size=1"], 1 / 3),
    ],
    ids=str,
)
def test_the_peak_of_a_start_is_the_share_of_a_rank(
    words: list[str], share: float, tmp_path: Path
) -> None:
    """At most 1.4 times the float32 bytes of what the rank has from then on."""
    running = processes.Process(target=start, args=(words, str(tmp_path / "found")))
    running.start()
    running.join(120)
    peak, kept = map(int, (tmp_path / "found").read_text().split())
    assert kept <= 1.1 * share * WHOLE_MIB * 2**20 and peak <= 1.4 * kept
