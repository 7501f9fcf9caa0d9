"""A short run of nodes, before a rewrite and after it."""

from typing import Any

import torch
from folding_models import Functional, Pair, image
from pass_contract import captured
from torch import Tensor, nn

from passes.graph.region import Region
from passes.graph.rewriter import Rewriter


class Twice(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return torch.add(y, y) * x.mean()


def regions_of(model: nn.Module, item: Any) -> tuple[Any, Any]:
    program, context = captured(model, image())
    done = item.run(program, context)
    return program, done.changes[0]


def test_a_region_of_nothing_gives_what_it_was_given() -> None:
    program, _ = captured(nn.Sequential(nn.Dropout(), nn.ReLU()).eval())
    node = program.calls_of(program.root[0])[0]
    graph = Rewriter(program)
    with graph.change("0", "taken out for good", (node,)):
        graph.bypass(node)
    (change,) = graph.changes
    x = image()
    assert change.after is not None
    assert change.after(x) is x
    assert torch.equal(change.before(x), x)


def test_inputs_are_named_once() -> None:
    program, _ = captured(Twice().eval())
    nodes = [node for node in program.nodes() if node.op == "call_function"]
    region = Region.of(program, nodes)
    assert len(region.inputs) == len(set(region.inputs)) == 2
    y, scale = image(), torch.tensor(3.0)
    values = [scale if source.name.startswith("mean") else y for source in region.inputs]
    assert torch.equal(region(*values), (y + y) * 3)


def test_what_takes_another_value_than_before_has_no_after() -> None:
    program, _ = captured(Twice().eval())
    first = next(node for node in program.nodes() if node.op == "call_function")
    x = next(node for node in program.nodes() if node.op == "placeholder")
    graph = Rewriter(program)
    with graph.change("", "takes the input now", (first,)):
        graph.bypass(first, x)
    assert graph.changes[0].before is not None
    assert graph.changes[0].after is None


def test_a_run_writes_to_copies_of_the_buffers() -> None:
    """The buffers may be the caller's, whose statistics a BatchNorm in training would count on."""

    class Counts(Functional):
        def forward(self, x: Tensor) -> Any:
            return torch.nn.functional.batch_norm(x[:, :1] + self.mean.reshape(1, -1, 1, 1), self.mean, self.var, None)

    for model in (Pair().train(), Counts()):
        program, _ = captured(model, keep_flags=True)
        nodes = [node for node in program.nodes() if node.op in ("call_module", "call_function")]
        region = Region.of(program, nodes)
        tensors = list(program.root.buffers())
        before = [tensor.clone() for tensor in tensors]
        values = [image() for _ in region.inputs]
        with region.private_state():
            if type(model) is Pair:
                region(*values)
                assert not torch.equal(program.root.bn.running_mean, before[0])
            assert all(held is not tensor for held, tensor in zip(program.root.buffers(), tensors, strict=True))
        assert all(held is tensor for held, tensor in zip(program.root.buffers(), tensors, strict=True))
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_a_region_runs_under_the_autocast_that_it_was_seen_under() -> None:
    class Cast(Pair):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.conv(x)
            return y @ y.new_ones(8, 2)

    program, _ = captured(Cast().eval(), image())
    conv, *_, product = [node for node in program.nodes() if node.op.startswith("call")]
    assert Region.of(program, [conv])(image()).dtype is torch.bfloat16
    assert Region.of(program, [product])(image(2, 4, 8, 8), torch.ones(8, 2)).dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")
