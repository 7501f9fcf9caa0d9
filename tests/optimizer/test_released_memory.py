"""After `optimize` or a comparison, no reference cycles keep activations or copies alive until garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize
from optimizer.model import Samples
from optimizer.parity import measure_reference
from optimizer.pipeline import optimizing

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Masked(nn.Module):
    """Masks with the lowest number of the dtype, which is another number in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, torch.full((), torch.finfo(x.dtype).min)).clamp(min=-1)


class RaisesAtFive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 5:
            raise ValueError("five rows")
        return x * 2


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    # Modules that torch imports at first use keep the frames of that use alive.
    optimize(enliven(Net()).eval(), example_inputs=(X,))
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_transactions_go_with_their_call(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    class Noted(optimizing.Transactions):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    monkeypatch.setattr(optimizing, "Transactions", Noted)
    result = optimize(enliven(Net()).eval(), mode=mode, example_inputs=(X,))
    assert result is not None
    assert [each() for each in made] == [None]


@pytest.mark.parametrize("kind", [Masked, RaisesAtFive, Net])
def test_a_reference_goes_with_its_last_use(kind: type[nn.Module]) -> None:
    model = enliven(kind()).eval()
    reference = measure_reference(model, Samples((X,)))
    held = [weakref.ref(value) for one in reference.original.calls for value in one.own.values.values()]
    del reference
    assert held
    assert [each() for each in held if each() is not None] == []
