"""Every private name of torch that the exporters use, each with the reason and the versions it was seen in.

Inductor's names are imported when they are used: importing inductor takes a second, and only `aoti` needs it. If a name
is missing, the ImportError or AttributeError names it, except where a function says what happens instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._C import _is_tracing  # Whether torch.jit.trace is running. Seen in 2.13.
from torch._ops import OpOverload as _OpOverload  # The class of the operators in a capture. Seen in 2.11 and 2.13.

is_tracing = _is_tracing
OpOverload = _OpOverload


def at_least(lowest: int) -> Any:
    """The range of a size that has no upper bound, for `ExportedProgram.range_constraints`. Seen in 2.13."""
    # They import sympy, which files that are only loaded don't need.
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    return ValueRanges(lowest, int_oo)


def lstm_in_one_piece() -> AbstractContextManager[None]:
    """Let torch.export infer the shapes of an LSTM without unrolling it, which specializes the number of steps.

    The graph holds the layer as one operation either way. torch unrolls layers that oneDNN doesn't compute, and it
    turns oneDNN off during a capture. Seen in 2.13. Without the name, layers are unrolled.
    """

    def with_onednn(select: Callable[..., Any]) -> Callable[..., Any]:
        def selected(*args: Any) -> Any:
            with torch.backends.mkldnn.flags(enabled=True):
                return select(*args)

        return selected

    return _replaced(torch._decomp.decompositions, "select_one_layer_lstm_function", with_onednn)


def without_onnx_log() -> AbstractContextManager[None]:
    """Keep the old ONNX exporter from printing the graph on which it fails.

    It prints regardless of `verbose`: it tests the function that reports whether logging is on, but never calls it. The
    text goes to the process's stdout and bypasses sys.stdout. Seen in 2.13. Without the name, it prints.
    """
    return _replaced(torch._C, "_jit_onnx_log", lambda log: lambda *_: None)


_onnx_registries: dict[Any, Any] = {}


def with_kept_onnx_registry() -> AbstractContextManager[None]:
    """Let `torch.onnx.export` read its table of translations once per process, instead of once per export.

    It parses the source of 500 functions: 1.3 s, more than half of the export of a small model. An export changes its
    own copy, in which it lists the translations it was given. Seen in 2.11 and 2.13. Without the names, it reads anew.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:
        return nullcontext()

    def kept(read: Callable[..., Any]) -> Any:
        def registry(**options: Any) -> Any:
            key = tuple(options.items())
            if key not in _onnx_registries:
                _onnx_registries[key] = read(**options)
            own = copy(_onnx_registries[key])
            own.functions = {target: list(found) for target, found in own.functions.items()}
            return own

        return staticmethod(registry)

    return _replaced(ONNXRegistry, "from_torchlib", kept)


def graphs_of(module: torch.jit.ScriptModule) -> Iterator[Any]:
    """The graph of each method of a TorchScript module and of its children. Seen in 2.11 and 2.13."""
    for part in module.modules():
        methods: Any = part._c
        yield from (methods._get_method(name).graph for name in methods._method_names())


def _replaced(owner: Any, name: str, replacement: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """In the block, put `replacement(own)` in the place of the owner's attribute; do nothing if there is none."""
    own = getattr(owner, name, None)
    return nullcontext() if own is None else patch.object(owner, name, replacement(own))


def inductor_cache(folder: Path) -> AbstractContextManager[Any]:
    """Let inductor compile with an empty cache in this folder. Seen in 2.13."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache(dir=str(folder))


def without_line_info() -> AbstractContextManager[Any]:
    """Let Triton compile kernels without the paths and lines of their sources, which are paths of this machine.

    Triton reads the variable at each compilation. Seen in Triton 3.6.
    """
    return patch.dict(os.environ, {"TRITON_DISABLE_LINE_INFO": "1"})


def aot_compile(module: torch.fx.GraphModule, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Sequence[Any]:
    """Compile a captured program by AOTInductor, and return the written files and kernels' metadata. Seen in 2.13.

    `aoti_compile_and_package` would put all files into the package, the sources too. Options that this torch lacks are
    left out: 2.11 and 2.12 have neither `aot_inductor.enable_line_tables` nor `cpp.march`.
    """
    import torch._inductor.config

    here = torch._inductor.config.get_config_copy()
    known = {name: value for name, value in options.items() if name in here}
    written: Any = torch._inductor.aot_compile(module, args, kwargs, options=known)
    return written


def gemm_templates_share_their_work() -> bool:
    """Whether inductor's matrix products for the CPU are right with any number of threads.

    In 2.11, each thread computes its own part, and if fewer threads run than the file was compiled for, as OpenMP may
    decide, parts are missing. In 2.13, the threads that run share all parts.
    """
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def package_writer() -> Callable[..., Any]:
    """`package_pt2`, which writes the files of AOTInductor into one package. Seen in 2.13."""
    from torch.export.pt2_archive._package import package_pt2

    return package_pt2


def package_loader() -> Any:
    """The class that reads and runs packages of AOTInductor.

    It also reads the metadata alone, before any code of the package is loaded. Seen in 2.13.
    """
    return torch._C._aoti.AOTIModelPackageLoader


def vector_flags() -> str:
    """The compiler's options for the vector instructions that inductor chooses on this processor. Seen in 2.13."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return pick_vec_isa().build_arch_flags()


def compute_capability() -> Any:
    """The compute capability of the GPU, in the form that inductor writes it into a package. Seen in 2.13."""
    from torch._dynamo.device_interface import get_interface_for_device

    return get_interface_for_device("cuda").get_compute_capability()
