"""Compile a graph to a Python function."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

from torch import fx

_numbers = itertools.count()
# Keyed by the source code and the objects that it names.
_known_functions: weakref.WeakValueDictionary[Any, Callable[..., Any]] = weakref.WeakValueDictionary()


def compile_graph(graph: fx.Graph, title: str) -> Callable[..., Any]:
    """The function `f(owner, *tensors) -> list of leaves` of a graph; equal graphs share one function.

    torch.compile identifies functions by their code, so code compiled for one of several equal modules serves the
    others too. Tracebacks show the lines of the graph, under the title of the first graph.
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
    # The function keeps the objects alive, so the ids in the key stay valid.
    _known_functions[key] = function
    return function
