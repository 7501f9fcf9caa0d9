"""Writing to a program: one record, one way back, and work that grows with what is written."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from folding_models import FunctionalBias, Island, Pair, image
from pass_contract import captured, conv_bn_chains, state_of
from tiny_models import enliven
from torch import nn

from passes import ChannelsLast, FoldConvBias, FoldConvBn
from passes.graph.edits import taken_back
from passes.graph.guards import ChannelsLastInputs, FormattedForward
from passes.graph.program import Program
from passes.graph.rewriter import Place, Rewriter
from passes.program import matching
from passes.program.tensors import TensorRef


def chain(pairs: int) -> nn.Module:
    layers = [layer for _ in range(pairs) for layer in (nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU())]
    return enliven(nn.Sequential(*layers)).eval()


def program_of(model: nn.Module) -> Program:
    return captured(model)[0]


def test_graphs_are_written_to_inside_of_a_change_only() -> None:
    program = program_of(Pair().eval())
    before = state_of(program)
    ((conv, norm),) = conv_bn_chains(program)
    graph = Rewriter(program)
    with pytest.raises(RuntimeError, match="a graph is written to outside of a change"):
        graph.bypass(norm.node)
    with graph.change("conv", "nothing of note") as done:
        pass
    with pytest.raises(RuntimeError, match="a module is written to outside of its change"):
        graph.set_tensor(done, conv.weight, None)
    with pytest.raises(RuntimeError, match="inside of another"), graph.change("a", "b"), graph.change("c", "d"):
        pass
    assert state_of(program) == before


def test_a_record_of_a_run_is_never_written_to() -> None:
    program, _ = captured(Island().eval(), image())
    ((_, norm),) = conv_bn_chains(program)
    graph = Rewriter(program)
    with pytest.raises(RuntimeError, match="is a record of a run"), graph.change("bn", "taken out"):
        graph.bypass(norm.node)


def test_an_error_inside_a_change_takes_its_edits_back() -> None:
    program = program_of(Pair().eval())
    before = state_of(program)
    ((conv, _),) = conv_bn_chains(program)
    graph = Rewriter(program)

    def fail_half_way() -> None:
        with graph.change("conv", "half done", (conv.node,)) as change:
            graph.set_tensor(change, conv.weight, torch.zeros(4, 3, 3, 3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert graph.changes == []
    assert state_of(program) == before
    with pytest.raises(RuntimeError, match="left half-way"):
        graph.finish()


def test_a_change_that_is_left_alone_writes_to_nothing_that_an_earlier_one_made() -> None:
    program = program_of(Pair().eval())
    ((conv, _),) = conv_bn_chains(program)
    assert conv.module is not None
    graph = Rewriter(program, {Place("conv", "another format", 0): "it is better as it is"})
    with graph.change("conv", "another weight") as change:
        graph.set_tensor(change, conv.weight, torch.randn(4, 3, 3, 3))
    made = conv.weight.value
    with graph.change("conv", "another format") as change:
        graph.set_memory_format(change, conv.weight, torch.channels_last)
        graph.set_attribute(change, conv.module, "mark", 1)
    assert conv.weight.value is made
    assert made.is_contiguous()
    assert not hasattr(conv.module, "mark")


def test_changes_of_the_same_words_are_left_alone_one_by_one() -> None:
    program = program_of(chain(3))
    graph = Rewriter(program, {Place("here", "made to nothing", 1): "it is better as it is"})
    weights = [conv.weight for conv, _ in conv_bn_chains(program)]
    for weight in weights:
        with graph.change("here", "made to nothing") as change:
            graph.set_tensor(change, weight, torch.zeros(2, 2, 1, 1))
    assert [bool(weight.value.any()) for weight in weights if weight.value is not None] == [False, True, False]
    assert [change.number for change in graph.changes] == [0, 2]
    assert len(graph.skips) == 1


def test_a_forward_keeps_its_graph_when_a_later_pass_is_rolled_back() -> None:
    """What a pass installed is pickled and copied by its graph: a later pass mustn't have written to that one."""
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), norms[0], nn.Dropout(), norms[1])).eval()
    program, context = captured(model)
    (activation,) = (node for node in program.nodes() if program.where(node) == "2")
    graph = Rewriter(program)
    with graph.change("2", "taken out", (activation,)):
        graph.bypass(activation)
    graph.finish()
    installed = program.root.__dict__["forward"]
    text = str(installed.graphs[False][0])
    second = FoldConvBn().run(program, context)
    assert str(installed.graphs[False][0]) == text
    second.rewriter.roll_back()
    assert program.root.__dict__["forward"] is installed
    twin = pickle.loads(pickle.dumps(program.root))
    assert torch.equal(twin(image()), program.root(image()))
    graph.roll_back()
    assert "forward" not in program.root.__dict__
    assert torch.equal(program.root(image()), model(image()))


def test_passes_are_rolled_back_in_reverse() -> None:
    program, context = captured(FunctionalBias().eval(), image())
    states, done = [state_of(program)], []
    for item in (FoldConvBias(), FoldConvBn()):
        done.append(item.run(program, context))
        states.append(state_of(program))
    for result in reversed(done):
        assert state_of(program) == states.pop()
        result.rewriter.roll_back()
    assert state_of(program) == states.pop()


def test_taking_back_leaves_what_later_changes_made() -> None:
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4))).eval()
    program, context = captured(model, image())
    done = FoldConvBn().run(program, context)
    after = state_of(program)
    for change in done.changes:
        with taken_back(change.edits):
            assert state_of(program) != after
        assert state_of(program) == after


