# SPDX-License-Identifier: Apache-2.0
"""DASH with Hugging Face accelerate in one process: ``python examples/accelerate_single.py``."""

import argparse
from pathlib import Path

from accelerate import Accelerator
from task import BATCH, STEPS, dataset, evaluate, make_model
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from dash_optim import DASH, param_groups


def main() -> None:
    """Train, and save after each epoch; go on where the folder's last epoch ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="accelerate_checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make_model()
    opt = DASH(param_groups(model, weight_decay=0.1), lr=1e-2, block_size=32)
    scheduler = CosineAnnealingLR(opt, args.epochs * STEPS)
    data = DataLoader(dataset(), batch_size=BATCH // 2)
    model, opt, data, scheduler = accelerator.prepare(model, opt, data, scheduler)

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
                scheduler.step()
                opt.zero_grad()
        accelerator.save_state(str(args.folder / f"epoch{epoch + 1:04}"))

    print(opt.optimizer.diagnostics())  # the DASH that accelerate has wrapped
    print(f"loss {evaluate(accelerator.unwrap_model(model)):.9g}")


if __name__ == "__main__":
    main()
