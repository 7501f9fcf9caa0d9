"""How a module is called: which of its arguments are tensors, and in what containers they and the outputs stand."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.errors import UnseenCall
from passes.program.seals import SealedOutput

# The functions made here, by their text and what it names.
_known_functions: weakref.WeakValueDictionary[Any, Callable[..., Any]] = weakref.WeakValueDictionary()

# A value of one of these types may be part of what a graph is made for: it is compared at every call.
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, slice)


def is_plain(value: Any) -> bool:
    """Whether the value is a tensor of one of torch's own classes.

    To one of another class, which may do anything when it is used, a forward may answer otherwise than its graph.
    """
    # Fake tensors, parameters and what else torch itself runs a forward on are tensors to a forward; a sealed one goes
    # through it as it is.
    if isinstance(value, SealedOutput):
        return True
    return isinstance(value, torch.Tensor) and (
        type(value) is torch.Tensor or type(value).__module__.partition(".")[0] == "torch"
    )


class Unstructured(Exception):
    """An argument or an output that has no tensors that could be named; the message says which."""


class _Tensor:
    """Stands in a `CallStructure` where a call has a tensor."""

    def __repr__(self) -> str:
        return "Tensor"

    def __reduce__(self) -> str:
        # Copies and pickles are the one object of this module: it is compared by identity.
        return "TENSOR"


TENSOR = _Tensor()


def signature_of(module: nn.Module) -> inspect.Signature:
    """The signature of the module's forward, without `self`.

    Raises:
        Unstructured: the forward has none that can be read.
    """
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError) as error:
        raise Unstructured(f"its forward has no signature that can be read ({error})") from error
    # Annotations can be anything, also what can't be pickled, and nothing here reads them.
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return inspect.Signature(bare)


def binder_of(signature: inspect.Signature) -> Callable[..., dict[str, Any]]:
    """A function of that signature which returns its arguments by name, defaults filled in.

    `Signature.bind` does the same, but a tracer of bytecode such as torch.compile doesn't see through it.
    """
    names = ", ".join(f"{name!r}: {name}" for name in signature.parameters)
    return _function_of(signature, f"return {{{names}}}", {})


def _function_of(signature: inspect.Signature, line: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """A function of that signature with a body of one line, which reads the names of the namespace."""
    texts: list[str] = []
    kinds = inspect.Parameter
    parameters = list(signature.parameters.values())
    for index, parameter in enumerate(parameters):
        star = "*" * (parameter.kind is kinds.VAR_POSITIONAL) + "**" * (parameter.kind is kinds.VAR_KEYWORD)
        first_keyword = parameter.kind is kinds.KEYWORD_ONLY and (
            index == 0 or parameters[index - 1].kind not in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL)
        )
        texts.append("*, " * first_keyword + star + parameter.name)
        if parameter.default is not parameter.empty:
            namespace[f"_default_{index}"] = parameter.default
            texts[-1] += f"=_default_{index}"
        last_positional_only = parameter.kind is kinds.POSITIONAL_ONLY and (
            index + 1 == len(parameters) or parameters[index + 1].kind is not kinds.POSITIONAL_ONLY
        )
        if last_positional_only:
            texts[-1] += ", /"
    text = f"def forward({', '.join(texts)}):\n    {line}\n"
    # One for all that are equal, as `passes.graph.forward.compile_graph` has it.
    key = text, tuple((name, id(value)) for name, value in namespace.items())
    known = _known_functions.get(key)
    if known is not None:
        return known
    exec(text, namespace)
    function: Callable[..., Any] = namespace["forward"]
    _known_functions[key] = function
    return function


@dataclass(frozen=True)
class CallStructure:
    """The structure of the calls that one graph answers.

    Attributes:
        signature: the signature of the module's forward.
        spec: the pytree of the bound arguments, a mapping from parameter names to values.
        leaves: for each leaf of `spec`, `TENSOR` or the constant that stands there in every call.
        positional: how many parameters are given by position.
        omitted: the parameters that are left to their defaults.
    """

    signature: inspect.Signature
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    positional: int
    omitted: frozenset[str]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.signature, skeleton_of(self.spec), self.leaves, self.positional, self.omitted)

    @classmethod
    def of_call(
        cls,
        signature: inspect.Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        bound: Mapping[str, Any] | None = None,
    ) -> CallStructure:
        """The structure of one call; `bound` are its arguments by name, as `binder_of(signature)` gives them.

        Raises:
            Unstructured: an argument is neither a tensor, a constant, nor a container of them that pytree knows.
        """
        bound = binder_of(signature)(*args, **kwargs) if bound is None else bound
        flat, spec = pytree.tree_flatten(bound)
        leaves = tuple(TENSOR if is_plain(leaf) else leaf for leaf in flat)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                raise Unstructured(f"a {type(leaf).__name__} may answer otherwise than the tensors of a graph")
            if leaf is not TENSOR and not isinstance(leaf, CONSTANTS):
                raise Unstructured(f"an argument of type {type(leaf).__name__} holds no tensors that could be named")
        given = set(signature.bind(*args, **kwargs).arguments)
        return cls(signature, spec, leaves, len(args), frozenset(set(signature.parameters) - given))

    @classmethod
    def by_default(cls, signature: inspect.Signature) -> CallStructure:
        """The structure of a call that gives a tensor to every parameter that has no default, and nothing else."""
        bound: dict[str, Any] = {}
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                bound[parameter.name] = ()
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound[parameter.name] = {}
            else:
                bound[parameter.name] = TENSOR if parameter.default is parameter.empty else parameter.default
        leaves, spec = pytree.tree_flatten(bound)
        for leaf in leaves:
            if leaf is not TENSOR and not isinstance(leaf, CONSTANTS):
                raise Unstructured(f"the default of an argument, of type {type(leaf).__name__}, is no constant")
        omitted = frozenset(p.name for p in signature.parameters.values() if p.default is not p.empty)
        return cls(signature, spec, tuple(leaves), len(signature.parameters), omitted)

    @classmethod
    def unnamed(cls) -> CallStructure:
        """That of calls whose tensors can't be named, for a graph that is never run."""
        leaves, spec = pytree.tree_flatten({})
        return cls(inspect.Signature(), spec, tuple(leaves), 0, frozenset())

    def same_as(self, other: CallStructure) -> bool:
        """Whether a graph that answers the one answers the other."""
        if self.spec != other.spec or len(self.leaves) != len(other.leaves):
            return False
        return all(_same_leaf(mine, theirs) for mine, theirs in zip(self.leaves, other.leaves, strict=True))

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """A name for each tensor of a call, after the parameter that it comes in by."""
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(self.leaves), self.spec))
        names = []
        for path, leaf in paths:
            if leaf is TENSOR:
                names.append("_".join(_key_text(key) for key in path))
        return tuple(names)

    def tensors_of(self, bound: Mapping[str, Any]) -> list[Any]:
        """The tensors of one call, in the order of the graph's inputs, from its arguments by name.

        Raises:
            UnseenCall: the call has another structure than the graph was made for.
        """
        flat, spec = pytree.tree_flatten(bound)
        if spec != self.spec:
            raise UnseenCall("with other arguments, or containers of another size,")
        tensors = []
        for value, leaf in zip(flat, self.leaves, strict=True):
            if leaf is TENSOR and is_plain(value):
                tensors.append(value)
            elif leaf is TENSOR or not _answers(value, leaf):
                raise UnseenCall(f"with {_short(value)} where its graph was made for {_short(leaf)}")
        return tensors

    def reader(self, kinds: frozenset[type]) -> Callable[..., tuple[Any, ...] | None] | None:
        """A function of a call's arguments that gives its tensors where that is plain to see; None for all others.

        It is there for calls whose arguments are tensors and constants that are one object each, such as None and True; it
        knows tensors by their classes, which are `kinds`. Most calls are so, and pytree takes many times as long.
        """
        # No parameter has these names.
        namespace: dict[str, Any] = {"_kinds_of_tensors": kinds, "_type_of": type}
        conditions, tensors = [], []
        parts = pytree.tree_unflatten(list(self.leaves), self.spec)
        for name, parameter in self.signature.parameters.items():
            value = parts[name]
            if value is TENSOR:
                conditions.append(f"_type_of({name}) in _kinds_of_tensors")
                tensors.append(name)
            elif value is None or type(value) is bool:
                conditions.append(f"{name} is {value}")
            elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and not value:
                conditions.append(f"not {name}")
            else:
                return None
        taken = f"({', '.join(tensors)},)" if tensors else "()"
        return _function_of(
            self.signature, f"return {taken} if {' and '.join(conditions) or 'True'} else None", namespace
        )

    @property
    def given_none(self) -> tuple[str, ...]:
        """The parameters that a call gives None itself, where another call may give a tensor."""
        parts = pytree.tree_unflatten(list(self.leaves), self.spec)
        return tuple(name for name, value in parts.items() if value is None and name not in self.omitted)

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of a call with the given tensors (or what stands for them)."""
        remaining = iter(tensors)
        flat = [next(remaining) if leaf is TENSOR else leaf for leaf in self.leaves]
        bound = pytree.tree_unflatten(flat, self.spec)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        kinds = inspect.Parameter
        for parameter in self.signature.parameters.values():
            value = bound[parameter.name]
            if parameter.kind is kinds.VAR_POSITIONAL:
                args.extend(value)
            elif parameter.kind is kinds.VAR_KEYWORD:
                kwargs.update(value)
            elif parameter.name in self.omitted:
                # Not the same as giving the default: decorators look at what was given.
                continue
            elif parameter.kind is kinds.KEYWORD_ONLY or len(args) >= self.positional:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return tuple(args), kwargs


def skeleton_of(spec: pytree.TreeSpec) -> Any:
    """The tree with numbers for leaves: it pickles where a `TreeSpec` doesn't without a warning."""
    return pytree.tree_unflatten(list(range(spec.num_leaves)), spec)


