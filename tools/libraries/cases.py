"""Cases: a small model of each library, trained by its own means. `python cases.py CASE WAY` prints one row; exit code 1 where it is
not right."""

from __future__ import annotations

import functools
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import fp8cfg
from tools.libraries.operators import without_operators
from tools.libraries.training import CLIP, LR, STEPS, Trained, compared, looked_at, recipe, train

VOCABULARY, LENGTH = 128, 32


@functools.cache
def tokens() -> Tensor:
    """Rows of a text, as bytes."""
    text = (Path(fp8cfg.__file__).parent / "data/tiny.txt").read_bytes()[: STEPS * 8 * LENGTH]
    return torch.tensor([min(b, VOCABULARY - 1) for b in text]).view(-1, LENGTH)


def rows(step: int) -> Tensor:
    return tokens()[step * 8 : (step + 1) * 8]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            use_cache=False,
            initializer_range=0.05,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def trl(way: str) -> Trained:
    """SFTTrainer, which puts a fused head in the place of the model's forward, with bf16=True, its default."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    model, given, arguments = llama(), dict[str, Any](), dict[str, Any]()
    fp8 = fp8cfg.convert_model(model, recipe()) if way == "converted" else None
    job = fp8cfg.build(recipe(), model=model) if way == "built" else None
    if fp8 or job:
        fp8cfg.apply_fp8_autowrap(model, recipe())
    if job:
        given = {
            "optimizers": (job.optimizer, job.scheduler()),
            "callbacks": [job.trainer_callback()],
        }
    else:
        arguments = {
            "learning_rate": LR,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-8,
            "max_grad_norm": CLIP,
            "lr_scheduler_type": "constant",
        }
    with tempfile.TemporaryDirectory() as folder:
        loop = SFTTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"input_ids": tokens().tolist()}),
            **given,
            args=SFTConfig(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=8,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                logging_steps=1,
                save_strategy="no",
                gradient_checkpointing=False,
                train_sampling_strategy="sequential",
                **arguments,
            ),
        )
        loop.train()
    for proof in filter(None, (fp8, job)):
        proof.prove()
    return looked_at(
        [line["loss"] for line in loop.state.log_history if "loss" in line], loop.model
    )


def _peft(way: str, after: bool) -> Trained:
    from peft import LoraConfig, get_peft_model

    def adapted(model: nn.Module) -> nn.Module:
        config = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"])
        torch.manual_seed(8)
        return get_peft_model(model, config)

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(input_ids=rows(step), labels=rows(step)).loss

    if not after or way != "converted":
        return train(way, adapted(llama()), loss)
    model = llama()
    fp8 = fp8cfg.convert_model(model, recipe())
    fp8cfg.apply_fp8_autowrap(model, recipe())
    wrapped = adapted(model)
    found = train("plain", wrapped, loss)
    fp8.prove()
    return found


def peft(way: str) -> Trained:
    """Adapters first, then FP8."""
    return _peft(way, after=False)


def peft_after(way: str) -> Trained:
    """FP8 first, then adapters around its layers; a job's optimizer has the adapters that were there."""
    return _peft(way, after=True)


def x_transformers(way: str) -> Trained:
    """A Transformer whose head is to_logits."""
    from x_transformers import Decoder, TransformerWrapper

    torch.manual_seed(7)
    model = TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=LENGTH,
        attn_layers=Decoder(dim=32, depth=2, heads=2, attn_dim_head=16),
    )

    def loss(model: nn.Module, step: int) -> Tensor:
        return F.cross_entropy(model(rows(step)[:, :-1]).flatten(0, 1), rows(step)[:, 1:].flatten())

    return train(way, model, loss)


def timm(way: str) -> Trained:
    """A vision transformer whose head is `head`."""
    import timm as library

    torch.manual_seed(7)
    return train(
        way,
        library.create_model(
            "vit_tiny_patch16_224",
            pretrained=False,
            img_size=32,
            patch_size=8,
            embed_dim=32,
            depth=2,
            num_heads=2,
            num_classes=16,
        ),
        _images,
    )


def torchvision(way: str) -> Trained:
    """A vision transformer whose head is `heads.head`, with nn.MultiheadAttention."""
    from torchvision.models import VisionTransformer

    torch.manual_seed(7)
    return train(
        way,
        VisionTransformer(
            image_size=32,
            patch_size=8,
            num_layers=2,
            num_heads=2,
            hidden_dim=32,
            mlp_dim=64,
            num_classes=16,
        ),
        _images,
    )


def _images(model: nn.Module, step: int) -> Tensor:
    made = torch.Generator().manual_seed(step % 2)
    images, labels = (
        torch.randn(16, 3, 32, 32, generator=made),
        torch.randint(16, (16,), generator=made),
    )
    dtype = next(p.dtype for p in model.parameters())
    return F.cross_entropy(model(images.to(dtype)).float(), labels)


CASES: dict[str, tuple[Callable[[str], Trained], str, tuple[str, ...], float]] = {
    # name: script, part of the output layer's name, ways, largest difference of losses
    "trl": (trl, "lm_head", ("converted", "built"), 0.02),
    "peft": (peft, "lm_head", ("converted", "built"), 0.02),
    "peft_after": (peft_after, "lm_head", ("converted",), 0.02),
    "x_transformers": (x_transformers, "to_logits", ("converted", "built"), 0.02),
    "timm": (timm, "head", ("converted", "built"), 0.02),
    "torchvision": (torchvision, "heads.head", ("converted", "built"), 0.02),
}


def main(name: str, way: str) -> int:
    warnings.simplefilter("ignore")
    without_operators()
    script, head, _, within = CASES[name]
    try:
        print("RESULT " + compared(script("plain"), script(way), head, within))
    except (
        AssertionError,
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        fp8cfg.NotFP8Error,
    ) as e:
        print(f"RESULT FAILED, {type(e).__name__}: " + str(e).partition("\n")[0])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
