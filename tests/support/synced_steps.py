"""Training steps of several processes with synchronized BatchNorms, and of one process on the whole batch.

Each process runs `python synced_steps.py RANK FOLDER BACKEND PASSES...` and writes its results for each list of passes
to FOLDER/RANK.pt. With BACKEND nccl it uses the GPU of its number, with gloo the CPU. On a CPU, torch has no kernels
for the synchronization, and refuses it. `rehearse` adds kernels that are plain sums. So the code of
torch.nn.SyncBatchNorm, of its gradient and of DistributedDataParallel runs as on a GPU.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ranks import Logged, leave
from tiny_models import enliven
from torch import Tensor, distributed, nn

ROWS, STEPS = 4, 3


class Convolutions(nn.Module):
    """Convolutions with BatchNorms, whose outputs go to functions that a synchronizing layer also calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.BatchNorm1d(6)])
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(F.relu(self.norms[0](self.first(x))) + 1)
        y = self.norms[1](self.second(y))
        y = F.gelu(F.gelu(torch.cat([y, y], dim=2)).sigmoid()).mean((2, 3))
        return F.gelu(self.norms[2](self.head(y)))


def made() -> nn.Module:
    torch.manual_seed(0)
    # In float64, a difference between two processes and one can't be rounding.
    return enliven(Convolutions().double()).train()


def batch(ranks: int) -> Tensor:
    """The rows of all processes, in order; each process has other statistics."""
    shape, generators = (ROWS, 3, 8, 8), [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    rows = [torch.randn(shape, generator=generator, dtype=torch.float64) for generator in generators]
    return torch.cat([(rank + 1) * values + rank for rank, values in enumerate(rows)])


def steps(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """The losses of some steps, and the state after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    state = {name.removeprefix("module."): value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    return {"losses": losses, "state": state}


def run_together(commands: Sequence[list[str]], environment: Mapping[str, str]) -> None:
    """Run all commands at once, and check that each succeeds; no process is left over."""
    running = [subprocess.Popen(each, env=environment, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        for process in running:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
    finally:
        for process in running:
            process.kill()


def run_ranks(folder: Path, backend: str, *passes: str, ranks: int = 2) -> list[list[dict[str, Any]]]:
    """The results of each process, for each list of passes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", __file__]
    run_together([[*command, str(rank), str(folder), backend, *passes] for rank in range(ranks)], environment)
    seen = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
    return [list(each) for each in zip(*seen, strict=True)]


def check_ranks(ranks: list[dict[str, Any]]) -> None:
    """Check that the processes trained as one does on the whole batch."""
    whole = steps(made(), batch(len(ranks)))
    for each in zip(whole["losses"], *(rank["losses"] for rank in ranks), strict=True):
        torch.testing.assert_close(sum(each[1:]) / len(ranks), each[0], rtol=1e-9, atol=1e-12)
    for name, value in whole["state"].items():
        for rank in ranks:
            torch.testing.assert_close(rank["state"][name], value, rtol=1e-9, atol=1e-12, msg=name)


def rehearse() -> None:
    """Make this process treat the CPU as a device that synchronizes."""

    def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        dims = _all_but_channels(input)
        return input.mean(dims), (input.var(dims, unbiased=False) + eps).rsqrt()

    def gather(
        input: Tensor, mean: Tensor, invstd: Tensor, running_mean: Any, running_var: Any, momentum: float, eps: float,
        counts: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        share = (counts / counts.sum()).unsqueeze(1)
        whole = (mean * share).sum(0)
        var = ((invstd**-2 - eps + (mean - whole) ** 2) * share).sum(0)
        if running_mean is not None:
            running_mean.lerp_(whole, momentum)
            running_var.lerp_(var * counts.sum() / (counts.sum() - 1), momentum)
        return whole, (var + eps).rsqrt()

    def apply(input: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
        return F.batch_norm(input, mean, invstd**-2 - eps, weight, bias, False, 0.0, eps)

    def reduce(
        gradient: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Any, *wanted: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = _all_but_channels(input)
        sums, products = gradient.sum(dims), (gradient * (input - _like(mean, input))).sum(dims)
        return sums, products, products * invstd, sums.clone()

    def backward(
        gradient: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, sums: Tensor, products: Tensor,
        counts: Tensor,
    ) -> Tensor:  # fmt: skip
        count = counts.sum()
        slope = _like(products / count * invstd**2, input) * (input - _like(mean, input))
        return (gradient - _like(sums / count, input) - slope) * _like(invstd * weight, input)

    kernels = {
        "batch_norm_stats": stats, "batch_norm_gather_stats_with_counts": gather, "batch_norm_elemt": apply,
        "batch_norm_backward_reduce": reduce, "batch_norm_backward_elemt": backward,
    }  # fmt: skip
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CPU")
    _KEPT.append(library)
    torch._C._get_privateuse1_backend_name = lambda: "cpu"
    nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None


# Kept alive, because the kernels of a library are removed with it.
_KEPT: list[Any] = []


def _all_but_channels(value: Tensor) -> list[int]:
    return [dim for dim in range(value.dim()) if dim != 1]


def _like(channels: Tensor, value: Tensor) -> Tensor:
    return channels.reshape(-1, *(1,) * (value.dim() - 2))


def _peak(model: nn.Module, x: Tensor) -> int:
    from passes.checkpointing.live_bytes import LiveBytes
    from passes.checkpointing.profile import loss_of, there_before

    with LiveBytes(without=there_before(model, (x,), {})) as live:
        loss_of(model(x)).backward()
    return int(live.peak)


def _main(rank: int, folder: Path, backend: str, *lists: str) -> None:
    from optimizer import optimize

    ranks = 2
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, store=distributed.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks
    )
    x = batch(ranks)[rank * ROWS : (rank + 1) * ROWS].to(device)
    results = [optimize(made().to(device), passes, mode="training", example_inputs=(x,)) for passes in lists]
    if device.type == "cpu":
        rehearse()
    torch.save([_seen(result, x) for result in results], folder / f"{rank}.pt")
    leave()


def _seen(result: nn.Module, x: Tensor) -> dict[str, Any]:
    from optimizer import report_of

    warned = Logged()
    logging.getLogger("passes").addHandler(warned)
    devices = [x.device] if x.is_cuda else None
    seen = steps(nn.parallel.DistributedDataParallel(result, device_ids=devices), x)
    report = report_of(result)
    seen["status"], seen["verified"] = [record.status for record in report.passes], report.verified
    # The peak of a step, and the peak that was planned for it.
    seen["peak"] = _peak(result, x)
    seen["planned"] = [record.detail.chosen.peak for record in report.passes if record.detail is not None]
    seen["warned"] = warned.messages
    return seen


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
