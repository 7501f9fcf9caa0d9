"""What torch.export captures, and what it takes for granted of the open dims."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from exporters.base import TensorSpec, clones, parameter_names
from exporters.conditions import Condition, Line, batches_near
from exporters.decisions import conditions_of, traced_with_decisions
from exporters.errors import RouteRefused
from exporters.guards import UnreadableGuard, guard_holds
from exporters.isolation import silent, undisturbed
from exporters.places import place_in_stack
from exporters.proof import Evidence, Shapes, refusing
from exporters.steps import Program, program_of

# Where a node came from: files and lines of this machine, and how the graph was made.
_TRACES = ("stack_trace", "from_node", "source_fn_stack", "custom", "original_aten")

_FIXED = (
    re.compile(
        r"L\['(?P<name>\w+)'\]\.size\(\)\[(?P<dim>\d+)\] as dynamic"
        r" but your code specialized it to be a constant \((?P<size>\d+)\)"
    ),
    re.compile(r"a static shape of (?P<size>\d+) for dimension inputs\['(?P<name>\w+)'\]\.shape\[(?P<dim>\d+)\]"),
)


def captured(evidence: Evidence, *, strict: bool) -> tuple[torch.export.ExportedProgram, Program | None]:
    """The adapter as torch.export takes it, on the first call, without traces of this machine and of the user's data; and its
    steps with their places, where they can be computed one by one.

    `strict` reads the model's byte code in place of running it: it takes `len(x)` of an open batch, which Python wants as
    a number, and fewer other things.

    Raises:
        RouteRefused: it can't be captured, or an open dim was fixed.
    """
    # DYNAMIC raises where the capture fixes a dim; AUTO would fix it without a word.
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple(dict.fromkeys(named_dims(spec), dynamic) or None for spec in evidence.input_specs)
    inputs = tuple(tensor.contiguous() for tensor in clones(evidence.inputs[0]))
    try:
        with fixed_dims_told(evidence), undisturbed(evidence.adapter), silent(), _lstm_in_one_piece():
            if strict:
                # What a model does in its first call alone (hooks that it installs under a lock) can't be read.
                evidence.adapter.run(inputs)
            program = torch.export.export(
                evidence.adapter, inputs, dynamic_shapes=shapes if any(shapes) else None, strict=strict
            )
    except RouteRefused:
        # A trace sees more of what a capture fails at: the line, and whether it goes by values or by the batch.
        conditions_of(evidence, traced_with_decisions(evidence.adapter, evidence.inputs[0])[1])
        raise
    steps = program_of(program, evidence.adapter.model)
    _drop_traces(program)
    _plain_parameters(program)
    return program, steps


def _plain_parameters(program: torch.export.ExportedProgram) -> None:
    """Leave no parameters of other classes in a program that are plain tensors once they are detached: files know no others."""
    for name, held in program.state_dict.items():
        # Classes that guard their values have a method that gives them bare.
        values = held.bare() if hasattr(held, "bare") else held.detach()
        if isinstance(held, nn.Parameter) and type(held) is not nn.Parameter and type(values) is torch.Tensor:
            program.state_dict[name] = nn.Parameter(values, requires_grad=held.requires_grad)


@contextmanager
def _lstm_in_one_piece() -> Iterator[None]:
    """Let torch.export tell the shapes of an LSTM without a loop over its steps, which fixes their number.

    The graph holds the layer as one operation either way. torch goes through the steps of layers that oneDNN doesn't
    compute, and switches that off while it captures.
    """
    decompositions: Any = torch._decomp.decompositions
    select = getattr(decompositions, "select_one_layer_lstm_function", None)
    if select is None:
        yield
        return

    def selected(*args: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=True):
            return select(*args)

    decompositions.select_one_layer_lstm_function = selected
    try:
        yield
    finally:
        decompositions.select_one_layer_lstm_function = select


@contextmanager
def fixed_dims_told(evidence: Evidence) -> Iterator[None]:
    """Turn whatever a capture inside raises into RouteRefused, and say where it fixed an open dim if that is why."""
    try:
        with refusing():
            yield
    except RouteRefused as refusal:
        reason = str(refusal.__cause__)
        names = parameter_names(evidence.adapter.input_names)
        found = next(filter(None, (pattern.search(_by_input(reason, names)) for pattern in _FIXED)), None)
        if found is None or found["name"] not in names:
            raise
        spec, dim = evidence.input_specs[names.index(found["name"])], int(found["dim"])
        place = place_in_stack(reason, evidence.adapter.model) or _place_of_fixing(evidence)
        raise RouteRefused(
            f"the model fixes dim {dim} of input `{spec.name}` to {found['size']}, and it must be open"
            f"{place and f'; it does so at {place}'}",
            size=str(spec.shape[dim]),
        ) from refusal


def _place_of_fixing(evidence: Evidence) -> str:
    """Where an open dim is fixed: a strict capture has the stack; empty where that tells nothing either."""
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple(dict.fromkeys(named_dims(spec), dynamic) or None for spec in evidence.input_specs)
    inputs = tuple(tensor.contiguous() for tensor in clones(evidence.inputs[0]))
    try:
        with refusing(), undisturbed(evidence.adapter), silent():
            torch.export.export(evidence.adapter, inputs, dynamic_shapes=shapes, strict=True)
    except RouteRefused as refusal:
        return place_in_stack(str(refusal.__cause__), evidence.adapter.model)
    return ""


def named_dims(spec: TensorSpec) -> dict[int, str]:
    """The open dims of an input or output, with their names."""
    return {dim: size for dim, size in enumerate(spec.shape) if isinstance(size, str)}


def conditions_of_program(program: torch.export.ExportedProgram, evidence: Evidence) -> tuple[Condition, ...]:
    """What torch.export took for granted of the open dims: the ranges and relations that its branches imply.

    It raises for none of them where a dim is given by name.
    """
    if not evidence.open_dims:
        return ()
    examples = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    values = [examples[name] for name in program.graph_signature.user_inputs]
    environment = values[evidence.open_dims[0][0]].fake_mode.shape_env
    symbols = {
        size.node.expr: (index, dim)
        for index, dim in evidence.open_dims
        if isinstance(size := values[index].shape[dim], torch.SymInt) and size.node.expr.is_Symbol
    }
    names = {symbol: str(evidence.input_specs[index].shape[dim]) for symbol, (index, dim) in symbols.items()}
    return tuple(
        replace(condition, along=number)
        for number, view in enumerate(evidence.along)
        for condition in _conditions_along(_lines(view, symbols), environment, names, several=bool(view.steps))
    )


def _lines(evidence: Evidence, symbols: Mapping[Any, tuple[int, int]]) -> dict[Any, Line]:
    """How each of torch's symbols grows; one that stands still has a slope of 0."""
    lines: dict[Any, Line] = {}
    for symbol, (index, dim) in symbols.items():
        still = Line(0, evidence.inputs[0][index].shape[dim])
        line = evidence.line(index, dim) if (index, dim) in evidence.open_dims else still
        if line is not None:
            lines[symbol] = line
    return lines


