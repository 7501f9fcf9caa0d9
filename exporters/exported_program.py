"""Programs captured by torch.export, and the assumptions of the capture about the open dims: conditions and guards.

Conditions are relations of sizes of the inputs. Guards are comparisons of these as Python source.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from exporters.base import Captures, TensorSpec, captured_names, clones
from exporters.errors import RouteRefused
from exporters.evidence import TOGETHER, Evidence, Place, Shapes, Size
from exporters.isolation import refusing, silent, undisturbed
from exporters.places import Program, operations_of, place_in_stack
from exporters.torch_private import at_least, lstm_in_one_piece
from exporters.tracing import refuse_values, trace
from optimize_export.relations import can_be_declared

# Node metadata about the origin of a node: files and lines of this machine, and how the graph was made.
_TRACES = ("stack_trace", "from_node", "source_fn_stack", "custom", "original_aten")

_FIXED = (
    re.compile(
        r"L\['(?P<name>\w+)'\]\.size\(\)\[(?P<dim>\d+)\] as dynamic"
        r" but your code specialized it to be a constant \((?P<size>\d+)\)"
    ),
    re.compile(r"a static shape of (?P<size>\d+) for dimension inputs\['(?P<name>\w+)'\]\.shape\[(?P<dim>\d+)\]"),
)


@dataclass(frozen=True)
class Condition:
    """An assumption that a capture made."""

    # The condition or its location in the source, for messages.
    what: str
    # Whether it holds for inputs of these shapes.
    holds: Callable[[Shapes], bool]
    # The dims that it compares.
    places: frozenset[Place]
    # The numbers that it compares them with.
    numbers: tuple[int, ...] = ()
    # The condition as a relation of sizes by name: `4096*batch <= 2147483648`; "" if a bundle can't declare it.
    relation: str = ""

    @property
    def key(self) -> tuple[str, frozenset[Place]]:
        """What it is about, for comparisons with other conditions."""
        return self.what, self.places

    def follows(self, size: Size) -> bool:
        """Whether the size decides on it: alone, or together with others that none of them decides on alone."""
        lines = {place: line for place, line in size.lines.items() if place in self.places}
        growing = [line for line in lines.values() if line is not None and line.slope]
        return None not in lines.values() and len(growing) > (size.name == TOGETHER)

    def hints(self, size: Size) -> frozenset[int]:
        """The values of a size at which one of the dims reaches one of the numbers."""
        lines = [line for place, line in size.lines.items() if place in self.places]
        return frozenset(
            (number - line.start) // line.slope for number in self.numbers for line in lines if line and line.slope
        )


def captured(evidence: Evidence, *, strict: bool) -> tuple[torch.export.ExportedProgram, Program]:
    """The shared capture as a program of the caller's own, without origin metadata in its nodes; weights aren't copied.

    The second result holds the program with the places of its values in the model. `strict` is as for `shared_program`.

    Raises:
        RouteRefused: the model can't be captured, or the capture specialized an open dim.
    """
    shared = shared_program(evidence, strict=strict)
    tensors = pytree.tree_leaves((shared.state_dict, shared.constants, shared.example_inputs))
    with silent():
        program = copy.deepcopy(shared, {id(tensor): tensor for tensor in tensors})
    for node, original in zip(nodes_of(program.graph_module), nodes_of(shared.graph_module), strict=True):
        # A copied graph renames nodes that have the name of a Python function, such as `input`.
        node.name, node.target = original.name, original.target
    placed = Program.of(program, evidence.captures.adapter.model)
    _drop_traces(program)
    return program, placed


def shared_program(evidence: Evidence, *, strict: bool | None = None) -> torch.export.ExportedProgram:
    """The capture of the first call by torch.export, which all formats share: it must not be changed.

    Args:
        strict: analyze the model's byte code instead of running it. This supports `len(x)` of an open batch, which
            Python requires to be an int, but less of everything else. None analyzes it where running it fails.

    Raises:
        RouteRefused: the model can't be captured, or the capture specialized an open dim.
    """
    if strict is not None:
        return evidence.captures.once(("program", strict), lambda: _captured(evidence, strict=strict))
    try:
        return shared_program(evidence, strict=False)
    except RouteRefused:
        return shared_program(evidence, strict=True)


def captured_operations(captures: Captures) -> list[tuple[str, str]] | None:
    """The operations of the capture that the formats share, as `operations_of`; None if nothing was captured."""
    programs = [captures.known(("program", strict)) for strict in (False, True)]
    return next((operations_of(program) for program in programs if program is not None), None)


def _captured(evidence: Evidence, *, strict: bool) -> torch.export.ExportedProgram:
    adapter = evidence.captures.adapter
    # DYNAMIC raises if the capture specializes a dim; AUTO would specialize it silently.
    dynamic = torch.export.Dim.DYNAMIC
    inputs = tuple(tensor.contiguous() for tensor in clones(evidence.inputs[0]))
    # A size of 1, which only captures outside the calls have, is a constant in each capture.
    shapes = tuple(
        {dim: dynamic for dim in named_dims(spec) if tensor.shape[dim] > 1} or None
        for spec, tensor in zip(evidence.input_specs, inputs, strict=True)
    )
    try:
        with refusing(), undisturbed(adapter), silent(), lstm_in_one_piece():
            if strict:
                # Code that a model runs only in its first call (hooks that it installs under a lock) can't be analyzed.
                adapter.run(inputs)
            program = torch.export.export(
                adapter, inputs, dynamic_shapes=shapes if any(shapes) else None, strict=strict
            )
    except RouteRefused as refusal:
        # If Python reads a value of the inputs, a trace names the line. The trace may fail for reasons of its own.
        try:
            _, watch = trace(adapter, evidence.inputs[0])
        except RouteRefused:
            pass
        else:
            refuse_values(watch)
        raise _naming_the_fixed_dim(refusal, evidence, strict=strict) from refusal
    # Files only support plain parameters, and some of other classes hold a plain tensor.
    for name, held in program.state_dict.items():
        values = held.detach()
        if isinstance(held, nn.Parameter) and type(held) is not nn.Parameter and type(values) is torch.Tensor:
            program.state_dict[name] = nn.Parameter(values, requires_grad=held.requires_grad)
    return program


def _naming_the_fixed_dim(refusal: RouteRefused, evidence: Evidence, *, strict: bool) -> RouteRefused:
    """The refusal in terms of the open dim that the capture specialized, with the location; unchanged if none was."""
    reason = str(refusal.__cause__)
    names = captured_names(evidence.adapter.input_names)
    found = next(filter(None, (pattern.search(_by_input(reason, names)) for pattern in _FIXED)), None)
    if found is None or found["name"] not in names:
        return refusal
    spec, dim = evidence.input_specs[names.index(found["name"])], int(found["dim"])
    size, place = str(spec.shape[dim]), place_in_stack(reason, evidence.captures.adapter.model)
    if not (place or strict):
        # Only a strict capture has a stack.
        try:
            shared_program(evidence, strict=True)
        except RouteRefused as other:
            if other.size == size:
                return other
    return RouteRefused(
        f"the model fixes dim {dim} of input `{spec.name}` to {found['size']}, but it must be open"
        f"{place and f', at {place}'}",
        size=size,
    )


def named_dims(spec: TensorSpec) -> dict[int, str]:
    """The open dims of an input or output, with their names."""
    return {dim: size for dim, size in enumerate(spec.shape) if isinstance(size, str)}


@dataclass(frozen=True)
class Assumptions:
    """What a program assumes about the open dims, as data that another process can read."""

    # Relations between sizes, each with the dim of every symbol in it.
    relations: tuple[tuple[Any, Mapping[Any, Place]], ...] = ()
    # The least and largest size of a dim; None for no limit.
    ranges: tuple[tuple[int | None, int | None, Place], ...] = ()

    def joined(self, other: Assumptions) -> Assumptions:
        """These assumptions and those of another one."""
        return Assumptions(self.relations + other.relations, self.ranges + other.ranges)


def assumptions_of(program: torch.export.ExportedProgram, open_dims: Iterable[Place]) -> Assumptions:
    """The assumptions of torch.export about the open dims: the ranges and relations implied by its branches.

    torch.export doesn't raise for these: `Dim.DYNAMIC` only forbids that a dim becomes a constant.
    """
    if not (places := tuple(open_dims)):
        return Assumptions()
    environment, symbols = _open_sizes(program, places)
    # Relations on data-dependent sizes were checked in the run and aren't branches.
    relations = [each for each in environment.get_axioms() if each.free_symbols and each.free_symbols <= symbols.keys()]
    ranges = [(symbol, bounds) for symbol, bounds in environment.var_to_range.items() if symbol in symbols]
    return Assumptions(
        tuple((each, {symbol: symbols[symbol] for symbol in each.free_symbols}) for each in relations),
        tuple((_number(bounds.lower), _number(bounds.upper), symbols[symbol]) for symbol, bounds in ranges),
    )


def _number(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer else None


def conditions_of(assumptions: Assumptions, evidence: Evidence) -> tuple[Condition, ...]:
    """Assumptions as conditions, each once."""
    found = (
        *(_relation(relation, symbols, evidence) for relation, symbols in assumptions.relations),
        *(_range(lower, upper, place, evidence) for lower, upper, place in assumptions.ranges),
    )
    return tuple({condition.key: condition for condition in found}.values())


def conditions_of_program(program: torch.export.ExportedProgram, evidence: Evidence) -> tuple[Condition, ...]:
    """The assumptions of a program about the open dims as conditions."""
    return conditions_of(assumptions_of(program, evidence.open_dims), evidence)


def conditions_of_numbers(program: torch.export.ExportedProgram, evidence: Evidence) -> tuple[Condition, ...]:
    """The sizes at which numbers that the program computes from the open dims turn: `n // 64`, `min(n, 64)`.

    The program computes such a number in each call, so it assumes nothing about it. But a trace of a model that reads
    the number in Python holds that of the first call, which may be the same in all calls.
    """
    if not evidence.open_dims:
        return ()
    import sympy  # Its import takes half a second, and files that are only loaded don't need it.

    _, symbols = _open_sizes(program, evidence.open_dims)
    results = [node.meta.get("val") for node in nodes_of(program.graph_module) if node.op == "call_function"]
    numbers = [each.node.expr for each in results if isinstance(each, torch.SymInt | torch.SymFloat)]
    calls = dict.fromkeys(call for number in numbers for call in number.atoms(sympy.core.function.Application))
    return tuple(
        _relation(relation, symbols, evidence)
        for call in calls
        if call.free_symbols and call.free_symbols <= symbols.keys()
        for relation in _turns(call, symbols, evidence)
        if relation.free_symbols
    )


def _turns(call: Any, symbols: Mapping[Any, Place], evidence: Evidence) -> Iterator[Any]:
    # A minimum turns where two arguments are equal, and any other function where it has another value.
    first = {symbol: evidence.inputs[0][index].shape[dim] for symbol, (index, dim) in symbols.items()}
    pairs = [(call, call.subs(first))]
    if type(call).__name__ in ("Min", "Max"):
        pairs = list(itertools.combinations(call.args, 2))
    import sympy

    for left, right in pairs:
        yield from (sympy.Le(left, right), sympy.Ge(left, right))


def _open_sizes(program: torch.export.ExportedProgram, open_dims: Sequence[Place]) -> tuple[Any, dict[Any, Place]]:
    """The ShapeEnv of a program, and the (input, dim) of the symbol of each open dim."""
    examples = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    values = [examples[name] for name in program.graph_signature.user_inputs]
    environment = values[open_dims[0][0]].fake_mode.shape_env
    symbols = {
        size.node.expr: (index, dim)
        for index, dim in open_dims
        if isinstance(size := values[index].shape[dim], torch.SymInt) and size.node.expr.is_Symbol
    }
    return environment, symbols


def _relation(relation: Any, symbols: Mapping[Any, Place], evidence: Evidence) -> Condition:
    places = {symbol: symbols[symbol] for symbol in sorted(relation.free_symbols, key=str)}

    def holds(shapes: Shapes) -> bool:
        try:
            value = relation.subs({symbol: shapes[index][dim] for symbol, (index, dim) in places.items()})
        except ArithmeticError:  # undefined there, so the model can't take the same path
            return False
        return bool(value == True)  # noqa: E712 - it may still be an expression

    numbers = tuple(int(number) for number in relation.atoms() if number.is_Integer)
    # With names of sizes in place of symbols such as s77.
    names = {str(symbol): str(evidence.input_specs[index].shape[dim]) for symbol, (index, dim) in symbols.items()}
    text = re.sub(r"\bs\d+\b", lambda found: names.get(found[0], found[0]), str(relation))
    relation_text = text if can_be_declared(text) else ""
    return Condition(f"`{text}`", holds, frozenset(places.values()), numbers, relation_text)


def _range(lower: int | None, upper: int | None, place: Place, evidence: Evidence) -> Condition:
    index, dim = place

    def holds(shapes: Shapes) -> bool:
        size = shapes[index][dim]
        return (lower is None or lower <= size) and (upper is None or size <= upper)

    # Sizes at the lower bound are small enough to be tried.
    text = f"{evidence.input_specs[index].shape[dim]} <= {upper}"
    return Condition(
        f"a size between {lower} and {upper}",
        holds,
        frozenset([place]),
        tuple(bound for bound in (lower, upper) if bound is not None),
        text if can_be_declared(text) else "",
    )


def take_guards(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Remove the program's guards and return them; also widen the ranges of its open dims.

    torch.export keeps every comparison that it met, even one that only distinguishes small batches. A program that
    enforced them all would refuse batches at which it is right.
    """
    guards = tuple(_by_input(guard, program.graph_signature.user_inputs) for guard in program._guards_code)
    program._guards_code = []
    for symbol, bounds in program.range_constraints.items():
        program.range_constraints[symbol] = at_least(min(bounds.lower, 2))
    return guards


