"""Roles of a given model's layers: output layers by what they are, LoRA adapters, norms with statistics; the model in DistributedDataParallel."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from tests.support.convert_models import Block, recipe, transformers_lm


def layers(count: int = 2) -> list[Block]:
    return [Block() for _ in range(count)]


class Body(nn.Module):
    """A stack of layers and what stands after it: `names` -> modules."""

    def __init__(self, vocabulary: int = 48, /, **parts: nn.Module) -> None:
        super().__init__()
        self.token_emb, self.positions = nn.Embedding(vocabulary, 64), nn.Embedding(32, 64)
        self.blocks = nn.Sequential(*layers())
        self.project = nn.Linear(64, 64)
        for name, part in parts.items():
            setattr(self, name, part)


class Classes(Body):
    num_classes = 32

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__(**parts)
        self.num_classes = 32


def heads(model: nn.Module, *words: str) -> dict[str, str]:
    """The layers that fp8.output_layer=false leaves out."""
    plan = fp8cfg.convert_model(model, recipe(*words)).plan
    return {p.name: p.reason for p in plan if p.output}


def linear(width: int = 48) -> nn.Linear:
    return nn.Linear(64, width)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Body(to_logits=linear()), {"to_logits"}),  # x-transformers
        (Classes(head=linear(32)), {"head"}),  # timm
        (Classes(heads=nn.Sequential(linear(32))), {"heads.0"}),  # torchvision: heads.head
        (Body(out=linear()), {"out"}),  # around nn.Transformer
        (
            Body(proj_out_1=linear(128), proj_out_2=nn.Linear(128, 16)),
            {"proj_out_2"},
        ),  # diffusers' DiT
        (
            Classes(classifier=nn.ModuleDict({"dense": linear(64), "out_proj": linear(32)})),
            {"classifier.out_proj"},
        ),  # RoBERTa
        (Body(unembed=linear()), {"unembed"}),
        (
            Body(heads=nn.ModuleList(linear() for _ in range(3))),
            {"heads.0", "heads.1", "heads.2"},
        ),  # several tokens at once
        (Body(last=linear()), {"last"}),  # as wide as the vocabulary
        (Body(up=linear(128)), set()),
    ],
    ids=lambda v: "" if isinstance(v, nn.Module) else ",".join(sorted(v)) or "none",
)
def test_output_layers_by_name_place_and_width(model: nn.Module, found: set[str]) -> None:
    model = copy.deepcopy(model)
    assert {name for name in heads(model)} == found and heads_stay(model, found)


def heads_stay(model: nn.Module, found: set[str]) -> bool:
    said = {getattr(model.get_submodule(name), "high_precision_reason", "") for name in found}
    return said <= {"fp8.output_layer=false"} and fp8cfg.has_fp8_layers(
        model.get_submodule("project")
    )


def test_a_tied_layer_is_an_output_layer_whatever_its_name() -> None:
    model = Body(prediction=nn.Linear(64, 48, bias=False), head=linear(16))
    model.prediction.weight = model.token_emb.weight
    assert set(heads(model)) == {"prediction"}
    fp8cfg.convert_back(model)
    assert set(heads(model, "fp8.output_layer=true")) == {"prediction"}


def test_transformers_says_itself_which_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    assert set(
        heads(
            transformers_lm(
                "Llama",
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=1,
                num_attention_heads=4,
            )
        )
    ) == {"lm.lm_head"}
    bert = transformers.BertForSequenceClassification(
        transformers.BertConfig(num_labels=16, **shape)
    )
    assert set(heads(bert)) == {"classifier"}
    whole = transformers.BertForMaskedLM(transformers.BertConfig(**shape))
    assert set(heads(whole)) == {"cls.predictions.decoder"}
    base = transformers.BertModel(transformers.BertConfig(**shape))
    assert not heads(base), "it has none, and get_output_embeddings raises"


def test_the_table_says_where_none_was_found() -> None:
    model = Body(up=linear(128))
    fp8 = fp8cfg.convert_model(model, recipe())
    assert "fp8.output_layer=false: no output layer was found" in str(fp8)
    fp8cfg.convert_back(model)
    assert "no output layer" not in str(
        fp8cfg.convert_model(model, recipe("fp8.output_layer=true"))
    )
    assert "no output layer" not in str(fp8cfg.convert_model(Body(head=linear()), recipe()))


class Share(nn.Module):
    """Nine tenths of its weights are a convolution's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv1d(64, 64, 9, padding=4), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.conv(x.mT).mT).square().mean()


LOW = r"only 10\.0% of the FLOPs of all weights ran in FP8; the largest part in high precision is conv, 90\.0% \(Conv1d is no linear layer\)"


