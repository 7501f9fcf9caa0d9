"""Merging of linear layers on the same input: which are merged, and that later changes to them take effect."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operations import computed
from pass_contract import captured, changes, check_pass, skips
from real_models import REAL_MODELS
from tiny_models import Net, enliven
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from optimizer import check_parity, export, optimize, report_of
from passes import MergeLinears, PassResult


class Gated(nn.Module):
    """The gated unit of a language model; it can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 6)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x).sigmoid() * self.up(x))


class Attention(nn.Module):
    """Computes query, key and value of one input, in a forward that can't be traced; the key has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e6:
            return x
        batch, length, width = x.shape
        parts = self.query(x), self.key(x), self.value(x)
        heads = [part.view(batch, length, 2, width // 2).transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(*heads)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


@pytest.fixture(autouse=True)
def captured_anew() -> Iterator[None]:
    """Capture the models of each test anew: torch keeps a limited number of graphs per forward, over all models."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def products(model: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """How many linear layers one call computes."""
    return computed("linear", model, *args, **kwargs)


def image_of(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed))


def merged(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    fast = optimize(model.eval(), ["merge-linears:force=true"], example_inputs=args or (image_of(),), **kwargs)
    assert report_of(fast).passes[0].status == "applied", report_of(fast).passes[0]
    # The parameters of a result for inference require no gradients.
    for parameter, original in zip(fast.parameters(), model.parameters(), strict=True):
        assert parameter.data_ptr() == original.data_ptr()
        parameter.requires_grad_(original.requires_grad)
    return fast


def same(fast: nn.Module, model: nn.Module, x: Tensor | None = None) -> bool:
    """Whether both outputs are equal up to rounding; merged products may sum in another order."""
    x = image_of(9) if x is None else x
    with torch.no_grad():
        return torch.allclose(fast(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def made() -> tuple[nn.Module, nn.Module]:
    model = Attention().eval()
    return model, merged(model)


@pytest.fixture
def attention(made: Any) -> tuple[nn.Module, nn.Module]:
    """A model and its result, which share their weights."""
    return copy.deepcopy(made)


# What is merged -------------------------------------------------------------------------------------------------------


def test_the_gate_of_a_gated_unit() -> None:
    model, x = Gated().eval(), torch.randn(3, 6)
    done = check_pass(MergeLinears(force=True), model, (x,))
    assert changes(done) == [("", "gate and up computed together")]
    assert skips(done) == []
    assert (products(model, x), products(merged(model, x), x)) == (3, 2)


@pytest.mark.slow
def test_query_key_and_value_where_no_trace_goes() -> None:
    model = nn.Sequential(Attention(), nn.ReLU(), Attention()).eval()
    done = check_pass(MergeLinears(force=True), model, (image_of(),))
    what = "query, key and value computed together"
    # The graph breaks inside the two equal modules, so they share one captured graph, whose change is reported for both.
    assert changes(done) == [("0", what), ("2", what)]
    assert (products(model, image_of()), products(merged(model), image_of())) == (8, 4)


def test_on_a_cpu_nothing_is_merged_unless_that_is_asked_for() -> None:
    model = nn.Sequential(Attention(), nn.ReLU(), Attention()).eval()
    done = check_pass(MergeLinears(), model, (image_of(),))
    reason = (
        "some of its layers share an input, but on this device (cpu) one product for all is only slower: "
        "merge-linears:force=true merges them anyway"
    )
    assert changes(done) == []
    assert skips(done) == [("", reason)]
    assert skips(check_pass(MergeLinears(), nn.Sequential(nn.Linear(8, 8)).eval(), (image_of(),))) == []


class Side(nn.Linear):
    """Computes more than a linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def _on_two_inputs(m: Any, x: Tensor) -> Tensor:
    y = x.relu()
    first, second, third, fourth = m.a(x), m.b(y), m.c(x), m.d(y)
    return first * third.sum(-1, keepdim=True) + second * fourth.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("run", "together"),
    [
        (_on_two_inputs, ["a and c", "b and d"]),
        # A group on the output of another.
        (lambda m, x: m.b(x).sin() + m.c(y := m.a(x)).cos() * m.d(y).relu(), ["b and a", "c and d"]),
        # Layers of several modules, and functions.
        (
            lambda m, x: m.e(x) + m.f(x) + F.linear(x, weight=m.weight).sin(),
            ["e.0, f (linear) and the root (linear)"],
        ),
    ],
)
def test_groups_of_one_forward(run: Callable[..., Any], together: list[str]) -> None:
    layers = {name: nn.Linear(8, 8) for name in "abcd"}
    more = {"e": nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "f": Side(8, 8), "weight": nn.Parameter(torch.randn(8, 8))}
    model = enliven(Net(run, **layers, **more)).eval()
    fast = merged(model)
    assert [change.text for change in report_of(fast).passes[0].changes] == [
        f"{names} computed together" for names in together
    ]
    assert same(fast, model)
    assert products(fast, image_of()) == len(together)