def _conditions_along(
    lines: Mapping[Any, Line], environment: Any, names: Mapping[Any, str], *, several: bool
) -> Iterator[Condition]:
    """The relations and ranges of the sizes that grow; `several` leaves out those of one size alone."""
    growing = {symbol for symbol, line in lines.items() if line.slope}
    for relation in environment.get_axioms():
        # What holds sizes that come from data was checked in the run, and is no branch.
        if relation.free_symbols <= lines.keys() and len(relation.free_symbols & growing) > several:
            yield _relation(relation, lines, names)
    for symbol, bounds in environment.var_to_range.items():
        if symbol in growing and not several:
            yield _range(bounds, lines[symbol])


def _relation(relation: Any, lines: Mapping[Any, Line], names: Mapping[Any, str]) -> Condition:
    symbols = sorted(relation.free_symbols, key=str)

    def holds(batch: int) -> bool:
        try:
            value = relation.subs({symbol: lines[symbol].at(batch) for symbol in symbols})
        except ArithmeticError:  # no value: the model can't go the same way there either
            return False
        return bool(value == True)  # noqa: E712 - it may be an expression still

    numbers = [int(number) for number in relation.atoms() if number.is_Integer]
    hints = batches_near(numbers, (lines[symbol] for symbol in symbols))
    return Condition(f"`{_by_name(relation, names)}`", holds, hints)


def _by_name(relation: Any, names: Mapping[Any, str]) -> str:
    """The relation with the sizes by name; torch's symbols are called s77."""
    by_text = {str(symbol): name for symbol, name in names.items()}
    return re.sub(r"\bs\d+\b", lambda found: by_text.get(found[0], found[0]), str(relation))


def _range(bounds: Any, line: Line) -> Condition:
    lower, upper = (int(bound) if bound.is_Integer else None for bound in (bounds.lower, bounds.upper))

    def holds(batch: int) -> bool:
        size = line.at(batch)
        return (lower is None or lower <= size) and (upper is None or size <= upper)

    hints = batches_near((bound for bound in (lower, upper) if bound is not None), (line,))
    return Condition(f"a size between {lower} and {upper}", holds, hints)


def take_guards(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """The program's guards, taken out of it, with the ranges that they gave its open dims.

    torch.export keeps every comparison that it met, also those that only tell small batches from others: a program that
    refused what they exclude would refuse batches that it is right for.
    """
    guards = tuple(_by_input(guard, program.graph_signature.user_inputs) for guard in program._guards_code)
    program._guards_code = []
    for symbol, bounds in program.range_constraints.items():
        program.range_constraints[symbol] = ValueRanges(min(bounds.lower, 2), int_oo)
    return guards


def guards_in_force(guards: Sequence[str], evidence: Evidence, agreed: Iterable[Shapes]) -> tuple[str, ...]:
    """The guards that hold wherever the program was seen to be right: they refuse what it wasn't captured for.

    Args:
        agreed: the shapes of the inputs there.

    Raises:
        RouteRefused: one of them can't be read.
    """
    names = parameter_names(evidence.adapter.input_names)
    sizes = [dict(zip(names, each, strict=True)) for each in agreed]
    return tuple(guard for guard in guards if all(_holds(guard, each) for each in sizes))


def _by_input(text: str, names: Sequence[Any]) -> str:
    """The text with `L['x']` for `L['flat_args'][0]`, as a strict capture calls the first input."""
    return re.sub(r"L\['flat_args'\]\[(\d+)\]", lambda found: f"L['{names[int(found[1])]}']", text)


def _holds(guard: str, sizes: Mapping[str, Sequence[int]]) -> bool:
    try:
        return guard_holds(guard, sizes)
    except ArithmeticError:
        return False
    except UnreadableGuard as error:
        raise RouteRefused(f"torch.export guards its program by what can't be judged: {error}") from error


def _drop_traces(program: torch.export.ExportedProgram) -> None:
    for module in program.graph_module.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            for name in _TRACES:
                node.meta.pop(name, None)
