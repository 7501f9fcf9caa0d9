"""The contract that every pass must keep, whoever wrote it.

from pass_contract import check_pass

def test_my_pass():
    done = check_pass(MyPass(), model, (x,))
    assert [change.where for change in done.changes] == ["stem.conv"]
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimizer.model import two_batch_sizes
from optimizer.model.inputs import Call, Samples
from optimizer.model.runs import Runs
from optimizer.model.working_copy import Mode, working_copy
from optimizer.parity import check_parity
from optimizer.pipeline.transactions import CopyRuns
from passes import Precision
from passes.base import Context, ModelTree, Pass, PassResult, device_of
from passes.graph.layers import RecordedLayers
from passes.graph.recording import Recorder, Recording, call_of, recorded_runs, tensor_of
from passes.torch_private import AnyBatchNorm

Snapshot = dict[str, Any]


def captured(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    example_kwargs: dict[str, Any] | None = None,
    mode: Mode = "inference",
    keep_flags: bool = False,
) -> tuple[ModelTree, Context]:
    """Make a working copy as `optimize` gives it to passes, and the context of its passes.

    Args:
        keep_flags: keep the training flags, which `optimize` sets to eval; for use without example inputs.
    """
    clone = working_copy(model, mode)
    if mode == "inference" and not keep_flags:
        clone.root.eval()
    device = device_of(model)
    if example_inputs is None and not example_kwargs:
        return ModelTree(clone.root, clone.unregistered()), Context(mode, device)
    samples = Samples(() if example_inputs is None else example_inputs, example_kwargs)
    tree = ModelTree(clone.root, clone.unregistered())
    # Only the calls: parity checks measure the outputs of the original themselves.
    sizes = two_batch_sizes(samples, mode, None)
    calls = [samples.at(size) for size in sizes] if sizes else [samples.given]
    context = CopyRuns(clone.root, [call for call in calls if _runs(clone.root, call)]).context(mode, device)
    recorded_runs(tree, context)
    return tree, context


def conv_bn_chains(tree: ModelTree, context: Context) -> Iterator[tuple[SimpleNamespace, SimpleNamespace]]:
    """Each pair of a convolution and a BatchNorm in the first recorded run, once: their modules, and their tensors."""
    runs = recorded_runs(tree, context)
    assert runs is not None
    layers = RecordedLayers(runs.runs[0].recording.graph)
    seen = set()
    for node in runs.runs[0].recording.nodes():
        norm = layers.batch_norm_at(node)
        pair = norm and layers.pair_before(norm)
        if norm is None or pair is None or pair.layer.weight in seen:
            continue
        seen.add(pair.layer.weight)
        weight, bias, mean, var = map(tensor_of, (pair.layer.weight, pair.layer.bias, norm.mean, norm.var))
        owner = call_of(node).module
        yield (
            SimpleNamespace(module=call_of(pair.layer.node).module, weight=weight, bias=bias),
            SimpleNamespace(
                node=node, module=owner if isinstance(owner, AnyBatchNorm) else None, mean=mean, var=var, eps=norm.eps
            ),
        )


def recorded(model: nn.Module, x: torch.Tensor) -> Recording:
    """The torch calls of one run of the model, in its own mode and on its own modules."""
    recorder = Recorder(model, model.modules)
    with torch.no_grad(), recorder:
        model(x)
    return recorder.recording


def _runs(root: nn.Module, call: Call) -> bool:
    """Whether the model accepts the batch size; as in `optimize`, other batch sizes are left out."""
    state = copy.deepcopy(root)
    args, kwargs = copy.deepcopy((call.args, dict(call.kwargs)))
    try:
        with torch.no_grad(), torch.random.fork_rng():
            state(*args, **kwargs)
    except RuntimeError:
        return False
    return True


def check_pass(
    item: Pass,
    model: nn.Module,
    example_inputs: Any = None,
    *,
    example_kwargs: dict[str, Any] | None = None,
    mode: Mode = "inference",
    atol: float | None = None,
) -> PassResult:
    """Run the pass on the model, check that it keeps the contract, and return its result.

    - The caller's module doesn't change.
    - The result computes the same, and so does a copy of it.
    - A second run finds nothing more to do. A run without changes leaves everything identical.
    - A rollback restores everything, to the identity of each tensor. A run after it does the same as the first one.
    - The texts of changes, skips and remarks are clauses.
    - The options can be given as text.

    Args:
        example_inputs, example_kwargs: as for `optimize`; without them, parity isn't checked.
        atol: a bound for the difference, instead of the noise of the model.

    Raises:
        AssertionError: names the part of the contract that isn't kept.
    """
    before_model = tree_of(model)
    tree, context = captured(model, example_inputs, example_kwargs=example_kwargs, mode=mode)
    item.check(context)
    before = tree_of(tree.root)

    result = item.run(tree, context)
    changes, skips = _texts(result.changes, "what"), _texts(result.skips, "reason")
    _check_sentences(result)
    if not result.changes:
        check_same(before, tree_of(tree.root), f"{item.name} changed nothing and still left a difference")
    after = tree_of(tree.root)
    if example_inputs is not None or example_kwargs:
        _check_parity(item, model, tree.root, example_inputs, example_kwargs, atol, mode, result.precision)
        _check_copy(item, tree.root, context)
    check_same(before_model, tree_of(model), f"{item.name} changed the caller's module")

    again = item.run(tree, context)
    assert not again.changes, f"a second {item.name} still changes {again.changes[0].where}: {again.changes[0].what}"
    check_same(after, tree_of(tree.root), f"a second {item.name} changed nothing and still left a difference")
    again.rewriter.roll_back()
    check_same(after, tree_of(tree.root), f"rolling back a second {item.name} left a difference")

    result.rewriter.roll_back()
    check_same(before, tree_of(tree.root), f"rolling back {item.name} left a difference")
    result.rewriter.roll_back()
    check_same(before, tree_of(tree.root), f"rolling back {item.name} twice left a difference")
    once_more = item.run(tree, context)
    assert _texts(once_more.changes, "what") == changes, f"{item.name} does something else after a rollback"
    assert _texts(once_more.skips, "reason") == skips, f"{item.name} skips something else after a rollback"
    check_same(before_model, tree_of(model), f"{item.name} changed the caller's module")
    _check_options(item)
    return result


def tree_of(root: nn.Module) -> Snapshot:
    """Everything in a module tree: modules by identity and class, tensors by identity and value, attributes, hooks."""
    found: Snapshot = {}
    for path, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        found[path] = id(module), type(module)
        for name, value in module.__dict__.items():
            found[f"{path}|{name}"] = _plain(value)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            found[f"{path}|{name}|values"] = None if tensor is None else _bits(tensor)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, id(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [id(item) for item in value]
    return value if isinstance(value, bool | int | float | str | type(None)) else id(value)


def _bits(tensor: torch.Tensor) -> Any:
    if tensor.is_meta or isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return None
    return tensor.requires_grad, tensor.dtype, tensor.stride(), tensor.detach().flatten().tolist()


def check_same(before: Snapshot, after: Snapshot, message: str) -> None:
    for place in sorted(before.keys() | after.keys()):
        # Compare texts, because NaN is unequal to itself.
        mine, theirs = repr(before.get(place, "nothing")), repr(after.get(place, "nothing"))
        assert mine == theirs, f"{message}: {place}: {mine[:200]} became {theirs[:200]}"


def _texts(records: Any, name: str) -> list[tuple[str, str]]:
    return [(record.where, getattr(record, name)) for record in records]


def _check_parity(
    item: Pass,
    model: nn.Module,
    candidate: Callable[..., Any],
    inputs: Any,
    kwargs: Any,
    atol: float | None,
    mode: Mode,
    precision: Precision | None,
) -> None:
    # A result for training must be right in eval, too.
    for one in dict.fromkeys(("inference", mode)):
        report = check_parity(
            model,
            candidate,
            () if inputs is None else inputs,
            example_kwargs=kwargs,
            batch_sizes=(1, 2, 5) if one == "inference" else (2, 5),
            draws=1,
            atol=atol,
            mode=one,
            precision=precision,
        )
        assert report.ok, f"{item.name} computes something else: {report.reason}"


def _check_copy(item: Pass, root: nn.Module, context: Context) -> None:
    args, kwargs = context.example_calls[0]
    outputs = []
    for module in (root, copy.deepcopy(root)):
        torch.manual_seed(0)
        with torch.no_grad(), Runs(module, in_eval=False).fresh() as fresh:
            outputs.append(pytree.tree_leaves(fresh(*copy.deepcopy(args), **copy.deepcopy(kwargs))))
    for mine, theirs in zip(*outputs, strict=True):
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine.nan_to_num(), theirs.nan_to_num()), f"a copy of what {item.name} made differs"


def sentences_of(result: PassResult) -> Iterator[tuple[str, str]]:
    """The pair (where, text) of every change and skip."""
    yield from _texts(result.changes, "what")
    yield from _texts(result.skips, "reason")


def _check_sentences(result: PassResult) -> None:
    for where, text in (*sentences_of(result), *_texts(result.remarks, "text")):
        assert text == text.strip(), f"{where}: {text!r} has blanks around it"
        assert len(text.split()) >= 3, f"{where}: {text!r} says too little"
        assert not text.endswith("."), f"{where}: {text!r} is a clause, without its full stop"
        assert "\n" not in text, f"{where}: {text!r} has more lines than one"
        assert not re.search(r"Traceback|0x[0-9a-f]{6}|<[a-z_.]+ object", text), f"{where}: {text!r} is no sentence"


def _check_options(item: Pass) -> None:
    text = {name.replace("_", "-"): str(value) for name, value in item.options.items()}
    assert type(item).from_options(text) == item, f"{item.name}: its options don't come back from text"


def changes(done: PassResult) -> list[tuple[str, str]]:
    return _texts(done.changes, "what")


def skips(done: PassResult) -> list[tuple[str, str]]:
    return _texts(done.skips, "reason")
