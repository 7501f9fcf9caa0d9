"""Tune a training step on one rank, and train with its choices on all ranks: DistributedDataParallel, or FSDP2.

    python examples/train_tuned.py
    torchrun --nproc-per-node=2 examples/train_tuned.py
    torchrun --nproc-per-node=2 examples/train_tuned.py --fsdp2
    torchrun --nproc-per-node=8 examples/train_tuned.py --rows 1024 --tune-seconds 180

Rank 0 measures, and writes the folder `tuned`. A later run reads it instead. `--rows` counts the rows of a step on all
ranks together, so the losses don't depend on the number of ranks. On GPUs, the BatchNorms of the model use the
statistics of all ranks. torch synchronizes on GPUs only, so on CPUs the model has GroupNorms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from optimize_export import TrainingTuning, optimize, profile, tune_training
from passes import InsertCheckpoints

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Returns the loss: a plan of checkpoints assumes that a step holds nothing else when the backward pass starts."""

    def __init__(self, *, batch_norm: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 4, stride=4)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(64, 64, 3, padding=1, groups=64),
                nn.BatchNorm2d(64) if batch_norm else nn.GroupNorm(8, 64),
                nn.ReLU(),
                nn.Conv2d(64, 64, 1),
            )
            for _ in range(4)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def training_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(*batch)


def make_optimizer(parameters: Any, **how: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, **how)


def join_group() -> torch.device:
    """Join the process group of torchrun, or one of this process alone; returns the device of this rank."""
    on_gpu, local = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    if on_gpu:
        torch.cuda.set_device(local)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", **alone)
    return torch.device("cuda", local) if on_gpu else torch.device("cpu")


def batch_of(step: int, rows: int, device: torch.device) -> Batch:
    """This rank's share of the rows of a step."""
    images = torch.randn(rows, 3, 64, 64, generator=torch.Generator().manual_seed(step))
    share = slice(dist.get_rank(), None, dist.get_world_size())
    return images[share].to(device), (torch.arange(rows) % 10)[share].to(device)


def tuned_by_rank_0(model: nn.Module, batch: Batch, folder: Path, seconds: float) -> TrainingTuning:
    """The tuned step that rank 0 measured, or that the folder has; ranks of other machines needn't have the folder."""
    # Tuning may take longer than its seconds, because it ends what it has begun, such as compiling. By default NCCL
    # gives up after 10 minutes, and gloo after 30. So the others wait in a group with a longer timeout, and the group
    # that trains keeps the short one. It is a gloo group also on GPUs, which NCCL would keep busy with waiting.
    waiting = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds, hours=1))
    found: list[Any] = [None]
    if dist.get_rank() == 0 and folder.is_dir():
        found = [TrainingTuning.from_json(json.loads((folder / "training.json").read_text()))]
    elif dist.get_rank() == 0:
        found = [tune_training(model, training_step, batch, optimizer=make_optimizer, tune_seconds=seconds)]
        found[0].save(folder)
    dist.broadcast_object_list(found, src=0, group=waiting)
    return found[0]


