# SPDX-License-Identifier: Apache-2.0
"""DASH with DistributedDataParallel: ``torchrun --nproc-per-node 2 examples/ddp.py``."""

import os

import torch
import torch.distributed as dist
from task import STEPS, batch, evaluate, make_model
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dash_optim import DASH, param_groups


def main() -> None:
    """Train."""
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model = make_model().to(device)
    ddp = DistributedDataParallel(model)
    opt = DASH(
        param_groups(model, weight_decay=0.1, verbose=rank == 0),
        lr=1e-2,
        block_size=32,
        process_group=dist.group.WORLD,  # all that sharing takes
    )
    for step in range(STEPS):
        x, y = (part.to(device) for part in batch(step, rank, ranks))
        opt.zero_grad()
        cross_entropy(ddp(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()

    loss = evaluate(model)
    if rank == 0:
        print(opt.summary())
        print(f"loss {loss:.9g}")
    dist.barrier()  # nobody leaves while another still speaks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
