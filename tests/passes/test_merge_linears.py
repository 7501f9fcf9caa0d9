"""Linear layers on one input: computed together where that can be done, and right whatever is done to them afterwards."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_contract import captured, check_pass
from tiny_models import enliven
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from optimizer import check_parity, export, optimize, report_of
from passes import MergeLinears, PassResult
from passes.graph.linear_groups import LinearGroup, SharingForward, shared_by

NAMES = ("query", "key", "value")


class Gated(nn.Module):
    """The gated unit of a language model; it can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 6)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x).sigmoid() * self.up(x))


def _in_order(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    return self.query(x), self.key(x), self.value(x)


class Attention(nn.Module):
    """Query, key and value of one input, in a forward that can't be traced; the key has no bias."""

    def __init__(self, before: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        enliven(self)
        self.projections: Callable[..., Any] = before or _in_order

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e6:
            return x
        batch, length, width = x.shape
        heads = [part.view(batch, length, 2, width // 2).transpose(1, 2) for part in self.projections(self, x)]
        y = F.scaled_dot_product_attention(*heads)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Branching(nn.Module):
    """Goes the way that is set, where no run showed any but the first."""

    def __init__(self, otherwise: Callable[..., Any]) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        enliven(self)
        self.otherwise: Callable[..., Any] = otherwise
        self.is_other = False

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e6:
            return x
        if self.is_other:
            return self.otherwise(self, x)
        return self.query(x) * self.key(x) + self.value(x).relu()


class _Products(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.linear
        return func(*args, **(kwargs or {}))


def products(model: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """How many linear layers one call computes."""
    with torch.no_grad(), _Products() as mode:
        model(*args, **kwargs)
    return mode.count


def image_of(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed))


def merged(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    fast = optimize(model.eval(), ["merge-linears:force=true"], example_inputs=args or (image_of(),), **kwargs)
    assert report_of(fast).passes[0].status == "applied", report_of(fast).passes[0]
    return fast


def changes(done: PassResult) -> list[tuple[str, str]]:
    return [(change.where, change.what) for change in done.changes]


def skips(done: PassResult) -> list[tuple[str, str]]:
    return [(skip.where, skip.reason) for skip in done.skips]


def same(fast: nn.Module, model: nn.Module, x: Tensor | None = None) -> bool:
    """Whether both answer alike: the products are the same sums, rounded in another order."""
    x = image_of(9) if x is None else x
    with torch.no_grad():
        return torch.allclose(fast(x), model(x), rtol=1e-4, atol=1e-5)


# What is merged -------------------------------------------------------------------------------------------------------


def test_the_gate_of_a_gated_unit() -> None:
    model, x = Gated().eval(), torch.randn(3, 6)
    done = check_pass(MergeLinears(force=True), model, (x,))
    assert changes(done) == [("", "gate and up computed together")]
    assert skips(done) == []
    assert (products(model, x), products(merged(model, x), x)) == (3, 2)


def test_query_key_and_value_where_no_trace_goes() -> None:
    model = nn.Sequential(Attention(), nn.ReLU(), Attention()).eval()
    done = check_pass(MergeLinears(force=True), model, (image_of(),))
    what = "query, key and value computed together"
    assert changes(done) == [("0", what), ("2", what)]
    assert (products(model, image_of()), products(merged(model), image_of())) == (8, 4)


def test_on_a_cpu_nothing_is_merged_unless_that_is_asked_for() -> None:
    model = nn.Sequential(Attention(), nn.ReLU(), Attention()).eval()
    done = check_pass(MergeLinears(), model, (image_of(),))
    reason = (
        "of its layers 2 groups take one input, and the model is on a device where one product for all only costs (cpu):"
        " merge-linears:force=true has it anyway"
    )
    assert changes(done) == []
    assert skips(done) == [("", reason)]
    assert skips(check_pass(MergeLinears(), nn.Sequential(nn.Linear(8, 8)).eval(), (image_of(),))) == []


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_batch_is_answered(size: int) -> None:
    model = Attention().eval()
    report = check_parity(model, merged(model), (image_of(),), batch_sizes=(size,))
    assert report.ok, report.reason


def test_groups_of_one_forward_each_on_an_input_of_its_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(8, 4 + number) for number in range(4))
            enliven(self)

        def forward(self, x: Tensor) -> Tensor:
            y = x.relu()
            first, second, third, fourth = self.a(x), self.b(y), self.c(x), self.d(y)
            return first.sum(-1) * third.sum(-1) + second.sum(-1) * fourth.sum(-1)

    model = Two().eval()
    done = check_pass(MergeLinears(force=True), model, (image_of(),))
    assert changes(done) == [("", "a and c computed together"), ("", "b and d computed together")]
    assert products(merged(model), image_of()) == 2


def test_what_lies_in_one_place_is_there_once_and_the_model_keeps_its_own() -> None:
    model = Attention().eval()
    fast = merged(model)
    weights = [fast.get_submodule(name).weight for name in NAMES]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert weights[0].untyped_storage().nbytes() == sum(weight.nbytes for weight in weights)
    held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in fast.parameters()}
    # The joint bias has zeros for the key, which has none.
    assert sum(held.values()) == sum(value.nbytes for value in model.parameters()) + 8 * 4
    assert not held.keys() & {model.get_submodule(name).weight.data_ptr() for name in NAMES}


def test_without_example_inputs_by_the_graph_alone() -> None:
    class Flat(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.gate(x).view(-1, 10) * self.up(x))

    model = nn.Sequential(Gated(), Flat()).eval()
    fast = optimize(model, ["merge-linears:force=true"])
    (record,) = report_of(fast).passes
    assert [(change.where, change.text) for change in record.changes] == [("0", "gate and up computed together")]
    reason = "its output comes to view, which may not take rows of a wider tensor: give example inputs"
    assert [(skip.where, skip.text) for skip in record.skips] == [("1.gate", reason)]
    assert products(fast, torch.randn(3, 6)) == 5
    assert same(fast, model, torch.randn(3, 6))


# What stays -----------------------------------------------------------------------------------------------------------


class Refused(nn.Module):
    """Two layers on one input that a change is made to, and two functions on another that a function of it uses."""

    def __init__(self, change: Callable[[Any], Any], use: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        enliven(self)
        change(self)
        self.use: Callable[..., Tensor] = use or (lambda self, x: self.first(x).relu() + self.second(x).sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def _replaced(model: Any) -> None:
    scaled = Scaled(8, 8)
    scaled.load_state_dict(model.first.state_dict())
    model.first = scaled


def _no_change(model: Any) -> None:
    pass


REFUSALS: list[tuple[Callable[[Any], Any], Callable[..., Tensor] | None, str, str]] = [
    (_replaced, None, "first", "it is of the class Scaled or has a forward of its own, and may compute anything"),
    (lambda m: m.first.register_forward_hook(lambda *_: None), None, "first", "it has hooks"),
    (lambda m: m.first.register_forward_pre_hook(lambda *_: None), None, "first", "it has hooks"),
    (lambda m: nn.utils.weight_norm(m.first), None, "first", "it has hooks"),
    (lambda m: parametrizations.weight_norm(m.first), None, "first", "it has parametrizations"),
    (lambda m: setattr(m, "again", m.first), None, "first", "it stands in the tree under two names, first and again"),
    (lambda m: setattr(m.other, "weight", m.first.weight), None, "first", "its weight is shared with another module"),
    (lambda m: setattr(m.first, "bias", m.second.bias), None, "first", "its bias is shared with another module"),
    (
        _no_change,
        lambda self, x: self.first(x).relu() + self.first(x.relu()) + self.second(x),
        "first",
        "it is called 2 times",
    ),
    (
        _no_change,
        lambda self, x: F.linear(x, self.other.weight) + self.first(x).relu(),
        "the root (linear)",
        "it is called as a function, and others that take the same input can't stand in for that",
    ),
    (
        _no_change,
        lambda self, x: torch.as_strided(self.first(x), (2, 40), (40, 1)).sum() + self.second(x),
        "first",
        "the code of the root names as_strided, which may go by how its output lies in memory",
    ),
]


def _copy(by: str, how: str) -> str:
    return f"its output may be written to (by {by}) through what {how} gives, which is a copy of rows that are parts of wider"


def _data_in_an_island(self: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 1e6 else _data_where_no_name_shows(self, x)


def _written_in_a_branch(self: Any, x: Tensor) -> Tensor:
    y = self.first(x)
    if self.training:
        y.flatten(1)[:, 0] = 0
    return y + self.second(x).relu()


def _written_in_a_child(self: Any, x: Tensor) -> Tensor:
    y = self.first(x)
    self.act(y.reshape(y.shape[0], -1))
    return y + self.second(x).sigmoid()


def _copied_in_a_child(self: Any, x: Tensor) -> Tensor:
    y = self.first(x)
    self.flat(y).add_(1)
    return y + self.second(x).sigmoid()


def _written_by_a_helper(self: Any, x: Tensor) -> Tensor:
    y = self.first(x)
    _double(y.contiguous())
    return y + self.second(x).sigmoid()


def _double(y: Tensor) -> None:
    y *= 2


def _written_as_one_of_some(self: Any, x: Tensor) -> Tensor:
    parts = [self.first(x), self.second(x).sigmoid()]
    flat = [part.reshape(-1) for part in parts]
    flat[0] += 1
    return parts[0] + parts[1]


def _written_by_data(self: Any, x: Tensor) -> Tensor:
    y = self.first(x).relu()
    if self.training:
        x.data.mul_(2)
    return y + self.second(x).sigmoid()


def _written_by_numpy(self: Any, x: Tensor) -> Tensor:
    y = self.first(x).relu()
    if self.training:
        x.numpy()[:] = 2
    return y + self.second(x).sigmoid()


def _data_where_no_name_shows(self: Any, x: Tensor) -> Tensor:
    y = self.first(x).relu()
    _WAYS["data"](x).mul_(1)
    return y + self.second(x).sigmoid()


_WAYS: dict[str, Callable[[Tensor], Any]] = {
    "double": lambda y: y.reshape(-1).mul_(2),
    "data": lambda x: x.data,
    "set data": lambda x: setattr(x, "data", x * 2),
}
_UNSEEN = "by which its input may be written to between the layers without torch counting that"


def _written_where_no_name_shows(self: Any, x: Tensor) -> Tensor:
    y = self.first(x)
    _WAYS["double"](y)
    return y + self.second(x).sigmoid()


def _written_in_a_child_of_a_branch(self: Any, x: Tensor) -> Tensor:
    y = self.first(x)
    if self.training:
        self.act(y.reshape(-1))
    return y + self.second(x).sigmoid()


REFUSALS += [
    (_no_change, _written_by_data, "first", f"the code of the root names data, {_UNSEEN}"),
    (_no_change, _written_by_numpy, "first", f"the code of the root names numpy, {_UNSEEN}"),
    (_no_change, _data_in_an_island, "first", f"the root does data, {_UNSEEN}"),
    (_no_change, _data_where_no_name_shows, "first", f"the root does data, {_UNSEEN}"),
    (_no_change, _written_where_no_name_shows, "first", _copy("mul_", "reshape")),
    (lambda m: setattr(m, "act", nn.ReLU(True)), _written_in_a_child_of_a_branch, "first", _copy("ReLU", "reshape")),
    (_no_change, _written_in_a_branch, "first", _copy("[]=", "flatten")),
    (lambda m: setattr(m, "act", nn.ReLU(inplace=True)), _written_in_a_child, "first", _copy("ReLU", "reshape")),
    (lambda m: setattr(m, "flat", nn.Flatten()), _copied_in_a_child, "first", _copy("add_", "Flatten")),
    (_no_change, _written_by_a_helper, "first", _copy("*=", "contiguous")),
    (_no_change, _written_as_one_of_some, "first", _copy("+=", "reshape")),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(("change", "use", "where", "reason"), REFUSALS)
def test_what_may_not_be_merged_stays(
    change: Callable[[Any], Any], use: Callable[..., Tensor] | None, where: str, reason: str
) -> None:
    program, context = captured(Refused(change, use).eval(), (image_of(),))
    done = MergeLinears(force=True).run(program, context)
    assert changes(done) == []
    assert any(skip[0] == where and skip[1].startswith(reason) for skip in skips(done)), skips(done)


def _writes_to_its_own(self: Any, x: Tensor) -> Tensor:
    first, second = self.first(x), self.second(x)
    scores = torch.matmul(first, second.transpose(1, 2))
    scores += 1
    bias = torch.zeros_like(scores)
    bias[..., 0] = 1
    scores.add_(bias)
    weights = scores.softmax(-1)
    weights[:, 0] *= 2
    return (weights @ second).reshape(x.shape[0], -1).contiguous()


def _writes_and_copies_apart(self: Any, x: Tensor) -> Tensor:
    first = self.first(x)
    first.mul_(2)
    return first.transpose(0, 1).transpose(0, 1) + self.second(x).relu()


@pytest.mark.parametrize("use", [_writes_to_its_own, _writes_and_copies_apart])
def test_writes_that_no_copy_misses_are_merged(use: Callable[..., Tensor]) -> None:
    model = Refused(_no_change, use).eval()
    done = check_pass(MergeLinears(force=True), model, (image_of(),))
    assert changes(done) == [("", "first and second computed together")]


@pytest.mark.parametrize("write", ["flatten", "reshape", "contiguous"])
def test_a_write_through_a_view_that_strides_make_a_copy_reaches_the_output(write: str) -> None:
    def use(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        {"flatten": lambda: y.flatten(1), "reshape": lambda: y.reshape(-1), "contiguous": y.contiguous}[write]().mul_(3)
        return y + self.second(x).relu()

    model = Refused(_no_change, use).eval()
    assert same(optimize(model, ["merge-linears:force=true"], example_inputs=(image_of(),)), model)


def test_the_others_of_a_group_are_merged_all_the_same() -> None:
    model = Attention().eval()
    model.key.register_forward_hook(lambda *_: None)
    done = check_pass(MergeLinears(force=True), model, (image_of(),))
    assert changes(done) == [("", "query and value computed together")]
    assert skips(done) == [("key", "it has hooks")]


def test_weights_of_another_dtype_stay() -> None:
    model = Refused(_no_change, lambda self, x: self.first(x).relu() + self.second(x).float() + self.other(x)).eval()
    model.second.weight = nn.Parameter(model.second.weight.detach().double())
    model.second.bias = nn.Parameter(model.second.bias.detach().double())
    program, context = captured(model)
    done = MergeLinears(force=True).run(program, context)
    assert changes(done) == [("", "first and other computed together")]
    assert skips(done) == [("second", "its weight is of another dtype, device or width than those beside it")]


def test_outputs_that_leave_lie_as_they_did() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(8, 3) for _ in range(4))
            enliven(self)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.a(x), self.b(x).transpose(0, 1), self.c(x).relu(), self.d(x).relu()

    model = Heads().eval()
    done = check_pass(MergeLinears(force=True), model, (image_of(),))
    assert changes(done) == [("", "c and d computed together")]
    reason = "its output may leave the forward, and would lie in memory otherwise than it did"
    assert skips(done) == [("a", reason), ("b", reason)]
    with torch.no_grad():
        assert [one.stride() for one in merged(model)(image_of())] == [one.stride() for one in model(image_of())]


def test_what_takes_no_rows_of_a_wider_tensor_is_found_by_a_run() -> None:
    def projections(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        flat = self.key(x).view(x.shape[0], -1)
        return self.query(x), flat.view(x.shape), self.value(x)

    done = check_pass(MergeLinears(force=True), Attention(projections).eval(), (image_of(),))
    assert changes(done) == [("", "query and value computed together")]
    assert skips(done) == [("key", "its output comes to view, which takes no rows of a wider tensor")]


@pytest.mark.parametrize("shape", [(4, 1, 8), (1, 1, 8), (1, 8)])
@pytest.mark.parametrize(
    ("view", "is_merged"),
    [
        (lambda y: y.view(*y.shape[:-1], 2, -1).flatten(-2), True),
        (lambda y: y.view((*y.shape[:-1], 2, 4)).flatten(-2), True),
        (lambda y: y.view(-1, 2, 4).reshape(y.shape), True),
        (lambda y: y.view(y.shape), True),
        (lambda y: y.view(torch.int32).view(torch.float32), True),
        (lambda y: y.view(y.shape[0], -1) if y.dim() > 2 else y.view(-1), False),
        (lambda y: y.view(y.numel()), False),
        (lambda y: y.view_as(y.flatten()), False),
    ],
)
def test_a_dim_of_one_hides_nothing_that_a_longer_one_shows(
    view: Callable[[Tensor], Tensor], is_merged: bool, shape: tuple[int, ...]
) -> None:
    model = Refused(_no_change, lambda self, x: view(self.first(x)).sum() + self.second(x).relu()).eval()
    program, context = captured(model, (torch.randn(shape),))
    done = MergeLinears(force=True).run(program, context)
    assert bool(changes(done)) == is_merged
    longer = ", which may take no rows of a wider tensor where a dim is longer than 1: give longer example inputs"
    reasons = [reason for where, reason in skips(done) if where == "first"]
    assert is_merged != any(reason.endswith((longer, ", which takes no rows of a wider tensor")) for reason in reasons)
    assert is_merged or shape[0] > 1 or reasons[0].endswith(longer)
    x = torch.randn([3 * length for length in shape[:-1]] + [8])
    assert same(program.root, model, x)


def test_a_group_that_a_run_raises_with_stays_and_the_others_go_on() -> None:
    class Picky(Attention):
        def forward(self, x: Tensor) -> Tensor:
            if not self.query(x).is_contiguous():
                raise ValueError("it has to lie in one piece")
            return x + self.key(x).relu() + self.value(x)

    model = nn.Sequential(Attention(), Picky(), Attention()).eval()
    done = check_pass(MergeLinears(force=True), model, (image_of(),))
    assert [where for where, _ in changes(done)] == ["0", "2"]
    assert {skip[0] for skip in skips(done)} == {"1.query", "1.key", "1.value"}
    assert "raises (ValueError: it has to lie in one piece)" in done.skips[0].reason


def test_a_module_around_that_has_a_forward_of_its_own_stays() -> None:
    model = nn.Sequential(Attention())
    inner = model[0]
    inner.forward = lambda x: Attention.forward(inner, x)  # type: ignore[method-assign]
    program, context = captured(model.eval(), (image_of(),))
    done = MergeLinears(force=True).run(program, context)
    assert changes(done) == []


def test_another_linear_on_another_input_stays() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    assert changes(check_pass(MergeLinears(force=True), model, (image_of(),))) == []


def test_a_wrong_joint_weight_is_found_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = LinearGroup.joined

    def wrong(self: LinearGroup) -> Any:
        found = joined(self)
        with torch.no_grad():
            found.parts[1][2].mul_(1.01)
        return found

    monkeypatch.setattr(LinearGroup, "joined", wrong)
    fast = optimize(Attention().eval(), ["merge-linears:force=true"], example_inputs=(image_of(),))
    (record,) = report_of(fast).passes
    assert record.status == "rolled-back"
    assert "query, key and value computed together" in record.reason


# The keys, both ways --------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_the_original_goes_into_the_result_and_back() -> None:
    model, other = Attention().eval(), Attention().eval()
    enliven(other, seed=5)
    with torch.no_grad():
        other.query.weight.mul_(1.3)
    fast = merged(model)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert {name: value.shape for name, value in fast.state_dict().items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    fast.load_state_dict(other.state_dict())
    assert same(fast, other)
    assert products(fast, image_of()) == 2
    back = Attention().eval()
    back.load_state_dict(fast.state_dict())
    assert same(fast, back)
    assert all(torch.equal(value, fast.state_dict()[name]) for name, value in back.state_dict().items())


def test_tensors_that_are_put_in_the_place_of_others_are_used() -> None:
    model, other = Attention().eval(), Attention().eval()
    enliven(other, seed=5)
    with torch.no_grad():
        other.key.weight.mul_(-1)
    fast = merged(model)
    fast.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert same(fast, other)
    assert products(fast, image_of()) == 4


def test_weights_that_were_replaced_are_held_by_nobody() -> None:
    fast = merged(Attention().eval())
    old = [weakref.ref(fast.get_submodule(name).weight) for name in NAMES]
    fast.load_state_dict({name: value.clone() for name, value in fast.state_dict().items()}, assign=True)
    fast(image_of())
    assert [reference() for reference in old] == [None, None, None]


def test_weights_that_come_back_compute_together_again() -> None:
    model = Attention().eval()
    fast = merged(model)
    others = {name: value.detach() * 2 for name, value in model.named_parameters()}
    for _ in range(2):
        mine, theirs = (torch.func.functional_call(one, others, (image_of(),)) for one in (fast, model))
        torch.testing.assert_close(mine, theirs)
        assert products(fast, image_of()) == 2
        assert same(fast, model)


def test_safetensors_and_torch_hold_every_weight_once(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    model = Attention().eval()
    fast = merged(model)
    save_file(fast.state_dict(), tmp_path / "weights.safetensors")
    back = Attention().eval()
    back.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert same(fast, back)
    sizes = [io.BytesIO() for _ in range(2)]
    for one, file in zip((model, fast), sizes, strict=True):
        torch.save(one.state_dict(), file)
    assert len(sizes[1].getvalue()) <= len(sizes[0].getvalue()) + 64


# What is done to a result ---------------------------------------------------------------------------------------------


def _written(fast: Any) -> Any:
    with torch.no_grad():
        fast.key.weight.mul_(3)
    return fast


def _replaced_parameter(fast: Any) -> Any:
    fast.key.weight = nn.Parameter(fast.key.weight.detach() * 3)
    return fast


def _set_data(fast: Any) -> Any:
    fast.key.weight.data = fast.key.weight.data.t()
    return fast


def _given_a_bias(fast: Any) -> Any:
    fast.key.bias = nn.Parameter(torch.ones(8))
    return fast


def _without_a_bias(fast: Any) -> Any:
    fast.query.bias = None
    return fast


def _pruned(fast: Any) -> Any:
    prune.ln_structured(fast.key, "weight", 0.5, n=1, dim=0)
    return fast


def _parametrized(fast: Any) -> Any:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    parametrize.register_parametrization(fast.key, "weight", Twice())
    return fast


def _cast_apart(fast: Any) -> Any:
    for name in (*NAMES, "out"):
        fast.get_submodule(name).double()
    return fast


def _tied(fast: Any) -> Any:
    fast.key.weight = fast.query.weight
    fast.float()
    with torch.no_grad():
        fast.query.weight.add_(0.5)
    return fast


def _replaced_layer(fast: Any) -> Any:
    layer = nn.Linear(8, 8)
    layer.load_state_dict(fast.query.state_dict())
    fast.value = layer
    return fast


def _saved(fast: Any) -> Any:
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("act", "count"),
    [
        (_written, 2),
        (_replaced_parameter, 4),
        (_set_data, 4),
        (_given_a_bias, 4),
        (_without_a_bias, 4),
        (_pruned, 4),
        (_parametrized, 4),
        (_cast_apart, 4),
        (_tied, 4),
        (_replaced_layer, 3),
        (copy.deepcopy, 2),
        (_saved, 2),
        (lambda fast: fast.double(), 2),
        (lambda fast: fast.to(torch.float64).float(), 2),
        (lambda fast: fast.requires_grad_(False), 2),
        (lambda fast: fast.share_memory(), 2),
    ],
)
def test_the_result_does_what_the_model_does_after(act: Callable[[Any], Any], count: int) -> None:
    model = Attention().eval()
    fast = merged(model)
    fast, model = act(fast), act(model)
    x = image_of(3).to(fast.out.weight.dtype)
    assert same(fast, model, x)
    assert products(fast, x) == count


class Kept(nn.Module):
    """Can be pickled by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.branching = Gated(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.branching(F.pad(self.gated(x[..., :6]), (0, 2)))


def test_a_pickled_result_is_the_same_and_joined() -> None:
    model = Kept().eval()
    fast = merged(model)
    again = pickle.loads(pickle.dumps(fast))
    assert same(again, model)
    assert products(again, image_of()) == products(fast, image_of()) == 4
    weight = again.branching.query.weight
    assert weight.untyped_storage().nbytes() == 3 * weight.nbytes
    with torch.no_grad():
        again.gated.gate.weight.zero_()
    assert not same(again, fast)


def test_a_copy_is_joined_and_on_its_own() -> None:
    fast = merged(Attention().eval())
    twin = copy.deepcopy(fast)
    before = fast(image_of())
    with torch.no_grad():
        twin.query.weight.zero_()
    assert torch.equal(fast(image_of()), before)
    assert not same(twin, fast)
    alone = copy.deepcopy(fast.key)
    assert torch.equal(alone(image_of()), F.linear(image_of(), fast.key.weight))


def test_a_copy_of_what_came_apart_stays_apart() -> None:
    fast = _replaced_parameter(merged(Attention().eval()))
    twin = copy.deepcopy(fast)
    assert products(twin, image_of()) == products(pickle.loads(pickle.dumps(fast)), image_of()) == 4
    assert same(twin, fast)


def test_a_result_is_optimized_again() -> None:
    model = Attention().eval()
    fast = merged(model)
    again = optimize(fast, ["merge-linears:force=true"], example_inputs=(image_of(),))
    assert report_of(again).passes[0].status == "unchanged"
    assert products(again, image_of()) == products(fast, image_of()) == 2
    assert same(again, model)


def test_hooks_that_come_later_see_each_layer() -> None:
    model = Attention().eval()
    fast = merged(model)
    seen: list[Tensor] = []
    fast.key.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    x = image_of(4)
    assert same(fast, model, x)
    assert len(seen) == 1
    assert torch.allclose(seen[0], model.key(x), atol=1e-5)
    fast.key.register_forward_hook(lambda module, args, output: output * 2)
    model.key.register_forward_hook(lambda module, args, output: output * 2)
    assert same(fast, model, x)


def test_a_layer_called_on_its_own_computes_what_it_did() -> None:
    model = Attention().eval()
    fast = merged(model)
    for name in NAMES:
        mine, theirs = fast.get_submodule(name)(image_of()), model.get_submodule(name)(image_of())
        assert torch.equal(mine, theirs)
        assert mine.is_contiguous()
        assert mine.untyped_storage().nbytes() == mine.nbytes
        assert torch.equal(fast.get_submodule(name)(input=image_of()), theirs)


# Other ways through a forward -----------------------------------------------------------------------------------------


def _writes_between(self: Any, x: Tensor) -> Tensor:
    x = x.clone()
    first = self.query(x)
    x.add_(1)
    return first + self.key(x) + self.value(x)


def _sets_data_between(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    first = self.query(x)
    _WAYS["set data"](x)
    return first + self.key(x) + self.value(x)


def _writes_to_a_share(self: Any, x: Tensor) -> Tensor:
    first = self.query(x)
    first.mul_(2)
    second = self.key(x)
    second.add_(first)
    return first + second + self.value(x)


def _writes_to_a_weight(self: Any, x: Tensor) -> Tensor:
    first = self.query(x)
    with torch.no_grad():
        self.key.weight.mul_(1.5)
    second = self.key(x)
    with torch.no_grad():
        self.key.weight.div_(1.5)
    return first + second + self.value(x)


def _in_another_thread(self: Any, x: Tensor) -> Tensor:
    first, found = self.query(x), list[Tensor]()
    gradients = torch.is_grad_enabled()

    def run() -> None:
        with torch.set_grad_enabled(gradients):
            found.append(self.key(x))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return first + found[0] + self.value(x)


def _calls_itself(self: Any, x: Tensor) -> Tensor:
    first = self.query(x)
    if x.shape[1] > 1:
        return first + self(x[:, 1:]).sum(1, keepdim=True) + self.key(x)
    return first + self.value(x) + self.key(x)


def _without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = self.query(x)
    return first + self.key(x) + self.value(x)


WAYS: list[tuple[Callable[..., Tensor], int]] = [
    (lambda self, x: self.value(x) * 2 + self.key(x) - self.query(x), 1),
    (lambda self, x: self.query(x).relu(), 1),
    (lambda self, x: self.query(x) + self.key(x.clone()) + self.value(x), 3),
    (lambda self, x: self.query(x) + self.query(x.relu()) + self.key(x), 3),
    (lambda self, x: self.query(x) + self.query(x) + self.key(x) + self.value(x), 2),
    (lambda self, x: self.query(x) + self.key(x[:]) + self.value(x), 3),
    (lambda self, x: self.query(x[0]) + self.key(x[0, 0]), 2),
    (_writes_between, 3),
    (_sets_data_between, 3),
    (_writes_to_a_share, 1),
    (_writes_to_a_weight, 3),
    (_in_another_thread, 2),
    (_calls_itself, 6),
]


@pytest.mark.parametrize(("way", "count"), WAYS)
def test_another_way_is_answered_as_by_the_model(way: Callable[..., Tensor], count: int) -> None:
    model = Branching(way).eval()
    fast = merged(model)
    assert products(fast, image_of()) == 1
    model.is_other = fast.is_other = True
    for seed in (0, 1):
        assert same(fast, model, image_of(seed))
    with torch.no_grad(), _Products() as mode:
        fast(image_of())
    assert mode.count == count
    model.is_other = fast.is_other = False
    assert same(fast, model)
    assert products(fast, image_of()) == 1


@pytest.mark.parametrize(
    "way",
    [
        *(way for way, _ in WAYS if way not in (_writes_to_a_weight, _writes_between, _sets_data_between)),
        _without_gradients,
    ],
)
def test_gradients_go_that_way_too(way: Callable[..., Tensor]) -> None:
    # What the ways add up has gradients of 1e5 beside small ones, which single precision rounds by more than is allowed.
    model, x = Branching(way).eval().double(), image_of().double()
    fast = merged(model, x)
    model.is_other = fast.is_other = True
    check_gradients(fast, model, x)


def rows_computed(model: nn.Module, x: Tensor) -> list[int]:
    """How wide the result of each linear layer is."""
    rows: list[int] = []

    class Widths(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is F.linear:
                rows.append(result.shape[-1])
            return result

    with torch.no_grad(), Widths():
        model(x)
    return rows


@pytest.mark.parametrize(
    ("way", "first", "then"),
    [
        (lambda self, x: self.query(x).relu(), [24], [8]),
        (lambda self, x: self.value(x).relu() + self.query(x), [24], [8, 8]),
        (lambda self, x: self.value(x).relu() + self.key(x), [24], [16]),
        (lambda self, x: self.query(x) + self.key(x.clone()), [24, 8], [8, 8]),
        (lambda self, x: self.query(x) + self.key(x) + self.value(x.clone()), [24, 8], [16, 8]),
        (lambda self, x: self.value(x.clone()) + self.query(x) + self.key(x), [24, 8, 8], [8, 16]),
        (lambda self, x: sum(self.query(y) + self.key(y) for y in x), [24, 8, 8], [16, 16]),
        (lambda self, x: x * 2, [], []),
    ],
)
def test_what_a_branch_does_not_take_is_soon_not_computed(
    way: Callable[..., Tensor], first: list[int], then: list[int]
) -> None:
    model = Branching(way).eval()
    fast = merged(model)
    fast.is_other = model.is_other = True
    assert rows_computed(fast, image_of()) == first
    assert same(fast, model)
    for seed in range(3):
        assert rows_computed(fast, image_of()) == then
        assert same(fast, model, image_of(seed))
    fast.is_other = model.is_other = False
    for _ in range(2):
        assert same(fast, model)
    assert rows_computed(fast, image_of()) == [24]


def test_gradients_of_some_layers_of_a_group() -> None:
    model = Branching(lambda self, x: self.value(x).relu() + self.key(x)).eval()
    fast = merged(model)
    model.is_other = fast.is_other = True
    check_gradients(fast, model, image_of())
    check_gradients(fast, model, image_of())
    assert products(fast, image_of()) == 1


def test_nothing_is_kept_behind_the_forward() -> None:
    model = Branching(lambda self, x: self.query(x).relu()).eval()
    fast = merged(model)
    fast.is_other = True
    seen: list[weakref.ref[Tensor]] = []
    fast.query.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        x = image_of()
        given = weakref.ref(x)
        with torch.no_grad():
            fast(x)
        del x
        assert given() is None
        assert seen[0]() is None
        kept = [one for one in gc.get_objects() if type(one).__name__ == "_Kept"]
        assert not [one for one in kept if type(one).__module__ == "passes.graph.linear_groups"]
    finally:
        gc.enable()


def test_an_error_leaves_nothing_open() -> None:
    def fails(self: Any, x: Tensor) -> Tensor:
        self.query(x)
        raise ValueError("half-way")

    fast = merged(Branching(fails).eval())
    fast.is_other = True
    with pytest.raises(ValueError, match="half-way"):
        fast(image_of())
    assert fast.key(image_of()).is_contiguous()


def test_a_layer_called_by_another_thread_computes_by_itself() -> None:
    lying: list[bool] = []

    def way(self: Any, x: Tensor) -> Tensor:
        first = self.query(x)
        thread = threading.Thread(target=lambda: lying.append(self.key(x.detach()).is_contiguous()))
        thread.start()
        thread.join()
        thread = threading.Thread(target=lambda: lying.append(self.key(x).is_contiguous()))
        thread.start()
        thread.join()
        lying.append(self.key(x).is_contiguous())
        return first + self.value(x)

    fast = merged(Branching(way).eval())
    fast.is_other = True
    fast(image_of())
    assert lying == [True, True, False]


def test_threads_don_t_meet() -> None:
    model = Attention().eval()
    fast = merged(model)
    wrong: list[int] = []

    def run(seed: int) -> None:
        for number in range(20):
            x = image_of(seed * 100 + number)
            if not same(fast, model, x):
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Gradients ------------------------------------------------------------------------------------------------------------


def check_gradients(fast: nn.Module, model: nn.Module, x: Tensor) -> None:
    found = []
    for one in (model, fast):
        given = x.clone().requires_grad_()
        output = one(given)
        wanted = [given, *(parameter for parameter in one.parameters() if parameter.requires_grad)]
        found.append(torch.autograd.grad(output.square().sum(), wanted, allow_unused=True, materialize_grads=True))
    for mine, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", [(), ("query.weight",), ("key.weight", "value.bias"), ("",)])
def test_gradients_are_those_of_the_model(frozen: tuple[str, ...]) -> None:
    model = Attention().eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    fast = merged(model)
    assert [p.requires_grad for p in fast.parameters()] == [p.requires_grad for p in model.parameters()]
    check_gradients(fast, model, image_of())
    check_gradients(fast.double(), model.double(), image_of().double()[0:1])


def test_with_gradients_one_product_goes_forward() -> None:
    fast = merged(Attention().eval())
    with _Products() as mode:
        fast(image_of().requires_grad_()).sum().backward()
    assert mode.count == 2
    assert all(parameter.grad is not None for parameter in fast.parameters())


def test_gradients_of_gradients() -> None:
    model = Attention().eval().double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        fast = merged(model, image_of().double())
        found = []
        for one in (model, fast):
            x = image_of().double().requires_grad_()
            (first,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
            wanted = [x, *one.parameters()]
            found.append(torch.autograd.grad(first.square().sum(), wanted, allow_unused=True, materialize_grads=True))
    for mine, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


def _again(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def _all_again(self: Any, x: Tensor) -> Tensor:
    return _again(lambda x: self.query(x) * self.key(x) + self.value(x).relu(), x)


def _one_again(self: Any, x: Tensor) -> Tensor:
    return self.query(x) * _again(lambda x: self.key(x).relu(), x) + self.value(x)


def _first_again(self: Any, x: Tensor) -> Tensor:
    return _again(lambda x: self.query(x).relu(), x) * self.key(x) + self.value(x)


def _again_in_another_way(self: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: self.query(x) * self.key(x) + self.value(x).relu(), x, use_reentrant=True)


@pytest.mark.parametrize(
    ("way", "count"), [(_all_again, 3), (_one_again, 3), (_first_again, 2), (_again_in_another_way, 1)]
)
def test_gradients_of_a_part_that_is_computed_again(way: Callable[..., Tensor], count: int) -> None:
    model = Branching(way).eval()
    fast = merged(model)
    model.is_other = fast.is_other = True
    check_gradients_of_sum(fast, model)
    with _Products() as mode:
        fast(image_of().requires_grad_())
    assert mode.count == count


def check_gradients_of_sum(fast: nn.Module, model: nn.Module) -> None:
    """As `check_gradients`, by a backward pass: a part that is computed again in another way has no other."""
    for one in (model, fast):
        one.zero_grad()
        one(image_of().requires_grad_()).square().sum().backward()
    for mine, theirs in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_forward_that_is_computed_again_as_a_whole_is_merged() -> None:
    model = Attention().eval()
    fast = merged(model)
    for one in (model, fast):
        with _Products() as mode:
            output = _again(one, image_of().requires_grad_())
        output.square().sum().backward()
    assert mode.count == 2
    for mine, theirs in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_weight_written_to_before_the_backward_pass_is_seen(is_trained: bool) -> None:
    fast = copy.deepcopy(merged(Attention().eval().requires_grad_(is_trained)))
    output = fast(image_of().requires_grad_())
    with torch.no_grad():
        fast.value.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# Modes and transforms -------------------------------------------------------------------------------------------------


def test_in_inference_mode_each_layer_computes() -> None:
    model = Branching(_writes_between).eval()
    fast = merged(model)
    with torch.inference_mode():
        x = image_of()
        assert torch.allclose(fast(x), model(x), atol=1e-5)
        model.is_other = fast.is_other = True
        assert torch.allclose(fast(x), model(x), atol=1e-5)


def test_under_autocast() -> None:
    model = Attention().eval()
    fast = merged(model)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            mine, theirs = fast(image_of()), model(image_of())
        assert mine.dtype is theirs.dtype is torch.bfloat16
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)
    found = []
    for one in (model, fast):
        x = image_of().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = one(x)
        # Out of the context, as is usual.
        found.append(torch.autograd.grad(output.float().sum(), [x, *one.parameters()]))
    for mine, theirs in zip(*reversed(found), strict=True):
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_cast_first", [True, False])
def test_weights_of_half_a_precision_take_any_input_together(is_cast_first: bool, dtype: str) -> None:
    model = Attention().eval()
    cast = f"cast-precision:how=weights:dtype={dtype}"
    passes = [cast, "merge-linears:force=true"] if is_cast_first else ["merge-linears:force=true", cast]
    fast, alone = (optimize(model, each, example_inputs=(image_of(),)) for each in (passes, [cast]))
    assert [record.status for record in report_of(fast).passes] == ["applied"] * 2
    assert products(fast, image_of()) == 2
    twin = copy.deepcopy(fast)
    assert products(twin, image_of()) == 2
    half = getattr(torch, dtype)
    (group,) = [group for module in fast.modules() for group in shared_by(module)]
    with torch.no_grad():
        for x in (image_of(9), image_of(9).to(half)):
            torch.testing.assert_close(fast(x), alone(x), rtol=4 * torch.finfo(half).eps, atol=0.02)
            # Called by hand they go on taking what the cast ones take, as in a file.
            assert fast.query(x).dtype is half
            assert {share.dtype for share in group.compute_in_export(x, range(3))} == {half}


def test_a_layer_that_stays_in_float32_computes_by_itself() -> None:
    passes = ["cast-precision:how=weights:keep=key", "merge-linears:force=true"]
    fast = optimize(Attention().eval(), passes, example_inputs=(image_of(),))
    (skip,) = report_of(fast).passes[1].skips
    assert (skip.where, skip.text) == ("key", "it stays in float32, in the midst of others that don't")
    assert products(fast, image_of()) == 3
    fast = optimize(Attention().eval(), passes[::-1], example_inputs=(image_of(),))
    assert products(fast, image_of()) == 4
    assert report_of(fast).parity.verdict == "ok"


def test_autocast_casts_the_weights_of_a_loop_once() -> None:
    fast = merged(Attention().eval())
    casts = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
                fast(image_of())
            shapes = [event.input_shapes[0] for event in found.events() if event.name == "aten::_to_copy"]
            casts.append(([24, 8] in shapes, [24] in shapes, [2, 5, 8] in shapes))
    assert casts == [(True, True, True), (False, False, True)]


def test_autocast_doesn_t_make_frozen_layers_take_gradients() -> None:
    fast = merged(Attention().eval().requires_grad_(False))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        fast(image_of())
    assert not fast(image_of()).requires_grad
    fast.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        fast(image_of())
    fast.requires_grad_(False)
    assert not fast(image_of()).requires_grad


def test_an_autocast_that_ends_between_two_layers() -> None:
    def way(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = self.query(x)
        second = self.key(x)
        assert (first.dtype, second.dtype) == (torch.bfloat16, torch.float32)
        return first.float() + second + self.value(x)

    model = Branching(way).eval()
    fast = merged(model)
    model.is_other = fast.is_other = True
    with torch.no_grad():
        torch.testing.assert_close(fast(image_of()), model(image_of()), rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_of_functions() -> None:
    model = Gated().eval()
    fast = merged(model, torch.randn(3, 6))
    x = torch.randn(4, 3, 6)
    torch.testing.assert_close(torch.vmap(fast)(x), torch.vmap(model)(x))
    weights = {name: value.detach() * 1.5 for name, value in model.named_parameters()}

    def loss(one: nn.Module) -> Callable[[Any], Tensor]:
        return lambda w: torch.func.functional_call(one, w, (x,)).square().sum()

    mine, theirs = (torch.func.grad(loss(one))(weights) for one in (fast, model))
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-4)
    tangents = [torch.func.jvp(one, (x,), (torch.ones_like(x),))[1] for one in (fast, model)]
    torch.testing.assert_close(*tangents)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(fast(dual)).tangent, tangents[1])


def test_compiled_without_a_break() -> None:
    model = Gated().eval()
    fast = merged(model, torch.randn(3, 6))
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    x = torch.randn(5, 6)
    torch.testing.assert_close(compiled(x), model(x))
    torch._dynamo.reset()


def test_traced_by_fx_it_is_the_layers() -> None:
    fast = merged(Gated().eval(), torch.randn(3, 6))
    graph = torch.fx.symbolic_trace(fast)
    x = torch.randn(5, 6)
    torch.testing.assert_close(graph(x), fast(x))


# In files -------------------------------------------------------------------------------------------------------------


def _operations(path: Any) -> dict[str, int]:
    import onnx

    names = [node.op_type for node in onnx.load(path).graph.node]
    return {"products": sum(name in ("MatMul", "Gemm") for name in names), "splits": names.count("Split")}


def test_an_onnx_file_holds_one_product(tmp_path: Any) -> None:
    model, x = Gated().eval(), torch.randn(3, 6)
    bundle = export(merged(model, x), example_inputs=(x,), output=tmp_path / "gated", formats=("onnx",))
    assert bundle.parity.ok
    assert _operations(tmp_path / "gated" / "model.onnx") == {"products": 2, "splits": 1}


class Exported(Attention):
    """As attention in transformers: no trace of FX goes through, and that of an exporter does."""

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], 2, -1)
        parts = {name: self.get_submodule(name)(x).view(shape).transpose(1, 2) for name in NAMES}
        y = F.scaled_dot_product_attention(*parts.values())
        return self.out(y.transpose(1, 2).reshape(*x.shape[:-1], -1).contiguous())


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_both_exporters_of_torch_hold_one_product(dynamo: bool, tmp_path: Any) -> None:
    model = Exported().eval()
    counts = []
    for name, one in (("plain", model), ("fast", merged(model))):
        torch.onnx.export(one, (image_of(),), str(tmp_path / f"{name}.onnx"), dynamo=dynamo, verbose=False)
        counts.append(_operations(tmp_path / f"{name}.onnx"))
    plain, fast = counts
    assert (plain["products"] - fast["products"], fast["splits"] - plain["splits"]) == (2, 1)


def test_a_torchscript_file_holds_the_layers(tmp_path: Any) -> None:
    model, x = Gated().eval(), torch.randn(3, 6)
    bundle = export(merged(model, x), example_inputs=(x,), output=tmp_path / "gated", formats=("torchscript",))
    assert bundle.parity.ok


# With other passes ----------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Something for each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout())
        self.attention, self.drop, self.gated = Attention(), nn.Dropout(), nn.Linear(8, 6)
        self.unit = Gated()
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).flatten(2).transpose(1, 2)
        return self.unit(self.gated(self.drop(self.attention(y))))


OTHERS = ("fold-conv-bias", "fold-conv-bn", "channels-last", "simplify")


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("first", [True, False])
def test_in_a_pair_of_passes(other: str, first: bool) -> None:
    model, x = Mixed().eval(), torch.randn(2, 3, 4, 4)
    order = ["merge-linears:force=true", other] if first else [other, "merge-linears:force=true"]
    fast = optimize(model, order, example_inputs=(x,))
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    report = check_parity(model, fast, (x,), batch_sizes=(1, 2, 5))
    assert report.ok, report.reason
    assert (products(model, x), products(fast, x)) == (8, 5)


def test_before_torch_compile() -> None:
    from passes import TorchCompile

    model, x = Mixed().eval(), torch.randn(2, 3, 4, 4)
    fast = optimize(model, ["merge-linears:force=true", TorchCompile(backend="eager")], example_inputs=(x,))
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    assert check_parity(model, fast, (x,)).ok
    torch._dynamo.reset()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)) * self.second(x).relu()


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_is_folded_is_not_merged_and_the_reverse(first: bool) -> None:
    model, x = Normed().eval(), torch.randn(4, 8)
    order = ["merge-linears:force=true", "fold-conv-bn"] if first else ["fold-conv-bn", "merge-linears:force=true"]
    fast = optimize(model, order, example_inputs=(x,))
    mine, other = report_of(fast).passes
    assert (mine.status, other.status) == ("applied", "unchanged")
    reason = (
        "the layer before it, first, is computed together with others on its input: put merge-linears last"
        if first
        else "it was folded together with another layer"
    )
    assert [skip.text for skip in other.skips] == [reason]
    assert check_parity(model, fast, (x,)).ok


def test_taken_back_alone() -> None:
    model, x = Mixed().eval(), torch.randn(2, 3, 4, 4)
    program, context = captured(model, (x,))
    done = MergeLinears(force=True).run(program, context)
    assert isinstance(vars(program.root.unit)["forward"], SharingForward)
    done.rewriter.roll_back()
    assert not {"forward", "_apply"} & vars(program.root.unit).keys()
    assert products(program.root, x) == 8


# Models of transformers -----------------------------------------------------------------------------------------------


def _transformer(name: str) -> tuple[nn.Module, dict[str, Tensor], int]:
    import transformers
    from real_models import lively

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 37}
    ids = torch.randint(1, 30, (2, 6), generator=torch.Generator().manual_seed(0))
    if name == "gpt2":
        made = transformers.GPT2Model(transformers.GPT2Config(vocab_size=31, n_embd=32, n_layer=1, n_head=4,
                                                             bos_token_id=1, eos_token_id=2))  # fmt: skip
        return lively(made), {"input_ids": ids}, 0
    if name == "vit":
        made = transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **sizes))
        return lively(made), {"pixel_values": torch.randn(2, 3, 16, 16)}, 3
    if name == "llama":
        config = transformers.LlamaConfig(vocab_size=31, num_key_value_heads=2, **sizes)
        return lively(transformers.LlamaModel(config)), {"input_ids": ids}, 5
    return lively(transformers.BertModel(transformers.BertConfig(vocab_size=31, **sizes))), {"input_ids": ids}, 3


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "llama"])
def test_a_transformer(name: str) -> None:
    model, kwargs, layers = _transformer(name)
    fast = optimize(model, ["merge-linears:force=true"], example_kwargs=kwargs)
    (record,) = report_of(fast).passes
    assert record.status == ("applied" if layers else "unchanged")
    groups = len(record.changes)
    assert products(model, **kwargs) - products(fast, **kwargs) == layers - groups
    report = check_parity(model, fast, (), example_kwargs=kwargs, batch_sizes=(1, 2, 5))
    assert report.ok, report.reason
    assert list(fast.state_dict()) == list(model.state_dict())


def test_a_language_model_generates_the_same_with_its_cache() -> None:
    import transformers
    from real_models import lively

    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=37, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = lively(transformers.LlamaForCausalLM(config))
    ids = torch.randint(3, 30, (2, 6), generator=torch.Generator().manual_seed(0))
    fast = optimize(model, ["merge-linears:force=true"], example_kwargs={"input_ids": ids})
    answers = [one.generate(ids, max_new_tokens=5, do_sample=False) for one in (model, fast)]
    assert torch.equal(*answers)


def test_a_forward_with_hundreds_of_groups_is_tried_in_one_run() -> None:
    class Parallel(nn.Module):
        """As many gated units, one behind another."""

        def __init__(self) -> None:
            super().__init__()
            self.gates = nn.ModuleList(nn.Linear(2, 2) for _ in range(600))
            self.values = nn.ModuleList(nn.Linear(2, 2) for _ in range(600))

        def forward(self, x: Tensor) -> Tensor:
            for gate, value in zip(self.gates, self.values, strict=True):
                x = x + gate(x).tanh() * value(x).tanh()
            return x

    program, context = captured(Parallel().eval(), (torch.randn(3, 2),))
    run_inside, problems = context.run_inside, []
    assert run_inside is not None

    def noting(watch: Any) -> str | None:
        problems.append(run_inside(watch))
        return problems[-1]

    done = MergeLinears(force=True).run(program, replace(context, run_inside=noting))
    assert problems == [None]
    assert len(done.changes) == 600
