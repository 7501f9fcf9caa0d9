"""The Python function of a graph."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

from torch import fx

_numbers = itertools.count()
# By their source and what it names.
_known_functions: weakref.WeakValueDictionary[Any, Callable[..., Any]] = weakref.WeakValueDictionary()


def compile_graph(graph: fx.Graph, title: str) -> Callable[..., Any]:
    """The Python function `f(owner, *tensors) -> list of leaves` of a graph, which is one for all equal graphs.

    What is compiled for one of many equal modules is then right for the others too: torch.compile tells functions apart by
    their code. Tracebacks show the lines of the graph, under the title of the first that it was made for.
    """
    code = graph.python_code("self")
    key = code.src, tuple((name, id(value)) for name, value in code.globals.items())
    known = _known_functions.get(key)
    if known is not None:
        return known
    name = f"<graph of {title} {next(_numbers)}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    namespace = dict(code.globals)
    exec(compile(code.src, name, "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    weakref.finalize(function, linecache.cache.pop, name, None)
    # The function holds its names, so that what the key tells by identity lives as long.
    _known_functions[key] = function
    return function
