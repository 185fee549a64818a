"""Weights under the Transformer Engine backend: held in FP8, quantized once for a step, tied, stored at a level, given back."""

from __future__ import annotations

import copy
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.backends.te.state import as_native
from fp8cfg.numerics.scaling import Scaling
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.training import trained_model
from fp8cfg.training.runs import train_job
from fp8cfg.training.trained_model import RunWeights
from tests.support.small import small, steps
from tests.support.te_cases import CASES, backend
from tests.support.te_small import converted, tokens
from tests.support.te_table import node


@pytest.mark.parametrize(
    ("case", "recompute"), [("current O2", "none"), ("current O2", "full"), ("current O3", "none")]
)
def test_only_stored_bytes_stay_from_step_to_step(
    case: str, recompute: str, te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = fp8cfg.build(small(*CASES[case], f"model.recompute_granularity={recompute}"))
    list(steps(job, 1))
    layers = list(backend()._linears(job.model).values())
    owned = {id(p) for p in job.model.parameters()}
    kept = [
        t
        for engine in backend()._engines(job.model)
        for t in engine.module._parameters.values()
        if t is not None
    ]
    assert len(kept) >= len(layers) and sum(t.nbytes for t in kept if id(t) not in owned) == 0
    decoded = []
    monkeypatch.setattr("fp8cfg.numerics.codecs.Codec.decode", lambda *_: decoded.append(1))
    assert not any(layer.fp8_params for layer in layers) or case == "current O3"
    assert (
        len(backend().writers(job.model)) == (8 if case == "current O3" else 0) and not decoded
    ), "a flag is asked of what is stored"


def test_weights_tied_to_an_embedding_stay_tied_under_a_level(te: Any) -> None:
    job = fp8cfg.build(
        small(
            *CASES["current O2"],
            "model.share_embeddings_and_output_weights=true",
            "fp8.output_layer=true",
        )
    )
    found = [s.loss for s in steps(job, 4)]
    assert (
        found[-1] < found[0] - 0.05
        and job.model.output_layer._parameters["weight"] is job.model.embedding.weight
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_under_a_level_comes_back_decoded(tied: bool, te: Any) -> None:
    job = fp8cfg.build(
        small(
            *CASES["current O2"],
            f"model.share_embeddings_and_output_weights={tied}",
            f"fp8.output_layer={tied}",
        )
    )
    list(steps(job, 1))
    layer = job.model.layers[0].mlp.linear_fc1
    want, stored = layer.codec.decode(layer.codec_tensors), layer.parameter
    model = fp8cfg.convert_back(job.model)
    assert (
        torch.equal(model.layers[0].mlp.linear_fc1.weight, want) and stored.dtype == torch.float16
    )
    assert {type(m) for n, m in model.named_modules() if "linear" in n} == {nn.Linear} and {
        p.dtype for p in model.parameters()
    } == {torch.float32}
    assert (model.output_layer.weight is model.embedding.weight) == tied
    model(*(torch.zeros(1, 32, dtype=torch.int64),) * 2).backward()


@pytest.mark.parametrize("case", [name for name in CASES if name.endswith("params")])
def test_weights_held_in_fp8_multiply_in_high_precision_as_their_values(case: str, te: Any) -> None:
    job = fp8cfg.build(small(*CASES[case], "fp8.use_autocast_during_eval=false"))
    assert {type(engine.module).__name__ for engine in backend()._engines(job.model)} >= {
        "LayerNormLinear",
        "LayerNormMLP",
    }
    plain = fp8cfg.convert_back(copy.deepcopy(job.model))
    x, y = (torch.arange(64).reshape(2, 32) + shift for shift in (0, 1))
    with job.autocast(False):
        got = job.model(x, y)
        got.backward()
    want = plain(x, y)
    want.backward()
    assert got.item() == pytest.approx(want.item(), rel=1e-3)  # norms round elsewhere
    wanted = {name: p.grad.float() for name, p in plain.named_parameters()}
    for name, p in job.model.named_parameters():
        assert (p.grad.float() - wanted[name]).norm() < 0.03 * wanted[name].norm(), name


@pytest.mark.parametrize("case", ["delayed", "delayed params"])
def test_a_jobs_weights_are_the_plain_models_and_its_optimizer_has_the_fp8_state(
    case: str, te: Any
) -> None:
    job, plain = (
        fp8cfg.build(small(*CASES[case])),
        fp8cfg.build(small("precision=bf16_mixed")).model,
    )
    list(steps(job, 2))
    weights, optimizer = (
        {k: t.clone() for k, t in job.model.state_dict().items()},
        copy.deepcopy(job.optimizer.state_dict()),
    )
    assert list(weights) == list(plain.state_dict()) and {
        (type(t), t.dtype) for t in weights.values()
    } == {(torch.Tensor, torch.bfloat16)}
    plain.load_state_dict(weights, strict=True)
    want = [s.loss for s in steps(job, 2, first=2)]
    te.FP8GlobalStateManager.reset()
    resumed = fp8cfg.build(small(*CASES[case]))
    resumed.model.load_state_dict(plain.state_dict(), strict=True)
    resumed.optimizer.load_state_dict(optimizer)
    assert [s.loss for s in steps(resumed, 2, first=2)] == want
    other = fp8cfg.build(small(*CASES[case]))
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict({k: v for k, v in optimizer.items() if k != "fp8"})
    with pytest.warns(RuntimeWarning, match="scales and amax histories were reset"):
        list(steps(other, 1))


@pytest.mark.parametrize("case", ["delayed params", "current params"])
def test_weights_held_in_fp8_are_natives_bit_for_bit(case: str, te: Any) -> None:
    mine, theirs = (
        stored_state_dict(
            fp8cfg.build(
                small(*[w for w in CASES[case] if w != "backend=te"], f"backend={b}")
            ).model
        )
        for b in ("te", "native")
    )
    held = [n for n, t in theirs.items() if t.dtype == torch.float8_e4m3fn]
    assert len(held) == 8 and mine.keys() == theirs.keys()
    for name in (n for n, t in theirs.items() if n in held or "fp8_" in n):
        assert torch.equal(
            mine[name].reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)
        ), name


def test_a_weight_of_a_skipped_step_stays_and_a_transpose_that_was_not_made_is_not_read(
    te: Any,
) -> None:
    job = fp8cfg.build(small(*CASES["delayed params"]))
    list(steps(job, 1))
    layer = job.model.layers[0].mlp.linear_fc2
    codes, master = layer.weight._data.clone(), job.optimizer.masters[layer.weight]
    layer.weight._transpose, layer.weight._transpose_invalid = None, True
    layer._columns()[1][0].scale.mul_(0.25)  # as Transformer Engine has moved it meanwhile
    for skip, same in ((True, True), (False, False)):
        backend().after_step(job.model, None, 2, torch.tensor(skip))
        layer.set_weight(master)
        layer.weight.update_usage(columnwise_usage=True)
        assert torch.equal(layer.weight._data, codes) == same and torch.equal(
            layer.weight._transpose, layer.weight._data.t()
        )
    layer.set_weight(master * 2)
    assert layer.skip is None and not torch.equal(layer.weight._data, codes)


def test_weights_are_quantized_once_for_a_step(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count = {"quantized": 0}
    base = sys.modules["transformer_engine.pytorch.module.base"]
    for name in ("linear", "layernorm_linear", "layernorm_mlp"):
        module = sys.modules[f"transformer_engine.pytorch.module.{name}"]

        def counted(*, update_workspace: bool = True, **given: Any) -> Any:
            count["quantized"] += update_workspace
            return base.quantize_weight(update_workspace=update_workspace, **given)

        monkeypatch.setattr(module, "quantize_weight", counted)
    found = []
    for on in (False, True):
        model = converted(node({"scaling": "current"}))
        backend().cache_weights(model, on)
        for step in range(2):
            for microbatch in range(3):
                with backend().autocast(model):
                    model(tokens(microbatch), tokens(microbatch)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
            backend().after_step(model, None, step + 1)
        found.append(({n: p.clone() for n, p in model.named_parameters()}, count.pop("quantized")))
        count["quantized"] = 0
    (plain, every), (cached, once) = found
    assert (every, once) == (8 * 6, 8 * 2)
    assert all(torch.equal(plain[n], cached[n]) for n in plain)


@pytest.mark.parametrize(("accumulated", "want"), [(1, [None]), (4, [True, False, False, False])])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_run_quantizes_weights_in_the_first_microbatch_of_a_step(
    accumulated: int,
    want: list[bool | None],
    recompute: str,
    te: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, list[bool | None]] = {"LayerNormLinear": [], "Linear": [], "LayerNormMLP": []}
    for name in seen:
        plain = getattr(te, name).forward

        def watched(self: Any, x: Any, plain: Any = plain, **options: Any) -> Any:
            if torch.is_grad_enabled():  # not an evaluation
                seen[type(self).__name__].append(options["is_first_microbatch"])
            return plain(self, x, **options)

        monkeypatch.setattr(getattr(te, name), "forward", watched)
    words = (
        *CASES["current"],
        f"trainer.micro_batch_size={8 // accumulated}",
        "trainer.global_batch_size=8",
        "trainer.max_steps=2",
        f"model.recompute_granularity={recompute}",
    )
    train_job(fp8cfg.build(small(*words)))
    again = [w if w is None else False for w in want]
    passes = [
        x
        for w, a in zip(want, again, strict=True)
        for x in ([w] * 2 + [a] * 2 * (recompute == "full"))
    ]  # two layers
    assert seen == dict.fromkeys(seen, passes * 2)


def test_a_pass_in_high_precision_keeps_no_weight_of_the_step_before(te: Any) -> None:
    model, found = converted(node({"scaling": "current"})), []
    for keep in (True, False):
        backend().cache_weights(model, keep)
        for enabled in (True, False, True):  # weights move after the first
            with backend().autocast(model, enabled):
                loss = model(tokens(), tokens())
                loss.backward()
            if keep and not found:
                with torch.no_grad():
                    [p.mul_(1.5) for p in model.parameters()]
                backend().after_step(model, None, 1)
            found.append(loss.item())
    assert found[2] == found[3] != found[0]


def test_weights_kept_over_microbatches_change_no_loss(te: Any) -> None:
    found = []
    for keep in (False, True):
        job = fp8cfg.build(
            small(
                *CASES["current"], "trainer.micro_batch_size=2", "model.recompute_granularity=full"
            )
        )
        backend().cache_weights(job.model, keep)
        found.append([s.loss for s in steps(job, 3)])
    assert found[0] == found[1]


@pytest.mark.parametrize("entry", ["quantized_model_init", "fp8_model_init"])
def test_weights_are_quantized_by_the_entry_point_that_is_there(
    entry: str, te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    genuine, signature = te.quantized_model_init, inspect.signature(getattr(te, entry))

    def recorded(**arguments: Any) -> Any:
        given.append(signature.bind(**arguments).arguments)
        return genuine(**arguments)

    monkeypatch.delattr(te, "quantized_model_init")
    monkeypatch.delattr(te, "__getattr__")  # mocks whatever a package of the stand-in lacks
    monkeypatch.setattr(te, entry, recorded, raising=False)
    model = converted(node({"scaling": "current", "params": True}))
    assert {type(layer.weight).__name__ for layer in backend()._linears(model).values()} == {
        "Float8Tensor"
    }
    assert {(g["enabled"], type(g["recipe"]).__name__) for g in given} == {
        (True, "Float8CurrentScaling")
    }


@pytest.mark.parametrize(
    "case", ["delayed params", "current O3", "block params", "mxfp8 params", "nvfp4 params"]
)
def test_weights_of_a_run_are_read_without_its_library(case: str, te: Any, tmp_path: Path) -> None:
    job = fp8cfg.build(
        small(
            *CASES[case],
            "trainer.max_steps=1",
            "trainer.val_check_interval=0",
            "optim.warmup_steps=0",
        )
    )
    fp8cfg.fit(job, folder=tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformer_engine", None)
        found = RunWeights(tmp_path / "run", print)
        weight, scale = found.read("layers.0.mlp.linear_fc1.weight")
    want = job.model.layers[0].mlp.linear_fc1.dequantized_weight(torch.float32)
    torch.testing.assert_close(
        weight, want, rtol=2e-7 if case == "nvfp4 params" else 0, atol=0
    )  # which multiplies in another order
    assert (scale is None) == (case in ("block params", "mxfp8 params", "nvfp4 params"))


def test_a_run_of_auto_is_exported_and_gone_on_with_by_who_multiplied(
    te: Any, tmp_path: Path
) -> None:
    """Of which a GPU's checkpoint tells where there is none. Native has no norms to leave out."""
    words = (
        *CASES["current params"],
        "fp8.exclude=[final_layernorm]",
        "trainer.max_steps=1",
        "trainer.val_check_interval=0",
        "optim.warmup_steps=0",
    )
    job, run, said = fp8cfg.build(small(*words)), tmp_path / "run", list[str]()
    job.recipe.precision.backend = "auto"
    fp8cfg.fit(job, folder=run)
    assert RunWeights(run, print).read("layers.0.mlp.linear_fc1.weight")[1] is not None
    trained_model.load(run, said.append, lambda recipe: setattr(recipe.fp8, "exclude", ()))
    fp8cfg.resume(run, ["fp8.exclude=[]", "trainer.max_steps=2"], ["fp8.exclude"], say=said.append)
    fp8cfg.resume(run, say=said.append)
    assert [line.partition(";")[0] for line in said if "backend" in line] == [
        "note: backend=auto: now native, te in the checkpoint"
    ] * 2


@pytest.mark.parametrize(("square", "scales"), [(True, (2, 4)), (False, (2, 132))])
def test_padded_scales_of_blocks_multiply_as_its_own_do(
    square: bool, scales: tuple[int, int], te: Any
) -> None:
    """Of a matrix of 130 x 200: one for each square, or for each 1x128, the rows last; either way up to a multiple of four."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
        Float8BlockwiseQTensorStorage,
    )

    codes, scale_inv = torch.randn(130, 200).to(torch.float8_e4m3fn), torch.rand(scales)
    theirs = Float8BlockwiseQTensorStorage(
        rowwise_data=codes.view(torch.uint8),
        rowwise_scale_inv=scale_inv,
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=tex.DType.kFloat8E4M3,
        quantizer=None,
        is_2D_scaled=square,
    )
    ours = as_native(codes, scale_inv, None, Scaling(kind="block", weights_2d=square))
    assert torch.equal(ours.values(torch.float32), theirs.dequantize(dtype=torch.float32))
