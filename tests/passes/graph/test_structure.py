import inspect
import pickle
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from exporters.isolation import silent
from exporters.torchscript_deprecation import torchscript_allowed
from passes.errors import UnseenCall
from passes.graph.structure import TENSOR, CallStructure, Unstructured, binder_of, flatten_outputs, signature_of

A, B = torch.ones(2), torch.zeros(3)
Point = namedtuple("Point", "x y")


@dataclass
class Options:
    mask: torch.Tensor
    size: int


pytree.register_dataclass(Options)


def structure_of(function, *args, **kwargs) -> CallStructure:
    return CallStructure.of_call(inspect.signature(function), args, kwargs)


FORWARDS = [
    (lambda x, y: 0, (A, B), {}),
    (lambda x, y: 0, (A,), {"y": B}),
    (lambda x, y=None: 0, (A,), {}),
    (lambda x, y=None: 0, (A, None), {}),
    (lambda x, y=None, z=2: 0, (A,), {"z": B}),
    (lambda x, *, y=1.5: 0, (A,), {"y": 2.5}),
    (lambda x, *rest: 0, (A, B, 3), {}),
    (lambda x, **rest: 0, (A,), {"b": B, "a": A}),
    (lambda x, /, y, *rest, z, **more: 0, (A, B, A, "s"), {"z": {"k": [A, (B, None)]}, "w": torch.float32}),
    (lambda x, /, **more: 0, (A,), {"x": B}),
    (lambda x: 0, (Point(A, [B]),), {}),
    (lambda x: 0, (Options(A, 3),), {}),
    (lambda x=(): 0, (), {}),
    (lambda x, _default_1=3: 0, (A,), {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), FORWARDS)
def test_a_call_is_taken_apart_and_put_together_again(function, args, kwargs):
    structure = structure_of(function, *args, **kwargs)
    tensors = structure.tensors_of(binder_of(structure.signature)(*args, **kwargs))
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    assert sorted(map(id, tensors)) == sorted(map(id, given))
    new_args, new_kwargs = structure.arguments(tensors)
    assert len(new_args) == len(args)
    assert new_kwargs.keys() == kwargs.keys()
    mine, my_spec = pytree.tree_flatten((new_args, {key: new_kwargs[key] for key in kwargs}))
    theirs, their_spec = pytree.tree_flatten((args, kwargs))
    assert my_spec == their_spec
    assert all(a is b or a == b for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("function", "args", "kwargs"), FORWARDS)
def test_structures_are_pickled(function, args, kwargs):
    structure = structure_of(function, *args, **kwargs)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(structure, protocol))
        assert again.same_as(structure)
        assert again.arguments("abcdefg")[1].keys() == structure.arguments("abcdefg")[1].keys()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((A, None), {}),
        ((A, 1.0), {}),
        ((A, True), {}),
        ((A, B), {}),
        ((1, 1), {}),
        (([A], 1), {}),
        ((A, float("nan")), {}),
        ((A, 1), {"more": A}),
    ],
)
def test_another_structure_is_refused(args, kwargs):
    def forward(x, y, **more):
        return x

    structure = structure_of(forward, A, 1)
    bound = binder_of(structure.signature)(*args, **kwargs)
    with pytest.raises(UnseenCall):
        structure.tensors_of(bound)
    assert not structure.same_as(CallStructure.of_call(structure.signature, args, kwargs))


def test_which_parameters_are_given_none():
    def forward(x, y=None, *, z=None, rest=()):
        return x

    assert structure_of(forward, A).given_none == ()
    assert structure_of(forward, None, z=None, rest=(None,)).given_none == ("x", "z")


@pytest.mark.parametrize(
    ("made_for", "given", "answered"),
    [
        (3, torch.tensor(3), True),
        (3, torch.tensor(4), False),
        (3, torch.tensor([3]), False),
        (3, torch.tensor(3.0), False),
        (3.0, torch.tensor(3.0), False),
        (True, torch.tensor(1), False),
        (None, torch.tensor(3), False),
    ],
)
def test_a_trace_gives_sizes_as_tensors(made_for, given, answered):
    structure, seen = structure_of(lambda x, y: 0, A, made_for), []

    def called(x):
        try:
            seen.append(structure.tensors_of({"x": x, "y": given}) == [x])
        except UnseenCall:
            seen.append(False)
        return x + 1

    called(A)
    with torchscript_allowed(), silent():
        torch.jit.trace(called, A, check_trace=False)
    assert seen == [False, answered]


