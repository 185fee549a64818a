"""The Transformer: its counts, its two ways into memory, and what may not change its result."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8cfg.models import (
    RopeScaling,
    TransformerConfig,
    linear_layers,
    parameter_counts,
    parameter_shapes,
)
from fp8cfg.models.attention import rotary_tables
from fp8cfg.models.norms import RMSNorm
from fp8cfg.models.transformer import Transformer

TINY = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    vocab_size=64,
    seq_length=16,
)
TIED = dataclasses.replace(TINY, tie_embeddings=True)

# layers, hidden, ffn, heads, groups, head_dim, vocab, tied -> parameters as published
PUBLISHED = {
    "llama2_7b": ((32, 4096, 11008, 32, 32, 128, 32000, False), 6_738_415_616),
    "llama3_8b": ((32, 4096, 14336, 32, 8, 128, 128256, False), 8_030_261_248),
    "llama3_70b": ((80, 8192, 28672, 64, 8, 128, 128256, False), 70_553_706_496),
    "llama31_405b": ((126, 16384, 53248, 128, 8, 128, 128256, False), 405_853_388_800),
    "llama32_1b": ((16, 2048, 8192, 32, 8, 64, 128256, True), 1_235_814_400),
    "llama32_3b": ((28, 3072, 8192, 24, 8, 128, 128256, True), 3_212_749_824),
}


def on_meta(config: TransformerConfig, **options: Any) -> Transformer:
    with torch.device("meta"):
        return Transformer(config, **options)


def materialised(
    config: TransformerConfig,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    recompute: str = "none",
) -> Transformer:
    model = on_meta(config, recompute=recompute).to(dtype).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, math.nan)  # what to_empty leaves must not survive
    model.init_weights(seed)
    return model


def batch(config: TransformerConfig, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (2, config.seq_length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_equal_the_published_ones(name: str) -> None:
    (layers, hidden, ffn, heads, groups, head_dim, vocab, tied), published = PUBLISHED[name]
    config = TransformerConfig(
        layers, hidden, ffn, heads, groups, head_dim, vocab, 8192, tie_embeddings=tied
    )
    counts = parameter_counts(config)
    assert counts["total"] == published == sum(p.numel() for p in on_meta(config).parameters())
    assert counts["total"] == sum(count for kind, count in counts.items() if kind != "total")


@pytest.mark.parametrize("config", [TINY, TIED], ids=["untied", "tied"])
def test_names_and_shapes_are_the_models(config: TransformerConfig) -> None:
    model = on_meta(config)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameter_shapes(
        config
    )
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert [(name, m.in_features, m.out_features) for name, m in linears.items()] == linear_layers(
        config
    )
    assert not dict(model.named_buffers())


def test_shapes_need_no_torch() -> None:
    code = "import sys, fp8cfg.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_seed_gives_one_model() -> None:
    eager = Transformer(TINY)
    eager.init_weights(0)
    lazy, half = materialised(TINY), materialised(TINY, torch.bfloat16)
    for name, weight in eager.state_dict().items():
        assert torch.equal(weight, lazy.state_dict()[name])
        assert torch.equal(weight.bfloat16(), half.state_dict()[name])
    assert not torch.equal(
        materialised(TINY, seed=1).output_layer.weight, eager.output_layer.weight
    )


def test_init_is_megatrons() -> None:
    config = dataclasses.replace(TINY, num_layers=8, hidden_size=128, init_std=0.02)
    for name, parameter in materialised(config).named_parameters():
        if "layernorm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            expected = 0.02 / math.sqrt(16) if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.06), name


def test_tied_weight_stays_one_parameter() -> None:
    model = materialised(TIED)
    assert model.output_layer.weight is model.embedding.weight
    assert model.bfloat16().output_layer.weight is model.embedding.weight
    tokens, targets = batch(TIED)
    model(tokens, targets).backward()
    assert model.embedding.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_is_float32_and_that_of_the_logits(dtype: torch.dtype) -> None:
    model = materialised(TINY, dtype)
    tokens, targets = batch(TINY)
    logits, loss = model(tokens), model(tokens, targets)
    assert logits.shape == (2, TINY.seq_length, TINY.vocab_size) and logits.dtype == dtype
    assert loss.dtype == torch.float32 and loss.dim() == 0
    log_probability = logits.float().log_softmax(-1).gather(-1, targets[..., None])
    torch.testing.assert_close(loss, -log_probability.mean())
    assert abs(loss.item() - math.log(TINY.vocab_size)) < 0.1


def test_later_tokens_do_not_reach_earlier_ones() -> None:
    model = materialised(TINY)
    tokens, _ = batch(TINY)
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % TINY.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_positions_stay_exact_in_a_half_precision_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # bfloat16 has 8 bits: positions 8190 and 8191 would share an angle if the tables were cast with the model.
    seen: list[tuple[Tensor, Tensor]] = []

    def recorded(*arguments: object) -> tuple[Tensor, Tensor]:
        seen.append(rotary_tables(*arguments))
        return seen[-1]

    monkeypatch.setattr("fp8cfg.models.transformer.rotary_tables", recorded)
    config = dataclasses.replace(TINY, num_layers=1)
    materialised(config, torch.bfloat16)(torch.zeros(1, 8192, dtype=torch.int64))
    cos, sin = seen[0]
    angles = 8191 * 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(cos[8191].double(), angles.cos(), rtol=0, atol=1e-3)
    torch.testing.assert_close(sin[8191].double(), angles.sin(), rtol=0, atol=1e-3)


def test_norm_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(64, 1e-5).bfloat16()
    nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
    x = torch.randn(8, 64, generator=generator).bfloat16()
    exact = (
        x.double()
        * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        * norm.weight.double()
    )
    assert torch.equal(norm(x), exact.bfloat16())
    assert torch.equal(RMSNorm(32, 0.0)(torch.full((1, 32), 1e4).half()), torch.ones(1, 32).half())


@pytest.mark.parametrize("autocast", [False, True])
def test_recompute_changes_no_bit(autocast: bool) -> None:
    tokens, targets = batch(TINY)
    gradients = []
    for recompute in ("none", "selective", "full"):
        model = materialised(TINY, recompute=recompute)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, targets)
        loss.backward()
        gradients.append([loss.detach()] + [p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*gradients, strict=True))


class Doubled(nn.Linear):
    """Stands for a linear layer of another precision."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiles_whole_with_swapped_linears(recompute: bool) -> None:
    model = materialised(
        dataclasses.replace(TINY, rope_scaling=RopeScaling(8.0)), recompute=recompute
    )
    for layer in model.layers:
        layer.mlp.linear_fc2.__class__ = Doubled
    tokens, targets = batch(TINY)
    expected = model(tokens, targets)
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(tokens, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_query_groups": 3}, "num_attention_heads=4 must be a multiple of num_query_groups=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_scaling_needs_a_band() -> None:
    with pytest.raises(ValueError, match="must be above low_freq_factor"):
        RopeScaling(8.0, low_freq_factor=4.0, high_freq_factor=4.0)
