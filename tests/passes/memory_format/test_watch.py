"""Watch a run to find where feature maps lose channels_last."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import Net
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.overrides import TorchFunctionMode

from exporters.isolation import torchscript_allowed
from passes.graph.layouts import CHANNELS_LAST_FORMATS, is_channels_last
from passes.memory_format.forwards import ContiguousInput
from passes.memory_format.watch import CONTIGUOUS, EITHER, LAST, Layouts, LayoutWatch, layout_of

LAST_2D, LAST_3D = torch.channels_last, torch.channels_last_3d


def in_last(model: nn.Module) -> nn.Module:
    """Convert the convolution weights to channels_last, and return the model in eval mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            module.weight.data = module.weight.data.contiguous(memory_format=CHANNELS_LAST_FORMATS[module.weight.dim()])
    return model.eval()


def watched(model: nn.Module, *args: Any, **kwargs: Any) -> Layouts:
    watch = LayoutWatch(model)
    with torch.no_grad(), watch:
        model(*args, **kwargs)
    return watch.layouts


def between(operation: Callable[[Tensor], Tensor], width: int = 8) -> nn.Module:
    """One operation between two convolutions."""
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(width, 4, 3)
    return Net(lambda m, x: m.second(m.operation(m.first(x))), first=first, second=second, operation=operation)


def image(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 6, 6)


def shuffled(x: Tensor) -> Tensor:
    return x.view(x.shape[0], 2, 4, *x.shape[2:]).transpose(1, 2).reshape(x.shape)


def attended(x: Tensor) -> Tensor:
    """Attention over the positions, whose result is contiguous."""
    rows = x.flatten(2)
    return (rows @ (rows.transpose(1, 2) @ rows).softmax(-1)).reshape(x.shape)


def tokens_and_back(x: Tensor) -> Tensor:
    tokens = F.gelu(x.flatten(2).transpose(1, 2))
    return tokens.transpose(1, 2).reshape(x.shape)


def heads_and_back(x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    heads = tokens.view(2, 36, 2, 4).transpose(1, 2)
    mixed = (heads @ heads.transpose(2, 3)).softmax(-1) @ heads
    return mixed.transpose(1, 2).reshape(2, 36, 8).transpose(1, 2).reshape(x.shape)


def as_rows_of_pixels(x: Tensor) -> Tensor:
    pixels = F.layer_norm(x.permute(0, 2, 3, 1), (8,))
    return F.gelu(pixels).permute(0, 3, 1, 2)


def squeezed(x: Tensor) -> Tensor:
    return x * F.adaptive_avg_pool2d(x, 1).sigmoid()


MAP = 2 * 8 * 36


@pytest.mark.parametrize(
    ("operation", "where"),
    [
        (Tensor.contiguous, "the root (contiguous)"),
        (lambda x: F.relu(F.instance_norm(x)) * 2, "the root (instance_norm)"),
        (lambda x: x.softmax(1), "the root (softmax)"),
        (lambda x: x.repeat(1, 1, 1, 1), "the root (repeat)"),
        (lambda x: x.transpose(2, 3), "the root (transpose)"),
        (shuffled, "the root (reshape)"),
        (attended, "the root (reshape)"),
        (nn.InstanceNorm2d(8), "operation (instance_norm)"),
    ],
)
def test_the_place_is_named(operation: Any, where: str) -> None:
    model = in_last(between(operation))
    (loss,) = watched(model, image()).losses
    assert (loss.where, loss.elements, loss.converted, loss.convolutions) == (where, MAP, MAP, ["second"])


@pytest.mark.parametrize(
    "operation",
    [
        F.relu, lambda x: F.pad(x, (1, 1)), lambda x: torch.channel_shuffle(x, 2), lambda x: F.max_pool2d(x, 2),
        lambda x: F.interpolate(x, scale_factor=2), tokens_and_back, heads_and_back, as_rows_of_pixels, squeezed,
        nn.GroupNorm(2, 8), lambda x: torch.cat([x[:, :4], x[:, 4:]], 1), lambda x: x[:, ::2].repeat_interleave(2, 1),
    ],
)  # fmt: skip
def test_what_keeps_the_format_is_not_named(operation: Any) -> None:
    """A loss is expected only if torch loses the format, as the input of the second convolution shows."""
    model = in_last(between(operation))
    given: list[Tensor] = []
    model.second.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    losses = watched(model, image()).losses
    kept = layout_of(given[0]) == LAST
    assert (losses == []) is kept, losses


def test_the_usual_ways_keep_the_format() -> None:
    """Shows that the test above isn't vacuous."""
    for operation in (F.relu, tokens_and_back, heads_and_back, as_rows_of_pixels, squeezed):
        assert watched(in_last(between(operation)), image()).losses == []


def test_a_new_map_of_features_is_no_loss() -> None:
    layouts = watched(in_last(between(lambda x: (x.flatten(1) * 2).view(x.shape[0], 8, 6, 6))), image())
    assert layouts.losses == []
    assert layouts.moved > 0


@pytest.mark.parametrize(
    ("tail", "count"),
    [
        (nn.Sequential(nn.Softmax(1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2)), 1),
        (nn.Sequential(nn.Softmax(1), nn.Conv2d(8, 4, 1)), 1),
        (nn.Sequential(nn.ReLU(), nn.Softmax(1)), 0),
        (nn.Sequential(nn.Softmax(1), nn.Flatten(), nn.Linear(288, 2)), 0),
        (nn.Sequential(nn.Flatten(2)), 0),
    ],
)
def test_at_the_end_only_what_goes_on_counts(tail: nn.Module, count: int) -> None:
    model = in_last(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), tail))
    losses = watched(model, image()).losses
    assert [loss.where for loss in losses] == ["1.0 (softmax)"] * count
    assert all(loss.converted == 0 and loss.goes_on for loss in losses)


