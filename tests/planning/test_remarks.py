"""Remarks on settings that are allowed and have no effect in a run, and on none that has."""

from __future__ import annotations

import pytest

from fp8cfg.planning import remarks
from fp8cfg.planning.layout import rank_part
from tests.support.small import small

STORED = "storage.weight_grad=fp8 storage.comm=fp8 storage.accumulate=stored precision=bf16_fp8"


@pytest.mark.parametrize(
    ("words", "ranks", "said"),
    [
        (
            "storage.comm=bf16 trainer.timeout.step=5",
            1,
            "storage.comm=bf16, trainer.timeout.step=5.0: no effect on one rank",
        ),
        ("storage.comm=bf16 trainer.timeout.step=5", 2, ""),
        ("storage.comm=bf16 storage.weight_grad=bf16", 1, ""),
        (
            "precision=bf16_fp8 fp8.tp_only_amax_red=true",
            1,
            "fp8.tp_only_amax_red=true: no effect on one rank",
        ),
        (
            "fp8.enabled=true fp8.reduce_amax=false trainer.devices=2 trainer.strategy.tensor_model_parallel_size=2",
            1,
            "",
        ),
        *(
            (
                f"precision=bf16_fp8 fp8.tp_only_amax_red=true storage.comm=bf16 trainer.micro_batch_size=4 trainer.devices=2 trainer.strategy.{axis}_parallel_size=2",
                ranks,
                f"{said}: no effect on one data-parallel rank",
            )
            for axis, ranks, said in (
                ("tensor_model", 1, "storage.comm=bf16, fp8.tp_only_amax_red=true"),
                ("pipeline_model", 1, "storage.comm=bf16, fp8.tp_only_amax_red=true"),
                ("context", 2, "fp8.tp_only_amax_red=true"),
            )
        ),
        (
            "precision=bf16_fp8 fp8.reduce_amax=false trainer.micro_batch_size=4 trainer.devices=2 trainer.strategy.pipeline_model_parallel_size=2",
            1,
            "fp8.reduce_amax=false: no effect on one data-parallel rank",
        ),
        (
            "precision=bf16_fp8 fp8.reduce_amax=false trainer.micro_batch_size=4 trainer.devices=2 trainer.strategy.context_parallel_size=2",
            2,
            "",
        ),
        (STORED, 1, "storage.accumulate=stored: no effect with one microbatch per step"),
        (f"{STORED} trainer.micro_batch_size=4", 1, ""),
        (
            "checkpoint.every_n_steps=6 checkpoint.keep=3 checkpoint.async_save=true",
            1,
            "checkpoint.keep=3, checkpoint.async_save=true: the run saves only one checkpoint; "
            "checkpoint.every_n_steps=6, trainer.max_steps=6",
        ),
        (
            "checkpoint.every_n_steps=5 checkpoint.keep=3",
            1,
            "checkpoint.keep=3: the run saves only 2 checkpoints; checkpoint.every_n_steps=5, trainer.max_steps=6",
        ),
        ("checkpoint.every_n_steps=2 checkpoint.keep=3", 1, ""),
        ("checkpoint.every_n_steps=5", 1, ""),
        *(
            (f"precision=bf16_fp8 backend={backend} {words}", 1, said)
            for backend, words, said in (
                (
                    "native",
                    "fp8.exclude=[output_layer]",
                    "fp8.exclude=output_layer: changes nothing, its layers stay in high precision without it (fp8.output_layer=false)",
                ),
                (
                    "native",
                    "fp8.high_precision_at_start=1 fp8.exclude=[layers.0.*]",
                    "fp8.exclude=layers.0.*: changes nothing, its layers stay in high precision without it (fp8.high_precision_at_start=1)",
                ),
                (
                    "te",
                    "fp8.high_precision_at_start=1 fp8.exclude=[layers.0.*]",
                    "",
                ),  # whose norms it names
                (
                    "native",
                    "fp8.exclude=[*.linear_qkv,layers.1.self_attention.linear_qkv]",
                    "fp8.exclude=layers.1.self_attention.linear_qkv: changes nothing, its layers stay in high precision without it (fp8.exclude *.linear_qkv)",
                ),
                (
                    "native",
                    "fp8.include=['*',layers.0.*] fp8.exclude=[*.linear_fc1]",
                    "fp8.include=layers.0.*: changes nothing, without it the same layers run",
                ),
            )
        ),
        ("log.dir=a log.folder=b", 1, "log.dir=a: no effect, log.folder=b is the run folder"),
        ("log.dir=a log.folder=a/b", 1, ""),
    ],
)
def test_what_has_no_effect_in_a_run_is_said(words: str, ranks: int, said: str) -> None:
    recipe = small(*words.split())
    part = rank_part(recipe, ranks * recipe.trainer.strategy.data_parallel_replicate_size)
    assert remarks.remark_lines(recipe, part) == ([f"note: {said}"] if said else [])
