"""On a GPU: the Transformer Engine backend trains as planned, follows native, and comes back as it was."""

from __future__ import annotations

import pytest
import torch

import fp8cfg
from fp8cfg.backends.choice import backend_violations
from fp8cfg.backends.te import decoder
from fp8cfg.checkpoint import job_state
from fp8cfg.models.attention import rotary_tables
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.planning.hardware import find_hardware
from fp8cfg.training.data import run_data
from tests.support.small import small, steps
from tests.support.whole_checkpoints import collect

pytestmark = pytest.mark.gpu
EVERYWHERE = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
SHAPE = (
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.ffn_hidden_size=256",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "trainer.accelerator=cuda",
    "model.seq_length=128",
)
SCALINGS = {
    "delayed": ("precision=bf16_fp8", EVERYWHERE),
    "current": ("precision=bf16_fp8_current", EVERYWHERE),
    "block": ("precision=bf16_fp8_block", EVERYWHERE),
    "mxfp8": ("precision=bf16_mxfp8", EVERYWHERE),
    "nvfp4": ("precision=bf16_nvfp4", EVERYWHERE),
}
CASES = {
    f"{name} {'params' if params else 'weights'}": (*words, f"fp8.params={params}")
    for name, words in SCALINGS.items()
    for params in (False, True)
}


def job(words: tuple[str, ...], backend: str = "te") -> fp8cfg.Job:
    """The small model under `words`; skips where the backend cannot be loaded or the GPU cannot run them."""
    recipe = small(*SHAPE, *words, *([] if backend == "auto" else [f"backend={backend}"]))
    if backend != "auto" and (
        why := "; ".join(
            str(found)
            for found in backend_violations(backend, recipe.precision, find_hardware("cuda"))
        )
    ):
        pytest.skip(why)
    return fp8cfg.build(recipe)


@pytest.mark.parametrize("case", CASES)
def test_a_job_trains_as_planned_and_follows_native(case: str) -> None:
    mine = job(CASES[case])
    got = [s.loss for s in steps(mine, 6)]
    assert mine.prove().layers_in_fp8 == 16
    want = [s.loss for s in steps(job(CASES[case], "native"), 6)]
    assert got == pytest.approx(want, rel=0.03)
    assert got[-1] < got[0]


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_holds_plain_tensors_and_gives_back_the_same_bits(case: str) -> None:
    first = job(CASES[case])
    list(steps(first, 2))
    tensors, state = collect(first, run_data(first.recipe)[0], 2)
    tensors = {
        group: {n: t.detach().clone() for n, t in found.items()} for group, found in tensors.items()
    }
    assert all(type(t) is torch.Tensor for found in tensors.values() for t in found.values())
    assert not any("extra_state" in name for found in tensors.values() for name in found)
    second = job(CASES[case])
    assert job_state.restore(second, tensors, state, run_data(second.recipe)[0]) == 2
    before, after = stored_state_dict(first.model), stored_state_dict(second.model)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)
        ), name
    assert [s.loss for s in steps(second, 2, first=2)] == pytest.approx(
        [s.loss for s in steps(first, 2, first=2)], rel=1e-3
    )


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_weights_held_in_fp8_are_natives_bit_for_bit(scaling: str) -> None:
    words = (*SCALINGS[scaling], "fp8.params=true")
    mine, theirs = (
        stored_state_dict(job(words).model),
        stored_state_dict(job(words, "native").model),
    )
    held = [n for n, t in theirs.items() if t.dtype == torch.float8_e4m3fn]
    assert held
    for name in held:
        assert torch.equal(mine[name].view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.mark.parametrize("scaling", SCALINGS)
def test_whole_layers_follow_their_parts_and_native(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = job((*SCALINGS[scaling], "fp8.params=false"))
    assert (
        list(decoder.describe_decoder_layers(whole.model).values()) == ["te.TransformerLayer"] * 4
    )
    got = [s.loss for s in steps(whole, 6)]
    monkeypatch.setattr(decoder, "obstacle", lambda layer, make: "a test")
    part = job((*SCALINGS[scaling], "fp8.params=false"))
    assert not any(
        text.startswith("te.TransformerLayer")
        for text in decoder.describe_decoder_layers(part.model).values()
    )
    assert got == pytest.approx([s.loss for s in steps(part, 6)], rel=0.01)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_whole_layer_computes_ours(fp8: bool) -> None:
    plain = job(("precision=bf16",), "auto")
    made = job((*SCALINGS["current"], "fp8.params=false"))
    made.model.load_state_dict(stored_state_dict(plain.model))
    g = torch.Generator("cuda").manual_seed(0)
    x, dy = (torch.randn(2, 128, 256, device="cuda", generator=g).bfloat16() for _ in range(2))
    found = []
    for owner in (plain, made):
        given = x.clone().requires_grad_()
        with owner.autocast(fp8):
            y = owner.model.layers[1](
                given, *rotary_tables(owner.model.config, torch.arange(128, device=x.device))
            )
            y.backward(dy)
        found.append(
            [y.detach(), given.grad, *(p.grad for p in owner.model.layers[1].parameters())]
        )
    for want, got in zip(*found, strict=True):
        assert (got - want).float().norm() <= (0.1 if fp8 else 0.02) * want.float().norm()


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_attention_in_fp8(scaling: str) -> None:
    heads = (
        "model.num_attention_heads=2",
        "model.num_query_groups=1",
        "model.kv_channels=128",
    )  # Hopper trains these alone
    made = job((*SCALINGS[scaling], *heads, "fp8.dot_product_attention=true"))
    got = [s.loss for s in steps(made, 4)]
    made.prove()
    want = [s.loss for s in steps(job((*SCALINGS[scaling], *heads), "native"), 4)]
    assert got == pytest.approx(want, rel=0.03)


def test_a_backward_pass_in_high_precision() -> None:
    made = job((*SCALINGS["current"], "fp8.override_linear_precision={dgrad: true, wgrad: true}"))
    list(steps(made, 1))
    made.prove()


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_recomputed_activations_give_the_same_losses(scaling: str) -> None:
    found = [
        [s.loss for s in steps(job((*SCALINGS[scaling], f"model.recompute_granularity={how}")), 4)]
        for how in ("none", "full")
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