def distributed(model: nn.Module, device: torch.device) -> nn.Module:
    """The model under DistributedDataParallel.

    DDP sums gradients in buckets, which are flat tensors. With `gradient_as_bucket_view`, the gradients are views of
    them instead of copies, with the strides that the parameters have when DDP makes the buckets. So convert to
    channels_last before. With contiguous weights, convolutions of images in channels_last may return gradients in
    other strides, and so may compiled code. DDP copies these more slowly, and warns once: "Grad strides do not match
    bucket view strides".

    `static_graph` promises that each step uses the same parameters, so that DDP doesn't look for unused ones.
    """
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, static_graph=True, gradient_as_bucket_view=True)


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    """Shard each block by itself, and then the rest."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(
    model: nn.Module, tuned: TrainingTuning, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Train as the tuned step recommends; returns the losses, and what this rank measured."""
    setup, shards, on_gpu = tuned.recommended, arguments.fsdp2, device.type == "cuda"
    precision, layout = setup.precision, torch.channels_last if setup.channels_last else torch.preserve_format
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = setup.cudnn_benchmark
    autocast = torch.autocast(device.type, DTYPES.get(precision), enabled=precision in DTYPES, cache_enabled=False)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    if not shards:
        # FSDP2 refuses weights in channels_last. There, convolutions convert them in each call.
        model.to(memory_format=layout)
    images, labels = batch_of(0, arguments.rows, device)
    example = images.to(memory_format=layout), labels
    with autocast:
        if shards:
            # Instead of the passes of the choices: this plan knows the modules that are sharded.
            passes = [InsertCheckpoints(memory_budget=0.5, units="blocks.*")]
            model = optimize(model, passes, mode="training", example_inputs=example)
        else:
            model = optimize(model, choices=tuned, mode="training", example_inputs=example)
        # The tensors of a step beyond parameters, their gradients and the batch. It has to run before the wrapping.
        activations = profile(model, example_inputs=example, mode="training").peak_memory
    if not shards and setup.compile:
        for each in [model] if setup.compile == "whole" else model.blocks:
            each.compile()
    wrapped = sharded(model, device) if shards else distributed(model, device)
    # `fully_shard` replaces the parameters, so the optimizer comes after it.
    how = {} if setup.optimizer == "as-is" else {setup.optimizer: True}
    optimizer = make_optimizer(model.parameters(), **how)

    losses, seconds = [], []
    if on_gpu:
        # The peak until here is that of tuning.
        torch.cuda.reset_peak_memory_stats()
    for number in range(arguments.steps):
        images, labels = batch_of(number, arguments.rows, device)
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=setup.set_to_none)
        with autocast:
            loss = wrapped(images.to(memory_format=layout), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    # All ranks have the same number of rows, so the mean of their means is that of all rows.
    mean = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(mean)
    parameters = list(model.parameters())
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in parameters]
    return {
        "losses": mean.tolist(),
        "norm": torch.stack([each.detach().double().norm() for each in whole]).norm().item(),
        "rate": len(labels) / statistics.median(seconds),
        "activations": activations.bytes,
        "allocated": torch.cuda.max_memory_allocated() if on_gpu else None,
        "keep_strides": all(each.grad.stride() == each.stride() for each in parameters),
    }


def main() -> None:
    """Tune, train, and print the results of all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32, help="of a step on all ranks together; a multiple of the ranks")
    parser.add_argument("--tune-seconds", type=float, default=10.0)
    parser.add_argument("--tuned", type=Path, default=Path("tuned"), help="the folder of the tuned step")
    parser.add_argument("--fsdp2", action="store_true", help="shard the model, and train it with checkpoints")
    arguments = parser.parse_args()
    device = join_group()
    if arguments.rows % dist.get_world_size():
        parser.error("--rows must be a multiple of the number of ranks.")
    # Every rank starts from the same weights.
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model: nn.Module = Net(batch_norm=on_gpu).to(device)
    batch = batch_of(0, arguments.rows, device)
    if on_gpu:
        # Before tuning, which sends nothing: there, each layer uses the statistics of rank 0's rows.
        model = optimize(model, ["sync-batch-norm"], mode="training", example_inputs=batch)
    tuned = tuned_by_rank_0(model, batch, arguments.tuned, arguments.tune_seconds)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, train(model, tuned, arguments, device))
    if dist.get_rank() == 0:
        print(next(line for line in str(tuned).splitlines() if line.startswith("recommended: ")))
        for number, each in enumerate(ranks):
            losses = " ".join(f"{loss:.7f}" for loss in each["losses"])
            print(f"rank {number}: losses {losses}  norm of the weights {each['norm']:.12f}")
            allocated = f", {each['allocated'] / 2**20:.1f} MiB allocated" if on_gpu else ""
            peak = f"{each['activations'] / 2**20:.1f} MiB of activations{allocated}"
            kept = "those" if each["keep_strides"] else "not those"
            print(f"  {each['rate']:.0f} samples/s  peak {peak}  strides of gradients: {kept} of the parameters")
        print(f"all ranks: {sum(each['rate'] for each in ranks):.0f} samples/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