def spec_of(skeleton: Any) -> pytree.TreeSpec:
    """The reverse of `skeleton_of`."""
    return pytree.tree_structure(skeleton)


def _restored(signature: inspect.Signature, skeleton: Any, *rest: Any) -> CallStructure:
    return CallStructure(signature, spec_of(skeleton), *rest)


def flatten_outputs(outputs: Any, tensor_like: type | tuple[type, ...]) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a module's outputs, and their tree.

    Raises:
        Unstructured: a leaf is neither a tensor (or of `tensor_like`) nor a constant.
    """
    leaves, spec = pytree.tree_flatten(outputs)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *CONSTANTS)) and not isinstance(leaf, tensor_like):
            raise Unstructured(f"it returns a {type(leaf).__name__}, whose tensors can't be named")
    return leaves, spec


def _answers(value: Any, leaf: Any) -> bool:
    """Whether a graph that was made for the constant `leaf` answers a call that has `value` there."""
    if not isinstance(value, torch.Tensor):
        return _same_leaf(value, leaf)
    # To torch.jit.trace a size is a tensor. What follows from it here holds for this number, as it does where a forward
    # itself makes a number of one: with `==` those who watch what a trace takes for granted see it.
    return type(leaf) is int and torch._C._is_tracing() and _is_number(value) and bool(value == leaf)


def _is_number(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.dim() == 0 and tensor.dtype is torch.int64


def _same_leaf(mine: Any, theirs: Any) -> bool:
    if mine is theirs:
        return True
    if mine is TENSOR or theirs is TENSOR:
        return False
    if type(mine) is not type(theirs):
        return False
    # Neither of NaN and -0.0 does `==` tell what it is.
    return repr(mine) == repr(theirs) if isinstance(mine, float | complex) else bool(mine == theirs)


def _key_text(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _short(value: Any) -> str:
    if value is TENSOR or isinstance(value, torch.Tensor):
        return "a tensor" if value is TENSOR or is_plain(value) else f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
