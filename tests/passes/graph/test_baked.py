"""What a trace read is compared at every call of the graph."""

import copy
import enum
import functools
import pickle
from collections import OrderedDict
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from passes.errors import UnseenCall
from passes.graph.baked import Baked
from passes.graph.capture import capture
from passes.graph.fingerprint import ABSENT, TooMuch, fingerprint

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
FACTOR = 2.0
TABLE = {"gain": 3.0}


FIRST, SECOND, THIRD, FOURTH = 2.0, 2.0, 2.0, 2.0
scale = "a global that nothing reads, of the name of an attribute"


def first(x: Any) -> Any:
    return x * FIRST


def second(x: Any, factor: float) -> Any:
    return x * SECOND * factor


class Applied:
    gain = 1.0

    def gained(self, x: Any) -> Any:
        return x * self.gain

    def not_gained(self, x: Any) -> Any:
        return x

    def third(self, x: Any) -> Any:
        return self.inner(x)

    def inner(self, x: Any) -> Any:
        return x * THIRD

    def fourth(self, x: Any) -> Any:
        return x * FOURTH


class Settings:
    gain = 2.0

    class Inner:
        shift = 1.0

    @property
    def unread(self) -> float:
        return 1.0


ACTS = {"first": first}


class Reaching(nn.Module):
    """Reads what stands in classes, and what functions name that it gets hold of by a value."""

    gain = 2.0
    scale = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.partial = functools.partial(second, factor=2.0)
        self.applied = Applied()
        self.bound = Applied().fourth

    def forward(self, x: Any) -> Any:
        x = ACTS["first"](x) * Settings.gain + Settings.Inner.shift
        x = self.bound(self.applied.third(self.partial(x)))
        return x * type(self).gain * self.scale


REACHED = {
    "FIRST": lambda patch: patch.setitem(globals(), "FIRST", 3.0),
    "SECOND": lambda patch: patch.setitem(globals(), "SECOND", 3.0),
    "THIRD": lambda patch: patch.setitem(globals(), "THIRD", 3.0),
    "FOURTH": lambda patch: patch.setitem(globals(), "FOURTH", 3.0),
    "gain of the class Settings": lambda patch: patch.setattr(Settings, "gain", 3.0),
    "shift of the class Inner": lambda patch: patch.setattr(Settings.Inner, "shift", 3.0),
    "gain of the class Reaching": lambda patch: patch.setattr(Reaching, "gain", 3.0),
}


class Kind(enum.Enum):
    PLAIN = 1
    OTHER = 2


class Slotted:
    __slots__ = ("__scale", "unset")

    def __init__(self, scale: float) -> None:
        self.__scale = scale


class SlottedMore(Slotted):
    pass


def outside(x: Any) -> Any:
    return x * TABLE["gain"]


class Reading(nn.Module):
    default = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.flag = True
        self.sizes = [1, 2]
        self.table: dict[str, Any] = {"a": 1.0, "b": [1.0]}
        self.config = SimpleNamespace(eps=0.5, inner=SimpleNamespace(shift=1.0))
        self.kind = Kind.PLAIN
        self.function = F.relu
        self.partial = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.down: nn.Module | None = None
        self.unread = 0
        self.layers = nn.ModuleList([nn.Tanh(), nn.ReLU()])
        self.linear = nn.Linear(4, 4, bias=False)
        self.direct = nn.Linear(4, 4)
        self.bound = Applied().gained
        self.drop = nn.Dropout(0.25)
        self.register_parameter("offset", None)

    @property
    def doubled(self) -> float:
        return self.scale * 2

    def forward(self, x: Any) -> Any:
        y = self.linear(x) * self.doubled * self.default * self.sizes[0] * self.table["a"] * self.table["b"][0]
        y = self.bound(self.direct.forward(y)) + self.config.eps + self.config.inner.shift
        for layer in self.layers:
            y = layer(y)
        if self.down is not None:
            y = self.down(y)
        if self.offset is not None:
            y = y + self.offset
        if self.kind == Kind.PLAIN and self.flag:
            y = self.partial(self.function(y))
        if getattr(self, "extra", False):
            y = y + 1
        return self.helped(y) * self.drop.p * len(self.linear._parameters)

    def helped(self, y: Any) -> Any:
        return outside(y) * self.shifted(y) * FACTOR

    @staticmethod
    def shifted(y: Any) -> Any:
        return y + 1


