"""When a convolution and the BatchNorm behind it, or in front of it, may become one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from passes.graph.arithmetic import float64
from passes.graph.capture import is_atom
from passes.graph.forward import GraphForward
from passes.graph.guards import SealCheckingForward, inner_forward, is_carried
from passes.graph.hooks import has_global_hooks, has_hooks
from passes.graph.match import (
    Affine,
    BatchNorm,
    ChannelScale,
    Convolution,
    Node,
    can_be_sealed,
    channels_between,
    in_order,
    is_layer,
    is_moving,
    is_parametrized,
    is_stock,
    modules_between,
    uses_values,
    way_of,
)
from passes.graph.program import Program, operation_name
from passes.graph.recording import autocast_dtype
from passes.graph.storage import kind_of
from passes.program.tensors import TensorRef


def why_not(program: Program, conv: Convolution, norm: Affine) -> str | None:
    """The reason why the two can't be rewritten together, or None.

    What is asked here holds for every rewrite of the pair: that nothing else sees the value between them, and that
    their tensors are theirs alone. "It" is the first of the two, whose output goes to the other.
    """
    if has_global_hooks():
        return "hooks for all modules are registered, which see what it gives: remove them and optimize again"
    values = [ref.value for ref in (conv.weight, *norm.tensors)]
    if autocast_dtype({value.device.type for value in values if value is not None}) is not None:
        return "optimize() was called under autocast, which changes what is computed in which dtype: call it outside"
    return (
        _why_not_value(program, conv, norm)
        or _why_not_modules(program, conv, norm)
        or _why_not_tensors(program, conv, norm)
        or _why_not_channels(program, conv, norm)
        or _why_not_autocast(program, conv, norm)
        or _why_not_forward(program, conv, norm)
        or _why_not_code(program, conv, norm)
    )


def _why_not_value(program: Program, conv: Convolution, norm: Affine) -> str | None:
    for value, following in itertools.pairwise(way_of(conv, norm)):
        others = (user for user in program.users(value) if user is not following)
        other = next((user for user in others if uses_values(program, user, value)), None)
        if other is not None:
            return f"its output is also used by {_name_of_user(program, other)}"
        if value.meta.get("escapes"):
            return "its output is kept somewhere outside of the graph"
    for module in modules_between(program, conv, norm):
        if reason := _why_not_through(program, module):
            return reason
    return None


def _why_not_through(program: Program, module: nn.Module) -> str | None:
    path = program.paths[id(module)][0] or "the root"
    if has_hooks(module):
        return f"its output passes the hooks of {path}"
    if is_carried(module):
        return None
    if isinstance(module, nn.Identity):
        return None if is_stock(module, (nn.Identity,)) else f"its output passes {path}, which is no plain Identity"
    if is_moving(program, module):
        return None
    if not program.graphs[id(module)].traced:
        hint = ": give example inputs" if program.recordings is None else ""
        return f"its output passes {path}, whose forward can't be traced{hint}"
    return None


def _name_of_user(program: Program, user: Node) -> str:
    if user.op == "output":
        return f"the caller of {program.home(user).path or 'the root'}, which returns it"
    return program.where(user)


def _why_not_modules(program: Program, conv: Convolution, norm: Affine) -> str | None:
    for role, module in (("the convolution", conv.module), ("the BatchNorm", norm.module)):
        if module is None:
            continue
        path, *aliases = program.paths[id(module)]
        if aliases:
            return f"{role} stands in the tree under two names, {path} and {aliases[0]}"
        if len(program.calls_of(module)) > 1:
            return f"{role} {path} is called {len(program.calls_of(module))} times"
        if reason := _why_not_called_elsewhere(program, conv if module is conv.module else norm, module):
            return f"{role} {path} {reason}"
        if any(is_lazy(tensor) for tensor in module._parameters.values() if tensor is not None):
            return f"{role} {path} is not initialised yet: run the model once first"
        if has_hooks(module):
            return f"{role} {path} has hooks{_what_hooks_set(module)}"
        if is_parametrized(module):
            return f"{role} {path} has parametrizations"
    return None


def _what_hooks_set(module: nn.Module) -> str:
    """What the hooks of a module do to its tensors, as a clause: the older weight_norm and spectral_norm are such hooks."""
    names = [name for name in ("weight", "bias") if isinstance(module.__dict__.get(name), torch.Tensor)]
    return f", which set its {names[0]} at every call" if names else ""


def _why_not_called_elsewhere(program: Program, place: Convolution | Affine, module: nn.Module) -> str | None:
    """Whether something calls the module that no graph shows."""
    home = program.home(place.node)
    if not home.whole:
        # All its calls are of this one kind, however many they are.
        return None
    count, around = program.calls_in_a_run(module), program.calls_in_a_run(home.module)
    if count is None or around is None:
        holder = program.named_reads.holder_of(module)
        return None if holder is None else f"is also held by {holder or 'the root'}, which may call it"
    if count > around:
        return f"is called {count}x in a run, and {home.path or 'the root'}, which calls it once, {around}x"
    return None


def _why_not_tensors(program: Program, conv: Convolution, norm: Affine) -> str | None:
    refs = [conv.weight, *([conv.bias] if conv.bias is not None and conv.bias.is_there else []), *norm.tensors]
    for ref in refs:
        if reason := _why_not_tensor(program, ref, (conv, norm)):
            return f"{_path_of(program, ref)} {reason}"
    # In training the other tensors stay the caller's.
    mean = norm.mean if isinstance(norm, BatchNorm) else None
    return _why_not_memory(program, refs if program.mode != "training" else [conv.bias, mean])


def _why_not_memory(program: Program, refs: Sequence[TensorRef | None]) -> str | None:
    for ref in refs if program.shares_memory else ():
        value = None if ref is None else ref.value
        sharer = None if value is None else program.sharer_of(value)
        if ref is not None and sharer is not None:
            return f"{_path_of(program, ref)} shares its memory with {sharer}"
    return None


def _why_not_tensor(program: Program, ref: TensorRef, pair: tuple[Convolution, Affine]) -> str | None:
    tensor = ref.value
    if tensor is None and not ref.is_computed:
        return "is missing"
    if tensor is None or _registered(ref) is not tensor:
        return "is computed or set by other code, and is no parameter or buffer"
    if is_lazy(tensor):
        return "is not initialised yet: run the model once first"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return f"is a {type(tensor).__name__}, which has an arithmetic of its own"
    if kind := kind_of(tensor):
        return f"is {kind}: a fold computes with dense numbers"
    if not tensor.is_floating_point():
        return f"is of dtype {str(tensor.dtype).removeprefix('torch.')}"
    if program.holders_of(tensor) > 1:
        return "is shared with another module"
    if ref.owner not in [place.module for place in pair] and (reason := _why_not_lent(program, ref.owner, pair)):
        return reason
    return _why_not_readers(program, ref, pair)


def _why_not_lent(program: Program, owner: nn.Module, pair: tuple[Convolution, Affine]) -> str | None:
    """Whether a layer whose tensor a function uses is called too, or may be where no run shows what is."""
    path, *aliases = program.paths[id(owner)]
    if _is_called(program, owner):
        return f"is also used by {path}, which is called too"
    homes = [program.home(place.node).module for place in pair]
    if program.recordings is not None or not is_layer(owner) or owner in homes:
        return None
    if aliases:
        return f"is of {path}, which is also {aliases[0]} and may be called: give example inputs"
    holder = program.named_reads.holder_of(owner)
    return None if holder is None else f"is of {path}, which {holder or 'the root'} may call: give example inputs"


def _is_called(program: Program, owner: nn.Module) -> bool:
    """Whether something calls a layer of torch's own, which reads its tensors without a node that shows it."""
    return is_atom(owner) and (bool(program.calls_of(owner)) or bool(program.calls_in_a_run(owner)))


