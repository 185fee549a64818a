"""torchtitan's Python configurations: what their functions say about precision, and what cannot be read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg import interop
from fp8cfg.__main__ import main
from fp8cfg.interop.translation import effective_values
from fp8cfg.recipes import llama_8b
from fp8cfg.schema.errors import ConfigError
from tests.support.verbs import refused

REGISTRY = '''
from torchtitan.trainer import Trainer
NAMES = ["lm_head"]


def debug() -> Trainer.Config:
    """A model of few layers."""
    model_spec = model_registry("debugmodel")
    return Trainer.Config(loss=Loss.Config(size=vocab(model_spec)), model_spec=model_spec,
                          training=TrainingConfig(steps=3000, max_context_length=2048))


def rowwise() -> Trainer.Config:
    config = debug()
    compiled = config.compile.enable and "model" in config.compile.components
    config.model_spec = model_registry("debugmodel", converters=[
        Float8LinearConverter.Config(filter_fqns=NAMES, model_compile_enabled=compiled)])
    return config


def gw_hp() -> Trainer.Config:
    config = rowwise()
    config.training.mixed_precision_param = "float32"
    config.model_spec = model_registry("debugmodel", converters=[
        Float8LinearConverter.Config(recipe_name="rowwise_with_gw_hp"), LoRAConverter.Config(rank=8)])
    return config


def container() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("8B"), model_converters=ModelConvertersContainer.Config(converters=[
        Float8LinearConverter.Config(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True,
                                     filter_fqns=["output"])]))


def off_again() -> Trainer.Config:
    config = rowwise()
    config.model_spec = model_registry("debugmodel")
    return config


def partly() -> Trainer.Config:
    config = debug()
    config.training.dtype = "bfloat16"
    config.training.mixed_precision_reduce = "float32"
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(
        emulate=True, filter_fqns=["lm_head", "attention.wk", "feed_forward.w2"])])
    return config


def mx_old() -> Trainer.Config:
    return Trainer.Config(model_converters=ModelConvertersContainer.Config(converters=[MXLinearConverter.Config()]))


def mx() -> Trainer.Config:
    spec = model_registry("8B", converters=[MXFP8LinearConverter.Config(model_compile_enabled=True)])
    return Trainer.Config(model_spec=spec, training=TrainingConfig(dtype="bfloat16"))


def mx_chosen() -> Trainer.Config:
    spec = model_registry("8B", converters=[MXFP8LinearConverter.Config(fqns=["feed_forward", "router"])])
    return Trainer.Config(model_spec=spec)
'''
ROW = {"fp8.enabled": True, "backend": "torchao", "fp8.granularity": "row", "fp8.format": "e4m3"}


@pytest.mark.parametrize(
    ("name", "ours", "lost"),
    [
        ("debug", {"precision.compute": "bf16", "fp8.enabled": False}, ()),
        ("rowwise", {**ROW, "fp8.output_layer": False}, ()),
        (
            "gw_hp",
            {
                **ROW,
                "fp8.output_layer": True,
                "fp8.override_linear_precision.wgrad": True,
                "precision.compute": "fp32",
            },
            ("LoRAConverter: has no equivalent here",),
        ),
        (
            "container",
            {
                "fp8.scaling": "current",
                "fp8.granularity": "tensor",
                "storage.shard": "fsdp",
                "storage.gather": "fp8",
                "fp8.output_layer": False,
            },
            (),
        ),
        ("off_again", {"fp8.enabled": False, "precision.compute": "bf16"}, ()),
        (
            "partly",
            {
                **ROW,
                "fp8.emulate": True,
                "fp8.output_layer": False,
                "fp8.exclude": ("*.linear_fc2",),
                "storage.weight": "bf16",
                "storage.weight_grad": "bf16",
                "storage.exp_avg": "bf16",
                "storage.exp_avg_sq": "bf16",
                "storage.master_weight": "none",
                "storage.comm": "fp32",
            },
            (
                "filter_fqns=attention.wk: is not a separate layer here; see fp8cfg plan for the layers and set fp8.exclude",
            ),
        ),
        ("mx_old", {"fp8.scaling": "mxfp8", "fp8.output_layer": False}, ()),
        ("mx", {"fp8.scaling": "mxfp8", "fp8.output_layer": True, "storage.weight": "bf16"}, ()),
        (
            "mx_chosen",
            {
                "fp8.scaling": "mxfp8",
                "fp8.output_layer": False,
                "fp8.exclude": ("*.linear_qkv", "*.linear_proj"),
            },
            (
                "fqns=router: is not a separate layer here; see fp8cfg plan for the layers and set fp8.exclude",
            ),
        ),
    ],
)
def test_a_function_of_a_registry(
    name: str, ours: dict[str, Any], lost: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "config_registry.py").write_text(REGISTRY)
    found = interop.from_file("torchtitan", tmp_path / f"config_registry.py:{name}")
    assert {k: effective_values(found.recipe)[k] for k in ours} == ours
    read = tuple(line for line in found.lost if not line.endswith(": not read"))
    assert (read, found.unknown) == (lost, ())


ONE = "def a() -> Trainer.Config:\n    return Trainer.Config(model_spec=model_registry('8B', converters=[Float8LinearConverter.Config({})]))\n"
REFUSED = {
    REGISTRY: "has 9 configurations; name one, as in FILE.py:debug; they are debug, rowwise, gw_hp, container, off_again, partly, mx_old, mx, mx_chosen",
    ONE.format("recipe_name=RECIPE"): "line 2: recipe_name: expected a literal, not RECIPE",
    ONE.format(
        "**KWARGS"
    ): "line 2: Float8LinearConverter.Config(**KWARGS): not read; write the fields",
    ONE.format("filter_fqn=['output']"): "",
    ONE.replace(
        "[Float8LinearConverter.Config({})]", "CONVERTERS"
    ): "line 2: converters: expected a list, not CONVERTERS",
    ONE.replace(
        "Float8LinearConverter.Config({})", "NVFP4LinearConverter.Config()"
    ): "NVFP4LinearConverter: torchao's NVFP4 has no equivalent; for Transformer Engine's set precision=bf16_nvfp4",
    ONE.replace(
        "({})]", "(), MXFP8LinearConverter.Config()]"
    ): "converters: float8 and mx are both on; remove one",
    "from x import base\ndef a() -> Trainer.Config:\n    c = base()\n    c.model_spec = 1\n    return c\n": [
        "line 4: c: is not defined in this file",
        "line 5: c: not read; return a configuration of this file",
    ],
    "def a() -> Trainer.Config:\n    c = Trainer.Config()\n    if X:\n        c.model_spec = model_registry('8B', converters=[])\n    return c\n": "line 3: if X: is not evaluated; write the fields without it",
    "def a() -> Trainer.Config:\n    return Trainer.Config(**K)\n": "line 2: **K: not read; write the fields",
    ONE.replace(
        "model_spec=", "model_convertors="
    ): "line 2: model_convertors: no known field of a configuration; did you mean 'model_converters'?",
    ONE.replace(
        "model_spec=", "seed=1, quantization="
    ): "line 2: quantization: no known field of a configuration",
    "def a() -> Trainer.Config:\n    c = Trainer.Config()\n    c.extras = [MXFP8Converter.Config()]\n    return c\n": "line 3: extras: no known field of a configuration",
    "x = 1\n": "has no configuration of torchtitan, such as Trainer.Config(...)",
    "x = = 1\n": "line 1: not valid Python (invalid syntax)",
}


@pytest.mark.parametrize("text", [text for text, line in REFUSED.items() if line])
def test_what_cannot_be_read_of_one_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config_registry.py"
    file.write_text(text)
    lines = REFUSED[text]
    assert main(["import", "torchtitan", str(file)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {file}: {line}" for line in ([lines] if isinstance(lines, str) else lines)
    ]


def test_a_misspelled_field_and_function_are_answered_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(ONE.format("filter_fqn=['output']"))
    with pytest.raises(
        ConfigError,
        match=r"a.py: filter_fqn: no such key of torchtitan; did you mean 'filter_fqns'\?",
    ):
        interop.from_file("torchtitan", file)
    with pytest.raises(
        ConfigError, match="aa: the file has no such configuration; did you mean 'a'"
    ):
        interop.from_file("torchtitan", tmp_path / "a.py:aa")


def test_each_function_is_read_once(tmp_path: Path) -> None:
    lines = [
        "def f0() -> Trainer.Config:\n    return Trainer.Config(model_spec=model_registry('8B'))"
    ]
    lines += [
        f"def f{i}() -> Trainer.Config:\n    a = f{i - 1}()\n    b = f{i - 1}()\n    return b"
        for i in range(1, 60)
    ]
    file = tmp_path / "a.py"
    file.write_text("\n".join(lines))
    assert not interop.from_file("torchtitan", tmp_path / "a.py:f59").recipe.fp8.enabled
    deep = [
        lines[0],
        *(f"def f{i}() -> Trainer.Config:\n    return f{i - 1}()" for i in range(1, 2000)),
    ]
    file.write_text("\n".join(deep))
    with pytest.raises(ConfigError, match="nested too deeply"):
        interop.from_file("torchtitan", tmp_path / "a.py:f1999")
    file.write_text("def a() -> Trainer.Config:\n    return a()\n")
    with pytest.raises(ConfigError, match="a: calls itself"):
        interop.from_file("torchtitan", file)


def test_python_of_a_project_that_is_not_read_from_it(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    with pytest.raises(
        ConfigError,
        match=r"a.py: is a Python file; DeepSpeed is imported from YAML or JSON",
    ):
        interop.from_file("deepspeed", file)


@pytest.mark.parametrize(
    ("project", "data"),
    [
        (
            "torchtitan",
            {
                "converter": "mx",
                "fqns": ["feed_forward"],
                "mxfp8_dim1_cast_kernel_choice": "cuda",
            },
        ),
        ("deepspeed", {"bf16": {"enabled": True}, "seq_parallel_communication_data_type": "fp32"}),
    ],
)
def test_keys_that_the_projects_have_are_no_unknown_ones(
    project: str, data: dict[str, Any]
) -> None:
    assert interop.from_mapping(project, data).unknown == ()


def test_torchtitan_has_python_configs_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "llama3_8b.toml"
    file.write_text('[model]\nconverters = ["float8"]\n')
    python = (
        "torchtitan has Python configurations since February 2026; run fp8cfg import torchtitan"
        " config_registry.py:NAME"
    )
    assert refused(capsys, "import", "torchtitan", str(file)) == [f"{file}: {python}"]
    assert refused(capsys, "import", "torchtitan", "--", "float8.recipe_name=rowwise") == [python]
    line = (
        "export torchtitan: its configurations are Python that builds a model; pass a converter such as"
        " Float8LinearConverter.Config(...) to its model_registry"
    )
    assert refused(capsys, "export", "torchtitan", "precision=bf16_fp8_current") == [line]
    with pytest.raises(ConfigError, match="export torchtitan: its configurations are Python"):
        interop.to_mapping("torchtitan", fp8cfg.compose(["precision=bf16_fp8_current"]))


def test_a_warmup_longer_than_the_steps_is_fitted(tmp_path: Path) -> None:
    file = tmp_path / "short.py"
    file.write_text("config = Trainer.Config(training=TrainingConfig(steps=1000))\n")
    found = interop.from_file("torchtitan", file, llama_8b())
    assert found.recipe.optim.warmup_steps == found.recipe.trainer.max_steps == 1000
    assert (
        "optim.warmup_steps=1000: not read from the source; set to fit trainer.max_steps=1000"
        in found.lost
    )
    found.recipe.check()


def test_an_import_into_a_file_says_where_dropped_settings_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "llama3.py", tmp_path / "mine.yaml"
    file.write_text(
        "config = Trainer.Config(training=TrainingConfig(steps=1000),"
        " lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200))\n"
    )
    assert main(["import", "torchtitan", str(file), "--output", str(output)]) == 0
    note = f"note: some settings were dropped or mean something else: see {output}\n"
    assert capsys.readouterr().err == note
    assert "warmup_steps=200" in output.read_text()
