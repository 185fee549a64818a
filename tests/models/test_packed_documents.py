"""Packed documents: with masks and positions of their own they have the logits and gradients that each has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fp8cfg
from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.transformer import Transformer, positions_in_documents
from tests.support.small import small

CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "seq_length": 32,
}
RESETS = {"reset_attention_mask": True, "reset_position_ids": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "scaled rotary": {"rotary_percent": 0.5, "qk_layernorm": "head"},
    "window": {"sliding_window": 7},
    "every other layer": {
        "sliding_window": 7,
        "window_attn_skip_freq": 2,
        "rotary_base_local": 100.0,
    },
    "soft caps": {
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "num_query_groups": 1,
        "sliding_window": 9,
        "window_attn_skip_freq": 2,
        "layernorm_placement": "both",
        "activation": "geglu",
    },
    "learned": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "activation": "gelu",
        "num_query_groups": 4,
    },
}
LENGTHS = ((1, 12, 19), (32,), (20, 12))
"""Lengths of the documents of each sample."""


def numbered(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Tensor:
    return torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    ).int()


def tokens_of(documents: Tensor, vocab_size: int = 96) -> Tensor:
    return torch.randint(vocab_size, documents.shape, generator=torch.Generator().manual_seed(2))


def model_of(changes: dict[str, Any], **options: Any) -> Transformer:
    model = Transformer(TransformerConfig(**{**CONFIG, **changes}), **options)
    model.init_weights(1)
    return model


def alone(model: torch.nn.Module, tokens: Tensor, documents: Tensor) -> list[Tensor]:
    """The logits of each document by itself, of all samples in one row."""
    return [
        model(row[number == n][None])[0]
        for row, number in zip(tokens, documents, strict=True)
        for n in number.unique()
    ]


def gradients(model: torch.nn.Module, logits: Tensor) -> list[Tensor]:
    """Those of something that all logits have a part in."""
    model.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    (logits * weights).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def masks_of(
    model: Transformer, tokens: Tensor, documents: Tensor | None = None
) -> list[Tensor | None]:
    """The mask that attention of each layer is called with."""
    found = list[Tensor | None]()
    hooks = [
        layer.self_attention.core_attention.register_forward_pre_hook(
            lambda _, args: found.append(args[3] if len(args) > 3 else None)
        )
        for layer in model.layers
    ]
    model(tokens, documents=documents)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_are_computed_as_each_alone(name: str, recompute: str) -> None:
    model, documents = model_of(FAMILIES[name], recompute=recompute, **RESETS), numbered()
    tokens = tokens_of(documents)
    packed, each = (
        model(tokens, documents=documents).flatten(0, 1),
        torch.cat(alone(model, tokens, documents)),
    )
    torch.testing.assert_close(packed, each, rtol=1e-5, atol=1e-5)
    for mine, want in zip(gradients(model, packed), gradients(model, each), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
    assert (model(tokens).flatten(0, 1) - each).abs().max() > 1e-2, (
        "a model that takes no documents would pass"
    )


@pytest.mark.parametrize("flag", RESETS)
def test_each_key_acts_by_itself(flag: str) -> None:
    model, documents = model_of({}, **{flag: True}), numbered()
    tokens = tokens_of(documents)
    changed = tokens.clone()
    changed[:, 0] += 1 - 2 * (changed[:, 0] > 0).long()
    differs = (model(tokens, documents=documents) - model(changed, documents=documents)).abs().amax(
        -1
    ) > 0
    apart = documents > 0
    assert differs[apart].any() != (flag == "reset_attention_mask")
    assert torch.equal(
        positions_in_documents(documents)[2], torch.cat([torch.arange(20), torch.arange(12)])
    )


def test_masks_and_positions_are_those_of_megatron() -> None:
    """Written after Megatron-LM's `_get_ltor_masks_and_position_ids` (core/datasets/gpt_dataset.py)."""
    data, end = torch.tensor([5, 1, 256, 7, 256, 256, 3, 4, 2, 256]), 256
    mask, positions = torch.tril(torch.ones(10, 10)), torch.arange(10)
    before = 0
    for i in torch.nonzero(data == end)[:, 0].tolist():
        mask[i + 1 :, : i + 1] = 0
        positions[i + 1 :] -= i + 1 - before
        before = i + 1
    ends = (data == end).int()
    documents = (ends.cumsum(0) - ends)[None]
    assert positions_in_documents(documents)[0].tolist() == positions.tolist()
    model = model_of({"seq_length": 10, "vocab_size": 272}, reset_attention_mask=True)
    added = masks_of(model, data[None], documents)[0]
    assert added is not None and torch.equal(added[0, 0] == 0, mask.bool())


