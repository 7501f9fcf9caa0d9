"""Trace an adapter: with a record of where Python reads a traced value, without the device and settings of the moment.

A trace freezes the consequences of each read for all inputs:
- A value of the inputs (`if x.sum() > 0`, `.item()`, `.tolist()`): the trace would be wrong for other values.
- A size of the inputs (`if x.shape[0] > 16`, `len(x)`): the trace may be wrong at other sizes.
- Weights and constants: they are the same at every call.

A test that only chooses between continuing and raising (`assert`, `if …: raise`) doesn't count. Only one branch
produces outputs, and the trace holds that one.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils.weak import WeakTensorKeyDictionary

from exporters.base import Adapter, clones
from exporters.eager_runs import Observer, calls_in, number_of_pieces
from exporters.errors import RouteRefused
from exporters.isolation import refusing, silent, torchscript_allowed, undisturbed
from exporters.places import called_in_torch, place_of_error, user_frame
from exporters.torch_private import graphs_of, is_tracing

# Part of torch's message when compiled code is traced; in each eager call, `torch.cond` compiles itself.
_NO_COMPILED_CODE = "torch.jit.trace a dynamo-optimized function"


Dependence = Literal["size", "count", "value", "length"]
"""How a tensor depends on the inputs.

- "size": it depends on their sizes.
- "count": it depends on the shape of a tensor whose shape depends on their values, such as the number of True elements.
- "value": its values depend on their values.
- "length": its shape depends on their values, too.
"""

# Types and functions whose results reveal no value, only types, names and storage details.
_TELLING_NO_VALUE = (str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device, torch.layout, type(None), type)
_ABOUT_THE_KIND = frozenset({
    "dim", "ndimension", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_contiguous", "is_pinned",
    "is_shared", "is_conj", "is_neg", "is_same_size", "element_size", "get_device", "stride", "storage_offset", "data_ptr",
    "has_names", "requires_grad_", "__get__", "__repr__", "__format__", "__hash__", "__deepcopy__", "__reduce_ex__",
    "is_nested", "result_type", "can_cast", "promote_types", "is_tensor", "is_storage", "_is_view", "_is_zerotensor",
    "backward", "register_hook", "untyped_storage", "storage", "_typed_storage", "_version", "broadcast_shapes",
})  # fmt: skip

# Functions that read the numbers in a list; the trace holds their result as a constant.
_TO_CONSTANTS = frozenset({"tensor", "new_tensor", "as_tensor", "asarray"})
# Functions that take the shape of their result from a number among the arguments.
_BY_A_NUMBER = frozenset({"arange", "linspace", "zeros", "ones", "full", "empty", "eye", "rand", "randn", "new_zeros"})
# The number of arguments of `torch.lstm`, for packed inputs too.
_ARGS_OF_LSTM = 9
# Functions that read a size; `__get__` does so for attributes with one of these names.
_SIZES = frozenset({"size", "numel", "nelement", "__len__", "shape", "sym_size", "stride"})
_TO_NUMPY = frozenset({"numpy", "__array__", "__dlpack__"})
_LEVELS: tuple[Dependence | None, ...] = (None, "size", "count", "value", "length")


def trace(
    adapter: Adapter, inputs: Sequence[torch.Tensor], fixed: Sequence[Sequence[bool]] = ()
) -> tuple[torch.jit.ScriptModule, Watch]:
    """Trace the adapter on these inputs, and record where Python reads traced values; `fixed` is as for `Watch`."""
    with (
        undisturbed(adapter), refusing(), silent(), torchscript_allowed(), traced_by_their_forwards(),
        watching(adapter, fixed) as watch,
    ):  # fmt: skip
        module = torch.jit.trace(adapter, clones(inputs), check_trace=False)
    return module, watch


@contextmanager
def watching(adapter: Adapter, fixed: Sequence[Sequence[bool]] = ()) -> Iterator[Watch]:
    """Record where Python reads traced values in traces of `adapter` made inside; `fixed` is as for `Watch`."""
    watch = Watch(adapter, fixed)
    hook = adapter.register_forward_pre_hook(watch.start)
    try:
        with watch:
            yield watch
    except RuntimeError as error:
        if _NO_COMPILED_CODE not in str(error) or not (place := place_of_error(error, adapter.model)):
            raise
        raise RouteRefused(
            f"TorchScript's tracer can't record torch's `{called_in_torch(error)}`, which the model calls at {place}: "
            "export to pt2, which can hold it"
        ) from error
    finally:
        hook.remove()


@contextmanager
def traced_by_their_forwards() -> Iterator[None]:
    """Inside, a trace records the operations of a `torch.autograd.Function`'s forward instead of one call to Python.

    No file format can hold a call to Python. Without gradients, the forward is all that the function does. Calls
    through names that were bound before (`gelu = Gelu.apply` at module level) stay calls to Python.
    """
    own = vars(torch.autograd.Function)["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not is_tracing() or torch.is_grad_enabled():
            return own.__get__(None, cls)(*args, **kwargs)
        if cls.setup_context is not torch.autograd.Function.setup_context:
            # setup_context saves data for a backward pass, and there is none.
            return cls.forward(*args, **kwargs)
        context = FunctionCtx()
        context.needs_input_grad = (False,) * len(args)  # type: ignore[attr-defined]
        return cls.forward(context, *args, **kwargs)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def follow_settings(module: torch.jit.ScriptModule) -> None:
    """Replace each convolution by the operator that reads torch's settings when it runs, in place.

    A trace holds the settings as constants, among them whether cuDNN may compute in TF32, which it may by default:

        aten::_convolution(x, ..., benchmark, deterministic, cudnn_enabled, allow_tf32)  ->  aten::conv2d(x, ...)
    """
    for graph in graphs_of(module):
        for node in graph.findAllNodes("aten::_convolution"):
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *_ = node.inputs()
            dims = len(list(stride.node().inputs()))
            if transposed.toIValue():
                inputs = [x, weight, bias, stride, padding, output_padding, groups, dilation]
                plain = graph.create(f"aten::conv_transpose{dims}d", inputs, 1)
            else:
                plain = graph.create(f"aten::conv{dims}d", [x, weight, bias, stride, padding, dilation, groups], 1)
            plain.insertBefore(node)
            plain.copyMetadata(node)
            plain.output().setType(node.output().type())
            node.output().replaceAllUsesWith(plain.output())
            node.destroy()


def follow_inputs(module: torch.jit.ScriptModule, device: torch.device) -> None:
    """Replace the device in each method of a trace by that of the method's first tensor, in place.

    A trace holds the device of each new tensor as a constant, which `map_location` doesn't change:

        torch.arange(n, device=x.device)  ->  traced as device="cuda:0"  ->  device=prim::device(x)

    On the device of the trace, that of the inputs, the results are the same. Constants with another device are kept.
    Does not handle methods without a tensor.
    """
    for graph in graphs_of(module):
        source = next((value for value in graph.inputs() if value.type().kind() == "TensorType"), None)
        for node in graph.findAllNodes("prim::Constant") if source is not None else ():
            constant = node.output()
            if constant.type().kind() == "DeviceObjType" and torch.device(node.s("value")) == device:
                followed = graph.create("prim::device", [source], 1)
                followed.insertBefore(next(iter(graph.nodes())))
                followed.output().setType(constant.type())
                constant.replaceAllUsesWith(followed.output())


class Watch(Observer):
    """Record where Python reads values and sizes of the inputs while an adapter is traced."""

    def __init__(self, adapter: Adapter, fixed: Sequence[Sequence[bool]] = ()) -> None:
        super().__init__(adapter)
        # Places where Python reads a value that depends on the inputs' values, or branches on a size that does.
        self.values: list[str] = []
        self.counts: list[str] = []
        # Where Python reads a size of a tensor that is computed from the inputs, or splits such a tensor into a number of
        # tensors that may follow a size, as a clause: "the model reads a size in Python at …".
        self.sizes: list[str] = []
        # The sizes and numbers of pieces that the model's code read, one tuple per call that gives them.
        self.asked: list[tuple[int, ...]] = []
        # Those of the places at which a tensor becomes a numpy array.
        self.in_numpy: set[str] = set()
        # Which of the `asked` sizes are the same in all calls; reading these isn't recorded.
        self._fixed = fixed
        self._dependent: Any = WeakTensorKeyDictionary()

    def start(self, module: nn.Module, tensors: tuple[torch.Tensor, ...]) -> None:
        """A forward pre-hook for the adapter: start a new record for a trace on these inputs."""
        if is_tracing():
            for record in (self.values, self.counts, self.sizes, self.asked):
                record.clear()
            self._dependent = WeakTensorKeyDictionary()
            for tensor in tensors:
                self._dependent[tensor] = "value"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A state may have a wrong number of rows only if Python has read a size, which the trace freezes.
        if self.sizes and getattr(func, "__name__", "").partition(".")[0] == "lstm" and len(args) == _ARGS_OF_LSTM:
            args = _with_checked_states(args)
        result = func(*args, **(kwargs or {}))
        if not is_tracing():
            return result
        depends = self._dependence((args, kwargs))
        if depends is None:
            return result
        given = list(_tensors_in(result))
        if getattr(func, "__name__", "") in _TO_CONSTANTS:
            lists = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, list | tuple)]
            if read := self._dependence(lists):
                self._note(read, func)
        if _asks_for_a_size(func):
            depends = "count" if depends == "length" else "size"
            sizes = self._open_sizes(result)
            if depends == "size" and not sizes:
                return result
            given = list(_tensors_in(sizes)) if depends == "size" else given
        elif (depends == "value" and _has_open_length(func, args)) or (
            depends in ("count", "value") and self._dependence(_lengths(func, args)) in ("count", "value", "length")
        ):
            depends = "length"
        if (count := number_of_pieces(func, args, result)) is not None and self._open_sizes((count,)):
            self.sizes.append(f"the model splits a tensor at {self.line(sys._getframe(1))[1]}, which the trace freezes")
        for tensor in (*given, *_written_tensors(func, args, kwargs or {})):
            for each in (tensor, tensor._base):
                if each is not None:
                    self._dependent[each] = max(self._dependent.get(each), depends, key=_LEVELS.index)
        if not given and not _tells_no_value(func, result):
            self._note(depends, func)
        return result

    def _open_sizes(self, result: Any) -> list[Any]:
        """The sizes in the result of a call that asks for sizes, without those that are the same in all calls."""
        sizes = list(result) if isinstance(result, tuple) else [result]
        self.asked.append(tuple(map(int, sizes)))
        known = self._fixed[len(self.asked) - 1] if len(self.asked) <= len(self._fixed) else [False] * len(sizes)
        return [size for size, is_fixed in zip(sizes, known, strict=True) if not is_fixed]

    def _dependence(self, arguments: Any) -> Dependence | None:
        held = (each for tensor in _tensors_in(arguments) for each in (tensor, tensor._base) if each is not None)
        return max((self._dependent.get(each) for each in held), key=_LEVELS.index, default=None)

    def _note(self, depends: Dependence, func: Any) -> None:
        innermost = sys._getframe(2)
        frame, place = self.line(innermost)
        # Checks of torch's own layers count as little as those of the user.
        if any(_is_check(each) and not _may_be_caught(each) for each in _frames_up_to(innermost, frame)):
            return
        if getattr(func, "__name__", "") in _TO_NUMPY:
            self.in_numpy.add(place)
        is_branch = getattr(func, "__name__", "") == "__bool__"
        if depends == "size":
            self.sizes.append(f"the model reads a size in Python at {place}, which the trace freezes")
        else:
            (self.counts if depends == "count" and is_branch else self.values).append(place)


def _with_checked_states(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `torch.lstm`, with states that raise in a file if they have too few rows; one row is repeated.

    The function itself would read beyond the end of such states, which ends the process. It takes (inputs, states, …,
    batch_first), or for packed inputs (inputs, batch sizes, states, …).
    """
    is_packed = isinstance(args[1], torch.Tensor)
    place, batch_first = (2, False) if is_packed else (1, args[-1])
    rows = args[1][0] if is_packed else args[0].size(0 if batch_first else 1)
    states = [state.expand(-1, rows, -1) for state in args[place]]
    return *args[:place], states, *args[place + 1 :]