def installed(module: nn.Module | None = None) -> Any:
    module = (module or Reading()).eval()
    captured = capture(module)
    assert id(module) in captured.graphs, captured.islands[id(module)].reason
    module.__dict__["forward"] = captured.graphs[id(module)].forward()
    return module


CHANGES: dict[str, Any] = {
    "scale": lambda m: setattr(m, "scale", 3.0),
    "another type": lambda m: setattr(m, "scale", 2),
    "flag": lambda m: setattr(m, "flag", 1),
    "class attribute": lambda m: setattr(m, "default", 2.0),
    "list": lambda m: m.sizes.append(3),
    "list item": lambda m: m.sizes.__setitem__(0, True),
    "list to tuple": lambda m: setattr(m, "sizes", (1, 2)),
    "dict": lambda m: m.table.update(a=1),
    "inner list": lambda m: m.table["b"].__setitem__(0, 2.0),
    "object": lambda m: setattr(m.config, "eps", 0.25),
    "inner object": lambda m: setattr(m.config.inner, "shift", -1.0),
    "enum": lambda m: setattr(m, "kind", Kind.OTHER),
    "function": lambda m: setattr(m, "function", F.gelu),
    "partial": lambda m: m.partial.keywords.update(negative_slope=0.2),
    "child for None": lambda m: setattr(m, "down", nn.Tanh()),
    "parameter for None": lambda m: setattr(m, "offset", nn.Parameter(torch.ones(()))),
    "another layer": lambda m: m.layers.append(nn.ReLU()),
    "fewer layers": lambda m: m.layers.__delitem__(1),
    "attribute of a child": lambda m: setattr(m.drop, "p", 0.5),
    "child with another attribute": lambda m: setattr(m, "drop", nn.Dropout(0.5)),
    "new attribute": lambda m: setattr(m, "extra", True),
    "method": lambda m: setattr(m, "helped", lambda y: y),
    "static method": lambda m: setattr(m, "shifted", lambda y: y),
    "method of an object": lambda m: setattr(m, "bound", m.bound.__self__.not_gained),
    "object of a method": lambda m: setattr(m.bound.__self__, "gain", 2.0),
    "child with another forward": lambda m: setattr(m, "direct", nn.Identity()),
    "gone": lambda m: delattr(m, "flag"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_refused(name: str) -> None:
    module = installed()
    assert torch.equal(module(X), Reading.forward(module, X))
    CHANGES[name](module)
    with pytest.raises(
        UnseenCall, match=r"was changed after optimize\(\), which put its value into the graph of Reading"
    ):
        module(X)


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = torch.ones(5)
        self.unasked = nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        weight = self.linear.weight
        return self.linear(x) * weight.size(0) * weight.shape[-1] * self.table.shape[0] * weight.numel() * self.unasked


SHAPES: dict[str, tuple[Any, str]] = {
    "parameter": (lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(1, 4))), "weight of linear"),
    "parameter of another child": (lambda m: setattr(m, "linear", nn.Linear(4, 2)), "weight of linear"),
    "plain tensor": (lambda m: setattr(m, "table", torch.ones(3)), "table of the root"),
}


