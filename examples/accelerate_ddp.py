# SPDX-License-Identifier: Apache-2.0
"""DASH with Hugging Face accelerate: ``torchrun --nproc-per-node 2 examples/accelerate_ddp.py``, or ``accelerate launch``."""

import argparse
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from task import BATCH, dataset, evaluate, make_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from dash_optim import DASH, param_groups


def main() -> None:
    """Train, and save after each epoch; go on where the folder's last epoch ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="accelerate_checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    accelerator = Accelerator(cpu=not gpu, gradient_accumulation_steps=2)

    model = make_model()
    opt = DASH(
        param_groups(model, weight_decay=0.1, verbose=accelerator.is_main_process),
        lr=1e-2,
        block_size=32,
        process_group=dist.group.WORLD,  # which Accelerator() has made
    )
    data = DataLoader(dataset(), batch_size=BATCH // accelerator.num_processes // 2)
    model, opt, data = accelerator.prepare(model, opt, data)  # the model before the optimizer
    # save_state asks on every rank and writes what the first one answers: let that be everything
    opt.state_dict = partial(opt.optimizer.full_state_dict, to=0)

    saved = sorted(args.folder.glob("epoch*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
    for epoch in range(len(saved), args.epochs):
        for x, y in data:
            with accelerator.accumulate(model):  # zero_grad and step do nothing but every second time
                accelerator.backward(cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
                opt.zero_grad()
        accelerator.save_state(str(args.folder / f"epoch{epoch + 1:04}"))

    accelerator.print(f"loss {evaluate(accelerator.unwrap_model(model)):.9g}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