def test_what_costs_most_comes_first() -> None:
    model = nn.Sequential(between(nn.Softmax(1)), nn.Softmax(1), nn.Conv2d(4, 8, 1), between(nn.Softmax(1), width=16))
    model[3].first = nn.Conv2d(8, 16, 1)
    in_last(model)
    found = [(loss.where, loss.converted) for loss in watched(model, image()).losses]
    assert [where for where, _ in found] == ["0.operation (softmax)", "1 (softmax)"]
    assert found[1][1] == 2 * 16 * 16, "through the pointwise convolutions, that take both formats, to the next one"


def test_a_convolution_that_is_kept_contiguous_is_meant_to_lose_it() -> None:
    model = in_last(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    model[1].weight.data = model[1].weight.data.contiguous()
    model[1].forward = ContiguousInput(model[1], None)
    layouts = watched(model, torch.randn(2, 3, 8, 8))
    assert layouts.losses == []
    assert layouts.moved == 2 * (3 * 64 + 8 * 36 + 8 * 16)


def test_a_format_that_is_lost_in_front_of_such_a_convolution_is_what_it_wants() -> None:
    model = in_last(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax(1), nn.Conv2d(8, 8, 3)))
    model[2].weight.data = model[2].weight.data.contiguous()
    assert [loss.where for loss in watched(model, torch.randn(2, 3, 8, 8)).losses] == ["1 (softmax)"]
    model[2].forward = ContiguousInput(model[2], None)
    assert watched(model, torch.randn(2, 3, 8, 8)).losses == []


def test_maps_of_three_dims() -> None:
    model = in_last(nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.ConvTranspose3d(4, 2, 2)))
    (loss,) = watched(model, torch.randn(2, 3, 4, 5, 6)).losses
    assert (loss.where, loss.converted, loss.convolutions) == ("1 (instance_norm)", 2 * 4 * 120, ["2"])


def test_torchscript_is_named_and_not_looked_into() -> None:
    with torchscript_allowed():
        inner = torch.jit.trace(nn.Softmax(1), torch.randn(2, 8, 6, 6))
    layouts = watched(in_last(between(inner)), image())
    assert layouts.scripted == ["operation"]
    (loss,) = layouts.losses
    assert (loss.where, loss.convolutions) == ("operation (TorchScript)", ["second"])


def test_the_run_keeps_nothing_alive_and_leaves_nothing_behind() -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(output))

    model = in_last(nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(8))))
    for layer in model:
        layer.register_forward_hook(look)
    call = nn.Module.__call__
    watched(model, image())
    assert max(alive) == 1, "the one that the next layer reads"
    assert nn.Module.__call__ is call

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        watched(Raises(), image())
    assert nn.Module.__call__ is call
    assert torch.overrides._get_current_function_mode_stack() == []
    assert issubclass(LayoutWatch, TorchFunctionMode)


@pytest.mark.parametrize("sizes", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 1, 4, 5), (2, 3, 1, 5)])
def test_the_format_of_a_map_is_what_torch_takes_it_for(sizes: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(4)):
        back = [order.index(dim) for dim in range(4)]
        tensor = torch.randn([sizes[dim] for dim in order]).permute(back)
        assert tensor.shape == sizes
        assert is_channels_last(tensor) is (suggest_memory_format(tensor) is LAST_2D)
        assert nn.functional.conv2d(tensor, torch.ones(4, sizes[1], 1, 1)).is_contiguous() or is_channels_last(tensor)
        found = layout_of(tensor)
        if tensor.is_contiguous() and tensor.is_contiguous(memory_format=LAST_2D):
            assert found == EITHER
        else:
            wanted = LAST if suggest_memory_format(tensor) is LAST_2D and not tensor.is_contiguous() else CONTIGUOUS
            assert found == wanted, (sizes, order)


def test_formats_of_other_values() -> None:
    last = torch.randn(2, 8, 4, 4).contiguous(memory_format=LAST_2D)
    assert layout_of(last) == layout_of(last[:, ::2]) == layout_of(last[:, :, :2]) == LAST
    assert layout_of(torch.randn(2, 3, 4, 5, 6).contiguous(memory_format=LAST_3D)) == LAST
    assert layout_of(torch.randn(2, 3, 4, 5, 6)) == layout_of(torch.randn(1, 1, 4, 5).expand(2, 3, 4, 5)) == CONTIGUOUS
    for other in (None, 3, [last], torch.randn(3), torch.randn(2, 3, 4), torch.randn(2, 3, 4, 4).to_sparse()):
        assert layout_of(other) is None
