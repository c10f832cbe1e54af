# SPDX-License-Identifier: Apache-2.0
"""DASH with fully_shard (FSDP2): ``torchrun --nproc-per-node 2 examples/fsdp2.py``."""

import os

import torch
import torch.distributed as dist
from task import STEPS, batch, evaluate, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

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
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in (model[0], model[3], model[5]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = DASH(
        param_groups(model, weight_decay=0.1, verbose=rank == 0), lr=1e-2, block_size=32
    )  # after fully_shard
    for step in range(STEPS):
        x, y = (part.to(device) for part in batch(step, rank, ranks))
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # over all ranks: gradients are DTensors
        opt.step()

    loss = evaluate(model)
    if rank == 0:
        print(opt.summary())
        print(f"loss {loss:.9g}")
    dist.barrier()  # nobody leaves while another still speaks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
