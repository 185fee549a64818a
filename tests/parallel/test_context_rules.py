"""Rules of context parallelism: what is refused beside it, with words that do, and a large recipe's layout rehearsed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fp8cfg
from fp8cfg.planning.layout import layout_violations
from fp8cfg.planning.smoke import cut_recipe
from tests.support.ranks import launch
from tests.support.small import small, small_words

CONTEXT = "trainer.strategy.context_parallel_size"
ALONE = "with data parallelism only, not with context_parallel_size=2"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "model.seq_length=30",
            "model.seq_length=30: must be a multiple of 2 x context_parallel_size = 4; nearest is 32",
        ),
        (
            "precision=bf16_fp8 fp8.dot_product_attention=true",
            f"fp8.dot_product_attention=true: FP8 attention needs whole sequences, but {CONTEXT}=2 splits them; set it to false",
        ),
        (
            "precision=bf16_fp8 log.fp8_stats_every_n_steps=2",
            f"log.fp8_stats_every_n_steps=2: needs whole sequences on one rank, but {CONTEXT}=2 splits them; remove it",
        ),
    ],
)
def test_what_split_sequences_do_not_have_is_refused(words: str, line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        small("trainer.devices=2", "trainer.val_check_interval=0", f"{CONTEXT}=2", *words.split())
    assert line in e.value.problems


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "precision=bf16_fp8 opt_level=O2",
            f"opt_level=O2: works {ALONE}; set opt_level=null, or {CONTEXT}=1",
        ),
        (
            "precision=bf16_fp8 backend=msamp",
            f"backend=msamp: its level O2 works {ALONE}; set backend=native",
        ),
        (
            "precision=bf16_fp8 storage.comm=fp8 storage.weight_grad=fp8 storage.accumulate=stored",
            f"storage.comm=fp8: gradients sent in FP8 work {ALONE}; set storage.comm=auto storage.accumulate=wide",
        ),
        (
            "precision=bf16_precision_aware storage.shard=zero1",
            f"storage.shard=zero1: shards whole tensors, which works {ALONE}; set storage.shard=none",
        ),
    ],
)
def test_what_data_parallel_ranks_alone_have_is_refused(words: str, line: str) -> None:
    """With words that are taken, by which the search goes too."""
    words = f"trainer.devices=2 trainer.micro_batch_size=2 {CONTEXT}=2 {words}"
    assert [str(found) for found in layout_violations(small(*words.split()), 2)] == [line]
    write = line.partition("; set ")[2].split(", or ")[0].split()
    assert (
        layout_violations(small(*words.split(), *write), 2)
        == layout_violations(small(*words.replace(f"{CONTEXT}=2", "").split()), 2)
        == []
    )


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("recipe=llama_70b precision=bf16_fp8 opt_level=O2", 1),
        ("recipe=llama_70b precision=bf16_fp8 storage.comm=fp8", 1),
        (
            "recipe=llama_8b precision=bf16_fp8 storage.master_weight=fp16_scaled storage.shard=zero1",
            1,
        ),
        ("recipe=llama_8b precision=bf16_fp8 storage.master_weight=fp16_scaled", 2),
        ("recipe=llama_70b precision=bf16_fp8", 4),
    ],
)
def test_a_smoke_run_keeps_what_is_stored_and_sent_before_the_layout(words: str, size: int) -> None:
    recipe = fp8cfg.compose([*words.split(), "trainer.smoke=true"])
    small = cut_recipe(recipe, 4)
    assert small.trainer.strategy.size == size and layout_violations(small, 4) == []
    assert (small.precision.opt_level, small.storage) == (
        recipe.precision.opt_level,
        recipe.storage,
    )


def test_ranks_that_are_no_whole_replicas_are_refused_with_those_that_are() -> None:
    recipe = small("trainer.devices=4", "trainer.micro_batch_size=1", f"{CONTEXT}=4")
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.build(recipe)
    assert e.value.problems == [
        f"{CONTEXT}=4: needs a multiple of 4 ranks, got 1; launch 4 ranks or set it to 1"
    ]
    with pytest.raises(fp8cfg.ConfigError, match="not of a custom model; set it to 1"):
        fp8cfg.fit(fp8cfg.build(recipe, model=torch.nn.Sequential(torch.nn.Linear(64, 64))))


@pytest.mark.slow
def test_four_ranks_rehearse_the_layout_of_a_large_recipe(tmp_path: Path) -> None:
    done = launch(
        4,
        "recipe=llama_8b",
        "precision=bf16_fp8",
        "trainer.smoke=true",
        "trainer.compile=off",
        f"log.dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        "ranks:      4 ranks = context 2 x data 2, " in done.stdout
        and "keys and values" in done.stdout
    )
    assert "resume: step 3 from step-00000002 gave " in done.stdout and CONTEXT not in done.stderr


@pytest.mark.slow
def test_three_ranks_are_refused_with_a_line_that_runs_there() -> None:
    done = launch(
        3,
        *small_words(
            "trainer.devices=2",
            "trainer.micro_batch_size=2",
            "trainer.global_batch_size=12",
            f"{CONTEXT}=2",
        ),
    )
    assert done.returncode == 2
    assert (
        f"{CONTEXT}=2: needs a multiple of 2 ranks, got 3; launch 4 ranks or set it to 1; runs here: "
        in done.stderr
    )
