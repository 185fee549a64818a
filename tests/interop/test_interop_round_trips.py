"""A recipe written for another project and read back: equal in everything but what is listed."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import fp8cfg
from fp8cfg import interop
from fp8cfg.backends.choice import Hardware, backend_violations
from fp8cfg.composition.recipe_yaml import assigned, flat
from fp8cfg.interop.projects import PROJECTS
from fp8cfg.interop.translation import effective_values
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.keys import PLUGIN, full
from fp8cfg.schema.presets import choices, precision_preset
from fp8cfg.schema.recipe import Recipe
from tests.support.overrides import value

PRECISION = sorted(k for k in flat(Recipe()) if k.startswith(f"{PLUGIN}."))
SAYS = {  # what each project can say: alone changed on top of a preset that it can write, none of these may be lost
    "accelerate": {
        "bf16_fp8": (
            "fp8.margin=3",
            "fp8.interval=4",
            "fp8.amax_history_len=16",
            "fp8.amax_compute_algo=most_recent",
            "fp8.format=e4m3",
            "fp8.override_linear_precision.wgrad=true",
            "fp8.override_linear_precision.fprop=true",
            "fp8.use_autocast_during_eval=true",
            "fp8.output_layer=true",
            "backend=te",
            "backend=msamp",
            "opt_level=O1",
            "opt_level=O2",
            "storage.shard=zero1",
            "storage.shard=zero2",
        ),
        "bf16_fp8_current": ("backend=torchao",),
        "bf16_mxfp8": ("backend=te",),
        "bf16": ("precision.compute=fp16", "precision.compute=fp32", "storage.shard=fsdp"),
    },
    "deepspeed": {
        "bf16": (
            "precision.compute=fp16",
            "precision.compute=fp32",
            "storage.comm=bf16",
            "storage.shard=zero1",
            "storage.shard=zero2",
        ),
        "fp16": (
            "precision.loss_scale=128",
            "precision.initial_loss_scale=65536",
            "precision.hysteresis=3",
            "precision.loss_scale_window=7",
            "precision.min_loss_scale=4",
        ),
        "bf16_fp8": ("opt_level=O1", "opt_level=O2", "opt_level=O3", "backend=msamp"),
    },
    "nemo": {
        "bf16_fp8": (
            "fp8.margin=3",
            "fp8.amax_history_len=16",
            "fp8.amax_compute_algo=most_recent",
            "fp8.format=e4m3",
            "fp8.params=false",
            "fp8.override_linear_precision.wgrad=true",
            "fp8.dot_product_attention=true",
        ),
        "bf16_fp8_current": (
            "fp8.high_precision_at_start=2",
            "fp8.high_precision_at_end=0",
            "fp8.format=e4m3",
            "fp8.dot_product_attention=true",
        ),
        "bf16_fp8_block": ("fp8.params=true",),
        "bf16_mxfp8": ("fp8.params=false",),
        "bf16_nvfp4": ("fp8.params=false", "fp8.high_precision_at_end=1"),
        "fp16": (
            "precision.loss_scale=128",
            "precision.initial_loss_scale=65536",
            "precision.hysteresis=3",
            "precision.loss_scale_window=7",
            "precision.min_loss_scale=4",
            "storage={comm: fp32, weight_grad: fp32}",
        ),
        "bf16": ("storage={comm: bf16, weight_grad: bf16}", "precision.compute=fp32"),
    },
    "megatron": {
        "bf16_precision_aware": ("fp8={enabled: true, scaling: block}",),
        "bf16_fp8_te_fused_adam": ("storage.exp_avg=bf16",),
        "bf16_fp8": (
            "fp8.margin=3",
            "fp8.amax_history_len=16",
            "fp8.amax_compute_algo=most_recent",
            "fp8.params=false",
            "storage.exp_avg=fp8",
            "storage.exp_avg_sq=fp16_scaled",
            "storage.master_weight=fp16_scaled",
            "storage={comm: bf16, weight_grad: bf16}",
            "storage.weight_grad=bf16",
            "storage.exp_avg=bf16",
            "storage.shard=zero1",
            "model.num_layers=3",
            "optim.lr=1e-3",
            "optim.betas=[0.8,0.9]",
            "trainer.max_steps=5000",
        ),
        "bf16_nvfp4": ("fp8.high_precision_at_start=1",),
        "fp16": ("precision.loss_scale=128",),
        "bf16": ("precision.compute=fp32",),
    },
    "te": {
        "bf16_fp8": (
            "fp8.margin=3",
            "fp8.amax_history_len=16",
            "fp8.amax_compute_algo=most_recent",
            "fp8.format=e4m3",
            "fp8.reduce_amax=false",
            "backend=te",
            "fp8.dot_product_attention=true",
        ),
        "bf16_fp8_current": (
            "fp8.use_power_2_scales=true",
            "fp8.format=e4m3",
            "fp8.override_linear_precision={dgrad: true, wgrad: true}",
        ),
        "bf16_fp8_block": ("fp8.use_power_2_scales=false", "fp8.enable_2d_quantization=false"),
        "bf16_mxfp8": ("fp8.enable_2d_quantization=true",),
        "bf16_nvfp4": (
            "fp8.enable_2d_quantization=false",
            "fp8.random_hadamard_transform=false",
            "fp8.stochastic_rounding=false",
        ),
    },
}


FSDP = ("precision=bf16_fp8_current", "fp8.params=false", "backend=torchao", "storage.shard=fsdp")


def lost_keys(lost: tuple[str, ...]) -> set[str]:
    return {line.partition("=")[0] for line in lost}


def doubted(lost: tuple[str, ...]) -> set[str]:
    """Keys that are written, and that the other project is known not to carry out."""
    return {line.partition("=")[0] for line in lost if ": exported, but " in line}


def changed(a: Recipe, b: Recipe, keys: list[str] = PRECISION) -> set[str]:
    """Short keys of what differs; `backend=auto` is whatever the other side takes, and null scales are what they come to."""
    x, y = effective_values(a), effective_values(b)
    shorts = {fp8cfg.schema.recipe.short(k) for k in keys}
    return {k for k in shorts if x[k] != y[k] and not (k == "backend" and x[k] == "auto")}


def sayings() -> list[Any]:
    """Every project, preset and word; of a word, `make test` has the first project that says it."""
    found, words = [], set[str]()
    for project, presets in SAYS.items():
        for number, (preset, word) in enumerate(
            (preset, word) for preset, said in presets.items() for word in said
        ):
            found.append(
                pytest.param(
                    project,
                    preset,
                    word,
                    marks=[] if word not in words or not number else pytest.mark.slow,
                )
            )
            words.add(word)
    return found


@pytest.mark.parametrize(("project", "preset", "word"), sayings())
def test_what_a_project_can_say_survives(
    project: str, preset: str, word: str, tmp_path: Path
) -> None:
    plain, recipe = (
        fp8cfg.compose([f"precision={preset}"]),
        fp8cfg.compose([f"precision={preset}", word]),
    )
    text, lost = interop.to_text(project, recipe)
    file = tmp_path / f"a.{'json' if project == 'deepspeed' else 'yaml'}"
    file.write_text(text)
    back = interop.from_file(project, file)
    set_by_word = {k for k in flat(recipe) if flat(recipe)[k] != flat(plain)[k]}
    assert set_by_word
    for key in set_by_word:
        assert (
            effective_values(back.recipe)[fp8cfg.schema.recipe.short(key)]
            == effective_values(recipe)[fp8cfg.schema.recipe.short(key)]
        ), key
    assert (
        not {fp8cfg.schema.recipe.short(k) for k in set_by_word} & lost_keys(lost) - doubted(lost)
        and not back.unknown
    )
    back.recipe.check()


@pytest.mark.parametrize(
    "preset", [c for c in choices() if precision_preset(c).storage == fp8cfg.Storage()]
)
@pytest.mark.parametrize("project", ["nemo", "bridge"])
def test_presets_survive_whole(project: str, preset: str) -> None:
    """Those without low-bit state are NeMo's and Megatron-Bridge's own, so nothing may be lost."""
    recipe = fp8cfg.compose(["recipe=llama_8b", f"precision={preset}"])
    written = interop.to_mapping(project, recipe)
    assert written.lost == () and interop.from_mapping(project, written.value, recipe) == (
        recipe,
        (),
        (),
    )


@functools.cache
def composed(preset: str) -> Recipe:
    return fp8cfg.compose(["recipe=llama_8b", f"precision={preset}"])


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """A preset with up to four keys of precision changed, if the rules allow it."""
    base = composed(draw(st.sampled_from(choices())))
    keys = draw(st.lists(st.sampled_from(PRECISION), max_size=4, unique=True))
    try:
        recipe = assigned(base, {k: draw(value(k)) for k in keys})
        recipe.check()
    except ConfigError:
        assume(False)
    return recipe


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(recipes(), st.sampled_from(sorted(SAYS)))
@example(fp8cfg.compose(["precision=bf16_fp8", "fp8.margin=1", "storage.comm=bf16"]), "megatron")
@example(fp8cfg.compose(["precision=bf16_fp8", "fp8.include=['--=(']"]), "megatron")
@example(fp8cfg.compose(["precision=bf16_fp8", "opt_level=O3"]), "accelerate")
@example(
    fp8cfg.compose(["precision=bf16_fp8", "opt_level=O3", "backend=msamp", "storage.shard=zero2"]),
    "deepspeed",
)
@example(fp8cfg.compose(["precision=bf16_fp8", "opt_level=O2", "storage.comm=fp32"]), "deepspeed")
@example(fp8cfg.compose(["precision=bf16_fp8", "backend=te", "fp8.interval=2"]), "accelerate")
@example(fp8cfg.compose([*FSDP, "storage.gather=fp8"]), "accelerate")
@example(fp8cfg.compose([*FSDP, "storage.gather=bf16"]), "accelerate")
@example(fp8cfg.compose(FSDP), "deepspeed")
def test_whatever_does_not_survive_is_listed(recipe: Recipe, project: str) -> None:
    """Through the text of the other project, which is read by a parser, not by what wrote it."""
    try:
        text, lost = interop.to_text(project, recipe)
    except ConfigError as e:
        assert all(line.partition("=")[0] in ("fp8.scaling", "fp8.enabled") for line in e.problems)
        return
    back = interop.from_mapping(project, parsed(project, text))
    follows = {
        k for k in map(fp8cfg.schema.recipe.short, PRECISION) if flat(recipe)[full(k)] == "auto"
    }
    rescaled = {
        k
        for k in follows
        if (effective_values(recipe)[k], effective_values(back.recipe)[k]) == ("fp8", "fp8_pow2")
    }  # MS-AMP's own
    assert changed(recipe, back.recipe) - (follows - rescaled) == {
        k for k in lost_keys(lost) - doubted(lost) if full(k).startswith(PLUGIN)
    }
    assert not back.unknown


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(recipes(), st.sampled_from(["accelerate", "deepspeed", "te"]))
@example(fp8cfg.compose(["precision=bf16_fp8"]), "accelerate")
@example(fp8cfg.compose(["precision=bf16_fp8"]), "te")
@example(
    fp8cfg.compose(["precision=bf16_fp8", "fp8.override_linear_precision.wgrad=true"]), "accelerate"
)
@example(
    fp8cfg.compose(
        ["precision=bf16_fp8", "fp8={dot_product_attention: true, multi_head_attention: true}"]
    ),
    "te",
)
@example(fp8cfg.compose(["precision=bf16_fp8", "opt_level=O2"]), "accelerate")
@example(
    fp8cfg.compose(["precision=bf16_fp8", "opt_level=O1", "storage.shard=zero1"]), "accelerate"
)
@example(fp8cfg.compose(["precision=bf16_fp8", "opt_level=O1"]), "deepspeed")
@example(fp8cfg.compose(["precision=bf16_fp8", "opt_level=O3", "storage.shard=zero2"]), "deepspeed")
def test_the_backend_that_is_read_back_has_every_key(recipe: Recipe, project: str) -> None:
    """But for what is about the GPU: this one has FP8 of every kind that the recipe's own scaling runs on."""
    try:
        text, _ = interop.to_text(project, recipe)
    except ConfigError:
        return
    p = interop.from_mapping(project, parsed(project, text)).recipe.precision
    blackwell = p.fp8.scaling in ("mxfp8", "nvfp4") and p.backend != "msamp"
    if p.backend != "auto" and p.fp8.enabled:
        assert (
            backend_violations(
                p.backend,
                p,
                Hardware("cuda", (10, 0) if blackwell else (9, 0), (12, 9)),
                here=False,
            )
            == []
        )


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["fp8", "bf16", "TE", "AO", "auto", "hybrid", "O1", "max"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


@st.composite
def nonsense(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A project, and anything at all for some of its keys and for others."""
    project = draw(st.sampled_from(sorted(PROJECTS)))
    table = PROJECTS[project].key_table
    keys = sorted({entry.key for entry in table.entries} | {*table.aliases, *table.unsupported})
    return project, draw(
        st.dictionaries(st.sampled_from(keys) | st.text(max_size=5), ANYTHING, max_size=5)
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(nonsense())
@example(("deepspeed", {"optimizer.params.betas": 5, "fp16.initial_scale_power": 10**6}))
@example(("torchtitan", {"converter": "float8", "filter_fqns": 5}))
@example(("megatron", {"hidden_size": 10**400, "num_attention_heads": 1, "swiglu": True}))
def test_nonsense_is_refused_in_lines_or_read(given: tuple[str, dict[str, Any]]) -> None:
    try:
        found = interop.from_mapping(*given)
    except ConfigError as e:
        assert all(line and "\n" not in line for line in e.problems)
    else:
        assert all("\n" not in line for line in (*found.lost, *found.unknown))


def parsed(project: str, text: str) -> dict[str, Any]:
    """The keys and values of a text, by the parsers of Python alone."""
    import json
    import shlex

    import yaml

    from fp8cfg.interop.transformer_engine import read_recipe_text

    if project == "megatron":
        words = shlex.split(text.partition("ARGS=(\n")[2].rpartition(")")[0])
        return {
            w[2:].replace("-", "_"): words[i + 1]
            if i + 1 < len(words) and not words[i + 1].startswith("--")
            else True
            for i, w in enumerate(words)
            if w.startswith("--")
        }
    if project == "te":
        return read_recipe_text(text)
    data: dict[str, Any] = json.loads(text) if project == "deepspeed" else yaml.safe_load(text)
    return data["mixed_precision"] if project == "bridge" else data


def test_interop_loads_no_library_of_theirs() -> None:
    import subprocess
    import sys

    code = "import sys, fp8cfg.interop; print(*sys.modules)"
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    assert not loaded & {"torch", "accelerate", "torchao", "transformer_engine", "hydra", "fiddle"}
    assert importlib.import_module("fp8cfg.interop").__all__
