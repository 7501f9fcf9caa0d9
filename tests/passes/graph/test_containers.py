"""Find tensors that overlap in memory."""

from __future__ import annotations

import functools

import pytest
import torch
from laid_out import laid_out
from torch import Tensor, nn

from passes.graph.memory import Place, SharedMemory, copied_together, groups_of, places_in


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
    module.deep = [[[[torch.zeros(1)]]]]
    inner = torch.zeros(1)
    module.kept = functools.partial(torch.add, torch.zeros(1), other=torch.zeros(1))
    module.function = lambda x: x + inner
    module.function.itself = module.function
    found = {place.path: place.stands_apart for place in places_in([("bn", module)])}
    assert found == {
        "bn.running_mean": False,
        "bn.running_var": False,
        "bn.num_batches_tracked": False,
        "bn.plain": True,
        "bn.held['a'][0]": True,
        "bn.kept": True,
        "bn.function": True,
    }
    assert len(list(places_in([("", module)]))) == len(found) + 1
    shared = SharedMemory(places_in([("", module)])).beside(module.running_mean)
    assert shared is not None
    assert shared.path == "plain"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_scripted_module_shares_the_memory_of_its_tensors() -> None:
    layer = nn.BatchNorm1d(2)
    scripted = torch.jit.script(layer)
    shared = SharedMemory(places_in([("layer", layer), ("scripted", scripted)]))
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        place = shared.beside(tensor)
        assert place is not None
        assert place.path == f"scripted.{name}"


def test_what_modules_share_is_looked_through_once() -> None:
    shared = [torch.zeros(1), [torch.zeros(1)]]
    modules = [nn.Module(), nn.Module()]
    for module in modules:
        module.shared = shared
    found = places_in((str(number), module) for number, module in enumerate(modules))
    assert [place.path for place in found] == ["0.shared[0]", "0.shared[1][0]"]


def test_groups_share_no_bytes() -> None:
    flat, other, meta = torch.zeros(8), torch.zeros(2), torch.zeros(2, device="meta")
    parts = [flat[:4], flat[4:], flat[2:3], other, meta, other]
    assert [[id(one) for one in group] for group in groups_of(parts)] == [
        [id(parts[0]), id(parts[2])],
        [id(parts[1])],
        [id(other)],
        [id(meta)],
    ]


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_copies_share_what_the_tensors_shared(dtype: torch.dtype | None) -> None:
    flat = torch.arange(20.0)[1:]
    group = [flat[3:9].view(2, 3).t(), flat[4:5], flat[2:]]
    copies = copied_together(group, dtype)
    for copied, tensor in zip(copies, group, strict=True):
        assert copied.dtype is (dtype or tensor.dtype)
        assert (copied.shape, copied.stride()) == (tensor.shape, tensor.stride())
        assert torch.equal(copied.to(tensor.dtype), tensor)
    copies[0].mul_(0)
    assert (copies[1].item(), copies[2].tolist()[:8]) == (0, [3, 0, 0, 0, 0, 0, 0, 10])
    assert torch.equal(flat, torch.arange(20.0)[1:])


def test_copies_of_several_dtypes_share_bytes() -> None:
    whole = torch.randn(4, dtype=torch.complex64)
    group = [torch.view_as_real(whole)[1:], whole]
    real, both = copied_together(group)
    assert torch.equal(both, whole)
    real.zero_()
    assert both.tolist() == [whole[0].item(), 0, 0, 0]


def test_a_copy_is_written_to_as_any_tensor_is() -> None:
    flat = torch.zeros(4)
    _, half = copied_together([flat, flat[:2]])
    weight = torch.ones(2, requires_grad=True)
    half.add_(weight)
    half.sum().backward()
    assert weight.grad is not None


def test_what_can_not_be_laid_anew_is_copied_for_itself() -> None:
    sparse = laid_out("coo", torch.eye(4))
    copies = copied_together([sparse, sparse._values()])
    copies[1].zero_()
    assert torch.equal(copies[0].to_dense(), torch.eye(4))


def test_what_stands_deep_in_one_module_and_near_in_another_is_found() -> None:
    inner = [torch.zeros(1)]
    deep, near = nn.Module(), nn.Module()
    deep.held = [[[inner]]]
    near.held = [inner]
    assert [place.path for place in places_in([("deep", deep), ("near", near)])] == ["near.held[0][0]"]
