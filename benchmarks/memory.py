"""Print the peak memory of one way to use a model with many weights, as one JSON object; run it in a new process.

    python benchmarks/memory.py 256 optimize

The first argument is the size of the weights in MiB.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from synthetic import Weights
from torch import nn

from optimizer import optimize
from optimizer.model.working_copy import working_copy
from optimizer.tuning.benchmark import PeakMemory
from passes.graph.backend import GraphCall, compilation_of
from passes.torch_private import COMPILED_CALL


def _forward(model: Weights) -> nn.Module:
    with torch.no_grad():
        model(model.example())
    return model


def _optimize(model: Weights) -> nn.Module:
    return _called(optimize(model), model)


def _optimize_with_inputs(model: Weights) -> nn.Module:
    return _called(optimize(model, example_inputs=(model.example(),)), model)


def _called(fast: nn.Module, model: Weights) -> nn.Module:
    """Call a result: without example inputs, its folded weights are computed then."""
    with torch.no_grad():
        fast(model.example())
    return fast


def _working_copy(model: Weights) -> nn.Module:
    return working_copy(model).root


CASES: dict[str, Callable[[Weights], nn.Module]] = {
    "forward": _forward,
    "working-copy": _working_copy,
    "optimize": _optimize,
    "optimize-with-inputs": _optimize_with_inputs,
}


def storages(model: nn.Module) -> dict[int, int]:
    """The bytes of every storage of the model's parameters, buffers and derived tensors, by address."""
    call = model.__dict__.get(COMPILED_CALL)
    derived = compilation_of(call).derived.values() if isinstance(call, GraphCall) else ()
    tensors = (*model.parameters(), *model.buffers(), *derived)
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def measure(mebibytes: int, case: str) -> dict[str, object]:
    """Measure one case; call this in a process that has done nothing else."""
    # Run once on a model of one layer first: imports and set-up at the first use don't belong to the model.
    CASES[case](Weights(1).eval())
    model = Weights(mebibytes).eval()
    own = storages(model)
    peak = PeakMemory()
    with peak:
        result = CASES[case](model)
    new = {address: size for address, size in storages(result).items() if address not in own}
    return {
        "case": case,
        "model_bytes": sum(own.values()),
        "peak_bytes": peak.bytes,
        "peak_exact": peak.exact,
        "new_tensors": len(new),
        "new_bytes": sum(new.values()),
        "largest_tensor_bytes": max(own.values()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mebibytes", type=int)
    parser.add_argument("case", choices=CASES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(arguments.mebibytes, arguments.case)))