def _registered(ref: TensorRef) -> torch.Tensor | None:
    if ref.is_computed or ref.name in ref.owner.__dict__:
        return None
    return ref.owner._parameters.get(ref.name, ref.owner._buffers.get(ref.name))


def _why_not_readers(program: Program, ref: TensorRef, pair: tuple[Convolution, Affine]) -> str | None:
    nodes = program.readers_of(ref.owner, ref.name)
    for node in nodes:
        if any(user is not pair[0].node and user is not pair[1].node for user in node.users):
            return f"is also read by {program.home(node).path or 'the root'}"
    # The graph of a forward shows all that it reads; where a run showed no more than parts of it, there may be more.
    shown = {id(home.module) for home in map(program.home, nodes) if id(home.module) in program.graphs}
    unknown = program.recorded_readers_of(ref.owner, ref.name) - shown
    if unknown:
        return f"is also read by {min(program.paths[key][0] or 'the root' for key in unknown)}"
    return None


def _why_not_autocast(program: Program, conv: Convolution, norm: Affine) -> str | None:
    for role, node in (("it", conv.node), (f"the BatchNorm {program.where(norm.node)}", norm.node)):
        dtype = program.autocast_at(node)
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            return f"{role} runs under autocast to {name}, where a fold changes what is computed in which dtype"
    return None


