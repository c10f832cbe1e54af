# SPDX-License-Identifier: Apache-2.0
"""DASH by name from timm's optimizer factory: ``python examples/timm_factory.py``."""

from functools import partial
from typing import Any

import torch
from timm import create_model
from timm.optim import OptimInfo, create_optimizer_v2
from timm.optim._optim_factory import default_registry
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dash_optim import DASH, param_groups


def dash(params: list[dict[str, Any]], **options: Any) -> DASH:
    """Return DASH for the groups that timm makes; those of its ``fallback_list`` go to AdamW."""
    for group in params:
        if group.pop("use_fallback", False):
            group["algorithm"] = "adamw"
    return DASH(params, **options)


default_registry.register(OptimInfo("dash", dash, "Shampoo on stacked blocks", has_betas=True))


def images() -> tuple[Tensor, Tensor]:
    """Return images in which one of four quarters is bright, and which one it is."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 3, 32, 32, generator=generator), torch.arange(32) % 4
    for image, quarter in zip(x, y.tolist(), strict=True):
        row, column = 16 * (quarter // 2), 16 * (quarter % 2)
        image[:, row : row + 16, column : column + 16] += 0.5
    return x, y


def train(model: nn.Module, steps: int = 10, **options: Any) -> tuple[DASH, float]:
    """Train by timm's own factories; return the optimizer and the last loss."""
    opt = create_optimizer_v2(model, opt="dash", lr=1e-2, weight_decay=0.05, block_size=64, **options)
    scheduler, _ = create_scheduler_v2(
        opt, sched="cosine", num_epochs=steps, warmup_epochs=2, warmup_lr=1e-3, warmup_prefix=True
    )
    x, y = images()
    for step in range(steps):
        scheduler.step(step)  # sets lr, times the lr_scale that layer_decay has given to each group
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    return opt, loss.item()


def main() -> None:
    """Train a vision transformer and a residual network."""
    torch.manual_seed(0)
    vit = create_model("test_vit", img_size=32, num_classes=4)
    _, loss = train(vit, layer_decay=0.75, fallback_list=["head*"], fallback_no_weight_decay=True)
    print(f"vision transformer: loss {loss:.9g}")
    resnet = create_model("test_resnet", num_classes=4)
    # groups with names; a convolution (out, in, h, w) is a matrix (out, in h w), unless nd="tensor" says otherwise
    opt, loss = train(resnet, param_group_fn=partial(param_groups, weight_decay=0.05, verbose=False))
    print(opt.summary())
    print(f"residual network: loss {loss:.9g}")


if __name__ == "__main__":
    main()
