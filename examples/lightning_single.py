# SPDX-License-Identifier: Apache-2.0
"""DASH with Lightning in one process: ``python examples/lightning_single.py``."""

import argparse
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from task import BATCH, STEPS, dataset, evaluate, make_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from dash_optim import DASH, param_groups

EPOCHS = 2


class Classifier(lightning.LightningModule):
    """The model, and what Lightning asks about it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer, and a schedule that moves after each step."""
        opt = DASH(param_groups(self.model, weight_decay=0.1), lr=1e-2, block_size=32)
        scheduler = OneCycleLR(opt, max_lr=1e-2, total_steps=EPOCHS * STEPS)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_epoch_end(self) -> None:
        """Log how the optimizer fares."""
        self.log_dict(self.optimizers().diagnostics().scalars())


def main() -> None:
    """Train, and save after each epoch; go on where the folder's last epoch ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="lightning_checkpoints")
    args = parser.parse_args()
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=EPOCHS,
        gradient_clip_val=0.5,
        callbacks=[
            ModelCheckpoint(args.folder, filename="{epoch:04d}", save_top_k=-1),
            LearningRateMonitor("step", log_momentum=True),
        ],
        logger=CSVLogger(args.folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    saved = sorted(args.folder.glob("*.ckpt"))
    trainer.fit(module, DataLoader(dataset(), batch_size=BATCH), ckpt_path=saved[-1] if saved else None)
    print(f"loss {evaluate(module.model):.9g}")


if __name__ == "__main__":
    main()
