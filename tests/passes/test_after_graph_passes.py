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
    """Query, key and value of one input, a fold, a dropout, a GELU by hand, a constant, and an optional mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))
        self.bn, self.drop, self.norm, self.head = (
            nn.BatchNorm1d(12),
            nn.Dropout(0.3),
            nn.LayerNorm(12),
            nn.Linear(12, 6),
        )
        self.register_buffer("steps", torch.arange(12))
        self.scale = 0.3

    def forward(self, x: Tensor, mask: Tensor | None = None, *, double: bool = False) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores + mask
        y = self.out(self.drop(scores.softmax(-1) @ v))
        y = self.bn(y.transpose(1, 2)).transpose(1, 2) + (self.steps.to(x.dtype) / 12).sin().exp()
        y = y * FACTOR * (1 + torch.erf(y / 1.414))
        y = self.head(self.norm(y))
        return y * 2 if double else y


class Island(Attention):
    """Has a data-dependent branch, which breaks the graph."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, double: bool = False) -> Tensor:
        y = self.drop(x.relu() * 2 + 1)
        if y.sum() > 1e9:
            return y
        return super().forward(y, mask, double=double)


MODELS: dict[str, Callable[[], nn.Module]] = {"attention": Attention, "island": Island}


def data(batch: int = 3, seed: int = 1, length: int = 5) -> Tensor:
    return torch.randn(batch, length, 12, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[nn.Module, nn.Module]]:
    """Each model, and its result after all graph passes."""
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = enliven(make()).eval()
        # Each kernel of jit-fusion takes seconds to compile, so one of the models has them.
        passes = PASSES if name == "attention" else PASSES[:-1]
        fast = optimize(model, passes, example_inputs=(data(4),))
        assert {record.status for record in report_of(fast).passes} == {"applied"}, report_of(fast)
        found[name] = model, fast
    return found


@pytest.fixture(params=list(MODELS))
def pair(request: pytest.FixtureRequest, made: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """Copies of a model and its result."""
    return copy.deepcopy(made[request.param])


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


def _state_in_part(model: nn.Module) -> None:
    state = {name: value * 1.1 for name, value in model.state_dict().items() if "head" in name}
    model.load_state_dict(state, strict=False)


def _root_hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, output: output + 1)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))


def _drop_gone(model: nn.Module) -> None:
    model.drop = nn.Identity()


def _forward(model: nn.Module) -> None:
    model.head.forward = lambda x: x[..., :2]


# Other ways to change weights: see `graph/test_derived.py`.
CHANGES = [_scale, _train_dropout, _head, _write, _state_in_part, _root_hook, _drop_gone, _forward]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "when"),
    [
        *((change, "after a call") for change in CHANGES),
        *((change, "at once") for change in (_scale, _write, _root_hook)),
    ],
)
def test_what_is_changed_counts(change: Callable[[nn.Module], None], when: str, pair: Any) -> None:
    model, fast = pair
    if when == "after a call":
        same(model, fast, data())
    for one in (model, fast):
        change(one)
    for size in (3, 2):
        answers = []
        for one in (model, fast):
            torch.manual_seed(0)
            with torch.no_grad():
                answers.append(one(data(size)))
        close(answers[1], answers[0])


def test_a_global_counts(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = pair
    same(model, fast, data())
    monkeypatch.setitem(globals(), "FACTOR", 0.8)
    same(model, fast, data())


@pytest.mark.slow
def test_other_arguments_and_sizes(pair: Any) -> None:
    model, fast = pair
    for batch, length in ((1, 5), (7, 5), (2, 6), (5, 11), (1, 4), (3, 5), (9, 7), (2, 9), (6, 3), (8, 12)):
        same(model, fast, data(batch, length=length))
    same(model, fast, data(), torch.ones(()))
    same(model, fast, x=data())
    same(model, fast, data(), double=True)
    same(model, fast, data(), torch.ones(()), double=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, pair: Any) -> None:
    model, fast = pair
    same(model, fast, data())
    same(model.to(dtype), fast.to(dtype), data().to(dtype))
    same(model.float(), fast.float(), data())


@pytest.mark.slow
def test_copies_and_pickles(pair: Any) -> None:
    model, fast = pair
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
        same(changed, twin, data())
    same(model, fast, data())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_a_shallow_copy_is_a_module_of_its_own(name: str, made: dict[str, Any]) -> None:
    model = copy.deepcopy(made[name][0])
    fast = optimize(model, ["simplify", "jit-fusion"], example_inputs=(data(4),))
    twin, other = copy.copy(fast), copy.copy(model)
    twin.scale = other.scale = 0.9
    same(other, twin, data())
    same(model, fast, data())


def test_threads(pair: Any) -> None:
    model, fast = pair
    wrong: list[Any] = []

    def run(number: int) -> None:
        try:
            for size in (1 + number % 3, 4):
                same(model, fast, data(size, seed=number))
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
    model, fast = pair
    x = data()
    with torch.inference_mode():
        close(fast(x), model(x))
    same(model, fast, x)
    with torch.autocast("cpu", torch.bfloat16):
        same(model, fast, x)
    same(model, fast, x)
    if not isinstance(model, Island):
        with torch.no_grad():
            wanted, got = (torch.func.vmap(lambda row, one=one: one(row[None]))(x) for one in (model, fast))
        close(got, wanted)
    weights = {key: value * 1.2 for key, value in model.named_parameters()}
    with torch.no_grad():
        wanted, got = (torch.func.functional_call(one, weights, (x,)) for one in (model, fast))
    close(got, wanted)
    same(model, fast, x)


def test_gradients(pair: Any) -> None:
    model, fast = pair
    found = []
    for one in (model, copy.deepcopy(fast).requires_grad_()):
        x = data().requires_grad_()
        found.append(torch.autograd.grad(one(x).square().sum(), [x, *one.parameters()]))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_parts_by_hand(pair: Any) -> None:
    model, fast = pair
    same(model, fast, data())
    x = data()
    same(model.forward, fast.forward, x)
    features = torch.randn(3, model.head.in_features)
    same(model.head, fast.head, features)
    same(lambda y: F.linear(y, model.head.weight), lambda y: F.linear(y, fast.head.weight), features)


def test_tracers_exporters_and_compilers(pair: Any) -> None:
    model, fast = pair
    x = data()
    same(model, torch.compile(fast, backend="eager"), x)
    if isinstance(model, Island):
        return
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.trace"):
        traced = torch.jit.trace(fast, (x,), check_trace=False)
    same(model, traced, data(5))
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(fast, (x,), dynamic_shapes={"x": {0: batch}}, strict=False)
    same(model, program.module(), data(5))
    assert set(program.state_dict) <= set(model.state_dict())
    same(model, fast, x)
