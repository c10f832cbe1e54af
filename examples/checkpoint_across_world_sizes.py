# SPDX-License-Identifier: Apache-2.0
"""Go on from a checkpoint with another number of processes, or in another way.

``torchrun --nproc-per-node 2 examples/checkpoint_across_world_sizes.py`` takes ten steps and saves; ``torchrun --nproc-per-node 3 ... --way fsdp2`` takes the next ten.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import STEPS, batch, evaluate, make_model
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dash_optim import DASH, param_groups


def save(folder: Path, step: int, model: nn.Module, opt: DASH) -> None:
    """Write model and optimizer; every rank has to call this, and writes what it has."""
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, opt)}
    dcp.save(state, checkpoint_id=folder / f"step{step:06}")


def load(folder: Path, model: nn.Module, opt: DASH) -> int:
    """Take the newest checkpoint, each rank what it needs of it; return how many steps had been taken."""
    whole = sorted(path.parent for path in folder.glob("step*/.metadata"))  # which is written last
    if not whole:
        return 0
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, opt)}
    dcp.load(state, checkpoint_id=whole[-1])
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, state["optimizer"])
    return int(whole[-1].name.removeprefix("step"))


def main() -> None:
    """Train from where the folder's newest checkpoint is, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="dash_checkpoints")
    parser.add_argument("--way", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model: nn.Module = make_model().to(device)
    shared = None
    if args.way == "ddp":
        model, shared = DistributedDataParallel(model), dist.group.WORLD
    else:
        fully_shard(model)
    opt = DASH(
        param_groups(model, weight_decay=0.1, verbose=False), lr=1e-2, block_size=32, process_group=shared
    )
    start = load(args.folder, model, opt)
    for step in range(start, start + args.steps):
        x, y = (part.to(device) for part in batch(step % STEPS, rank, ranks))
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    save(args.folder, start + args.steps, model, opt)

    loss = evaluate(model)
    if rank == 0:
        print(f"steps {start} to {start + args.steps} as {args.way} on {ranks}, loss {loss:.9g}")
    dist.barrier()  # nobody leaves while another still speaks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