@pytest.mark.parametrize("value", [float("nan"), -0.0, complex("nan")])
def test_numbers_that_equal_nothing_or_too_much(value):
    structure = structure_of(lambda x, y: 0, A, value)
    assert structure.tensors_of({"x": B, "y": value})[0] is B
    with pytest.raises(UnseenCall, match=r"0\.0"):
        structure.tensors_of({"x": B, "y": 0.0})


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, nn.Linear(1, 1), iter([])])
def test_what_has_no_structure(value):
    with pytest.raises(Unstructured):
        structure_of(lambda x: 0, value)
    with pytest.raises(Unstructured):
        CallStructure.by_default(inspect.signature(lambda x=value: 0))
    with pytest.raises(Unstructured):
        flatten_outputs((A, value), ())


def test_outputs():
    leaves, spec = flatten_outputs({"a": A, "b": [None, 3]}, ())
    assert leaves[0] is A
    assert pytree.tree_unflatten(leaves, spec) == {"a": A, "b": [None, 3]}


def test_calls_by_default():
    def forward(x, y, flag=True, *rest, key, option=None, **more):
        return x

    structure = CallStructure.by_default(inspect.signature(forward))
    assert structure.tensor_names == ("x", "y", "key")
    args, kwargs = structure.arguments(["X", "Y", "K"])
    assert (args, kwargs) == (("X", "Y"), {"key": "K"})


def test_names_of_tensors():
    structure = structure_of(lambda x, y, **kw: 0, A, (A, {"k": B}), z=[A])
    assert structure.tensor_names == ("x", "y_0", "y_1_k", "kw_z_0")
    assert structure.leaves.count(TENSOR) == 4


KINDS = frozenset({torch.Tensor})


def read(function, args, kwargs, *other, **others):
    """What the reader of the one call gives for the other."""
    reader = structure_of(function, *args, **kwargs).reader(KINDS)
    return "none" if reader is None else reader(*other, **others)


def test_a_reader_gives_the_tensors_of_plain_calls():
    assert read(lambda x, y: 0, (A, B), {}, B, y=A) == (B, A)
    assert read(lambda x, *, y: 0, (A,), {"y": B}, A, y=B) == (A, B)
    assert read(lambda x, mask=None, flag=False, **rest: 0, (A,), {}, B) == (B,)
    assert read(lambda x, mask=None, flag=False, **rest: 0, (A, None), {"flag": True}, B, flag=True) == (B,)
    assert read(lambda *x: 0, (), {}) == ()


def test_a_reader_gives_nothing_of_other_calls():
    assert read(lambda x, mask=None: 0, (A,), {}, A, B) is None
    assert read(lambda x, mask=None: 0, (A, B), {}, A) is None
    assert read(lambda x, flag=True: 0, (A,), {}, A, 1) is None
    assert read(lambda x, flag=True: 0, (A,), {}, A, False) is None
    assert read(lambda x, **rest: 0, (A,), {}, A, more=B) is None
    assert read(lambda x, *rest: 0, (A,), {}, A, B) is None
    assert read(lambda x: 0, (A,), {}, nn.Parameter(A)) is None
    assert read(lambda x: 0, (A,), {}, 1) is None


def test_calls_with_containers_and_numbers_have_no_reader():
    assert read(lambda x: 0, ([A],), {}, [A]) == "none"
    assert read(lambda x, n: 0, (A, 2), {}, A, 2) == "none"
    assert read(lambda x, n: 0, (A, "a"), {}, A, "a") == "none"
    assert read(lambda *x: 0, (A,), {}, A) == "none"
    assert read(lambda **x: 0, (), {"a": A}, a=A) == "none"


def test_a_reader_raises_where_the_forward_would():
    with pytest.raises(TypeError, match="forward"):
        read(lambda x: 0, (A,), {}, A, B)


def test_signatures():
    class Annotated(nn.Module):
        def forward(self, x: "NoSuchClass", y: int = 3) -> "NoSuchClass":  # noqa: F821
            return x

    assert str(signature_of(Annotated())) == "(x, y=3)"
