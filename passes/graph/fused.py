"""A group of pointwise operations that runs as one kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn

from passes.compiling.compiler import import_inductor
from passes.graph.forward import compile_graph, graph_of, nodes_of
from passes.graph.pointwise import PointwiseGroup, function_of, name_of_pointwise
from passes.graph.program import Program

Backend = Literal["torchscript", "inductor"]
# Of fewer elements, on a CPU, it takes longer to find the kernel than to run its operations one by one.
_FEWEST_ELEMENTS = 1 << 15


class FusedUnit:
    """A function of tensors, run as one kernel; operation by operation where something looks at the operations.

    That is where the call is traced, exported or compiled with what is around it, where torch's function or dispatch modes
    watch, and for tensors that are none of the plain ones.

    Args:
        graph: of the function: its inputs are tensors, its output one.
        name: what it holds.
        backend: what makes the kernel.
    """

    def __init__(self, graph: fx.Graph, name: str, backend: Backend) -> None:
        self.graph = graph
        self.name = name
        self.backend = backend
        # Answers in its place while its kernel is tried.
        self.trial: Callable[[FusedUnit, Sequence[torch.Tensor]], torch.Tensor] | None = None
        self._plain: Callable[..., Any] = compile_graph(graph, name)
        self._fused: Callable[..., Any] | None = None

    @classmethod
    def of(cls, program: Program, group: PointwiseGroup, backend: Backend) -> FusedUnit:
        """That of a group in a graph."""
        graph = fx.Graph()
        twins = {source: graph.placeholder(f"source_{number}") for number, source in enumerate(group.inputs)}
        for node in group.nodes:
            module = program.module_of(node)
            if module is None:
                twins[node] = graph.node_copy(node, twins.__getitem__)
                continue
            found = function_of(module)
            assert found is not None
            function, options = found
            twins[node] = graph.call_function(function, (twins[node.all_input_nodes[0]],), options)
        graph.output(twins[group.nodes[-1]])
        return cls(graph, name_of(program, group), backend)

    @property
    def operations(self) -> int:
        """How many operations it holds."""
        return sum(node.op in ("call_function", "call_method") for node in self.graph.nodes)

    def __call__(self, *sources: torch.Tensor) -> torch.Tensor:
        if _is_watched():
            return self.plain(*sources)
        if self.trial is not None:
            return self.trial(self, sources)
        if not _is_large(sources) or not self.can_run_kernel(sources):
            return self.plain(*sources)
        return self.by_kernel(sources)

    def plain(self, *sources: torch.Tensor) -> torch.Tensor:
        """The value, operation by operation."""
        value: torch.Tensor = self._plain(None, *sources)
        return value

    def by_kernel(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The value, by the kernel."""
        if self._fused is None:
            self._fused = _KERNELS[self.backend](self)
        value: torch.Tensor = self._fused(*sources)
        return value

    def can_run_kernel(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether a kernel computes what the operations do on these, which nobody watches."""
        if self.backend == "torchscript" and torch._C._is_any_autocast_enabled():
            return False
        if torch.autograd.forward_ad._current_level >= 0:
            # No kernel has a derivative in the forward direction.
            return False
        return all(map(_is_plain, sources))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unit_of, (nodes_of(self.graph), self.name, self.backend)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedUnit:
        # It holds no tensor and never changes.
        return self


def _is_watched() -> bool:
    """Whether something looks at the operations."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
    )


def _is_large(sources: Sequence[torch.Tensor]) -> bool:
    """Whether a kernel is faster than the operations; false where not all are tensors, as where a graph is traced."""
    is_large = False
    for source in sources:
        if type(source) is not torch.Tensor and type(source) is not nn.Parameter:
            return False
        is_large = is_large or source.is_cuda or source.numel() >= _FEWEST_ELEMENTS
    return is_large


def _is_plain(source: torch.Tensor) -> bool:
    """Whether the tensor has its numbers in memory."""
    return (
        type(source) in (torch.Tensor, nn.Parameter)
        and source.layout is torch.strided
        and not source.is_meta
        # Their memory holds other numbers than they have.
        and not source.is_neg()
        and not source.is_conj()
        and not torch._C._functorch.is_functorch_wrapped_tensor(source)
    )


def run_fused(unit: FusedUnit, *sources: torch.Tensor) -> torch.Tensor:
    """What stands in a graph in the place of the group."""
    return unit(*sources)


def name_of(program: Program, group: PointwiseGroup) -> str:
    """The names of the group's operations, in their order."""
    names = []
    for node in group.nodes:
        module = program.module_of(node)
        names.append(name_of_pointwise(node) if module is None else type(module).__name__.lower())
    return "_".join(names)


def torchscript_fuses(device: torch.device) -> bool:
    """Whether this build of torch has a fuser of TorchScript for the device."""
    if device.type == "cuda":
        return bool(torch._C._jit_texpr_fuser_enabled() and torch._C._jit_can_fuse_on_gpu())
    return device.type == "cpu" and bool(torch._C._llvm_enabled() and torch._C._jit_can_fuse_on_cpu())


def _by_inductor(unit: FusedUnit) -> Callable[..., Any]:
    import_inductor()
    # Equal units have one function, and so one code; of all sizes, as each element is computed by itself.
    compiled = torch.compile(unit._plain, dynamic=True, fullgraph=True, backend="inductor")
    return lambda *sources: compiled(None, *sources)


def _by_torchscript(unit: FusedUnit) -> Callable[..., Any]:
    with warnings.catch_warnings():
        # TorchScript is deprecated, and asked for; what it says of annotations is about a class of torch's own.
        warnings.simplefilter("ignore")
        scripted: Callable[..., Any] = torch.jit.script(fx.GraphModule(nn.Module(), unit.graph))
    return scripted


_KERNELS: dict[Backend, Callable[[FusedUnit], Callable[..., Any]]] = {
    "inductor": _by_inductor,
    "torchscript": _by_torchscript,
}


def _unit_of(nodes: Any, name: str, backend: Backend) -> FusedUnit:
    return FusedUnit(graph_of(nodes), name, backend)