def guards_in_force(guards: Sequence[str], evidence: Evidence, agreed: Iterable[Shapes]) -> tuple[str, ...]:
    """The guards that hold wherever the program was proven right, so that they refuse only other sizes."""
    shapes = list(agreed)
    return tuple(guard for guard in guards if not any(guards_refuse([guard], evidence, each) for each in shapes))


def guards_refuse(guards: Sequence[str], evidence: Evidence, shapes: Shapes) -> bool:
    """Whether a guard refuses inputs of these shapes."""
    sizes = dict(zip(captured_names(evidence.adapter.input_names), shapes, strict=True))
    return not all(guard_holds(guard, sizes) for guard in guards)


def _by_input(text: str, names: Sequence[Any]) -> str:
    """Replace `L['flat_args'][0]`, the first input's name in a strict capture, with `L['x']`."""
    return re.sub(r"L\['flat_args'\]\[(\d+)\]", lambda found: f"L['{names[int(found[1])]}']", text)


@dataclass(frozen=True)
class _Sized:
    """Placeholder for an input in a guard."""

    shape: Sequence[int]

    def size(self) -> Sequence[int]:
        return self.shape


class _Torch:
    """The functions of torch in guards, as they are for numbers: `int(n / 4)` is `trunc(sym_float(n) / 4)`."""

    sym_float, sym_int, sym_max, sym_min = float, int, max, min


