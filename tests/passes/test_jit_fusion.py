"""Fusion of pointwise operations: each group becomes one kernel."""

import copy
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import onnx
import pytest
import torch
import torch.nn.functional as F
from pass_contract import captured
from tiny_models import Net, enliven
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._inductor.exc import InductorError

from exporters.isolation import torchscript_allowed
from optimizer import export, optimize, report_of
from optimizer.report import PassRecord
from passes import JitFusion, Simplify, TorchCompile
from passes.base import Context
from passes.errors import RequirementNotMet
from passes.fusion import fused, kernels
from passes.fusion.fused import FusedUnit
from passes.fusion.pointwise import pointwise_groups
from passes.graph.captured import CapturedGraph, Modules
from passes.graph.derived import DerivedTensors
from passes.graph.graph_pass import GraphRewriter
from passes.jit_fusion import FusionRecord
from passes.torch_capture import captured_call
from passes.torch_private import torchscript_fuses

CPU = Context("inference", torch.device("cpu"), example_calls=(((), {}),))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class OneByOne:
    """Replaces the kernels of a unit by its operations, one by one.

    Attributes:
        ran: the names of the units whose values were computed.
        differentiated: the names of the units whose gradients were computed.
    """

    ran: ClassVar[list[str]] = []
    differentiated: ClassVar[list[str]] = []
    failure = ""

    def __init__(self, unit: FusedUnit) -> None:
        self.unit = unit

    def value(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        assert not any(source.requires_grad for source in sources)
        self.ran.append(self.unit.name)
        return self.unit.plain(*sources)

    def gradients(self, wanted: Any, gradient: torch.Tensor, sources: Sequence[torch.Tensor]) -> Any:
        assert not any(source.requires_grad for source in (gradient, *sources))
        self.differentiated.append(self.unit.name)
        return kernels.gradients(self.unit._plain, wanted, gradient, *sources)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the units that ran fused."""
    monkeypatch.setattr(FusedUnit, "kernels", lambda unit, sources: OneByOne(unit))
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 1)
    OneByOne.ran.clear()
    OneByOne.differentiated.clear()
    return OneByOne.ran


def model_of(function: Callable[..., Any], **layers: nn.Module) -> Net:
    """A function of a linear layer's output, and of a parameter."""
    torch.manual_seed(0)
    held = {"linear": nn.Linear(4, 6), "scale": nn.Parameter(torch.ones(6)), **layers}
    return enliven(Net(lambda m, x: function(m, m.linear(x)), **held)).eval()


def rows(count: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def fused_model(model: nn.Module, *passes: Any, **options: Any) -> tuple[nn.Module, PassRecord]:
    fast = optimize(model, [*(passes or (JitFusion(),))], example_inputs=(rows(),), **options)
    record = next(record for record in report_of(fast).passes if record.name == "jit-fusion")
    return fast, record


def units_of(record: PassRecord) -> list[str]:
    return [] if record.detail is None else [name for _, name, _ in record.detail.units]


def same(fast: nn.Module, model: nn.Module, sizes: tuple[int, ...] = (1, 2, 5)) -> bool:
    with torch.no_grad():
        return all(torch.equal(fast(rows(n, n)), model(rows(n, n))) for n in sizes)


def by_hand_gelu(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


# ------------------------------------------------------------------------------------------------------- what is fused


def test_operations_in_a_row_are_one_unit_that_is_named_after_them(ran: list[str]) -> None:
    model = model_of(by_hand_gelu)
    fast, record = fused_model(model)
    assert record.status == "applied"
    assert units_of(record) == ["mul_div_erf_add_mul"]
    assert record.changes[0].text == "mul_div_erf_add_mul: 5 kernels become one"
    ran.clear()
    assert same(fast, model)
    assert ran == ["mul_div_erf_add_mul"] * 3
    detail = record.detail
    assert isinstance(detail, FusionRecord)
    assert (detail.kernels_before, len(detail.units)) == (5, 1)
    assert "5 pointwise kernels -> 1, by inductor" in str(report_of(fast))
    assert detail.to_json()["units"] == [{"where": "the root (mul)", "name": "mul_div_erf_add_mul", "operations": 5}]


# The name of the unit of each.
FUSED: dict[str, Callable[..., Any]] = {
    "sigmoid_mul_sub_clamp": lambda self, x: (x.sigmoid() * x - 1).clamp(min=-0.5),
    "mul_add_relu": lambda self, x: torch.relu(x * self.scale + x),
    "gt_exp_sub_where_mul": lambda self, x: torch.where(x > 0, x, x.exp() - 1) * 2,
    "double_mul_float_add": lambda self, x: (x.double() * 1.5).float() + x,
    "gelu_leaky_relu_add": lambda self, x: self.leaky(self.gelu(x)) + x,
    # A value that is used twice inside.
    "tanh_mul_add": lambda self, x: (y := x.tanh()) * y + y,
}


def beside(functions: dict[str, Callable[..., Any]], **layers: nn.Module) -> Net:
    """A model that returns the output of each function; each gets the output of a linear layer of its own."""
    linears = nn.ModuleList(nn.Linear(4, 6) for _ in functions)
    held = {"linears": linears, "scale": nn.Parameter(torch.ones(6)), **layers}
    run = lambda m, x: [function(m, linear(x)) for function, linear in zip(functions.values(), linears, strict=True)]  # noqa: E731
    return enliven(Net(run, **held)).eval()


def test_what_is_fused(ran: list[str]) -> None:
    names = list(FUSED)
    model = beside(FUSED, gelu=nn.GELU(approximate="tanh"), leaky=nn.LeakyReLU(0.3))
    fast, record = fused_model(model)
    assert units_of(record) == names, record
    ran.clear()
    for size in (1, 2, 5):
        with torch.no_grad():
            assert all(map(torch.equal, fast(rows(size)), model(rows(size))))
    assert ran == names * 3


def test_a_value_that_is_used_outside_ends_a_unit(ran: list[str]) -> None:
    model = model_of(lambda self, x: (y := (x + 1).exp()).sum(-1, keepdim=True) + y.tanh() * 2)
    fast, record = fused_model(model)
    assert sorted(units_of(record)) == ["add_exp", "tanh_mul_add"]
    assert same(fast, model)


NOT_FUSED = {
    "one operation": lambda self, x: x.relu(),
    "a cast and one operation": lambda self, x: x.double().relu(),
    "random numbers": lambda self, x: torch.bernoulli(x.sigmoid()) + torch.rand_like(x),
    "reductions": lambda self, x: x.softmax(-1).cumsum(-1),
    "views": lambda self, x: x.reshape(-1, 3).transpose(0, 1).contiguous(),
    "a layer in place": lambda self, x: self.inplace(x * 1.5),
}


def test_what_is_not_fused(ran: list[str]) -> None:
    model = beside(NOT_FUSED, inplace=nn.ReLU(inplace=True))
    fast, record = fused_model(model)
    assert units_of(record) == [], record
    torch.manual_seed(0)
    got = fast(rows())
    torch.manual_seed(0)
    assert all(map(torch.equal, got, model(rows())))
    assert not ran


def test_numbers_of_the_call_are_those_of_each_call(ran: list[str]) -> None:
    model = model_of(lambda self, x: (x * x.shape[0]) + x.shape[1] * len(self._modules))
    fast, _ = fused_model(model)
    assert same(fast, model)


def test_nothing_moves_past_a_write(ran: list[str]) -> None:
    def writing(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        x.mul_(2)
        return y * 3 + x

    model = model_of(writing)
    fast, record = fused_model(model)
    assert units_of(record) == []
    assert any("may be written to" in skip.text for skip in record.skips)
    assert same(fast, model)


def test_dropout_that_draws_is_in_no_unit(ran: list[str]) -> None:
    model = model_of(lambda self, x: F.dropout(x * 2 + 1, 0.5, self.training) * 3 + 1).train()
    fast, record = fused_model(model, mode="training")
    assert units_of(record) == ["mul_add", "mul_add"]
    torch.manual_seed(3)
    got = fast(rows())
    torch.manual_seed(3)
    assert torch.equal(got, model(rows()))


# ----------------------------------------------------------------------------------------------------- after the fusion


def _twice(net: nn.Module, x: torch.Tensor) -> Any:
    (first,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), [x, *net.parameters()], allow_unused=True)


def _retained(net: nn.Module, x: torch.Tensor, *, autocast: bool = False) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = net(x).float().square().sum()
    return [torch.autograd.grad(out, [x, *net.parameters()], retain_graph=again) for again in (True, False)]


def _at_once(net: nn.Module, x: torch.Tensor) -> Any:
    out = net(x)
    return torch.autograd.grad(out, x, torch.eye(out.numel()).view(-1, *out.shape), is_grads_batched=True)


def _mapped(net: nn.Module, x: torch.Tensor) -> Any:
    out = net(x)
    gradients = torch.eye(out.numel()).view(-1, *out.shape)
    return torch.vmap(lambda gradient: torch.autograd.grad(out, x, gradient, retain_graph=True)[0])(gradients)


DERIVATIVES = {
    # It also contains a first-order gradient of the unit's value, which the kernel computes.
    "a second derivative": (_twice, 1),
    "many gradients at once": (_at_once, 0),
    "gradients in vmap": (_mapped, 0),
    "jacrev": (lambda net, x: torch.func.jacrev(net)(x.detach()), 0),
    "the same graph twice": (_retained, 2),
    "autocast": (functools.partial(_retained, autocast=True), 2),
}


@pytest.mark.parametrize("kind", DERIVATIVES)
def test_all_derivatives_are_those_of_the_operations(kind: str, ran: list[str]) -> None:
    derive, by_kernel = DERIVATIVES[kind]
    model = model_of(lambda self, x: (x * self.scale).sigmoid() * x.exp() + self.scale)
    fast, _ = fused_model(model, mode="training")
    ran.clear()
    OneByOne.differentiated.clear()
    got, wanted = (derive(net, rows().requires_grad_()) for net in (fast, model))
    torch.testing.assert_close(got, wanted)
    assert len(OneByOne.differentiated) == by_kernel
    assert ran or kind == "jacrev"


def test_second_derivatives_where_one_source_is_made_of_another(ran: list[str]) -> None:
    model = model_of(lambda self, x: (x * self.scale).sigmoid() * x.exp() + self.scale)
    unit = unit_of(model)
    plain = unit.plain

    def derive(function: Callable[..., torch.Tensor]) -> Any:
        x = rows().requires_grad_()
        y = x.tanh()
        first = torch.autograd.grad(function(x, y.sum(0)).sum(), [x, y], create_graph=True)
        return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), x)]

    got = derive(unit)
    assert ran
    torch.testing.assert_close(got, derive(plain))


