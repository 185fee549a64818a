"""Model families against transformers' models: the same numbers out, the same gradients, the same counts."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from fp8cfg.models import (
    linear_layers,
    parameter_counts,
    parameter_shapes,
)
from fp8cfg.models.hf_checkpoint import (
    from_hf,
    to_hf,
)
from fp8cfg.models.transformer import Transformer
from fp8cfg.schema import hugging_face
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.recipe_registry import recipes
from tools.families import PUBLISHED, TINY, build, config_of, layout_of, shaped, theirs


@pytest.mark.parametrize("name", TINY)
def test_logits_and_gradients_are_transformers(name: str) -> None:
    """In float32 to 1e-5 and 1e-4; in bfloat16, whose intermediate roundings differ, as close to float32's as theirs, or twice that."""
    their, ours, config, layout = build(name, torch.float32)
    tokens = torch.randint(config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    exact = their(tokens).logits
    torch.testing.assert_close(ours(tokens), exact, rtol=1e-5, atol=2e-5)

    ours(tokens[:, :-1], tokens[:, 1:]).backward()
    their(tokens, labels=tokens).loss.backward()
    gradients = {n: p.grad for n, p in ours.named_parameters(remove_duplicate=False)}
    unshifted = dataclasses.replace(
        layout, centered=None
    )  # a norm's gradient is the same around 0 and 1
    found = to_hf(gradients, config, unshifted)
    for n, p in their.named_parameters():
        torch.testing.assert_close(found[n], p.grad, rtol=1e-4, atol=2e-6, msg=lambda m, n=n: n + m)

    with torch.no_grad():
        rough, mine = their.bfloat16()(tokens).logits.float(), ours.bfloat16()(tokens).float()
        assert _error(mine, exact) < 2 * _error(rough, exact) < 0.1


def _error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("name", TINY)
def test_round_trip_changes_no_bit(name: str) -> None:
    model = shaped(name)
    family, config = hugging_face.family_of_model(model), config_of(model)
    state = theirs(family, model).bfloat16().state_dict()
    back = to_hf(from_hf(state, config, layout_of(family)), config, layout_of(family))
    assert not back.keys() - state.keys() and state.keys() - back.keys() <= {"lm_head.weight"}
    exact = family.model.layernorm_zero_centered_gamma == model.layernorm_zero_centered_gamma
    for n, tensor in back.items():
        torch.testing.assert_close(
            tensor, state[n], rtol=0 if exact else 1e-2, atol=0 if exact else 1e-2
        )


@pytest.mark.parametrize("name", TINY)
def test_names_and_shapes_are_the_models(name: str) -> None:
    config = config_of(shaped(name))
    with torch.device("meta"):
        model = Transformer(config)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(config)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert [(n, m.in_features, m.out_features) for n, m in linears.items()] == linear_layers(config)


@pytest.mark.parametrize("name", sorted(set(recipes()) - set(TINY) - {"from_hf"}))
def test_counts_equal_transformers_and_the_published_ones(name: str) -> None:
    """Of one layer transformers' model is counted on the meta device, and all that is outside of layers; layers are alike."""
    model = recipes()[name]().model
    total = parameter_counts(config_of(model))["total"]
    family = hugging_face.family_of_model(model)
    counts = []
    for layers in (1, 2):
        said = family.write(model.model_copy(update={"num_layers": layers}))
        said = {k: v for k, v in said.items() if k not in ("architectures", "model_type")}
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(family.model_type, **said)
            )
        counts.append(sum(p.numel() for p in made.parameters()))
    assert total == counts[0] + (model.num_layers - 1) * (counts[1] - counts[0])
    if name in PUBLISHED:
        shown = PUBLISHED[name]
        digits = len(str(shown).rstrip("0").partition(".")[2])
        assert round(total / 1e9, digits) == pytest.approx(shown, abs=10**-digits / 2 + 1e-9)


def test_what_no_family_says_is_refused_by_its_key() -> None:
    with pytest.raises(
        ConfigError,
        match=r"transformers has no such model: .*model.activation=squared_relu",
    ):
        hugging_face.family_of_model(
            shaped("llama_tiny").model_copy(update={"activation": "squared_relu"})
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "llama", "hidden_act": "gelu"},
            "config.json: hidden_act=gelu: not supported, llama needs silu",
        ),
        (
            {"model_type": "lama"},
            "config.json: model_type=lama: not supported; did you mean 'llama'",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "config.json: rope_type=yarn: not supported",
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "config.json: layer_types: layers without a sliding window must be evenly spaced",
        ),
        (
            {"model_type": "gemma3_text", "layer_types": ["sliding_attention"]},
            "config.json: layer_types: expected 2 entries, one for each layer, got 1",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]},
            "config.json: layer_types: linear_attention is not supported; use full_attention or",
        ),
    ],
)
def test_a_config_that_a_recipe_cannot_say_is_refused(config: dict[str, Any], message: str) -> None:
    shape = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
    }
    with pytest.raises(ConfigError) as e:
        hugging_face.family_of_config(config).read({**shape, **config})
    assert message in str(e.value)


@pytest.mark.parametrize(("kind", "window"), [("mistral", 8), ("qwen2", None), ("qwen3", None)])
def test_a_window_that_is_not_enabled(kind: str, window: int | None) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config = {**shape, "sliding_window": 8}
    assert transformers.AutoConfig.for_model(kind, **config).sliding_window == window
    assert hugging_face.registered_families()[kind].read(config).sliding_window == window


@pytest.mark.parametrize(
    "kind",
    ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "nemotron", "olmo2"],
)
def test_a_config_without_keys_has_transformers_defaults(kind: str) -> None:
    """Published config.json files leave defaults out."""
    family, small = (
        hugging_face.registered_families()[kind],
        {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
    )
    full = {
        k: v
        for k, v in transformers.AutoConfig.for_model(kind, **small).to_dict().items()
        if k not in family.fixed
    }
    said = {
        family.spelled and k: full[k]
        for k in full
        if k in ("n_layer", "n_embd", "n_head", "n_inner", "intermediate_size", *small)
    }
    if kind != "gpt2":
        said |= {k: full[k] for k in ("num_key_value_heads", "vocab_size", "head_dim") if k in full}
    whole, bare = family.read(full), family.read(said)
    same = {"max_position_embeddings", "seq_length", "vocab_size", "kv_channels", "init_method_std"}
    assert bare.model_dump(exclude=same) == whole.model_dump(exclude=same)
