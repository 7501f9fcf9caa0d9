"""Users change a result of graph passes: it stays equal to the original with the same change."""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize, report_of

PASSES = ["fold-conv-bn", "simplify", "merge-linears:force=true", "pad-channels:force=true", "jit-fusion"]
FACTOR = 0.5


class Attention(nn.Module):
    """Query, key and value of one input, a dropout, a GELU by hand, a constant, and an optional mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.drop, self.norm, self.head = nn.Dropout(0.3), nn.LayerNorm(12), nn.Linear(12, 6)
        self.register_buffer("steps", torch.arange(12))
        self.scale = 0.3

    def forward(self, x: Tensor, mask: Tensor | None = None, *, double: bool = False) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores + mask
        y = self.drop(scores.softmax(-1) @ v) + (self.steps.to(x.dtype) / 12).sin().exp()
        y = y * FACTOR * (1 + torch.erf(y / 1.414))
        y = self.head(self.norm(y))
        return y * 2 if double else y


class Convs(nn.Module):
    """Convolutions, a BatchNorm and activations, with numbers of channels that pad-channels pads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.act = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.SiLU()
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 5)
        self.scale = 0.3

    def forward(self, x: Tensor, mask: Tensor | None = None, *, double: bool = False) -> Tensor:
        y = self.act(self.bn(self.first(x))) * self.scale
        y = F.relu(self.second(y) + y)
        if mask is not None:
            y = y + mask.mean()
        y = self.head(self.drop(y).mean((2, 3)))
        return y * 2 if double else y


