"""The transformers Trainer with fp8cfg's optimizer and FP8 layers. Arguments are overrides."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp8cfg


def llama(recipe: fp8cfg.Recipe) -> LlamaForCausalLM:
    """Returns a small Llama with random weights. Your script has from_pretrained(...) here."""
    m = recipe.model
    torch.manual_seed(recipe.trainer.seed)
    config = LlamaConfig(
        vocab_size=m.vocab_size,
        hidden_size=m.hidden_size,
        intermediate_size=m.ffn_hidden_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.num_query_groups,
    )
    return LlamaForCausalLM(config)


def train(recipe: fp8cfg.Recipe, **arguments: Any) -> list[float]:
    job, t = fp8cfg.build(recipe, model=llama(recipe)), recipe.trainer
    if recipe.fp8.enabled:
        fp8cfg.apply_fp8_autowrap(job.model, recipe)  # its forward enters FP8
    batches, _ = fp8cfg.run_data(recipe)  # or your own data
    tokens, _ = batches.rows(0, t.max_steps * t.global_batch_size)
    trainer = Trainer(
        model=job.model,
        optimizers=(job.optimizer, job.scheduler()),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[job.trainer_callback()],  # rejects arguments that contradict the recipe
        args=TrainingArguments(
            max_steps=t.max_steps,
            per_device_train_batch_size=t.micro_batch_size,
            gradient_accumulation_steps=t.global_batch_size // t.micro_batch_size,
            train_sampling_strategy="sequential",
            logging_steps=1,
            report_to="none",
            use_cpu=job.device.type == "cpu",
            **arguments,
        ),
    )
    trainer.train(resume_from_checkpoint=arguments.get("resume_from_checkpoint"))
    print(job.prove())
    # To save: job.model.save_pretrained(folder) or torch.save(job.model.state_dict(), file).
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    with fp8cfg.exit_codes():  # one line and exit code 2 for a mistake
        words = ["recipe=llama_tiny", "precision=bf16_fp8", *sys.argv[1:]]
        train(fp8cfg.compose(words), save_strategy="no")