def test_in_fp8_too() -> None:
    """Under MXFP8 each block of 32 tokens has its own scales, so that documents of whole blocks are quantized alike wherever they are."""
    resets = [f"data.{name}=true" for name in RESETS]
    job = fp8cfg.build(
        small(
            "precision=bf16_mxfp8",
            "precision.compute=fp32",
            "fp8.params=false",
            "model.seq_length=96",
            *resets,
        )
    )
    documents = numbered(((32, 64), (64, 32)))
    tokens = tokens_of(documents, 272)
    with job.autocast():
        packed = job.model(tokens, documents=documents).flatten(0, 1)
        each = torch.cat(alone(job.model, tokens, documents))
        torch.testing.assert_close(packed, each, rtol=1e-5, atol=1e-5)
        for mine, want in zip(
            gradients(job.model, packed), gradients(job.model, each), strict=True
        ):
            torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-4 * want.abs().max().item())
    assert "FP8: 8 of 9 linear layers" in str(job.prove())


def test_layers_share_one_mask_of_each_kind() -> None:
    model, documents = (
        model_of({"num_layers": 4, "sliding_window": 7, "window_attn_skip_freq": 2}, **RESETS),
        numbered(),
    )
    masks = masks_of(model, tokens_of(documents), documents)
    assert masks[0] is masks[2] and masks[1] is masks[3] and masks[0] is not masks[1]
    assert [mask is None for mask in masks_of(model, tokens_of(documents))] == [
        False,
        True,
        False,
        True,
    ]


def test_targets_without_documents_are_refused() -> None:
    tokens = tokens_of(numbered())
    with pytest.raises(
        ValueError, match=r"call model\(tokens, targets, documents\) with the tensors of a batch"
    ):
        model_of({}, **RESETS)(tokens, tokens)
    loss = model_of({}, **RESETS)(tokens, tokens, numbered())
    assert loss.item() == pytest.approx(
        F.cross_entropy(
            model_of({}, **RESETS)(tokens, documents=numbered()).flatten(0, 1), tokens.flatten()
        ).item()
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "precision=bf16_fp8 fp8.dot_product_attention=true",
            "reset_attention_mask=true: FP8 attention does not support document masks; set fp8.dot_product",
        ),
        (
            "trainer.devices=2 trainer.strategy.context_parallel_size=2",
            "document boundaries need whole sequences, but trainer.strategy.context_parallel_size=2 splits",
        ),
        ("data=chat data.path=x", "data.reset_attention_mask=true: has no effect with data=chat"),
        (
            "data=tokens data.path=x",
            "data.reset_attention_mask=true: token files do not store the end-of-document token; set data.tokenizer",
        ),
    ],
)
def test_what_does_not_tell_documents_apart_is_refused(words: str, says: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as caught:
        small(*words.split(), "data.reset_attention_mask=true")
    assert says in str(caught.value)


def test_a_model_of_ones_own_is_refused() -> None:
    for name in RESETS:
        with pytest.raises(
            fp8cfg.ConfigError,
            match=f"data.{name}=true: works for a recipe's Transformer, not for a custom model",
        ):
            fp8cfg.build(small(f"data.{name}=true"), model=torch.nn.Linear(64, 64))
