"""Train a sharded GPT-2 in less memory, with FSDP2: the losses are the same with and without the pass.

    torchrun --nproc-per-node=2 examples/train_fsdp2.py
    torchrun --nproc-per-node=8 examples/train_fsdp2.py --steps 100 --checkpoint gpt2.pt

The order matters: `optimize` on each rank, then `fully_shard`, then the optimizer. The model is built from a
configuration of transformers and trained on random batches, on GPUs if there are any, and otherwise on CPUs with gloo.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from optimize_export import optimize, report_of
from passes import InsertCheckpoints


def gpt2() -> nn.Module:
    """A GPT-2 with four layers of width 128. Its cache is off: it would hold keys and values during the step."""
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


def batch_of(step: int, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens, other ones on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(0, 1000, (rows, 64), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each layer by itself, and then the rest."""
    for layer in model.transformer.h:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, steps: int, rows: int, device: torch.device) -> list[float]:
    """Train; returns the loss of each step on this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    model.train()
    losses = []
    for step in range(steps):
        loss = model(**batch_of(step, rows, device)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train without and with the pass, and save the weights of the latter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="rows of one rank")
    parser.add_argument("--memory-budget", type=float, default=0.5, help="a share of what the activations take")
    parser.add_argument("--checkpoint", help="save the trained weights here")
    arguments = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),))

    # Every rank starts from the same weights.
    torch.manual_seed(0)
    model = gpt2().to(device)
    # The modules that `sharded` shards are the units of the plan.
    checkpoints = InsertCheckpoints(memory_budget=arguments.memory_budget, units="transformer.h.*")
    example = batch_of(0, arguments.batch, device)
    # The result shares the model's parameters, so it is copied before they are sharded and trained.
    fast = copy.deepcopy(optimize(model, [checkpoints], mode="training", example_kwargs=example))

    losses = train(sharded(model, mesh), arguments.steps, arguments.batch, device)
    fast_losses = train(sharded(fast, mesh), arguments.steps, arguments.batch, device)
    # The keys and shapes are the original's, so a model that isn't optimized can load the checkpoint.
    weights = get_model_state_dict(fast, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        gpt2().load_state_dict(weights)
        if arguments.checkpoint:
            torch.save(weights, arguments.checkpoint)
        print(f"gpt2 on {mesh.size()} ranks: {report_of(fast).passes[-1].changes[-1].text}")
        print("losses as it is      ", *(f"{loss:.6f}" for loss in losses))
        print("losses with the pass ", *(f"{loss:.6f}" for loss in fast_losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
