"""The values that flow into a region while the module runs."""

from typing import Any

import torch
from folding_models import AcrossModules, Functional, Island, Pair, Stem, image
from pass_contract import captured, conv_bn_chains
from torch import Tensor, nn

from passes.graph.program import Program
from passes.graph.region import Region
from passes.graph.witness import witness_inputs

LIMIT = 1 << 30


def seen_by(program: Program, regions: dict[int, Region], x: Tensor, limit: int = LIMIT) -> dict[int, tuple[Any, ...]]:
    def as_it_is(home: Any) -> Any:
        return home.graph, {node: node for node in home.graph.nodes}

    return witness_inputs(program, regions, as_it_is, lambda: program.root(x), limit=limit)


def pair_regions(model: nn.Module) -> tuple[Program, dict[int, Region]]:
    program, _ = captured(model, image())
    return program, {
        number: Region.of(program, (conv.node, norm.node))
        for number, (conv, norm) in enumerate(conv_bn_chains(program))
    }


def test_sees_what_a_convolution_is_given() -> None:
    x = image(seed=5)
    for model, wanted in ((Pair(), x), (Island(), x), (Functional(), x), (AcrossModules(), x.tanh())):
        program, regions = pair_regions(model.eval())
        ((value,),) = seen_by(program, regions, x).values()
        assert torch.equal(value, wanted)
        assert value is not x


class Mapped(Pair):
    """Runs its layers on one row at a time, by `torch.func`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: self.bn(self.conv(row[None]))[0])(x)


def test_a_value_under_vmap_is_the_first_of_those_that_it_stands_for() -> None:
    x = image(seed=5)
    program, regions = pair_regions(Mapped().eval())
    ((value,),) = seen_by(program, regions, x).values()
    assert torch.equal(value, x[:1])
    assert regions[0](value).shape == (1, 4, 8, 8), "it lives on behind the call"


def test_each_call_of_a_shared_module_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = Stem()

        def forward(self, x: Tensor) -> Tensor:
            return self.stem(x).mean() + self.stem(x * 2)

    program, _ = captured(Shared().eval(), image())
    node = program.calls_of(program.root.stem.conv)[0]
    seen = seen_by(program, {7: Region.of(program, (node,)), 8: Region.of(program, (node,))}, image())
    assert list(seen) == [7, 8]
    assert torch.equal(seen[7][0], image().tanh())


class Later(Pair):
    """A region whose second node takes a value that is made after the first, and written to in between."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        z = x.mean(1, keepdim=True).mul_(2)
        return torch.add(y, z)


def test_values_that_are_made_between_the_nodes_of_a_region() -> None:
    program, _ = captured(Later().eval(), image())
    conv = program.calls_of(program.root.conv)[0]
    add = next(node for node in program.nodes() if node.op == "call_function" and node.target is torch.add)
    region = Region.of(program, (conv, add))
    seen = seen_by(program, {0: region}, image())
    assert torch.equal(region(*seen[0]), program.root(image()))


def test_one_value_given_twice() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Bilinear(4, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = x.relu()
            return self.mix(y, y)

    x = torch.randn(3, 4)
    program, _ = captured(Doubled().eval(), x)
    region = Region.of(program, program.calls_of(program.root.mix))
    seen = seen_by(program, {0: region}, x)
    assert len(seen[0]) == 1
    assert torch.equal(region(*seen[0]), program.root(x))


def test_the_limit_holds() -> None:
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))]).eval()
    program, regions = pair_regions(model)
    size = image().numel() * 4
    assert list(seen_by(program, regions, image(), limit=2 * size)) == [0, 1]
    assert seen_by(program, regions, image(), limit=0) == {}


def test_what_the_run_does_not_reach_is_missing() -> None:
    program, regions = pair_regions(Island().eval())
    assert seen_by(program, regions, torch.full((2, 3, 8, 8), 1e-6)) != {}

    class Skipping(Island):
        def forward(self, x: Tensor) -> Any:
            return x if x.sum() > 1e6 else super().forward(x)

    program, regions = pair_regions(Skipping().eval())
    assert seen_by(program, regions, torch.full((2, 3, 8, 8), 1e5)) == {}
