"""Mistakes in other projects' files: two of one kind, unknown keys and sections, typing errors, files that are none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fp8cfg import interop
from fp8cfg.__main__ import main
from fp8cfg.interop.projects import PROJECTS
from fp8cfg.schema.errors import ConfigError
from tests.support.verbs import refused


def test_values_that_cannot_be_come_at_once() -> None:
    with pytest.raises(ConfigError) as e:
        interop.from_mapping(
            "nemo",
            {
                "precision": "bf17",
                "fp8": "hybird",
                "fp8_recipe": "tensorwize",
                "fp8_margin": "x",
                "grad_reduce_in_fp32": "maybe",
            },
        )
    assert e.value.problems == [
        "precision=bf17: not an option; did you mean 'bf16'?",
        "fp8=hybird: not an option; did you mean 'hybrid'?",
        "fp8_recipe=tensorwize: not an option; did you mean 'tensorwise'?",
        "fp8_margin=x: expected an integer",
        "grad_reduce_in_fp32=maybe: expected true or false",
    ]


@pytest.mark.parametrize(
    ("project", "data"),
    [
        ("nemo", {"bf16": True, "fp16": "true"}),
        ("nemo", {"precision": "bf16-mixed", "fp16": True}),
        ("bridge", {"bf16": True, "fp16": True, "fp8": "hybrid"}),
        ("deepspeed", {"bf16": {"enabled": True}, "fp16": {"enabled": True}}),
        ("megatron", {"bf16": True, "fp16": True}),
    ],
)
def test_two_half_precisions_are_refused_as_theirs_are(project: str, data: dict[str, Any]) -> None:
    name = PROJECTS[project].key_table.name
    with pytest.raises(ConfigError) as e:
        interop.from_mapping(project, data)
    assert e.value.problems == [f"{name}: bf16 and fp16 are both on; remove one"]
    with pytest.raises(ConfigError) as e:  # beside what else is wrong
        interop.from_mapping(project, {**data, "gradient_clipping": "x", "fp8_margin": "x"})
    assert (
        len(e.value.problems) > 1
        and f"{name}: bf16 and fp16 are both on; remove one" in e.value.problems
    )


@pytest.mark.parametrize(
    ("project", "data", "line"),
    [
        (
            "bridge",
            {"bf16": True, "fp8": "hybrid", "fp4": "e2m1"},
            "Megatron-Bridge: fp8 and fp4 are both on; remove one",
        ),
        (
            "nemo",
            {"precision": "bf16-mixed", "fp8": "hybrid", "fp4": "e2m1", "fp16": True},
            "NeMo: bf16 and fp16 are both on; remove one\nNeMo: fp8 and fp4 are both on; remove one",
        ),
        (
            "megatron",
            {"bf16": True, "fp8_format": "hybrid", "fp4_format": "e2m1"},
            "Megatron-LM: fp8_format and fp4_format are both on; remove one",
        ),
    ],
)
def test_two_formats_are_refused(project: str, data: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as e:
        interop.from_mapping(project, data)
    assert str(e.value) == line


@pytest.mark.parametrize(
    ("project", "key", "near"),
    [
        ("deepspeed", "zero_optimisation.stage", "zero_optimization.stage"),
        (
            "deepspeed",
            "zero_optimisation.reduce_bucket_size",
            "zero_optimization.reduce_bucket_size",
        ),
        ("deepspeed", "bf16.enabledd", "bf16.enabled"),
        ("deepspeed", "bf61.enabled", "bf16.enabled"),
        ("deepspeed", "steps_per_prnt", "steps_per_print"),
        ("deepspeed", "loss_scale", "fp16.loss_scale"),
        ("deepspeed", "optimizer.params.weight_decy", "optimizer.params.weight_decay"),
        ("deepspeed", "wholly.other", None),
        ("accelerate", "fp8_cofnig.margin", "fp8_config.margin"),
        ("accelerate", "margin", "fp8_config.margin"),
        ("accelerate", "deepspeed_config.zero_stge", "deepspeed_config.zero_stage"),
        ("torchtitan", "recipe_nme", "recipe_name"),
        ("bridge", "fp8_margn", "fp8_margin"),
        ("te", "margn", "margin"),
        ("nemo", "fp32_", "fp32"),
        ("deepspeed", "fp32", None),
    ],
)
def test_an_unknown_key_or_section_is_named_with_the_nearest(
    project: str, key: str, near: str | None
) -> None:
    meant = f"; did you mean {near!r}?" if near else ""
    assert interop.from_mapping(project, {key: "5"}).unknown == (
        f"{key}: no such key of {PROJECTS[project].key_table.name}{meant}",
    )


def test_no_key_of_deepspeeds_own_is_called_a_typing_error() -> None:
    """As its documentation lists them."""
    keys = (
        "fp16.auto_cast",
        "fp16.consecutive_hysteresis",
        "fp16.fp16_master_weights_and_grads",
        "bf16.immediate_grad_update",
        "bf16.check_grad_overflow",
        "optimizer.legacy_fusion",
        "optimizer.params.adam_w_mode",
        "optimizer.params.torch_adam",
        "optimizer.params.bias_correction",
        "optimizer.params.momentum",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.sub_group_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.allgather_partitions",
        "zero_optimization.offload_optimizer.device",
        "scheduler.type",
        "scheduler.params.warmup_max_lr",
        "flops_profiler.enabled",
        "comms_logger.enabled",
        "amp.enabled",
        "amp.opt_level",
        "torch_autocast.enabled",
        "activation_checkpointing.profile",
        "data_types.grad_accum_dtype",
        "steps_per_print",
        "wall_clock_breakdown",
        "prescale_gradients",
        "zero_allow_untested_optimizer",
        "aio.block_size",
    )
    assert (
        interop.from_mapping(
            "deepspeed", {**dict.fromkeys(keys, "x"), "bf16.enabled": True}
        ).unknown
        == ()
    )


@pytest.mark.parametrize(
    ("project", "data", "first"),
    [
        ("deepspeed", {"bf16": True}, "bf16.enabled"),
        ("deepspeed", {"zero_optimization": 2}, "zero_optimization.stage"),
        ("accelerate", {"fp8_config": ["TE"]}, "fp8_config.backend"),
    ],
)
def test_a_value_where_a_section_stands_is_refused(
    project: str, data: dict[str, Any], first: str
) -> None:
    with pytest.raises(ConfigError) as e:
        interop.from_mapping(project, data)
    key, value = next(iter(data.items()))
    assert e.value.problems == [f"{key}={value}: is a section, with keys such as {first}"]


def test_a_typing_error_that_turns_a_switch_off_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"bf61": {"enabled": true}, "zero_optimization": {"stage": 1}}')
    assert main(["import", "deepspeed", str(file)]) == 0
    assert capsys.readouterr().err == (
        "warning: bf61.enabled: no such key of DeepSpeed; did you mean 'bf16.enabled'?\n"
    )


@pytest.mark.parametrize(
    ("project", "words", "lines"),
    [
        (
            "te",
            ["te.common.recipe.DelayedScaling(margin=1, marign=1, foo=2)"],
            [
                "marign: no such key of Transformer Engine; did you mean 'margin'?",
                "foo: no such key of Transformer Engine",
            ],
        ),
        (
            "accelerate",
            ["FP8RecipeKwargs(marign=1)"],
            ["marign: no such key of Accelerate; did you mean 'margin'?"],
        ),
        (
            "nemo",
            ["bf16=true", "fp8=hybrid", "fp8_marign=1"],
            ["fp8_marign: no such key of NeMo; did you mean 'fp8_margin'?"],
        ),
        (
            "megatron",
            ["--bf16", "--fp8-marign", "1"],
            ["--fp8-marign: no such flag of Megatron-LM; did you mean '--fp8-margin'?"],
        ),
    ],
)
def test_an_unknown_keyword_of_a_call_or_word_is_refused_as_the_project_does(
    project: str, words: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "import", project, "--", *words) == lines


def test_an_unknown_keyword_of_a_plugin_in_a_script_is_refused_and_those_that_nemo_has_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        'plugin = MegatronMixedPrecision(precision="bf16-mixed", fp8="hybrid", fp8_interval=1, device="cuda", params_dtype=None)\n'
    )
    assert interop.from_file("nemo", file)[1:] == ((), ())
    file.write_text(file.read_text().replace("fp8_interval", "fp8_intreval"))
    assert refused(capsys, "import", "nemo", str(file)) == [
        f"{file}: fp8_intreval: no such key of NeMo; did you mean 'fp8_interval'?"
    ]


def test_a_recipe_that_a_newer_transformer_engine_prints_is_read_with_a_warning() -> None:
    found = interop.from_words(
        "te", ["recipe_type=DelayedScaling, margin=1, format=HYBRID, later=3"]
    )
    assert (
        found.unknown == ("later: no such key of Transformer Engine",)
        and found.recipe.fp8.margin == 1
    )


def test_a_file_of_nothing_but_a_typing_error_is_refused_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"bf61": {"enabled": true}, "name": "x"}')
    assert refused(capsys, "import", "deepspeed", str(file)) == [
        f"{file}: bf61.enabled: no such key of DeepSpeed; did you mean 'bf16.enabled'?"
    ]


STRANGE = {
    "empty": b"",
    "blank": b" \n\n",
    "large": b"a: 1\n" * 400_000,
    "latin": "a: \xe9\n".encode("latin-1"),
    "utf-16": "fp8: hybrid".encode("utf-16"),
    "binary": bytes(range(256)),
    "list": b"- 1\n- 2\n",
    "word": b"hello\n",
    "deep": b'{"a":' * 5000,
    "twice": b"bf16: true\nbf16: false\n",
    "itself": b"a: &a {b: *a}\n",
    "bomb": b"".join(
        b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(8)
    ).replace(b"*a", b"x"),
    "interpolated": b"mixed_precision: ${oc.env:HOME}\nfp8: ${oc.env:HOME}\n",
}


KINDS = [*STRANGE, "folder", "missing", "link", "pipe"]
READ = [
    ("accelerate", "yaml"),
    ("accelerate", "json"),
    ("accelerate", "py"),
    ("deepspeed", "json"),
    ("nemo", "yaml"),
    ("bridge", "yaml"),
    ("megatron", "sh"),
    ("torchtitan", "py"),
    ("te", "py"),
]


@pytest.mark.parametrize(
    ("project", "ending", "strange"),
    [
        pytest.param(*read, kind, marks=[] if (i - j) % len(READ) in (0, 4) else pytest.mark.slow)
        for i, kind in enumerate(KINDS)
        for j, read in enumerate(READ)
    ],
)
def test_strange_files_end_in_one_line(
    project: str, ending: str, strange: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"a.{ending}"
    if strange in STRANGE:
        file.write_bytes(STRANGE[strange])
    else:
        {
            "folder": file.mkdir,
            "link": lambda: file.symlink_to(file),
            "pipe": lambda: os.mkfifo(file),
            "missing": lambda: None,
        }[strange]()
    (line,) = refused(capsys, "import", project, str(file))
    assert line.startswith(f"{file}: ")