def test_what_has_no_gradient_has_none(ran: list[str]) -> None:
    model = model_of(lambda self, x: (x > self.scale).float() * 2)
    fast, record = fused_model(model)
    assert units_of(record) == ["gt_float_mul"]
    ran.clear()
    assert not fast(rows()).requires_grad
    assert ran


KEPT = {
    "what is only added": (lambda self, x: (x * self.scale).exp() - x, [True, True]),
    "sums": (lambda self, x: (-x + self.scale) * 3 / 2, [False, False]),
    "a cast": (lambda self, x: x.double() * 2 + self.scale * self.scale, [False, True]),
    "a number by it": (lambda self, x: operator.truediv(2, x) - torch.add(self.scale, x, alpha=2), [True, False]),
    "a sum under a function": (lambda self, x: torch.add(x, self.scale, alpha=2).abs() + 1, [True, True]),
}


@pytest.mark.parametrize("kind", KEPT)
def test_sources_are_kept_for_gradients_where_these_depend_on_them(kind: str, ran: list[str]) -> None:
    function, kept = KEPT[kind]
    model = model_of(function).train()
    saved: list[torch.Tensor] = []
    y = model.linear(rows()).detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value) or value, lambda value: value):
        group = group_of(model)
        unit = FusedUnit.of(group, "inductor")
        saved.clear()
        sources = [model.scale if source.op == "placeholder" else y for source in group.inputs]
        value = unit(*sources)
    assert len(saved) == sum(kept)
    assert [any(source is value for value in saved) for source in (y, model.scale)] == kept
    got = torch.autograd.grad(value.sum(), [y, model.scale])
    assert OneByOne.differentiated
    torch.testing.assert_close(got, torch.autograd.grad(function(model, y).sum(), [y, model.scale]))


class OfGelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_hand_gelu(self, x)


def test_calls_of_few_elements_run_one_by_one(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 6 * 5)
    model = model_of(by_hand_gelu)
    fast, _ = fused_model(model)
    ran.clear()
    with torch.no_grad():
        fast(rows(4))
        assert not ran
        fast(rows(5))
    assert len(ran) == 1


def test_where_something_looks_at_the_operations_they_run_one_by_one(ran: list[str]) -> None:
    model = model_of(by_hand_gelu)
    fast, _ = fused_model(model)
    ran.clear()
    with torch.no_grad():
        torch.compile(fast, backend="eager", fullgraph=True)(rows())
        torch.vmap(fast)(rows(3).unsqueeze(1))
        x = rows()
        torch.vmap(lambda factor: fast(x) * factor)(torch.ones(3))
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            fast(rows())
        fast.to("meta")(rows().to("meta"))
    assert not ran


def test_derivatives_in_the_forward_direction_and_lazy_negation_are_those_of_the_operations(ran: list[str]) -> None:
    model = model_of(by_hand_gelu)
    fast, _ = fused_model(model)
    ran.clear()
    tangent = torch.ones(2, 4)
    # For forward-mode derivatives, torch scripts formulas.
    with torch.no_grad(), torch.autograd.forward_ad.dual_level(), torchscript_allowed():
        duals = [torch.autograd.forward_ad.make_dual(rows(), tangent) for _ in range(2)]
        got, wanted = (
            torch.autograd.forward_ad.unpack_dual(net(x)) for net, x in zip((fast, model), duals, strict=True)
        )
    assert torch.equal(got.tangent, wanted.tangent)
    assert not ran
    unit = unit_of(OfGelu())
    negated = torch.randn(2, 4, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    assert torch.equal(unit(negated), by_hand_gelu(None, negated.clone()))
    assert not ran


def group_of(model: nn.Module) -> Any:
    """The first group of operations that can be fused."""
    found: list[Any] = []

    def capture(graph: Any, inputs: Any, around: Any) -> Any:
        captured = CapturedGraph(graph.graph, Modules(model), around, inputs, DerivedTensors())
        rewriter = GraphRewriter(captured, lambda place: None, "inference")
        found.append(next(pointwise_groups(rewriter.nodes, rewriter.settings())))
        return graph.forward

    captured_call(lambda x: model(x), capture).run(rows() if hasattr(model, "linear") else torch.randn(2, 6))
    return found[0]


def unit_of(model: nn.Module) -> FusedUnit:
    return FusedUnit.of(group_of(model), "inductor")


@pytest.mark.slow
def test_the_exports_hold_the_operations(ran: list[str], tmp_path: Path) -> None:
    model = enliven(nn.Sequential(nn.Linear(4, 4), OfGelu())).eval()
    fast, _ = fused_model(model)
    bundle = export(fast, example_inputs=(rows(),), output=tmp_path / "bundle", formats=("torchscript", "onnx"))
    assert bundle.parity.ok
    operations = [node.op_type for node in onnx.load(tmp_path / "bundle" / "model.onnx").graph.node]
    assert operations.count("Erf") == 1


@pytest.mark.parametrize(
    "passes",
    [[Simplify(), JitFusion()], [JitFusion(), Simplify()], [JitFusion(), TorchCompile(backend="eager")]],
    ids=lambda passes: "-".join(item.name for item in passes),
)
def test_it_may_stand_anywhere_in_the_order(passes: list[Any], ran: list[str]) -> None:
    model = model_of(lambda self, x: by_hand_gelu(self, self.drop(x)), drop=nn.Dropout())
    fast, _ = fused_model(model, *passes)
    assert [record.status for record in report_of(fast).passes if record.name != "jit-fusion"] in (["applied"], [])
    assert same(fast, model)


# --------------------------------------------------------------------------------------------- the check of each kernel


@pytest.fixture
def off(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Errors that tests set: by the name of a unit, the function that its kernel applies to the right value."""
    made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    right = OneByOne.value
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 10**6)
    monkeypatch.setattr(
        OneByOne, "value", lambda self, sources: made.get(self.unit.name, lambda value: value)(right(self, sources))
    )
    return made


def _off_in_one(value: torch.Tensor) -> torch.Tensor:
    value.view(-1)[-1] *= 1 + 1e-5
    return value


def _raising(value: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such thing")


WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "one value": (_off_in_one, "computes something different from its operations in 1 of 12 values: off by up to"),
    "NaN": (lambda value: value * math.nan, r"12 of 12 values: off by up to inf"),
    "another dtype": (
        torch.Tensor.double,
        r"returns torch\.float64 of shape \(2, 6\), but its operations return torch\.float32",
    ),
    "an error": (_raising, "its kernel raises on the example values"),
    "another shape": (lambda value: value[:1], r"returns torch\.float32 of shape \(1, 6\), but its operations return"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_kernel_that_is_wrong_is_refused_at_any_size(kind: str, off: dict[str, Any]) -> None:
    make, said = WRONG[kind]
    model = model_of(lambda self, x: ((x.exp() + 1).sum(-1, keepdim=True) + x).sin() * 2)
    off["exp_add"] = make
    fast, record = fused_model(model)
    assert units_of(record) == ["add_sin_mul"]
    (skip,) = record.skips
    assert skip.where == "the root (add)"
    assert re.search(said, skip.text), skip.text
    assert same(fast, model)


WRONG_GRADIENTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "one value": (_off_in_one, "the kernel of its gradients computes something different from its operations in 1 of"),
    "none": (lambda each: None, "its kernel returns no gradient for input 0"),
}


@pytest.mark.parametrize("kind", WRONG_GRADIENTS)
def test_a_kernel_with_wrong_gradients_is_refused_in_training(
    kind: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, said = WRONG_GRADIENTS[kind]
    right = OneByOne.gradients

    def gradients(self: OneByOne, *arguments: Any) -> Any:
        first, *others = right(self, *arguments)
        return (make(first) if self.unit.name == "exp_add" else first, *others)

    monkeypatch.setattr(OneByOne, "gradients", gradients)
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 10**6)
    model = model_of(lambda self, x: ((x.exp() + 1).sum(-1, keepdim=True) + x).sin() * self.scale)
    _, record = fused_model(model.train(), mode="training")
    assert units_of(record) == ["add_sin_mul"]
    (skip,) = record.skips
    assert said in skip.text, skip.text


def test_gradients_of_each_kernel_are_tried_once_in_training(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 10**6)
    model = model_of(lambda self, x: ((x.exp() + 1).sum(-1, keepdim=True) + x).sin() * self.scale)
    # In inference, gradients aren't needed and aren't checked.
    _, record = fused_model(model)
    assert sorted(units_of(record)) == sorted(ran) == ["add_sin_mul", "exp_add"]
    assert OneByOne.differentiated == []
    ran.clear()
    _, record = fused_model(model.train(), mode="training", batch_sizes=(1, 2, 3))
    assert sorted(units_of(record)) == sorted(ran) == sorted(OneByOne.differentiated) == ["add_sin_mul", "exp_add"]
    assert model.scale.grad is None


def test_gradients_through_a_cast_are_tried(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 10**6)
    fast, record = fused_model(model_of(lambda self, x: (x.sin() * self.scale).bfloat16() + 1).train(), mode="training")
    assert units_of(record) == OneByOne.differentiated == ["sin_mul_bfloat16_add"]
    assert record.detail.kernels_before == 4
    assert report_of(fast).parity.verdict == "ok"


def test_a_sum_of_gradients_may_be_off_by_roundings_of_its_terms(ran: list[str]) -> None:
    """The terms nearly cancel, and the operations' own sum may be exact by luck, so rounding of the terms counts."""
    unit = unit_of(model_of(lambda self, x: x.sin() * self.scale))
    x, scale = torch.randn(4, 6, requires_grad=True), torch.ones(1, requires_grad=True)
    value = unit.plain(x, scale).detach()
    gradient = torch.linspace(-1.3, 1.7, 24).reshape(4, 6)
    rounding = torch.finfo(torch.float32).eps * float((gradient * x.detach().sin()).abs().sum())

    class Answering(OneByOne):
        def gradients(self, wanted: Any, gradient: torch.Tensor, sources: Any) -> Any:
            of_x, of_scale = super().gradients(wanted, gradient, sources)
            return of_x, of_scale + self.off

    for times, is_right in ((8, True), (-8, True), (100, False)):
        Answering.off = times * rounding
        unit.kernels = lambda sources: Answering(unit)
        assert (fused._why_gradients_wrong(unit, (x, scale), value) is None) == is_right


def test_what_nothing_depends_on_may_get_no_gradient_or_zeros(ran: list[str]) -> None:
    unit = unit_of(model_of(lambda self, x: x.sin() * (self.scale > 0)))
    x, scale = torch.randn(3, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    value, (of_x,) = unit.plain(x, scale).detach(), torch.autograd.grad(unit.plain(x, scale).sum(), x)
    for of_scale, is_right in ((None, True), (torch.zeros(6), True), (torch.ones(6), False)):

        class Answering(OneByOne):
            def gradients(self, wanted: Any, gradient: torch.Tensor, sources: Any, found: Any = of_scale) -> Any:
                return (of_x * gradient, found)

        unit.kernels = lambda sources, answering=Answering: answering(unit)
        reason = fused._why_gradients_wrong(unit, (x, scale), value)
        assert reason == (None if is_right else "its kernel returns a gradient for input 1, on which no output depends")


def apart(got: torch.Tensor, value: torch.Tensor, exact: torch.Tensor) -> bool:
    return fused._why_apart(got, value, exact) is not None


def test_a_kernel_may_be_off_by_as_much_as_its_operations() -> None:
    exact = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    value = exact.float() + torch.tensor([0, 0, 1e-4])
    assert not apart(exact.float(), value, exact)
    assert not apart(exact.float() + 2e-4, value, exact)
    assert apart(exact.float() + 1e-3, value, exact)
    assert apart(exact.float() + 2e-4, exact.float(), exact)
    # Integers and booleans must be equal.
    assert apart(torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor([1, 3]))
    assert apart(torch.tensor([True]), torch.tensor([False]), torch.tensor([False]))
    assert not apart(torch.tensor([True]), torch.tensor([True]), torch.tensor([True]))


def test_what_overflows_in_between_may_be_either() -> None:
    inf, nan = torch.inf, torch.nan
    value = torch.tensor([inf, nan, 1], dtype=torch.float16)
    everywhere = torch.tensor([inf, nan, 1], dtype=torch.float64)
    in_between = torch.tensor([7.0, 7, 1], dtype=torch.float64)
    assert not apart(value.clone(), value, everywhere)
    assert not apart(in_between.half(), value, in_between)
    assert apart(in_between.half(), value, everywhere)
    assert apart(torch.tensor([inf, nan, inf], dtype=torch.float16), value, everywhere)


# ------------------------------------------------------------------------------------------------------------- backends


def test_a_build_without_the_fuser_refuses_it_before_work() -> None:
    if torchscript_fuses(torch.device("cpu")):
        JitFusion(backend="torchscript").check(CPU)
        return
    with pytest.raises(RequirementNotMet) as caught:
        optimize(model_of(by_hand_gelu), [JitFusion(backend="torchscript")], example_inputs=(rows(),))
    assert str(caught.value) == (
        "jit-fusion:backend=torchscript isn't available here: this build of torch has no TorchScript fuser for "
        "cpu; use backend=inductor, or leave it out."
    )


def test_no_compiler_leaves_the_other_fuser_or_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(
        RequirementNotMet, match=r"backend=inductor isn't available here: inductor needs a C\+\+ compiler"
    ):
        JitFusion(backend="inductor").check(CPU)
    monkeypatch.setattr("passes.jit_fusion.torchscript_fuses", lambda device: False)
    with pytest.raises(RequirementNotMet, match=r"no TorchScript fuser for cpu, and inductor needs a C\+\+ compiler"):
        JitFusion().check(CPU)
    monkeypatch.setattr("passes.jit_fusion.torchscript_fuses", lambda device: True)
    JitFusion().check(CPU)
    assert JitFusion()._backend(CPU.device) == "torchscript"


def test_where_no_compiler_is_any_more_operations_run_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 1)
    kernels.tell.cache_clear()
    units = [unit_of(OfGelu()) for _ in range(2)]
    monkeypatch.setenv("CXX", "/nonexistent")
    x = rows().requires_grad_()
    for unit in units:
        for _ in range(2):
            assert torch.equal(unit(x), by_hand_gelu(None, x))
    told = [record.message for record in caplog.records if record.name == "passes.fusion.kernels"]
    assert [
        message.startswith("fused operations run one by one: inductor needs a C++ compiler") for message in told
    ] == [True]


def failing(error: Exception) -> Callable[..., Any]:
    """A compiler whose code raises this."""

    def run(*arguments: Any) -> Any:
        raise error

    return lambda function: run


GIVEN_UP = {
    "one kind of call too many": FailOnRecompileLimitHit("too many"),
    "a compiler that fails": InductorError(RuntimeError("no"), None),
}


@pytest.mark.parametrize("kind", GIVEN_UP)
def test_what_the_compiler_gives_up_runs_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            calls.append(arguments[-1].shape)
            if arguments[-1].dim() == 2:
                raise GIVEN_UP[kind]
            return function(*arguments)

        return run

    monkeypatch.setattr(kernels, "_compiled", compiled)
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 1)
    unit = unit_of(OfGelu())
    for x in (rows(2), rows(3), rows(5), rows(2)[0], rows(1), rows(1)):
        assert torch.equal(unit(x), by_hand_gelu(None, x))
    # A kind of call that failed isn't compiled again; other kinds are.
    assert calls == [(2, 4), (4,), (1, 4)]
    calls.clear()
    for _ in range(2):
        x = rows(2).requires_grad_()
        (got,) = torch.autograd.grad(unit(x).sum(), x)
        torch.testing.assert_close(got, torch.autograd.grad(by_hand_gelu(None, x).sum(), x)[0])
    assert not calls
    x = rows()[0].requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(unit(x).sum(), x), torch.autograd.grad(by_hand_gelu(0, x).sum(), x))
    assert calls == [(4,), (4,)]


