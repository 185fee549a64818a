"""What multiplies in a given model beside linear layers: listed in its coverage, and counted in its share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8cfg
from tests.support.convert_models import recipe


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(48, 64), nn.Linear(64, 64)
        self.attention, self.conv = (
            nn.MultiheadAttention(64, 4, add_zero_attn=True),
            nn.Conv2d(3, 64, 4, stride=4),
        )
        self.experts, self.token = (
            nn.Parameter(torch.randn(4, 64, 64)),
            nn.Parameter(torch.randn(1, 1, 64)),
        )
        self.normed, self.norm = (
            nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
            nn.LayerNorm((8, 64)),
        )
        self.rnn, self.lm_head = nn.GRU(64, 64), nn.Linear(64, 48, bias=False)
        self.lm_head.weight = self.embedding.weight
        self.tied = nn.Module()
        self.tied.weight = self.up.weight


def test_what_is_no_linear_layer_is_listed_and_counted() -> None:
    model = Beside()
    fp8 = fp8cfg.convert_model(model, recipe("fp8.min_coverage=0.9"))
    found = {p.name: (p.weights, p.reason) for p in fp8cfg.coverage(model).other_weights}
    assert found == {
        "the model itself": (4 * 64 * 64, "Beside is no linear layer"),
        "attention": (3 * 64 * 64, "MultiheadAttention is no linear layer"),
        "conv": (3 * 64 * 16, "Conv2d is no linear layer"),
        "rnn": (2 * 3 * 64 * 64, "GRU is no linear layer"),
    }
    elements = (
        sum(n for n, _ in found.values()) + 3 * 64 * 64 + 64 * 48
    )  # up, out_proj and normed; lm_head
    assert fp8cfg.coverage(
        nn.Linear(64, 64)
    ).other_weights == [] and "of the FLOPs of all weights" in str(fp8)
    with fp8.autocast():
        model.up(torch.randn(16, 64, requires_grad=True)).sum().backward()
    assert fp8cfg.coverage(model).share == pytest.approx(
        64 * 64 / elements
    ) and "high precision: MultiheadAttention is no" in str(fp8)
    with pytest.raises(
        fp8cfg.NotFP8Error,
        match=r"fp8\.min_coverage=0\.9: 5\.7% of the FLOPs of all weights ran in FP8",
    ):
        fp8.prove()


def test_a_convolution_weighs_as_many_places_as_it_computes() -> None:
    model = nn.ModuleList(
        [nn.Conv2d(3, 16, 3, padding=1), nn.ConvTranspose1d(16, 16, 2, stride=2), nn.Linear(64, 64)]
    )
    fp8 = fp8cfg.convert_model(model, recipe())
    with fp8.autocast():
        (
            model[0](torch.randn(2, 3, 8, 8)),
            model[1](torch.randn(5, 16, 7)),
            model[2](torch.randn(16, 64)),
        )
    seen = fp8cfg.coverage(model)
    assert [p.rows for p in seen.other_weights] == [2 * 8 * 8, 5 * 7] and [
        p.rows for p in seen.linears
    ] == [16]


@pytest.mark.parametrize(
    ("name", "shape", "listed"),
    [
        (
            "Mixtral",
            {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_local_experts": 4,
            },
            {"MixtralExperts", "MixtralTopKRouter"},
        ),
    ],
)
def test_models_of_transformers(name: str, shape: dict[str, int], listed: set[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, bos_token_id=0, eos_token_id=0, **shape
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    fp8 = fp8cfg.convert_model(model, recipe("fp8.output_layer=true", "fp8.min_coverage=0.5"))
    tokens = torch.arange(64).reshape(2, 32)
    with fp8.autocast():
        model(input_ids=tokens, labels=tokens).loss.backward()
    seen = fp8cfg.coverage(model)
    assert {p.reason.split()[0] for p in seen.other_weights} == listed and seen.share < 0.25
    with pytest.raises(
        fp8cfg.NotFP8Error,
        match=r"fp8\.min_coverage=0\.5: .* of the FLOPs of all weights ran in FP8",
    ):
        fp8.prove()


def test_an_empty_batch_has_a_coverage_of_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48))
    fp8 = fp8cfg.convert_model(model, recipe("fp8.exclude=['1']"))
    with fp8.autocast():
        model(torch.randn(0, 64))
    coverage = fp8cfg.coverage(model)
    assert coverage.share == 0 and coverage.low_share_warning == ""
    assert "0.0% of the linear layers' FLOPs" in str(coverage)
    assert [share for _, _, share in coverage.left_out] == [0]
