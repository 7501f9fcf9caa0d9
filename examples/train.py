"""Train in half of the memory: the losses are the same with and without the passes.

    python examples/train.py
    python examples/train.py --model gpt2 --steps 20 --memory-budget 0.33
    torchrun --nproc-per-node=2 examples/train.py

A ResNet and a GPT-2 from transformers are built from a configuration and trained on random batches. The loop is a usual
one: autocast, gradient accumulation and clipping, gradients set to None, pinned batches that are copied while the
device works, and DistributedDataParallel over several processes. `optimize` comes before all that. It returns a model
that is trained like the original.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from optimize_export import optimize, report_of
from passes import InsertCheckpoints

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Images(Dataset[dict[str, torch.Tensor]]):
    """Random images; an index always gives the same image."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 64, 64, generator=generator)
        return {"pixel_values": image, "labels": torch.tensor(index % 10)}


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Random rows of tokens; an index always gives the same row."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 1000, (128,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def resnet() -> nn.Module:
    """A ResNet with two blocks per stage and half the channels of a ResNet-50."""
    sizes = {"embedding_size": 32, "hidden_sizes": [128, 256, 512, 1024], "depths": [2, 2, 2, 2]}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=10))


def gpt2() -> nn.Module:
    """A GPT-2 with three layers of width 128. Its cache is off: it would hold keys and values during the step."""
    sizes = {"n_layer": 3, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


MODELS = {"resnet": (resnet, Images), "gpt2": (gpt2, Texts)}


@dataclass(frozen=True)
class Place:
    """Where this process trains: its rank and device, from the variables of torchrun if there are any."""

    rank: int
    count: int
    device: torch.device

    @classmethod
    def of_now(cls) -> Place:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if "RANK" not in os.environ:
            return cls(0, 1, device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def say(self, text: str) -> None:
        """Print a text in one process only."""
        if self.rank == 0:
            print(text, flush=True)


class Training:
    """The training loop."""

    def __init__(self, arguments: argparse.Namespace, place: Place, data: Dataset[dict[str, torch.Tensor]]) -> None:
        self._arguments = arguments
        self._place = place
        is_shared = place.count > 1
        sampler: DistributedSampler[Any] | None = DistributedSampler(data, shuffle=False) if is_shared else None
        pinned = place.device.type == "cuda"
        self._loader = DataLoader(data, arguments.batch, sampler=sampler, drop_last=True, pin_memory=pinned)

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield batches on the device, without end."""
        while True:
            for batch in self._loader:
                # A pinned batch is copied while the device computes.
                yield {key: value.to(self._place.device, non_blocking=True) for key, value in batch.items()}

    def autocast(self) -> torch.autocast:
        """The autocast context of the forward."""
        precision, kind = self._arguments.precision, self._place.device.type
        # The cache would hold every weight in the lower precision until the end of the forward. Without it, weights are
        # cast where they are used, and again in the backward pass. Only weights that are used several times take longer
        # that way.
        return torch.autocast(kind, DTYPES.get(precision), enabled=precision != "fp32", cache_enabled=False)

    def run(self, model: nn.Module) -> tuple[torch.Tensor, float]:
        """Train; returns the mean loss of each step, and the median seconds per step."""
        accumulate, device = self._arguments.accumulate, self._place.device
        wrapped = model if self._place.count == 1 else DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        # Only needed for float16, where small gradients would become zero.
        scaler = torch.amp.GradScaler(device.type, enabled=self._arguments.precision == "fp16")
        batches, losses, seconds = self.batches(), [], []
        torch.manual_seed(self._place.rank)
        model.train()
        for _ in range(self._arguments.steps):
            started = time.perf_counter()
            loss = torch.zeros((), device=device)
            for number, batch in enumerate(islice(batches, accumulate)):
                # Gradients are exchanged once per step, with its last batch.
                is_last = number == accumulate - 1
                with nullcontext() if is_last or wrapped is model else wrapped.no_sync():
                    with self.autocast():
                        # Only the loss is held when the backward pass starts, as the plan assumes.
                        part = wrapped(**batch).loss / accumulate
                    scaler.scale(part).backward()
                loss += part.detach()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            # Kept on the device, because reading the number would wait for it.
            losses.append(loss)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        mean = torch.stack(losses)
        if self._place.count > 1:
            dist.all_reduce(mean)
        return mean / self._place.count, statistics.median(seconds)


def compare(name: str, arguments: argparse.Namespace, place: Place) -> None:
    """Train one model without and with the passes."""
    make, data = MODELS[name]
    training = Training(arguments, place, data())
    torch.manual_seed(0)
    model = make().to(place.device)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    losses, seconds = training.run(model)
    peak = allocated(place)

    # The result shares the model's parameters, so reset them to train again from the same start.
    model.load_state_dict(start)
    batch = next(training.batches())
    passes = ["fold-conv-bias", InsertCheckpoints(memory_budget=arguments.memory_budget)]
    # Plan under the same autocast as in training.
    with training.autocast():
        fast = optimize(model, passes, mode="training", example_kwargs=batch)
    allocated(place)
    fast_losses, fast_seconds = training.run(fast)
    fast_peak = allocated(place)

    record = report_of(fast).passes[-1]
    place.say(f"{name}: {record.changes[-1].text}")
    shown = ("planned", record.detail.eager.peak, record.detail.chosen.peak)
    if place.device.type == "cuda":
        shown = ("allocated", peak, fast_peak)
    for text, each, bytes_, taken in (
        ("as it is", losses, shown[1], seconds),
        ("with the passes", fast_losses, shown[2], fast_seconds),
    ):
        numbers = " ".join(f"{loss:.6f}" for loss in each.tolist())
        place.say(f"  {text:<15}  peak {bytes_ / 2**20:.1f} MiB ({shown[0]})  {taken:.3f} s a step  losses {numbers}")
    place.say(f"  largest difference of a loss: {(losses - fast_losses).abs().max():.1e}")


def allocated(place: Place) -> int:
    """The peak of allocated bytes on a GPU since the last call; 0 on a CPU, where torch doesn't report it."""
    if place.device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def main() -> None:
    """Compare both models, or the requested one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="of one process, and of one forward")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of one step")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--memory-budget", type=float, default=0.5, help="a share of what the activations take")
    arguments = parser.parse_args()
    place = Place.of_now()
    for name in MODELS if arguments.model is None else [arguments.model]:
        compare(name, arguments, place)
    if place.count > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