def first_read(adapter: Adapter, tensors: Sequence[torch.Tensor]) -> str:
    """The first line at which Python reads a value of a tensor, such as `.item()` of a buffer; "" if there is none.

    Whether the value depends on the inputs or not.
    """

    def reads(func: Any, args: Any, kwargs: Any, result: Any) -> bool | None:
        if _asks_for_a_size(func) or list(_tensors_in(result)) or _tells_no_value(func, result):
            return None
        return bool(list(_tensors_in((args, kwargs)))) or None

    return next((place for _, place in calls_in(adapter, tensors, reads)), "")


def refuse_values(watch: Watch, where: str = "", *, counts: bool = True) -> None:
    """Raise RouteRefused if Python read a value of the inputs; with `counts`, also if it branched on such a size."""
    if watch.values and watch.values[0] in watch.in_numpy:
        raise RouteRefused(
            f"{where}the model computes in numpy at {watch.values[0]}, which a trace can't record: it would keep the result "
            "for the example inputs (use torch's functions, or move this code out of the model)"
        )
    if read := [*watch.values, *(watch.counts if counts else ())]:
        raise RouteRefused(
            f"{where}the model branches on the values of its inputs at {read[0]}, and a trace records only "
            "one branch for all inputs (torch.where keeps both, and so does torch.cond, except in torchscript)"
        )