@pytest.mark.parametrize("again", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_the_forward_asked_for_are_compared(name: str, again: Any) -> None:
    module = again(installed(Shapes()))
    module.linear.weight = nn.Parameter(torch.zeros(4, 4))
    module.unasked = nn.Parameter(torch.ones(1))
    assert torch.equal(module(X), Shapes.forward(module, X))
    change, place = SHAPES[name]
    change(module)
    with pytest.raises(UnseenCall, match=rf"^the shape of {place} was changed after optimize"):
        module(X)


@pytest.mark.parametrize("again", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_methods_of_a_class_are_compared(again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = again(installed())
    assert torch.equal(module(X), Reading.forward(module, X))
    monkeypatch.setattr(Reading, "helped", lambda self, y: y)
    with pytest.raises(UnseenCall, match=r"^helped of the root was changed"):
        module(X)


def test_globals_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    module = installed()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "FACTOR", 4.0)
        with pytest.raises(UnseenCall, match=r"^the global FACTOR was changed"):
            module(X)
    with monkeypatch.context() as patch:
        patch.setitem(TABLE, "gain", 5.0)
        with pytest.raises(UnseenCall, match=r"^the global TABLE was changed"):
            module(X)
    assert torch.equal(module(X), Reading.forward(module, X))


@pytest.mark.parametrize("again", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("name", REACHED)
def test_what_values_and_classes_lead_to_is_compared(name: str, again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = again(installed(Reaching()))
    monkeypatch.setitem(globals(), "scale", "another")
    monkeypatch.setattr(Settings, "unread", 2.0)
    assert torch.equal(module(X), Reaching.forward(module, X))
    REACHED[name](monkeypatch)
    with pytest.raises(UnseenCall, match=rf"^(the global )?{name} was changed"):
        module(X)


def test_variables_around_the_forward_are_compared() -> None:
    factor = 2.0

    class Closed(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * factor

    module = installed(Closed())
    assert torch.equal(module(X), X * 2)
    factor = 3.0
    with pytest.raises(UnseenCall, match=r"^a variable around the forward was changed"):
        module(X)


FOLLOWED: dict[str, Any] = {
    "what nothing reads": lambda m: setattr(m, "unread", 5),
    "a note": lambda m: setattr(m, "note", "text"),
    "an equal value": lambda m: setattr(m, "scale", float("2.0")),
    "equal containers": lambda m: (setattr(m, "sizes", [1, 2]), setattr(m, "table", {"a": 1.0, "b": [1.0]})),
    "a layer": lambda m: m.layers.__setitem__(0, nn.GELU()),
    "a child with an equal attribute": lambda m: setattr(m, "drop", nn.Dropout(0.25)),
    "a weight": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "an attribute of a called child": lambda m: setattr(m.drop, "inplace", True),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_rest_is_followed(name: str) -> None:
    module = installed()
    FOLLOWED[name](module)
    assert torch.equal(module(X), Reading.forward(module, X))


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: pickle.loads(pickle.dumps(m, 2))]
)
def test_copies_compare_their_own(again: Any) -> None:
    module = installed()
    twin = again(module)
    module.scale = 3.0
    assert torch.equal(twin(X), Reading.forward(twin, X))
    twin.drop = nn.Dropout(0.5)
    with pytest.raises(UnseenCall, match=r"^p of drop was changed"):
        twin(X)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning")
def test_attributes_of_a_child_that_is_gone_or_scripted_are_compared() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Sequential(nn.Dropout(0.25)))

        def forward(self, x: Any) -> Any:
            return self.block(x) * self.block[0][0].p

    module = installed(Outer())
    module.block = torch.jit.trace(nn.Sequential(nn.Sequential(nn.Dropout(0.25))).eval(), X)
    with pytest.raises(UnseenCall, match=r"^p of block.0.0 was changed"):
        module(X)
    module.block = nn.Sequential(nn.Identity())
    with pytest.raises(UnseenCall, match=r"was changed"):
        module(X)


def test_attributes_that_a_class_answers_for_itself_are_compared() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Dropout(0.25)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x: Any) -> Any:
            return self.inner(x) * self.p

    module = installed(Around())
    assert torch.equal(module(X), X * 0.25)
    module.inner.p = 0.5
    with pytest.raises(UnseenCall, match=r"^p of the root was changed"):
        module(X)


@pytest.mark.parametrize("read", [lambda m: m.__dict__["scale"], lambda m: vars(m)["scale"]])
def test_a_forward_that_reads_attributes_past_its_module_is_left_alone(read: Any) -> None:
    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        def forward(self, x: Any) -> Any:
            return x * read(self)

    (island,) = capture(Past().eval()).islands.values()
    assert island.reason == "its forward reads attributes from a __dict__, where it isn't seen which"


def test_a_forward_that_tests_classes_refuses_a_child_of_another() -> None:
    class Testing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Any) -> Any:
            return self.act(x) * 2 if isinstance(self.act, nn.ReLU) else self.act(x)

    module = installed(Testing())
    module.act = nn.ReLU()
    module(X)
    module.act = nn.Tanh()
    with pytest.raises(UnseenCall, match=r"^act of the root was changed"):
        module(X)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (1, True), (1, 1.0), (0.0, -0.0), (float("nan"), 1.0), ([1], (1,)), ([1], [1.0]), ({"a": 1}, {"b": 1}), (None, ABSENT),
        ({1}, frozenset({1})), (OrderedDict(a=1), {"a": 1}), (SimpleNamespace(a=1), SimpleNamespace(a=2)), (nn.ReLU(), nn.GELU()),
        (torch.float32, torch.float16), (int, float), (1j, -1j), (X.sum, X.relu), (F.relu, F.gelu),
        (Slotted(1.0), Slotted(2.0)), (Slotted(1.0), SlottedMore(1.0)), (SlottedMore(1.0), SlottedMore(2.0)),
        (numpy.float32(1), numpy.float32(2)), (numpy.int64(1), numpy.int32(1)), (Decimal("1"), Decimal("1.0")),
        (numpy.ones(2), numpy.zeros(2)), (numpy.ones(2), numpy.ones(2, dtype="float32")), (Path("a"), Path("b")),
        ([[[[[[1]]]]]], [[[[[[2]]]]]]), ({"a": {"b": {"c": {"d": {"e": 1}}}}}, {"a": {"b": {"c": {"d": {"e": 2}}}}}),
    ],
)  # fmt: skip
def test_fingerprints_tell_apart(mine: Any, theirs: Any) -> None:
    assert fingerprint(mine) != fingerprint(theirs)
    for value in (mine, theirs):
        assert fingerprint(value) == fingerprint(copy.copy(value))


