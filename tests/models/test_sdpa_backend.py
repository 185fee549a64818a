"""SDPA backends: what is asked of torch is what its dispatch runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.profiler import ProfilerActivity, profile

import fp8cfg
from fp8cfg.models import sdpa_backend
from fp8cfg.models.sdpa_backend import sdpa_backends
from tests.support.small import PACKED, small


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ((), {"flash"}),
        (("model.attn_logit_softcapping=5",), {"explicit"}),
        (PACKED, {"flash"}),
        (("model.sliding_window=8", "model.window_attn_skip_freq=2"), {"flash"}),
    ],
)
def test_what_is_asked_is_what_runs(words: tuple[str, ...], want: set[str]) -> None:
    recipe = small("precision=bf16", *words)
    job = fp8cfg.build(recipe)
    m = recipe.model
    found = sdpa_backends(
        job.model, 2, m.seq_length, torch.bfloat16, recipe.data.reset_attention_mask
    )
    assert set(found) == {f"layers.{n}.self_attention.core_attention" for n in range(m.num_layers)}
    assert set(found.values()) == want
    tokens = torch.randint(m.vocab_size, (2, m.seq_length))
    more = (torch.zeros_like(tokens),) if recipe.data.resets else ()
    with profile(activities=[ProfilerActivity.CPU]) as seen, job.autocast():
        job.model(tokens, tokens, *more)
    ran = {event.key for event in seen.key_averages() if "_scaled_dot_product" in event.key}
    assert any("flash" in key for key in ran) == (want == {"flash"}), ran


def test_a_kernel_that_is_switched_off_is_not_chosen() -> None:
    job = fp8cfg.build(small("precision=bf16"))
    with sdpa_kernel(SDPBackend.MATH):
        assert set(sdpa_backends(job.model, 2, 32, torch.bfloat16).values()) == {"math"}


@pytest.mark.parametrize(
    ("value", "name"), [(0, "math"), (1, "flash"), (2, "efficient"), (3, "cudnn")]
)
def test_names(value: int, name: str) -> None:
    assert sdpa_backend.backend_name(value) == name


def test_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was made would raise: it is none of these."""
    job, calls = fp8cfg.build(small("precision=bf16_fp8")), list[object]()
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: calls.append(args) or 2)
    assert (
        set(sdpa_backends(job.model, 2, 32, torch.bfloat16).values()) == {"efficient"}
        and len(calls) == 1
    ), "one for layers that are alike"


def test_queries_that_are_the_last_of_the_keys_are_asked_about_without_their_mask() -> None:
    """Its values are on no device: a GPU refuses it (attn_mask is on cpu)."""
    q, k = (torch.empty(1, 2, length, 16) for length in (4, 8))
    with sdpa_backend._BackendQuery() as asked:
        F.scaled_dot_product_attention(
            q,
            k,
            k,
            attn_mask=causal_lower_right(4, 8),
            is_causal=False,
            scale=None,
            enable_gqa=False,
        )
    assert asked.chosen == "math"  # of flash and efficient attention a CPU has none for it
