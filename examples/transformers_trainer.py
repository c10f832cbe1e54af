# SPDX-License-Identifier: Apache-2.0
"""DASH with the Trainer of Hugging Face transformers: ``python examples/transformers_trainer.py``."""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

from dash_optim import DASH, param_groups

STEPS, WARMUP, RATE = 12, 2, 1e-2


def make_model() -> LlamaForCausalLM:
    """Return a tiny model with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=16, **sizes))


def dataset() -> list[dict[str, Tensor]]:
    """Return sequences that go on in steps of three."""
    starts = torch.randint(50, (192, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in (starts + 3 * torch.arange(16)) % 50]


def make_trainer(folder: Path, way: str) -> Trainer:
    """Return a Trainer that is given an optimizer, or one that makes its own."""
    model = make_model()
    args = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=16,
        train_sampling_strategy="sequential",
        max_grad_norm=0.5,
        save_steps=4,
        logging_steps=1,
        lr_scheduler_type="cosine",  # this, warmup_steps and weight_decay are for an optimizer that Trainer makes
        warmup_steps=WARMUP,
        weight_decay=0.1,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    if way == "class":
        return Trainer(
            model,
            args,
            train_dataset=dataset(),
            optimizer_cls_and_kwargs=(DASH, {"lr": RATE, "block_size": 32}),
        )
    opt = DASH(param_groups(model, weight_decay=0.1, verbose=False), lr=RATE, block_size=32)
    scheduler = get_cosine_schedule_with_warmup(opt, WARMUP, STEPS)
    return Trainer(model, args, train_dataset=dataset(), optimizers=(opt, scheduler))


def main() -> None:
    """Train; go on where the folder's last checkpoint is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="transformers_checkpoints")
    parser.add_argument("--way", choices=("instance", "class"), default="instance")
    args = parser.parse_args()
    trainer = make_trainer(args.folder, args.way)
    trainer.train(resume_from_checkpoint=any(args.folder.glob("checkpoint-*")))
    print(f"loss {trainer.evaluate(dataset())['eval_loss']:.9g}")


if __name__ == "__main__":
    main()