def test_a_forward_that_reads_too_much_to_be_compared_is_left_alone() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = list(range(100_000))

        def forward(self, x: Any) -> Any:
            return x * self.table[3]

    module = Large().eval()
    (island,) = capture(module).islands.values()
    assert island.reason == "its forward reads an object that holds too much to be compared at every call"
    module.table = module.table[:10]
    installed(module)
    module.table *= 1000
    with pytest.raises(UnseenCall, match=r"^table of the root was changed"):
        module(X)


def test_values_that_are_too_large_or_too_deep_are_not_compared() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    for value in (deep, numpy.zeros(5000), list(range(5000))):
        with pytest.raises(TooMuch):
            fingerprint(value)


def test_values_that_hold_themselves_are_compared() -> None:
    ring: list[Any] = [1.0]
    ring.append(ring)
    other: list[Any] = [2.0]
    other.append(other)
    assert fingerprint(ring) == fingerprint(copy.deepcopy(ring)) != fingerprint(other)
    assert fingerprint([ring, ring]) == fingerprint([ring, copy.deepcopy(ring)])


def test_no_value_is_not_the_word_for_it() -> None:
    holder = nn.Identity()
    holder.items = [[]]
    baked = Baked.of(holder, "items", holder.items)
    assert baked.holds
    del holder.items
    assert not baked.holds


def test_a_variable_that_has_no_value_yet_is_no_hindrance():
    class Plain(nn.Module):
        def forward(self, x):
            return x + 1 if self.training else x + late

    module = Plain()
    captured = capture(module)
    late = 2.0
    assert id(module) in captured.graphs
