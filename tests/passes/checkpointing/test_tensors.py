"""Find the leaves and tensors among the arguments of a call."""

import sys

import torch

from passes.checkpointing.tensors import leaves, tensors_in


def test_finds_what_lies_in_containers_in_order():
    one, two, three = (torch.zeros(size) for size in (1, 2, 3))
    held = ([one, (None, "text")], {"a": two, "b": slice(1, three, None)}, [], {})
    found = leaves(held)
    assert [id(leaf) for leaf in found] == [id(leaf) for leaf in (one, None, "text", two, 1, three, None)]
    assert [id(tensor) for tensor in tensors_in(held)] == [id(one), id(two), id(three)]
    assert [id(leaf) for leaf in leaves(one)] == [id(one)]


def test_looks_once_into_each_container_and_no_oftener():
    entered = 0

    def count(frame, event, _):
        nonlocal entered
        entered += event == "call" and frame.f_code is leaves.__code__

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        leaves(((1, 2, 3, 4), {"a": 5, "b": 6}))
    finally:
        sys.setprofile(before)
    # The arguments of every call are searched several times, so a Python frame for each leaf would be too slow.
    assert entered == 3
