# SPDX-License-Identifier: Apache-2.0
"""DASH with Lightning: ``torchrun --nproc-per-node 2 examples/lightning_ddp.py``."""

import argparse
import os
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from task import BATCH, dataset, evaluate, make_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from dash_optim import DASH, param_groups


class Classifier(lightning.LightningModule):
    """The model, and what Lightning asks about it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> DASH:
        """Return the optimizer; Lightning calls this when the processes know one another."""
        return DASH(
            param_groups(self.model, weight_decay=0.1, verbose=self.global_rank == 0),
            lr=1e-2,
            block_size=32,
            process_group=dist.group.WORLD,
        )


def main() -> None:
    """Train, and save after each epoch; go on where the folder's last epoch ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="lightning_checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    world, local = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.device_count() >= local else "cpu",
        devices=local,
        num_nodes=world // local,
        strategy="ddp",
        max_epochs=args.epochs,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(args.folder, filename="{epoch:04d}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    saved = sorted(args.folder.glob("*.ckpt"))
    trainer.fit(
        module, DataLoader(dataset(), batch_size=BATCH // world), ckpt_path=saved[-1] if saved else None
    )
    loss = evaluate(module.model)
    if trainer.is_global_zero:
        print(f"loss {loss:.9g}")


if __name__ == "__main__":
    main()
