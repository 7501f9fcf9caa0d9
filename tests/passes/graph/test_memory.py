"""Which tensors lie in each other's memory."""

from __future__ import annotations

import pytest
import torch
from laid_out import laid_out
from torch import Tensor, nn

from passes.graph.memory import Place, SharedMemory, places_in


def _others(*tensors: Tensor) -> list[str | None]:
    shared = SharedMemory(Place(str(number), tensor) for number, tensor in enumerate(tensors))
    found = [shared.beside(tensor) for tensor in tensors]
    return [None if place is None else place.path for place in found]


def test_views_of_the_same_bytes_share_them() -> None:
    flat = torch.zeros(8)
    assert _others(flat, flat[2:4], torch.zeros(8)) == ["1", "0", None]
    assert _others(flat[:5], flat[4:]) == ["1", "0"]
    assert _others(flat.view(2, 4).t(), flat[7:]) == ["1", "0"]


def test_parts_of_one_storage_are_apart() -> None:
    flat = torch.zeros(8)
    assert _others(flat[:4], flat[4:]) == [None, None]
    assert _others(flat[6:], flat[:3], flat[3:6], flat[2:3]) == [None, "3", None, "1"]


def test_bytes_are_counted_and_not_elements() -> None:
    flat = torch.zeros(8)
    assert _others(flat[4:], flat.view(torch.float64)[:2]) == [None, None]
    assert _others(flat[4:], flat.view(torch.float64)[:3]) == ["1", "0"]


def test_a_tensor_is_not_beside_itself() -> None:
    assert _others(*[torch.zeros(2)] * 2) == [None, None]


def test_what_does_not_count_is_not_told_of() -> None:
    flat = torch.zeros(4)
    parameter, view = nn.Parameter(flat), flat[1:]
    shared = SharedMemory(
        [Place("parameter", parameter), Place("view", view)], counts=lambda tensor: tensor is not parameter
    )
    assert shared.beside(view) is None
    assert shared.beside(parameter) == Place("view", view)


def test_a_tensor_without_strides_shares_by_its_numbers() -> None:
    sparse = laid_out("coo", torch.eye(4))
    numbers = sparse._values()
    assert _others(sparse, numbers) == ["1", "0"]


def test_tensors_without_memory_share_none() -> None:
    none = [torch.zeros(4, device="meta"), torch.zeros(4)[:0], nn.UninitializedParameter()]
    assert _others(*none, *none[:1], laid_out("mkldnn", torch.eye(2))) == [None] * 5


def test_a_module_holds_tensors_by_registering_them_as_attributes_and_in_containers() -> None:
    module = nn.BatchNorm1d(2, affine=False)
    module.plain = module.running_mean
    module.held = {"a": [torch.zeros(1)], "b": 1}
    module.deep = [[[torch.zeros(1)]]]
    found = {place.path: place.stands_apart for place in places_in("bn", module)}
    assert found == {
        "bn.running_mean": False,
        "bn.running_var": False,
        "bn.num_batches_tracked": False,
        "bn.plain": True,
        "bn.held['a'][0]": False,
    }
    shared = SharedMemory(places_in("", module)).beside(module.running_mean)
    assert shared is not None
    assert shared.path == "plain"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_a_scripted_module_shares_the_memory_of_its_tensors() -> None:
    layer = nn.BatchNorm1d(2)
    scripted = torch.jit.script(layer)
    shared = SharedMemory([*places_in("layer", layer), *places_in("scripted", scripted)])
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        place = shared.beside(tensor)
        assert place is not None
        assert place.path == f"scripted.{name}"