def test_what_the_operations_raise_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_compiled", failing(RuntimeError("sizes don't match")))
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 1)
    with pytest.raises(RuntimeError, match="sizes don't match"):
        unit_of(OfGelu())(rows())


def test_a_unit_of_which_no_kernel_can_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_compiled", failing(GIVEN_UP["a compiler that fails"]))
    _, record = fused_model(model_of(by_hand_gelu))
    assert units_of(record) == []
    assert [skip.text for skip in record.skips] == [
        "inductor generates no kernel for it (InductorError: RuntimeError: no)"
    ]


@pytest.mark.slow
def test_units_of_torchscript(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("passes.jit_fusion.torchscript_fuses", lambda device: True)
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 1)
    model = enliven(nn.Sequential(nn.Linear(4, 4), OfGelu())).eval()
    fast, record = fused_model(model, JitFusion(backend="torchscript"))
    assert record.detail.backend == "torchscript"
    with torch.no_grad():
        assert torch.allclose(fast(rows()), model(rows()), atol=1e-6)
    y = fast.requires_grad_()(rows()).sum()
    y.backward()
    assert all(parameter.grad is not None for parameter in fast.parameters())
    bundle = export(fast, example_inputs=(rows(),), output=tmp_path / "bundle", formats=("torchscript", "onnx"))
    assert bundle.parity.ok