class Island(Attention):
    """Has a data-dependent branch, which breaks the graph."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, double: bool = False) -> Tensor:
        y = self.drop(x.relu() * 2 + 1)
        if y.sum() > 1e9:
            return y
        return super().forward(y, mask, double=double)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (Attention, (4, 5, 12)),
    "convs": (Convs, (4, 3, 8, 8)),
    "island": (Island, (4, 5, 12)),
}


def data(name: str, batch: int = 3, seed: int = 1, length: int | None = None) -> Tensor:
    shape = [batch, *MODELS[name][1][1:]]
    if length is not None:
        shape[-1 if name == "convs" else 1] = length
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[nn.Module, nn.Module]]:
    """Each model, and its result after all graph passes."""
    found = {}
    for name, (make, _) in MODELS.items():
        torch.manual_seed(0)
        model = enliven(make()).eval()
        # Each kernel of jit-fusion takes seconds to compile, so one of the models has them.
        passes = PASSES if name == "attention" else PASSES[:-1]
        fast = optimize(model, passes, example_inputs=(data(name, 4),))
        assert "applied" in [record.status for record in report_of(fast).passes], report_of(fast)
        assert {record.status for record in report_of(fast).passes} <= {"applied", "unchanged"}, report_of(fast)
        found[name] = model, fast
    return found


@pytest.fixture(params=list(MODELS))
def pair(request: pytest.FixtureRequest, made: dict[str, Any]) -> tuple[str, nn.Module, nn.Module]:
    """The name of a model, and copies of the model and its result."""
    model, fast = made[request.param]
    return request.param, copy.deepcopy(model), copy.deepcopy(fast)


def same(model: Any, fast: Any, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        wanted, got = model(*args, **kwargs), fast(*args, **kwargs)
    close(got, wanted)


def close(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == wanted.dtype
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-9}.get(wanted.dtype, 5e-2)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def _scale(model: nn.Module) -> None:
    model.scale = 0.9


def _train_dropout(model: nn.Module) -> None:
    model.drop.train()


def _head(model: nn.Module) -> None:
    torch.manual_seed(3)
    model.head = nn.Linear(model.head.in_features, 7)


def _write(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3).add_(0.01)


def _data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.7


def _parameter(model: nn.Module) -> None:
    first = next(module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d))
    first.weight = nn.Parameter(first.weight.detach() * 1.5)


def _state(model: nn.Module) -> None:
    state = {name: value + (0.1 if value.is_floating_point() else 0) for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def _state_in_part(model: nn.Module) -> None:
    state = {name: value * 1.1 for name, value in model.state_dict().items() if "head" in name}
    model.load_state_dict(state, strict=False)


def _assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() * 1 for name, value in model.state_dict().items()}, assign=True)


def _hook(model: nn.Module) -> None:
    model.head.register_forward_hook(lambda module, args, output: output * 2)


def _root_hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, output: output + 1)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))


def _drop_gone(model: nn.Module) -> None:
    model.drop = nn.Identity()


def _activation(model: nn.Module) -> None:
    model.drop = nn.Tanh()


def _forward(model: nn.Module) -> None:
    model.head.forward = lambda x: x[..., :2]


CHANGES = [
    *(_scale, _train_dropout, _head, _write, _data, _parameter, _state, _state_in_part, _assigned, _hook, _root_hook),
    *(_drop_gone, _activation, _forward),
]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at once", "after a call"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_changed_counts(change: Callable[[nn.Module], None], when: str, pair: Any) -> None:
    name, model, fast = pair
    if when == "after a call":
        same(model, fast, data(name))
    for one in (model, fast):
        change(one)
    for size in (3, 2):
        answers = []
        for one in (model, fast):
            torch.manual_seed(0)
            with torch.no_grad():
                answers.append(one(data(name, size)))
        close(answers[1], answers[0])


def test_a_global_counts(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, model, fast = pair
    same(model, fast, data(name))
    monkeypatch.setitem(globals(), "FACTOR", 0.8)
    same(model, fast, data(name))


@pytest.mark.slow
def test_other_arguments_and_sizes(pair: Any) -> None:
    name, model, fast = pair
    for batch, length in ((1, None), (7, None), (2, 6), (5, 11), (1, 4), (3, 5), (9, 7), (2, 9), (6, 3), (8, 12)):
        same(model, fast, data(name, batch, length=length))
    same(model, fast, data(name), torch.ones(()))
    same(model, fast, x=data(name))
    same(model, fast, data(name), double=True)
    same(model, fast, data(name), torch.ones(()), double=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, pair: Any) -> None:
    name, model, fast = pair
    same(model, fast, data(name))
    same(model.to(dtype), fast.to(dtype), data(name).to(dtype))
    same(model.float(), fast.float(), data(name))


@pytest.mark.slow
def test_copies_and_pickles(pair: Any) -> None:
    name, model, fast = pair
    kept = io.BytesIO()
    torch.save(fast, kept)
    kept.seek(0)
    twins = [copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), torch.load(kept, weights_only=False)]
    for twin in twins:
        assert type(twin) is type(model)
        assert list(twin.state_dict()) == list(model.state_dict())
        assert twin._compiled_call_impl.owner is twin
        changed = copy.deepcopy(model)
        for one in (twin, changed):
            _write(one)
        same(changed, twin, data(name))
    same(model, fast, data(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_a_shallow_copy_is_a_module_of_its_own(name: str, made: dict[str, Any]) -> None:
    model = copy.deepcopy(made[name][0])
    fast = optimize(model, ["simplify", "jit-fusion"], example_inputs=(data(name, 4),))
    twin, other = copy.copy(fast), copy.copy(model)
    twin.scale = other.scale = 0.9
    same(other, twin, data(name))
    same(model, fast, data(name))


def test_threads(pair: Any) -> None:
    name, model, fast = pair
    wrong: list[Any] = []

    def run(number: int) -> None:
        try:
            for size in (1 + number % 3, 4):
                same(model, fast, data(name, size, seed=number))
        except Exception as error:  # noqa: BLE001 - it is the assertion of the test
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_modes_and_transforms(pair: Any) -> None:
    name, model, fast = pair
    x = data(name)
    with torch.inference_mode():
        close(fast(x), model(x))
    same(model, fast, x)
    with torch.autocast("cpu", torch.bfloat16):
        same(model, fast, x)
    same(model, fast, x)
    if name != "island":
        with torch.no_grad():
            wanted, got = (torch.func.vmap(lambda row, one=one: one(row[None]))(x) for one in (model, fast))
        close(got, wanted)
    weights = {key: value * 1.2 for key, value in model.named_parameters()}
    with torch.no_grad():
        wanted, got = (torch.func.functional_call(one, weights, (x,)) for one in (model, fast))
    close(got, wanted)
    same(model, fast, x)


def test_gradients(pair: Any) -> None:
    name, model, fast = pair
    found = []
    for one in (model, copy.deepcopy(fast).requires_grad_()):
        x = data(name).requires_grad_()
        found.append(torch.autograd.grad(one(x).square().sum(), [x, *one.parameters()]))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_parts_by_hand(pair: Any) -> None:
    name, model, fast = pair
    same(model, fast, data(name))
    x = data(name)
    same(model.forward, fast.forward, x)
    features = torch.randn(3, model.head.in_features)
    same(model.head, fast.head, features)
    same(lambda y: F.linear(y, model.head.weight), lambda y: F.linear(y, fast.head.weight), features)


def test_tracers_exporters_and_compilers(pair: Any) -> None:
    name, model, fast = pair
    x = data(name)
    same(model, torch.compile(fast, backend="eager"), x)
    if name == "island":
        return
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.trace"):
        traced = torch.jit.trace(fast, (x,), check_trace=False)
    same(model, traced, data(name, 5))
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(fast, (x,), dynamic_shapes={"x": {0: batch}}, strict=False)
    same(model, program.module(), data(name, 5))
    assert set(program.state_dict) <= set(model.state_dict())
    same(model, fast, x)