@pytest.mark.parametrize("way", ["step", "prove", "autowrap", "job"])
def test_less_than_half_in_fp8_is_said_once_and_names_the_largest_part(way: str) -> None:
    model, x = Share(), torch.randn(2, 16, 64)
    if way == "job":
        job = fp8cfg.build(recipe("precision.compute=fp32"), model=model)
        with job.autocast():
            job.backward(model(x))
        says: list[Any] = [job.optimizer.step, job.prove]
    else:
        fp8 = fp8cfg.convert_model(model, recipe())
        with fp8.autocast():
            model(x).backward()
        says = {
            "step": [fp8.step, fp8.prove],
            "prove": [fp8.prove, fp8.step],
            "autowrap": [lambda: model(x), lambda: model(x)],
        }[way]
        if way == "autowrap":
            fp8cfg.apply_fp8_autowrap(model, recipe())
            model(x)
    with pytest.warns(RuntimeWarning, match=LOW):
        says[0]()
    says[1]()


# Adapters, norms.


class Adapted(nn.Module):
    """PEFT's lora.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(64, 64)
        self.lora_A, self.lora_B = (
            nn.ModuleDict({"default": nn.Linear(*shape, bias=False)})
            for shape in ((64, 16), (16, 64))
        )


@pytest.mark.parametrize(
    ("words", "converted"),
    [
        ((), {"q_proj.base_layer"}),
        (("fp8.include=['q_proj.*']",), {"q_proj.base_layer"}),
        (
            ("fp8.include=['*.base_layer','*lora_*']",),
            {"q_proj.base_layer", "q_proj.lora_A.default", "q_proj.lora_B.default"},
        ),
    ],
)
def test_adapters_stay_out_unless_they_are_named(
    words: tuple[str, ...], converted: set[str]
) -> None:
    model = nn.ModuleDict({"q_proj": Adapted()})
    plan = fp8cfg.convert_model(model, recipe(*words)).plan
    assert {p.name for p in plan if p.fp8} == converted
    assert {p.reason for p in plan if not p.fp8} <= {
        "LoRA adapter; name it in fp8.include to run it in FP8"
    }


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.up, self.down = (
            nn.Conv1d(16, 32, 1),
            nn.BatchNorm1d(32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.down(torch.relu(self.up(torch.relu(self.norm(self.conv(x))).mT)))
            .float()
            .square()
            .mean()
        )


@pytest.mark.parametrize(
    "words", ["precision.compute=bf16", "opt_level=O2", "precision.compute=fp32"]
)
def test_batch_norms_keep_their_statistics_in_float32(words: str) -> None:
    job, plain = (
        fp8cfg.build(recipe(words, "optim.lr=1e-3", "optim.warmup_steps=0"), model=Normed()),
        Normed(),
    )
    x = torch.randn(8, 16, 12, generator=torch.Generator().manual_seed(0))
    assert {
        t.dtype for t in (job.model.norm.weight, job.model.norm.bias, job.model.norm.running_mean)
    } == {torch.float32}
    losses = []
    for step in range(3):
        with job.autocast():
            loss = job.model(x.to(job.model.conv.weight.dtype))
            job.backward(loss)
        job.schedule.apply(job.optimizer, step)
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(loss.item())
        plain(x)
    assert losses[-1] < losses[0] and job.prove().layers_in_fp8 == 3
    assert torch.allclose(job.model.norm.running_var, plain.norm.running_var, rtol=0.05)
    job.model.eval()(x.to(job.model.conv.weight.dtype))


# DistributedDataParallel.


@pytest.fixture
def one_rank(tmp_path: Any) -> Any:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "held",
    [lambda model: model, lambda model: nn.Sequential(nn.Identity(), model)],
    ids=["model", "holder"],
)
@pytest.mark.parametrize(
    ("words", "refused"),
    [(("fp8.params=true",), True), ((), True), (("precision.compute=fp32",), False)],
)
def test_ddp_around_a_job_is_refused_where_it_wraps(
    one_rank: None, words: tuple[str, ...], refused: bool, held: Callable[[nn.Module], nn.Module]
) -> None:
    """Its model, or a module that holds it."""
    job = fp8cfg.build(recipe(*words), model=nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    x = torch.randn(16, 64).to(
        torch.float32 if "precision.compute=fp32" in words else torch.bfloat16
    )
    if refused:
        with pytest.raises(
            fp8cfg.ConfigError,
            match=r"^DistributedDataParallel: .* call job\.sum_gradients\(\) .* fp8cfg\.convert_model\(model, recipe\)",
        ):
            nn.parallel.DistributedDataParallel(held(job.model))
        fp8cfg.convert_back(job.model)
        nn.parallel.DistributedDataParallel(job.model)
        return
    wrapped = nn.parallel.DistributedDataParallel(held(job.model))
    with warnings.catch_warnings(), job.autocast():
        warnings.simplefilter("ignore")
        job.backward(wrapped(x).square().mean())
    assert job.optimizer.step()