def test_units_of_torchscript_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("passes.jit_fusion.torchscript_fuses", lambda device: True)
    runs: list[int] = []
    tree, context = captured(OfGelu(), (rows(),))
    run = context.run_compiled
    context = dataclasses.replace(context, run_compiled=lambda watch: runs.append(1) or run(watch))
    JitFusion(backend="torchscript").run(tree, context)
    # One run captures the graphs, one checks the kernels. The fuser profiles the next runs, then generates its kernels.
    assert len(runs) == 4


def test_equal_units_share_one_code() -> None:
    units = [unit_of(OfGelu()) for _ in range(3)]
    assert len({unit._plain.__code__ for unit in units}) == 1


@pytest.mark.slow
def test_inductor_makes_one_kernel_and_differentiates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 1)
    model = enliven(nn.Sequential(nn.Linear(4, 4), OfGelu())).eval()
    fast, record = fused_model(model)
    assert record.status == "applied", record.reason
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    with torch.no_grad():
        assert torch.allclose(fast(rows(3)), model(rows(3)), atol=1e-5)
    assert metrics.generated_kernel_count == 1
    twin = copy.deepcopy(model)
    fast.requires_grad_()(rows(3)).square().sum().backward()
    twin(rows(3)).square().sum().backward()
    assert torch.allclose(fast[0].weight.grad, twin[0].weight.grad, atol=1e-4)