def _path_of(program: Program, ref: TensorRef) -> str:
    path = program.paths[id(ref.owner)][0]
    return f"{path}.{ref.name}" if path else ref.name


def _why_not_channels(program: Program, conv: Convolution, norm: Affine) -> str | None:
    if isinstance(norm, ChannelScale):
        return _why_not_dtype(program, conv, norm)
    reason = _why_not_moved(program, conv, norm) if norm.moves else _why_not_rank(program, conv, norm)
    if reason:
        return reason
    sizes = {value.numel() for ref in norm.tensors if (value := ref.value) is not None}
    count = conv.input_channels if norm.leads else conv.channels
    if sizes and sizes != {count}:
        if norm.leads:
            return f"its channels are not the {count} that {program.where(conv.node)} takes"
        return f"its {count} channels are not those of the BatchNorm"
    return None


def _why_not_dtype(program: Program, conv: Convolution, scale: ChannelScale) -> str | None:
    """Another dtype would be that of the product."""
    weight, tensor = conv.weight.value, scale.tensor.value
    assert weight is not None
    assert tensor is not None
    if tensor.dtype == weight.dtype:
        return None
    return f"{_path_of(program, scale.tensor)} is of another dtype than its weight"


def _why_not_rank(program: Program, conv: Convolution, norm: Affine) -> str | None:
    """BatchNorm takes the second dim for the channels: of a layer on other ranks these are not its inputs or outputs."""
    rank = program.rank_of_input(conv.node)
    kind = "convolution" if conv.dims else "linear layer"
    if rank is not None and rank != conv.dims + 2:
        ends = "inputs" if norm.leads else "outputs"
        owner = f"the input of {program.where(conv.node)}" if norm.leads else "its input"
        return f"{owner} is {rank}-D, where the BatchNorm's channels are not the {ends} of the {kind}"
    # Of more dims than one, an unbatched input is no input of BatchNorm2d and BatchNorm3d, and a rare one elsewhere.
    ambiguous = conv.dims == 0 or (conv.dims == 1 and program.recordings is None)
    if rank is None and ambiguous:
        side = "in front of" if norm.leads else "behind"
        return f"the rank of its input isn't known, and BatchNorm takes the second dim for channels {side} a {kind}" + (
            ": give example inputs" if program.recordings is None else ""
        )
    return None


def _why_not_moved(program: Program, conv: Convolution, norm: Affine) -> str | None:
    way = ", ".join(program.where(node) for node in norm.moves)
    first, _ = in_order(conv, norm)
    if program.rank_of_input(first.node) is None:
        return f"its output passes {way}, and the rank of its input isn't known" + (
            ": give example inputs" if program.recordings is None else ""
        )
    channels = channels_between(program, conv, norm)
    if channels is None:
        return f"its output passes {way}, behind which its channels aren't known"
    if channels.dim != (channels.rank - conv.dims - 1 if norm.leads else 1):
        taker = program.where(conv.node) if norm.leads else "the BatchNorm"
        return f"its output passes {way}, behind which its channels are not those of {taker}"
    return None


def _why_not_forward(program: Program, conv: Convolution, norm: Affine) -> str | None:
    for node in (conv.node, norm.node):
        opaque = program.opaque_around(node)
        if opaque is not None and not _is_closed(program, conv, norm):
            unknown = (
                "no recorded run shows what it does: give example inputs"
                if program.recordings is None
                else "the recorded runs don't agree on what it does"
            )
            return f"the forward of {opaque or 'the root'} around it can't be traced, and {unknown}"
    for place in (conv, norm):
        home = program.home(place.node)
        if not home.traced and place.module is None:
            called = operation_name(place.node)
            return f"the forward of {home.path or 'the root'} calls {called} as a function and can't be traced"
        if place.module is None and (unwatched := home.unwatched()) is not None:
            called = operation_name(place.node)
            return (
                f"the forward of {home.path or 'the root'}, which calls {called} as a function, {unwatched}: what that"
                " answers at another call can't be known"
            )
    if isinstance(norm, ChannelScale) and (reason := _why_not_called_so(program, conv, norm)):
        return reason
    around = program.innermost_around(conv.node, norm.node)
    if around is None or around.shows_every_call:
        return None
    if not isinstance(inner_forward(around.module), SealCheckingForward | GraphForward | None):
        why = "branches on a rank" if around.traced else "can't be traced"
        return f"the module {around.path or 'the root'} has a forward of its instance, which {why}"
    return None


