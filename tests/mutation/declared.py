"""The guards that no test can miss, each with the reason: `<file>: <function>: <sentence or code>`, as `Guard.name`."""

_OTHER_TARGETS = (
    "what other nodes than calls of functions aim at is a text, which is none of the functions asked for next"
)
_A_MODULE_IS_CALLED = "a node that calls a module has one: this tells the type checker so"
_BY_ATTRIBUTE = "it writes by set_attribute and set_tensor alone, which drop it as well"
_ONE_ARGUMENT = (
    "a Flatten or Dropout that is called with more raises, in the original and in the result, where it stays"
)

DECLARED: dict[str, str] = {
    "passes/folding.py: _why_not_called_elsewhere: around is None": (
        "without runs neither count is known, and in runs that don't agree on the module around, none on what it calls"
    ),
    "passes/graph/rewriter.py: set_forward: _writes": _BY_ATTRIBUTE,
    "passes/graph/rewriter.py: keep_contiguous: _writes": _BY_ATTRIBUTE,
    "passes/graph/rewriter.py: enter_channels_last: _writes": _BY_ATTRIBUTE,
    "passes/graph/rewriter.py: draw_in_order: _writes": _BY_ATTRIBUTE,
    "passes/graph/rewriter.py: pad_layer: _writes": _BY_ATTRIBUTE,
    "passes/graph/rewriter.py: share_input: _writes": _BY_ATTRIBUTE,
    "passes/program/tensors.py: value: name in owner._parameters and name not in owner.__dict__": (
        "the look by getattr, which it spares, finds the same None"
    ),
    "passes/graph/match.py: convolution_at: if node.op != 'call_function': return None": _OTHER_TARGETS,
    "passes/graph/match.py: batch_norm_at: node.op != 'call_function'": _OTHER_TARGETS,
    "passes/graph/match.py: _convolution_module: module is None": _A_MODULE_IS_CALLED,
    "passes/graph/match.py: _batch_norm_module: module is None": _A_MODULE_IS_CALLED,
    "passes/graph/match.py: _module_move: if module is None: return None": _A_MODULE_IS_CALLED,
    "passes/graph/match.py: _move_at: len(node.args) == 1": _ONE_ARGUMENT,
    "passes/graph/match.py: _move_at: not node.kwargs": _ONE_ARGUMENT,
    "passes/graph/match.py: channel_scale_at: operation is None (1)": (
        "it is asked again at the end: here it spares a look at the arguments of all other nodes"
    ),
    "passes/graph/match.py: channels_between: if not 0 <= dim < rank: return None": (
        "torch takes no convolution, linear layer or BatchNorm on fewer dims, and the rank is that of a recorded run"
    ),
    "passes/graph/match.py: uses_values: user.args[0] is user.args[1]": (
        "where both arguments are the value, the first one is, which is asked before"
    ),
}
