"""Weights from and to transformers' Llama: the same numbers out, the same gradients, the same names back."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from fp8cfg.models import (
    RopeScaling,
    TransformerConfig,
)
from fp8cfg.models.hf_checkpoint import (
    LLAMA,
    Layout,
    from_hf,
    load,
    to_hf,
)
from fp8cfg.models.transformer import (
    Transformer,
    positions_in_documents,
)
from fp8cfg.parallel.pipeline import keep_stage

# Small contexts, so that 16 to 64 positions see the low, the blended and the high band of the scaling.
SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=24
)
CASES = {
    "mha": {"num_query_groups": 4},
    "gqa": {},
    "mqa": {"num_query_groups": 1},
    "scaled": {"rope_scaling": SCALING, "rotary_base": 500_000.0},
    "tied": {"tie_embeddings": True},
    "tied scaled wide heads": {"tie_embeddings": True, "rope_scaling": SCALING, "head_dim": 32},
}


def tiny(**changes: object) -> TransformerConfig:
    shapes = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "seq_length": 64,
        "init_std": 0.1,
    }
    return TransformerConfig(**(shapes | changes))


def llama(config: TransformerConfig) -> torch.nn.Module:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_position,
        }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_query_groups,
            head_dim=config.head_dim,
            max_position_embeddings=1024,
            rms_norm_eps=config.layernorm_epsilon,
            initializer_range=config.init_std,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters=rope,
        )
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a norm in the wrong place
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def ours_from(theirs: torch.nn.Module, config: TransformerConfig) -> Transformer:
    model = Transformer(config)
    model.load_state_dict(from_hf(theirs.state_dict(), config))
    return model


def tokens_for(config: TransformerConfig) -> Tensor:
    return torch.randint(
        config.vocab_size, (2, config.seq_length), generator=torch.Generator().manual_seed(1)
    )


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_transformers(case: str) -> None:
    config = tiny(**CASES[case])
    theirs = llama(config)
    ours = ours_from(theirs, config)
    tokens = tokens_for(config)
    expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)

    loss = ours(tokens[:, :-1], tokens[:, 1:])
    expected_loss = theirs(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected_loss)
    loss.backward()
    expected_loss.backward()
    gradients = to_hf(_gradients(ours), config)
    assert gradients.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m
        )


def test_packed_documents_are_those_of_transformers() -> None:
    """Which finds them where positions begin anew (masking_utils.find_packed_sequence_indices)."""
    config = tiny()
    theirs = llama(config)
    ours = Transformer(config, reset_attention_mask=True, reset_position_ids=True)
    ours.load_state_dict(from_hf(theirs.state_dict(), config))
    tokens = tokens_for(config)
    documents = (torch.arange(64) >= torch.tensor([[20], [41]])).int() + (
        torch.arange(64) >= 50
    ).int()
    positions = positions_in_documents(documents)
    logits, expected = (
        ours(tokens, documents=documents),
        theirs(tokens, position_ids=positions, use_cache=False).logits,
    )
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected - theirs(tokens).logits).abs().max() > 0.1
    logits.square().sum().backward()
    expected.square().sum().backward()
    gradients = to_hf(_gradients(ours), config)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            gradients[name],
            parameter.grad,
            rtol=1e-4,
            atol=1e-5 * parameter.grad.abs().max().item(),
        )


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_changes_no_bit(case: str, dtype: torch.dtype) -> None:
    config = tiny(**CASES[case])
    theirs = llama(config).to(dtype)
    back = to_hf(from_hf(theirs.state_dict(), config), config)
    assert back.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        assert back[name].dtype == dtype
        assert torch.equal(back[name], parameter)


def test_fused_rows_are_in_megatrons_order() -> None:
    config = tiny()
    given = llama(config).state_dict()
    q, k, v = (given[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    fused = from_hf(given, config)
    rows = torch.cat([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]])
    assert torch.equal(fused["layers.1.self_attention.linear_qkv.weight"], rows)
    gate, up = (given[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(fused["layers.1.mlp.linear_fc1.weight"], torch.cat([gate, up]))


def test_missing_and_unexpected_names_are_named() -> None:
    config = tiny()
    given = llama(config).state_dict()
    given["model.layers.0.self_attn.q_proj.bias"] = given.pop(
        "model.layers.0.self_attn.q_proj.weight"
    )
    with pytest.raises(ValueError) as error:
        from_hf(given, config)
    assert str(error.value) == (
        "not the weights of this model: 1 missing: model.layers.0.self_attn.q_proj.weight; "
        "1 unexpected: model.layers.0.self_attn.q_proj.bias"
    )
    with pytest.raises(
        ValueError, match=r"9 unexpected: model.layers.1.input_layernorm.weight, .*, \.\.\.$"
    ):
        from_hf(llama(config).state_dict(), tiny(num_layers=1))


def test_shapes_are_checked_by_name() -> None:
    given = llama(tiny()).state_dict()
    with pytest.raises(
        ValueError, match=r"k_proj.weight has shape \[32, 64\], the config says \[64, 64\]"
    ):
        from_hf(given, tiny(num_query_groups=4))
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight has shape \[128, 64\], the config says \[256, 64\]"
    ):
        from_hf(given, tiny(vocab_size=256))
    with pytest.raises(ValueError, match=r"1 missing: output_layer.weight"):
        to_hf(
            {n: w for n, w in from_hf(given, tiny()).items() if n != "output_layer.weight"}, tiny()
        )


def test_tied_head_may_be_absent_but_not_different() -> None:
    config = tiny(tie_embeddings=True)
    given = dict(llama(config).state_dict())
    del given["lm_head.weight"]
    loaded = from_hf(given, config)
    assert loaded["output_layer.weight"] is loaded["embedding.weight"]
    with pytest.raises(ValueError, match=r"lm_head.weight differs"):
        from_hf({**given, "lm_head.weight": given["model.embed_tokens.weight"] + 1}, config)


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_read_their_layers(tied: bool, tmp_path: Path) -> None:
    config = tiny(tie_embeddings=tied)
    full = Transformer(config)
    full.init_weights(1)
    save_file(to_hf(full.state_dict(), config), tmp_path / "model.safetensors")
    for rank in (0, 1):
        place = SimpleNamespace(
            chunks=[range(rank, rank + 1)], is_first=rank == 0, is_last=rank == 1
        )
        stage = Transformer(config)
        keep_stage(stage, place)
        load(stage, config, tmp_path, Layout(LLAMA))
        for name, parameter in stage.state_dict().items():
            assert torch.equal(parameter, full.state_dict()[name]), name


def test_frequency_buffers_of_llama_2_are_ignored() -> None:
    config = tiny()
    given = llama(config).state_dict()
    given["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert from_hf(given, config).keys() == Transformer(config).state_dict().keys()