def _why_not_called_so(program: Program, conv: Convolution, scale: ChannelScale) -> str | None:
    """A product less isn't worth a graph that an export calls otherwise: models make masks only where they are traced."""
    for place in (conv, scale):
        home = program.home(place.node)
        if place.module is None and home.path and home.structure.given_none:
            name = home.structure.given_none[0]
            return f"{home.path} is called with None for {name}, and where a model is exported that may be a tensor"
    return None


def _is_closed(program: Program, conv: Convolution, norm: Affine) -> bool:
    """Whether one graph holds the pair and a seal guards it, so that the forwards around it need not be known.

    Runs that don't agree on those still show who calls the two and who reads their tensors. What no run shows meets the
    seal, and raises.
    """
    home = program.home(conv.node)
    return (
        program.recordings is not None
        and home is program.home(norm.node)
        and (home.traced or not home.whole)
        and can_be_sealed(program, conv, norm)
    )


def _why_not_code(program: Program, conv: Convolution, norm: Affine) -> str | None:
    """Whether a branch that nothing showed may read what the rewrite changes, or ask what the sealed value is."""
    # Their graphs stand in for their forwards.
    replaced = frozenset(id(program.home(place.node).module) for place in (conv, norm) if place.module is None)
    homes = [program.home(place.node) for place in (conv, norm)]
    if can_be_sealed(program, conv, norm):
        asked = (home for home in homes if id(home.module) not in replaced)
        asking = [home for home in asked if program.named_reads.asks_for_types(home.module)]
        if asking:
            return (
                f"the forward of {asking[0].path or 'the root'} asks for the type of a value, which may be its output"
            )
    else:
        replaced |= {id(program.home(norm.node).module)}
    refs = (conv.weight, *([conv.bias] if conv.bias else []), *norm.tensors)
    if program.named_reads.any_goes_past:
        layers = [ref.owner for ref in refs if is_atom(ref.owner)]
        for module in dict.fromkeys([*layers, *(home.module for home in homes if id(home.module) in replaced)]):
            if reason := _why_not_gone_past(program, module, replaced):
                return reason
    for ref in refs:
        for path in program.paths[id(ref.owner)]:
            reader = program.named_reads.reader_of(path, ref.name, but=replaced)
            if reader is not None:
                code = f"the code of {reader or 'the root'}"
                return f"{_path_of(program, ref)} may be read by {code}, in a branch of its own"
    return None


def _why_not_gone_past(program: Program, module: nn.Module, but: frozenset[int]) -> str | None:
    """Whether something may run a module past what stands in for its forward: by a method of its class."""
    path = program.paths[id(module)][0]
    keepers = program.named_reads.keepers_of(module)
    # What other methods of a user's class read is known by name.
    method = next((name for name in keepers if name == "forward" or is_atom(module)), None)
    if method is not None:
        return f"{path or 'the root'} may be run by its method {method!r}, which {keepers[method] or 'the root'} keeps"
    runner = program.named_reads.runner_of(module, path, but)
    if runner is None:
        return None
    return (
        f"{path or 'the root'} may be run by the forward of its class, which the code of {runner or 'the root'} names"
    )


def scale_of(norm: BatchNorm) -> torch.Tensor:
    """What the BatchNorm multiplies each channel by before its own weight, (channels,), in float64."""
    assert norm.var is not None
    assert norm.var.value is not None
    return (float64(norm.var.value) + norm.eps).rsqrt_()


def are_finite(*tensors: torch.Tensor) -> bool:
    """Whether no tensor holds a NaN or an infinity: with one, the order of the operations changes what comes out."""
    return all(map(_is_finite, tensors))


def _is_finite(tensor: torch.Tensor) -> bool:
    # A NaN or an infinity is in the sum too; the sum of finite numbers may overflow.
    return math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())
