"""Train models in two processes, with and without a plan: `torchrun --nproc-per-node=2 distributed_steps.py SCENARIO…`.

Each scenario prints one line of JSON for each rank.
"""

import copy
import json
import logging
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Logged, leave
from tiny_models import enliven
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from optimizer import optimize
from passes import FoldConvBias, InsertCheckpoints


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Words(nn.Module):
    """A model with tied weights, and with a layer that is never used."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(5))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential()
        for number in range(4):
            conv = nn.Conv2d(8 if number else 3, 8, 3, padding=1)
            self.layers.extend([conv, nn.BatchNorm2d(8), nn.ReLU(inplace=True)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3))).square().mean()


def words():
    return Words(), lambda generator: torch.randint(0, 20, (4, 16), generator=generator)


def images():
    return Images(), lambda generator: torch.randn(4, 3, 8, 8, generator=generator)


def whole(model):
    """The state dict, with sharded parameters gathered."""
    state = model.state_dict()
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for name, value in state.items()
    }


def train(model, batches, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(7 + rank)
    losses = []
    for _ in range(3):
        loss = model(batches(generator))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


_PLANNED = {}


def planned(build, budget, passes=(), **options):
    """A copy of a model with its plan; each combination of model, budget and options is planned only once."""
    key = (build, budget, *options.items())
    if key not in _PLANNED:
        model, batches = made(build)
        example = batches(torch.Generator().manual_seed(100))
        plan = InsertCheckpoints(memory_budget=budget, **options)
        _PLANNED[key] = optimize(model, mode="training", passes=[*passes, plan], example_inputs=(example,))
    return copy.deepcopy(_PLANNED[key])


def made(build):
    torch.manual_seed(3)
    model, batches = build()
    return enliven(model), batches


class Gathers:
    """Counts the calls of `unshard`, and the maximum number of units that are whole at the same time."""

    def __init__(self, model):
        self.asked = 0
        self.together = 0
        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self.units:
            unit.unshard = self._counted(unit, unit.unshard)

    def _counted(self, unit, unshard):
        def counted():
            unshard()
            self.asked += 1
            self.together = max(self.together, sum(map(_is_whole, self.units)))

        return counted


def _is_whole(unit):
    return not isinstance(next(unit.parameters()), torch.distributed.tensor.DTensor)


def sharded(model, mesh, policy=None, *, whole_between=False):
    keywords = {"mesh": mesh, "reshard_after_forward": not whole_between}
    if policy is not None:
        keywords["mp_policy"] = policy
    for block in model.blocks:
        fully_shard(block, **keywords)
    return fully_shard(model, **keywords)


def compare(rank, build, budget, wrap, passes=(), **options):
    model, batches = made(build)
    expected_model, got_model = wrap(model), wrap(planned(build, budget, passes, **options))
    gathers = Gathers(got_model)
    expected, got = train(expected_model, batches, rank), train(got_model, batches, rank)
    before, after = whole(expected_model), whole(got_model)
    return {
        "expected": expected,
        "got": got,
        "parameters": all(torch.equal(before[name], after[name]) for name in before),
        "gathered": gathers.asked,
        "together": gathers.together,
    }


def ddp(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def other_plans(rank, mesh):
    """Plan for a different budget on each rank."""
    fast = sharded(planned(words, 0.5 if rank else "min"), mesh)
    try:
        fast(made(words)[1](torch.Generator()))
    except Exception as error:  # noqa: BLE001 - the test gets the error
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def main():
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    scenarios = {
        "ddp-tied-unused": lambda: compare(rank, words, 0.5, ddp),
        "ddp-folded": lambda: compare(rank, images, "min", ddp, [FoldConvBias()]),
        "fsdp-min": lambda: compare(rank, words, "min", lambda model: sharded(model, mesh)),
        "fsdp-units": lambda: compare(rank, words, "min", lambda model: sharded(model, mesh), units="blocks.*"),
        "fsdp-whole": lambda: compare(rank, words, "min", lambda model: sharded(model, mesh, whole_between=True)),
        "fsdp-bf16": lambda: compare(rank, words, "min", lambda model: sharded(model, mesh, half)),
        "fsdp-other-plans": lambda: other_plans(rank, mesh),
    }
    for name in sys.argv[1:] or scenarios:
        seen = Logged()
        logging.getLogger().addHandler(seen)
        found = scenarios[name]()
        logging.getLogger().removeHandler(seen)
        # Use one short write, because the other rank writes to the same pipe.
        sys.stdout.write("\n" + json.dumps({"scenario": name, "rank": rank, "logged": seen.messages, **found}) + "\n")
        sys.stdout.flush()
        dist.barrier()
    leave()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    main()