def _asks_for_a_size(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _SIZES
    return name in _SIZES


def _has_open_length(func: Any, args: Any) -> bool:
    """Whether the number of rows in the result of a call depends on the values of its tensors."""
    name = getattr(func, "__name__", "")
    if name == "__getitem__":
        # A mask selects as many rows as it has True elements.
        masks = (torch.bool, torch.uint8)
        return any(isinstance(each, torch.Tensor) and each.dtype in masks for each in _index(args))
    if name.startswith("__"):
        return False
    packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, f"_{name}", None)
    overloads = () if packet is None else (getattr(packet, each) for each in packet.overloads())
    return any(torch.Tag.dynamic_output_shape in overload.tags for overload in overloads)


def _lengths(func: Any, args: Any) -> Any:
    """The arguments that determine the shape of the result as numbers."""
    name = getattr(func, "__name__", "")
    if name == "__getitem__":
        return [each for each in _index(args) if isinstance(each, slice)]
    return args[1:] if name == "new_zeros" else args if name in _BY_A_NUMBER else ()


def _index(args: Any) -> tuple[Any, ...]:
    return args[1] if isinstance(args[1], tuple) else (args[1],)


def _written_tensors(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    targets = args[:1] if in_place or name == "__setitem__" or name.startswith("__i") else ()
    yield from _tensors_in((targets, kwargs.get("out")))


def _tells_no_value(func: Any, result: Any) -> bool:
    if isinstance(result, _TELLING_NO_VALUE) or getattr(func, "__name__", "") in _ABOUT_THE_KIND:
        return True
    # The result is a tensor-like object, which isn't a plain value.
    return hasattr(type(result), "__torch_function__")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers; during a trace, a torch.Size contains tensors, too."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    items: Any = (value.start, value.stop, value.step) if isinstance(value, slice) else ()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else items
    for item in items:
        yield from _tensors_in(item)


def _frames_up_to(innermost: FrameType, outermost: FrameType | None) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = None if frame is outermost else frame.f_back


def _is_check(frame: FrameType) -> bool:
    """Whether the frame is running the test of an `assert`, or of an `if` with a branch that raises.

    Or one of torch's methods that only check arguments: `GRU.check_forward_args`.
    """
    if frame.f_code.co_name.startswith("check_") and user_frame(frame) is not frame:
        return True
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if None in positions:
        return False
    line, end_line, column, end_column = positions
    start, end = (line, column), (end_line, end_column)
    # The instruction that converts a test to bool has the position of the test or of the whole statement.
    return any(
        (first <= start and end <= last) or (start, end) == statement
        for (first, last), statement in _raising_tests(frame.f_code.co_filename)
    )


def _may_be_caught(frame: FrameType) -> bool:
    """Whether the model may continue after an error raised in this frame; the check then decides as any other test."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code is not Adapter.forward.__code__:
        # torch calls a module in a `try`, and raises the error again.
        own = outer is frame or user_frame(outer) is outer
        if own and any(first <= outer.f_lineno <= last for first, last in _tries(outer.f_code.co_filename)):
            return True
        outer = outer.f_back
    return False


_Span = tuple[tuple[int, int], tuple[int, int]]
"""First and last (line, column)."""


@lru_cache(maxsize=256)
def _raising_tests(path: str) -> tuple[tuple[_Span, _Span], ...]:
    """The spans of each test in the file that only chooses between continuing and raising, and of its statement."""
    statements = [
        node
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and (_raises(node.body) or _raises(node.orelse)))
    ]
    return tuple(
        (_span(statement.test), _span(statement))
        for statement in statements
        # A name assigned in the test can be used afterwards.
        if not any(isinstance(node, ast.NamedExpr) for node in ast.walk(statement.test))
    )


@lru_cache(maxsize=256)
def _tries(path: str) -> tuple[tuple[int, int], ...]:
    """The first and last line of each `try` whose handlers don't all raise, and of each `with suppress(...)`."""
    return tuple(
        (node.body[0].lineno, node.body[-1].end_lineno or 0)
        for node in ast.walk(_parsed(path))
        if (isinstance(node, ast.Try | ast.TryStar) and not all(_raises(handler.body) for handler in node.handlers))
        or (isinstance(node, ast.With) and any("suppress" in ast.unparse(item.context_expr) for item in node.items))
    )


def _parsed(path: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):  # not Python, or edited since
        return ast.Module([], [])


def _span(node: ast.expr | ast.stmt) -> _Span:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)


_LEAVING = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom)


def _raises(body: Sequence[ast.stmt]) -> bool:
    """Whether the statements always end in `raise`."""
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    return not any(isinstance(node, _LEAVING) for statement in body for node in ast.walk(statement))