def test_output_formats_stand_around_other_forwards_once() -> None:
    model = Pair().eval()
    program, context = captured(model, image())
    for item in (ChannelsLast(), FoldConvBn(), ChannelsLast()):
        item.run(program, context)
    outer = program.root.__dict__["forward"]
    assert not isinstance(outer.inner, type(outer))
    assert program.root(image()).is_contiguous()


def test_a_format_makes_a_second_tensor_only_of_what_the_caller_holds() -> None:
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3))).eval()
    before = {name: (p.data_ptr(), p.stride(), p.detach().clone()) for name, p in model.named_parameters()}
    program, context = captured(model, image())
    folded = FoldConvBn().run(program, context)
    made, shared = program.root[0].weight, program.root[2].weight
    values, strides = made.detach().clone(), made.stride()
    assert shared.data_ptr() == model[2].weight.data_ptr()
    done = ChannelsLast().run(program, context)
    assert program.root[0].weight is made, "the values of a pass are brought into the format where they are"
    assert program.root[2].weight is not shared
    with taken_back(done.rewriter.edits):
        assert program.root[0].weight is made
        assert program.root[2].weight is shared
        assert (made.stride(), shared.stride()) == (strides, before["2.weight"][1])
        assert torch.equal(made, values)
    assert made.is_contiguous(memory_format=torch.channels_last)
    done.rewriter.roll_back()
    assert (made.stride(), program.root[2].weight.data_ptr()) == (strides, before["2.weight"][0])
    assert torch.equal(made, values)
    folded.rewriter.roll_back()
    assert program.root[0].weight.data_ptr() == before["0.weight"][0]
    for name, parameter in model.named_parameters():
        assert (parameter.data_ptr(), parameter.stride()) == before[name][:2]
        assert torch.equal(parameter, before[name][2])


def test_a_parameter_that_a_pass_was_given_is_not_written_to() -> None:
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3))).eval()
    program, _ = captured(model, image())
    graph = Rewriter(program)
    given = nn.Parameter(torch.randn(4, 3, 3, 3))
    address = given.data_ptr()
    with graph.change("0", "another weight in another format") as change:
        graph.set_tensor(change, TensorRef(program.root[0], "weight"), given)
        graph.set_memory_format(change, TensorRef(program.root[0], "weight"), torch.channels_last)
    assert program.root[0].weight is not given
    assert (given.data_ptr(), given.is_contiguous()) == (address, True)


class _Counting(dict[Any, Any]):
    """Counts how often its items are walked."""

    walks = 0

    def items(self) -> Any:
        type(self).walks += 1
        return super().items()


@pytest.mark.parametrize("passes", [(FoldConvBn(),), (FoldConvBias(), FoldConvBn())])
def test_work_grows_with_the_model_and_not_with_its_square(passes: Any) -> None:
    """Walks of a module's children, and looks at calls, counted: one per fold would make them a thousand times more."""
    walks, looks = [], []
    for pairs in (50, 500):
        program, context = captured(chain(pairs).eval(), torch.randn(2, 2, 1, 1))
        context = dataclasses.replace(context, judge=None)
        for module in program.root.modules():
            module.__dict__["_modules"] = _Counting(module._modules)
        _Counting.walks = 0
        count = 0
        real = matching.affine_at

        def counted(node: Any, real: Any = real) -> Any:
            nonlocal count
            count += 1
            return real(node)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(matching, "affine_at", counted)
            for item in passes:
                assert len(item.run(program, context).changes) == pairs
        walks.append(_Counting.walks)
        looks.append(count)
    assert walks[1] <= 12 * walks[0]
    assert looks[1] <= 12 * looks[0]


def test_reading_a_tensor_ref_that_is_gone() -> None:
    assert TensorRef(nn.Conv2d(1, 1, 1, bias=False), "bias").value is None
    assert TensorRef(nn.Conv2d(1, 1, 1), "stride").value is None


def test_the_last_change_can_be_withdrawn_and_no_other() -> None:
    program = program_of(Pair().eval())
    before = state_of(program)
    graph = Rewriter(program)
    with graph.change("bn", "taken out", [next(iter(program.nodes()))]) as replacing:
        pass
    with pytest.raises(RuntimeError, match="none that replaces nodes"):
        graph.withdraw(replacing)
    graph.roll_back()
    graph = Rewriter(program)
    with pytest.raises(RuntimeError, match="only the last change can be withdrawn"):
        graph.withdraw(replacing)
    first = graph.convert_inputs(["x"])
    second = graph.convert_inputs(["x", "y"])
    with pytest.raises(RuntimeError, match="only the last change can be withdrawn"):
        graph.withdraw(first)
    graph.withdraw(second)
    assert [change.what for change in graph.changes] == ["input x brought into channels_last once"]
    with graph.change("", "inside of another one"), pytest.raises(RuntimeError, match="only the last change"):
        graph.withdraw(first)
    graph.withdraw(graph.changes[-1])
    graph.withdraw(first)
    assert graph.changes == []
    assert state_of(program) == before


def test_the_order_of_outputs_stands_around_the_inputs_format() -> None:
    program = program_of(Pair().eval())
    root = program.root
    graph = Rewriter(program)
    graph.keep_output_orders([(0, 2, 3, 1)])
    graph.convert_inputs(["x"])
    graph.keep_output_orders([(0, 1, 2, 3)])
    graph.keep_output_orders([(0, 1, 2, 3)])
    assert type(root.forward) is FormattedForward
    assert type(root.forward.inner) is ChannelsLastInputs
    assert root.forward.inner.inner is None
    assert root(image()).is_contiguous()