def test_layers_that_are_tied_or_hooked_are_merged() -> None:
    model = Attention().eval()
    model.key.weight = model.query.weight
    model.value.register_forward_hook(lambda module, args, output: output * 2)
    fast = merged(model)
    assert products(fast, image_of()) == 2
    assert same(fast, model)


# What isn't merged ----------------------------------------------------------------------------------------------------


def refused(use: Callable[..., Any], **more: Any) -> PassResult:
    """Run the pass on a model with three layers, without comparing its outputs."""
    tree, context = captured(three_layers(use, **more), (image_of(),))
    return MergeLinears(force=True).run(tree, context)


def three_layers(use: Callable[..., Any], **more: Any) -> nn.Module:
    return enliven(Net(use, **{name: nn.Linear(8, 8) for name in ("first", "second", "other")}, **more)).eval()


def _under_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        first = self.first(x).relu()
    return first + self.second(x).relu()


@pytest.mark.parametrize(
    "use",
    [
        _under_autocast,
        lambda self, x: self.first(x).relu() + self.second(x * 1).relu(),
        lambda self, x: self.second(self.first(x).relu()).relu(),
        lambda self, x: checkpoint(self.first, x, use_reentrant=False).relu() + self.second(x).relu(),
    ],
)
def test_layers_on_other_inputs_or_in_other_modes_are_no_group(use: Callable[..., Any]) -> None:
    done = refused(use)
    assert changes(done) == skips(done) == []


def _writes_to_input(self: Any, x: Tensor) -> Tensor:
    y = x * 1
    first = self.first(y).relu()
    y.add_(1)
    return first + self.second(y).relu()


def _writes_to_weight(self: Any, x: Tensor) -> Tensor:
    first = self.first(x).relu()
    self.second.weight.data.mul_(1.5)
    return first + self.second(x).relu()


