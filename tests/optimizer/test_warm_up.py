"""`warm_up` captures the graphs of a result before its first real call."""

import copy
import pickle

import pytest
import torch
from tiny_models import enliven
from torch import Tensor, nn

from optimize_export.errors import UsageError
from optimizer import optimize
from passes.graph import backend

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x)) * scale
        return y


@pytest.fixture
def fast() -> nn.Module:
    torch.manual_seed(0)
    inputs = torch.randn(3, 3, 6, 6), torch.tensor(2.0)
    return optimize(enliven(Net()).eval(), ["fold-conv-bn"], example_inputs=inputs)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The graphs that are captured from now on."""
    found: list[object] = []
    make = backend._Program.__init__

    def counted(self: object, *args: object) -> None:
        found.append(self)
        make(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(backend._Program, "__init__", counted)
    return found


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))], ids=["copy", "pickle"]
)
def test_no_call_captures_after_it(fast: nn.Module, captures: list[object], again) -> None:
    new = again(fast)
    assert new.warm_up.owner is new
    new.warm_up(batch_sizes=(1, 4), modes=tuple(MODES))
    known = len(captures)
    assert known > 0
    for mode in MODES.values():
        for size in (1, 2, 7):
            outside = torch.randn(size, 3, 6, 6), torch.tensor(1.0)
            with mode():
                new(*outside)
                new(torch.randn(size, 3, 6, 6), torch.tensor(1.0))
    assert len(captures) == known


def test_by_default_it_calls_the_batch_size_of_the_example_inputs(fast: nn.Module) -> None:
    shapes: list[tuple[int, ...]] = []
    fast.conv.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    fast.warm_up()
    assert {tuple(map(int, shape)) for shape in shapes} == {(3, 3, 6, 6)}


def test_the_inputs_may_come_from_a_function_and_be_unpickled() -> None:
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))).eval()
    fast = optimize(model, example_inputs=lambda size, generator: (torch.randn(size, 3, 4, 4, generator=generator),))
    pickle.loads(pickle.dumps(fast)).warm_up(batch_sizes=(1, 5))


def test_what_it_cant_do_it_says(fast: nn.Module) -> None:
    with pytest.raises(UsageError, match="warm_up has no mode 'eval'; the modes are: no_grad, inference_mode, grad"):
        fast.warm_up(modes=("eval",))
    with pytest.raises(UsageError, match="A batch size must be at least 1, not 0"):
        fast.warm_up(batch_sizes=(0,))
    with pytest.raises(UsageError, match=r"warm_up\(\) needs the example inputs, and this result has none"):
        optimize(Net()).warm_up()


def test_an_attribute_of_the_model_with_this_name_stays() -> None:
    class Warm(Net):
        def warm_up(self) -> str:
            return "own"

    assert optimize(Warm()).warm_up() == "own"
