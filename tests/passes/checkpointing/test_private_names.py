"""The private functions of torch that checkpointing uses report hooks, modes and kernel switches."""

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from passes import torch_private


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_hooks_on_saved_tensors_are_seen():
    assert torch_private.top_saved_tensors_hooks() is None
    with saved_tensors_hooks(abs, abs):
        outer = torch_private.top_saved_tensors_hooks()
        with saved_tensors_hooks(abs, repr):
            assert torch_private.top_saved_tensors_hooks() != outer
        assert torch_private.top_saved_tensors_hooks() == outer
    assert torch_private.saved_tensors_hooks_enabled()
    with disable_saved_tensors_hooks("not here"):
        assert not torch_private.saved_tensors_hooks_enabled()


def test_transforms_and_forward_mode_are_seen():
    seen = []

    def watched(x):
        seen.append(torch_private.active_transforms() is not None)
        return x * 2

    torch.func.vmap(watched)(torch.ones(2))
    watched(torch.ones(2))
    assert seen == [True, False]
    assert not torch_private.is_in_forward_mode()
    with forward_ad.dual_level():
        assert torch_private.is_in_forward_mode()


def test_function_modes_and_a_default_device_are_seen():
    assert torch_private.active_function_modes() == []
    with Passing() as outer, Passing() as inner:
        assert torch_private.active_function_modes() == [outer, inner]
    with torch.device("meta"):
        (mode,) = torch_private.active_function_modes()
        assert isinstance(mode, torch_private.DefaultDevice)
    assert torch.zeros in torch_private.device_constructors()
    assert torch.relu not in torch_private.device_constructors()


def test_the_switches_of_kernels_are_read_and_set():
    before = [get() for get, _ in torch_private.KERNEL_SWITCHES]
    with sdpa_kernel(SDPBackend.MATH):
        assert [get() for get, _ in torch_private.KERNEL_SWITCHES] != before
    for get, choose in torch_private.KERNEL_SWITCHES:
        value = get()
        choose(not value)
        assert get() is not value
        choose(value)