def guard_holds(guard: str, sizes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a guard holds for inputs of these sizes, by parameter name. It doesn't where it divides by zero.

    The guard comes from torch, or from a file that can run any code when it is loaded, so it is passed to `eval`.

    Raises:
        RouteRefused: it reads something other than sizes.
    """
    inputs = {name: _Sized(shape) for name, shape in sizes.items()}
    names = {"L": inputs, "len": len, "max": max, "min": min, "math": math, "torch": _Torch}
    try:
        return bool(eval(guard, {"__builtins__": {}, **names}))
    except ArithmeticError:
        return False
    except Exception as error:
        raise RouteRefused(f"torch.export added a guard that isn't a comparison of sizes: `{guard[:80]}`") from error


def _drop_traces(program: torch.export.ExportedProgram) -> None:
    for node in nodes_of(program.graph_module):
        for name in _TRACES:
            node.meta.pop(name, None)
        if stack := node.meta.get("nn_module_stack"):
            # A strict capture has memory addresses as keys.
            node.meta["nn_module_stack"] = {
                path if key.isdigit() else key: (path, kind) for key, (path, kind) in stack.items()
            }


def nodes_of(module: nn.Module) -> Iterator[Any]:
    """The nodes of a graph and of the graphs inside it."""
    for inner in module.modules():
        yield from getattr(getattr(inner, "graph", None), "nodes", ())