# ------------------------------------------------------------------------------------------ calls of kernels, and worth


@pytest.mark.slow
def test_later_calls_of_a_kind_run_the_code_without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal sizes, strides, dtypes and settings; every other call is torch.compile's."""
    calls: list[Any] = []
    compiled = kernels._compiled

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        run = compiled(function)
        return lambda *given: calls.append(given[-1].shape) or run(*given)

    monkeypatch.setattr(kernels, "_compiled", counted)
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 1)
    unit = unit_of(model_of(lambda self, x: (x * self.scale).sigmoid() + x / 3))

    def guarded(*sources: torch.Tensor) -> int:
        calls.clear()
        torch.testing.assert_close(unit(*sources), unit.plain(*sources))
        return len(calls)

    scale = torch.randn(6)
    x = torch.randn(6, 6)
    assert [guarded(each, scale) for each in (x, x + 1, x[:5], x[:5] * 2, x.t(), x.double(), x, x.t())] == [
        *(1, 0),  # the first call of a kind, and a later one with other values
        *(1, 0),
        *(1, 1),  # other strides, another dtype
        *(0, 0),
    ]
    # One tensor twice: the code may have one argument for both, so it isn't kept.
    row = x[0]
    assert [guarded(row, row), guarded(row, row), guarded(row, scale), guarded(x[1], scale)] == [1, 1, 1, 0]
    integers = torch.arange(36).view(6, 6)
    assert guarded(integers, torch.arange(6)) == 1
    torch.set_default_dtype(torch.float64)
    try:
        assert guarded(integers, torch.arange(6)) == 1
        assert guarded(integers, torch.arange(6)) == 0
        assert unit(integers, torch.arange(6)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert unit(integers, torch.arange(6)).dtype == torch.float32
    # Gradients have code of their own.
    for expected in (1, 0):
        leaf = x.clone().requires_grad_()
        value = unit(leaf, scale)
        calls.clear()
        (got,) = torch.autograd.grad(value.sum(), leaf)
        assert len(calls) == expected
        torch.testing.assert_close(got, torch.autograd.grad(unit.plain(leaf, scale).sum(), leaf)[0])
    kernels_of = unit.kernels((x, scale))
    monkeypatch.setattr(kernels, "_MOST_KINDS", 2)
    assert [guarded(x[:count], scale) for count in (4, 3, 4)] == [1, 1, 0]
    assert len(kernels_of._direct) <= 2


@pytest.fixture
def timed(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, float]]:
    """By the name of a unit, the seconds that the timing finds for its kernel and its operations."""
    monkeypatch.delenv("OPTIMIZE_EXPORT_NO_BENCH")
    # Not the result as a whole.
    monkeypatch.setattr("optimizer.pipeline.optimizing._run_as_written_if_faster", lambda *given: "")
    seconds: dict[str, tuple[float, float]] = {}

    def shortest(runs: Sequence[Callable[[], None]]) -> list[float]:
        ran.clear()
        OneByOne.differentiated.clear()
        for run in runs:
            run()
        (name,) = ran
        assert OneByOne.differentiated in ([], [name])
        return list(seconds[name])

    monkeypatch.setattr(fused, "_shortest", shortest)
    return seconds


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_kernel_that_is_no_faster_than_its_operations_is_left_out(mode: str, timed: dict[str, Any]) -> None:
    timed.update({"exp_add": (71e-6, 70e-6), "add_sin_mul": (69e-6, 70e-6)})
    model = model_of(lambda self, x: ((x.exp() + 1).sum(-1, keepdim=True) + x).sin() * self.scale)
    _, record = fused_model(model.train(mode == "training"), mode=mode)
    assert units_of(record) == ["add_sin_mul"]
    (skip,) = record.skips
    assert skip.text == "it wouldn't pay: on the example inputs, its kernel takes 71 µs, and its operations 70 µs"


def test_if_no_kernel_pays_nothing_is_changed(timed: dict[str, Any]) -> None:
    timed["mul_div_erf_add_mul"] = (2.0, 1.0)
    fast, record = fused_model(model_of(by_hand_gelu))
    assert (record.status, record.detail) == ("unchanged", None)
    assert "_compiled_call_impl" not in fast.__dict__ or fast.__dict__["_compiled_call_impl"] is None


def test_kernels_that_calls_of_the_examples_would_not_use_are_left_out(
    timed: dict[str, Any], ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_FEWEST_ELEMENTS", 1000)
    _, record = fused_model(model_of(by_hand_gelu))
    assert record.status == "unchanged"
    (skip,) = record.skips
    assert skip.text == (
        "it wouldn't pay: on a CPU, kernels of fewer than 1,000 elements aren't used, and the example inputs have fewer"
    )
    # No kernel was compiled for that.
    assert not ran


def test_the_shortest_of_some_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(fused, "_now", lambda: next(clock))
    calls: list[str] = []
    assert fused._shortest([lambda: calls.append("a"), lambda: calls.append("b")]) == [1, 1]
    # Three warm ones of each, one that tells how many make a round, and the only round that the time allows.
    assert calls == [*"aaabbb", *"ab", *"ab"]