def _writes_through(how: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def use(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        how(y).mul_(3)
        return y + self.second(x).relu()

    return use


WRITTEN = "its input or its output may be written to"
# Others stand on the pass.
REFUSALS: list[tuple[Callable[..., Any], str]] = [
    (
        lambda self, x: F.linear(x, self.first.weight, x[0, 0]) + self.second(x).relu(),
        "its bias is computed at every call, and not from parameters and buffers alone",
    ),
    (
        lambda self, x: F.linear(x, self.first.weight[0]) + F.linear(x, self.other.bias) + self.second(x).sum(-1),
        "its weight has a shape that no layer has",
    ),
    (_writes_to_input, WRITTEN),
    (_writes_to_weight, "the forward may write to second.weight"),
    (_writes_through(lambda y: y.flatten(1)), WRITTEN),
    (_writes_through(lambda y: y.reshape(-1)), WRITTEN),
    (_writes_through(lambda y: y.contiguous()), WRITTEN),
    (_writes_through(lambda y: y[:, 0]), WRITTEN),
    (
        lambda self, x: torch.as_strided(self.first(x), (2, 40), (40, 1)).sum() + self.second(x),
        "its output goes to as_strided, which depends on its memory layout",
    ),
    (
        lambda self, x: self.first(x).view(x.shape[0], -1).sum() + self.second(x),
        "its output goes to view, which doesn't accept rows of a wider tensor",
    ),
]


@pytest.mark.parametrize(("use", "reason"), REFUSALS)
def test_what_may_not_be_merged_stays(use: Callable[..., Any], reason: str) -> None:
    done = refused(use)
    assert changes(done) == []
    assert reason in [each.reason for each in done.skips], skips(done)


@pytest.mark.slow
def test_a_weight_that_is_computed_from_parameters_is_merged_too() -> None:
    model = Attention().eval()
    parametrizations.weight_norm(model.key)
    done = check_pass(MergeLinears(force=True), model, (image_of(),))
    assert changes(done) == [("", "query, key (linear) and value computed together")]


def test_weights_of_another_dtype_or_width_stay() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.first(x).relu() + F.linear(x, m.whole).float() + m.other(x).relu()

    done = refused(use, whole=nn.Buffer(torch.ones(8, 8, dtype=torch.bfloat16)))
    assert changes(done) == [("", "first and other computed together")]
    reason = "its weight has a different dtype, device or width than the weights of the other layers"
    assert skips(done) == [("the root (linear)", reason)]


def test_outputs_that_leave_lie_as_they_did() -> None:
    layers = {name: nn.Linear(8, 3) for name in "abcd"}
    model = Net(lambda m, x: (m.a(x), m.b(x).transpose(0, 1), m.c(x).relu(), m.d(x).relu()), **layers).eval()
    done = check_pass(MergeLinears(force=True), model, (image_of(),))
    assert changes(done) == [("", "c and d computed together")]
    reason = "its output leaves the forward, and its memory layout would change"
    assert skips(done) == [("a", reason), ("b", reason)]
    with torch.no_grad():
        assert [one.stride() for one in merged(model)(image_of())] == [one.stride() for one in model(image_of())]


@pytest.mark.parametrize(
    ("view", "shapes"),
    [
        (lambda y: y.view(*y.shape[:-1], 2, -1).flatten(-2), [(4, 1, 8)]),
        (lambda y: y.view(-1, 2, 4).reshape(y.shape), [(1, 1, 8)]),
        (lambda y: y.view(torch.int32).view(torch.float32), [(1, 8)]),
        (lambda y: y.view(y.shape[0], -1) if y.dim() > 2 else y.view(-1), [(4, 1, 8), (1, 1, 8), (1, 8)]),
        (lambda y: y.view(y.numel()), [(1, 1, 8)]),
    ],
)
def test_longer_inputs_than_the_examples_are_answered(view: Callable[[Tensor], Tensor], shapes: Any) -> None:
    for shape in shapes:
        model = three_layers(lambda m, x: view(m.first(x)).sum() + m.second(x).relu())
        fast = optimize(model, ["merge-linears:force=true"], example_inputs=(torch.randn(shape),))
        for factor in (3, 2, 1):
            assert same(fast, model, torch.randn([factor * length for length in shape[:-1]] + [8]))


# Gradients ------------------------------------------------------------------------------------------------------------


def test_with_gradients_each_layer_computes_by_itself(attention: Any) -> None:
    _, fast = attention
    x = image_of().requires_grad_()
    assert computed("linear", fast, x) == 4
    fast(x).sum().backward()
    assert all(parameter.grad is not None for parameter in fast.parameters())


# Modes and transforms -------------------------------------------------------------------------------------------------


def test_under_an_autocast_of_the_forward() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first, second, other = m.first(x), m.second(x), m.other(x)
            # The operands have two dtypes, which only autocast makes equal.
            y = first.transpose(1, 2) @ x @ (second.transpose(1, 2) @ x) @ other.transpose(1, 2)
        return y.float()

    model = three_layers(use)
    tree, context = captured(model, (image_of(),))
    done = MergeLinears(force=True).run(tree, context)
    assert changes(done) == [("", "first, second and other computed together")]
    with torch.no_grad():
        torch.testing.assert_close(tree.root(image_of()), model(image_of()), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_autocast_to_a_dtype_that_the_weights_don_t_have(dtype: torch.dtype, attention: Any) -> None:
    model, fast = attention[0].to(dtype), attention[1].to(dtype)
    for other in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", other):
            mine, theirs = fast(image_of().to(dtype)), model(image_of().to(dtype))
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)


def test_the_joint_weight_is_kept_under_autocast(attention: Any) -> None:
    _, fast = attention
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert computed("cat", fast, image_of()) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("is_cast_first", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_weights_of_half_a_precision(is_cast_first: bool, dtype: str) -> None:
    cast = f"cast-precision:how=weights:dtype={dtype}"
    # Each cast layer casts the input itself. Simplify merges the casts, so that the layers share one input.
    merging = ["simplify", "merge-linears:force=true"]
    passes = [cast, *merging] if is_cast_first else [*merging, cast]
    model = Attention().eval()
    fast, alone = (optimize(model, each, example_inputs=(image_of(),)) for each in (passes, [cast]))
    assert report_of(fast).passes[passes.index(merging[1])].status == "applied"
    count = 2 if is_cast_first else 4
    assert products(fast, image_of()) == products(copy.deepcopy(fast), image_of()) == count
    half = getattr(torch, dtype)
    with torch.no_grad():
        for x in (image_of(9), image_of(9).to(half)):
            torch.testing.assert_close(fast(x), alone(x), rtol=4 * torch.finfo(half).eps, atol=0.02)


# In files -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_compute_the_same(tmp_path: Any) -> None:
    model, x = Gated().eval(), torch.randn(3, 6)
    # A source of the joint weight may be given twice.
    model.up.weight = model.gate.weight
    formats = "onnx", "torchscript", "pt2"
    bundle = export(merged(model, x), example_inputs=(x,), output=tmp_path / "gated", formats=formats)
    assert bundle.parity.ok


# With other passes ----------------------------------------------------------------------------------------------------


def test_a_folded_layer_is_merged() -> None:
    layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8), "norm": nn.BatchNorm1d(8)}
    model = enliven(Net(lambda m, x: m.norm(m.first(x)) * m.second(x).relu(), **layers)).eval()
    x = torch.randn(4, 8)
    fast = optimize(model, ["fold-conv-bn", "merge-linears:force=true"], example_inputs=(x,))
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    assert products(fast, x) == 1
    assert check_parity(model, fast, (x,)).ok


# Transformer models ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("bert", 3), ("llama", 5)])
def test_a_transformer(name: str, layers: int) -> None:
    model, args, kwargs = REAL_MODELS[name]()
    fast = optimize(model, ["merge-linears:force=true"], example_inputs=args or None, example_kwargs=kwargs)
    (record,) = report_of(fast).passes
    assert record.status == "applied"
    assert products(model, *args, **kwargs) - products(fast, *args, **kwargs) == layers - len(record.changes)
    report = check_parity(model, fast, args, example_kwargs=kwargs, batch_sizes=(1, 2, 5))
    assert report.ok, report.reason
    assert list(fast.state_dict()) == list(model.state_dict())


@pytest.mark.slow
def test_a_language_model_generates_the_same_with_its_cache() -> None:
    model, (ids,), _ = REAL_MODELS["llama"]()
    fast = optimize(model, ["merge-linears:force=true"], example_kwargs={"input_ids": ids})
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    assert torch.equal(*(one.generate(ids, **options) for one in (model, fast)))
