import array
import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from passes.graph.snapshot import Snapshot


class Slotted:
    __slots__ = ("number", "other")

    def __init__(self):
        self.number = 0


class Names(list):
    pass


class Masked(numpy.ndarray):
    pass


def generator_state(generator):
    return generator.get_state().tolist()


# What a module holds, what a forward does to it, and how its state is seen.
STATES = {
    "list": (lambda: [1], lambda held: held.append(1), list),
    "empty list": (list, lambda held: held.append(1), list),
    "list subclass": (lambda: Names("a"), lambda held: held.append(1), list),
    "dict": (lambda: {"a": 1}, lambda held: held.update(b=1), dict),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a"), list),
    "counter": (Counter, lambda held: held.update("a"), dict),
    "default": (lambda: defaultdict(int), lambda held: held["a"], dict),
    "deque": (lambda: deque([1], maxlen=2), lambda held: held.extend([2, 3]), list),
    "set": (lambda: {1}, lambda held: held.add(2), set),
    "object": (lambda: SimpleNamespace(number=0), lambda held: setattr(held, "number", 1), lambda held: held.number),
    "slots": (Slotted, lambda held: setattr(held, "other", 1), lambda held: hasattr(held, "other")),
    "bytearray": (lambda: bytearray(b"ab"), lambda held: held.append(1), bytes),
    "array": (lambda: array.array("d", [1, float("nan")]), lambda held: held.append(1), bytes),
    "numpy": (lambda: numpy.array([1, numpy.nan]), lambda held: held.__iadd__(1), lambda held: held.tobytes()),
    "numpy, another shape": (
        lambda: numpy.zeros(4),
        lambda held: held.resize((2, 3), refcheck=False),
        lambda held: (held.shape, held.tolist()),
    ),
    "numpy, read only": (
        lambda: numpy.zeros(2),
        lambda held: setattr(held.flags, "writeable", False),
        lambda held: held.flags.writeable,
    ),
    "numpy, another dtype": (
        lambda: numpy.ones(2, dtype=numpy.float32),
        lambda held: setattr(held, "dtype", numpy.int32),
        lambda held: (str(held.dtype), held.tolist()),
    ),
    "numpy, no dims": (lambda: numpy.zeros(()), lambda held: held.__iadd__(1), float),
    "numpy, of objects": (
        lambda: numpy.array([None, "a"], dtype=object),
        lambda held: held.__setitem__(0, 1),
        lambda held: held.tolist(),
    ),
    "numpy subclass": (
        lambda: numpy.zeros(2).view(Masked),
        lambda held: (held.__iadd__(1), setattr(held, "note", 1)),
        lambda held: (held.tolist(), dict(vars(held))),
    ),
    "random": (lambda: random.Random(3), lambda held: held.gauss(0, 1), lambda held: held.getstate()),
    "RandomState": (
        lambda: numpy.random.RandomState(3),
        lambda held: held.randn(3),
        lambda held: repr(held.get_state(legacy=False)),
    ),
    "PCG64": (
        lambda: numpy.random.default_rng(3),
        lambda held: held.random(),
        lambda held: held.bit_generator.state,
    ),
    "MT19937": (
        lambda: numpy.random.Generator(numpy.random.MT19937(3)),
        lambda held: held.random(),
        lambda held: repr(held.bit_generator.state),
    ),
    "bits": (lambda: numpy.random.PCG64(3), lambda held: held.random_raw(), lambda held: held.state),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda held: torch.rand(1, generator=held),
        generator_state,
    ),
}
PLACES = {
    "attribute": lambda held: held,
    "list": lambda held: [held],
    "tuple": lambda held: (held,),
    "object": lambda held: SimpleNamespace(inner={"a": held}),
    "four levels": lambda held: [{"a": (held,)}],
}


def holding(value):
    module = nn.Module()
    module.held = value
    return module


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("state", STATES)
def test_what_a_forward_changes_is_put_back_in_place(state, place):
    make, change, look = STATES[state]
    held = make()
    module = holding(PLACES[place](held))
    before = look(held)
    snapshot = Snapshot(module)
    assert not snapshot.restore()
    change(held)
    changed = look(held)
    assert repr(changed) != repr(before)
    assert snapshot.restore()
    assert repr(look(held)) == repr(before)
    assert not snapshot.restore()


def test_generators_go_on_as_if_nothing_had_been_drawn():
    ours, twin = random.Random(3), random.Random(3)
    assert ours.gauss(0, 1) == twin.gauss(0, 1)
    snapshot = Snapshot(holding(ours))
    ours.gauss(0, 1)
    ours.random()
    snapshot.restore()
    assert [ours.gauss(0, 1), ours.random()] == [twin.gauss(0, 1), twin.random()]


def test_what_is_exported_to_others_is_written_in_place():
    held = bytearray(b"abcd")
    tensor = torch.frombuffer(held, dtype=torch.uint8)
    snapshot = Snapshot(holding(held))
    tensor.add_(1)
    assert snapshot.restore()
    assert bytes(tensor.tolist()) == held == b"abcd"


def test_what_nobody_can_write_to_isnt_copied(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(8))
    fixed, mapped = numpy.zeros(2), numpy.asarray(numpy.memmap(path, dtype=numpy.uint8, mode="r+"))
    fixed.flags.writeable = False
    assert Snapshot(holding([fixed, mapped]))._numbers == []


def test_which_tensors_are_found():
    module = nn.Linear(2, 2)
    module.register_buffer("buffer", torch.zeros(1))
    module.plain = torch.zeros(2)
    module.listed = [module.plain, {"a": (torch.zeros(3), [torch.zeros(4)])}, nn.Parameter(torch.zeros(5))]
    module.held = SimpleNamespace(tensor=torch.zeros(6), optimizer=torch.optim.SGD(module.parameters(), momentum=0.1))
    module.held.optimizer.state[module.weight] = {"momentum_buffer": torch.zeros(7)}
    snapshot = Snapshot(module)
    assert sorted(len(tensor) for tensor in snapshot.own.values()) == [1, 2]
    assert sorted(len(tensor) for tensor in snapshot.nested.values()) == [2, 3, 4, 6]


def test_what_modules_share_is_kept_once_and_as_deep_as_the_nearest_allows():
    innermost = []
    shared = [[innermost]]
    far, near = holding([[shared]]), holding(shared)
    for modules in ((far, near), (near, far)):
        snapshot = Snapshot(*modules)
        assert len([found for found, _ in snapshot._kept if found is shared]) == 1
        innermost.append(1)
        assert snapshot.restore()
        assert innermost == []


def test_a_ring_of_containers_comes_to_an_end():
    ring = [1]
    ring.append(ring)
    snapshot = Snapshot(holding(ring))
    ring.clear()
    assert snapshot.restore()
    assert ring[1] is ring
