# SPDX-License-Identifier: Apache-2.0
"""DASH with autocast and a gradient scaler: ``python examples/grad_scaler.py``; ``--dtype bfloat16`` needs no scaler."""

import argparse

import torch
from task import STEPS, batch, evaluate, make_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dash_optim import DASH, param_groups


def train_step(
    model: nn.Module, opt: DASH, scaler: torch.amp.GradScaler, x: Tensor, y: Tensor, dtype: torch.dtype
) -> None:
    """Take a step in half precision; parameters, and all that DASH keeps, are in float32."""
    opt.zero_grad()
    with torch.autocast(x.device.type, dtype):
        loss = cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)  # before clipping
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(opt)  # not opt.step(): the scaler leaves the step out if a scaled gradient has overflowed
    scaler.update()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    dtype = getattr(torch, parser.parse_args().dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model = make_model().to(device)
    opt = DASH(param_groups(model, weight_decay=0.1, verbose=False), lr=1e-2, block_size=32)
    # bfloat16 has the range of float32; in float16 a scale that is too large overflows, and the scaler halves it
    scaler = torch.amp.GradScaler(device, init_scale=2.0**24, enabled=dtype == torch.float16)
    for step in range(STEPS):
        x, y = (part.to(device) for part in batch(step))
        train_step(model, opt, scaler, x, y, dtype)

    taken = int(opt.state[model[0].weight]["step"])
    print(f"{taken} of {STEPS} steps taken, scale {scaler.get_scale():g}, loss {evaluate(model):.9g}")


if __name__ == "__main__":
    main()
