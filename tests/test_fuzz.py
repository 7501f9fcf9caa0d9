"""Run random modules through `optimize`: for any module, the result computes the same as the original.

`make test-all` runs 20 of them, the same each time. `make fuzz N=20000` runs any number, different each time; the seed
that it prints repeats them. A failure prints the shrunk description of the module, as an expression that `check` takes.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pass_contract import check_same, tree_of
from random_modules import (
    DESCRIPTIONS,
    EXACT,
    BuiltPair,
    Conv,
    Description,
    Norm,
    Pair,
    build,
    inputs_of,
)
from random_steps import OPERATIONS, STEPS, RandomStep, Step, rows_of
from tiny_models import enliven
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from training_models import peak_of

from optimize_export.errors import LoadError, OptimizeFailed
from optimizer import check_parity, optimize, report_of
from optimizer.model.runs import Runs
from optimizer.report import PassRecord
from passes import InsertCheckpoints, insert_checkpoints
from passes.checkpointing import ambient
from passes.checkpointing.profile import loss_of
from passes.errors import RequirementNotMet
from passes.fold_conv_bn import FoldedWeight
from passes.registry import pass_named

# The examples are split into shares, one per test, so that they run in parallel and each stays within its time limit.
SHARE = 20
# Shares in training are smaller, because each example is captured and compared in both modes.
TRAINED_SHARE = 8
PLANNED_SHARE = 4
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "20"))
# Shares of different runs have different seeds.
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0")) * 1_000_000
BATCH_SIZES = (1, 2, 5)
HALF = ("float16", "bfloat16")
PRESET = ("fold-conv-bias", "fold-conv-bn", "channels-last")
OTHERS = ("simplify", "pad-channels:force=true", "merge-linears:force=true")
PASSES = (*PRESET, *OTHERS)
# Only one example in four has the others too: most times, the passes of the preset follow each other.
PLANS = (
    st.sampled_from([PRESET, PRESET, PRESET, PASSES])
    .flatmap(st.permutations)
    .flatmap(lambda order: st.sampled_from([order, order, order[:4], order[:2], order[:1]]))
    .map(tuple)
)
BUDGETS = st.sampled_from(["min", 0.5, 0.6, 0.7, 0.8, 0.9])
# Whether there are example inputs.
WITH_EXAMPLES = st.sampled_from([True, True, False])
# Whether the result is optimized once more.
AGAIN = st.sampled_from([False, False, True])


def examples(number: int, first_seed: int) -> Any:
    """Decorate a property so that the same seed gives the same examples."""

    def decorate(test: Any) -> Any:
        chosen = settings(
            max_examples=number,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        return seed(first_seed)(chosen(test))

    return decorate


@pytest.mark.slow
@pytest.mark.parametrize("share", range(-(-EXAMPLES // SHARE)))
def test_a_random_module_computes_the_same(share: int) -> None:
    @examples(min(SHARE, EXAMPLES - share * SHARE), FIRST_SEED + share)
    @given(DESCRIPTIONS, PLANS, WITH_EXAMPLES, AGAIN)
    def computes_the_same(description: Description, plan: tuple[str, ...], with_examples: bool, again: bool) -> None:
        check(description, plan, with_examples, again)

    computes_the_same()


@pytest.mark.slow
@pytest.mark.parametrize("share", range(-(-EXAMPLES // 120)))
def test_a_random_module_trains_the_same(share: int) -> None:
    @examples(TRAINED_SHARE, FIRST_SEED + share)
    @given(DESCRIPTIONS, st.lists(st.integers(0, 40), max_size=2))
    def trains_the_same(description: Description, in_eval: list[int]) -> None:
        check_training(description, in_eval)

    trains_the_same()


@pytest.mark.slow
@pytest.mark.parametrize("share", range(-(-EXAMPLES // 150)))
def test_a_random_step_is_the_same_to_the_bit_in_less_memory(share: int) -> None:
    @examples(PLANNED_SHARE, FIRST_SEED + share)
    @given(STEPS, BUDGETS, st.sampled_from(["optimal", "optimal", "uniform"]), st.booleans())
    def is_the_same(step: Step, budget: float | str, strategy: Any, selective: bool) -> None:
        check_plan(step, budget, strategy, selective)

    is_the_same()


@pytest.mark.slow
def test_a_step_that_isnt_the_same_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property fails if random states aren't restored, and if the budget is exceeded."""
    step = Step((("linear", 0, 0), ("dropout", 0, 0), ("tanh", 0, 0)) * 2)
    with monkeypatch.context() as patch:
        patch.setattr(ambient, "_set_random_states", lambda states: None)
        with pytest.raises(OptimizeFailed, match="insert-checkpoints was rolled back: gradient of"):
            check_plan(step, "min")
    with monkeypatch.context() as patch:
        right = insert_checkpoints.bytes_of
        patch.setattr(insert_checkpoints, "bytes_of", lambda *args: int(1.2 * right(*args)))
        with pytest.raises(AssertionError, match=r"bytes of \d+, for a budget of"):
            check_plan(step, 0.6)


@pytest.mark.slow
def test_every_operation_of_a_random_step_is_planned() -> None:
    """Four operations at a time, alternating with recomputed ones."""
    names = sorted(OPERATIONS)
    for some in (names[first : first + 4] for first in range(0, len(names), 4)):
        check_plan(Step(tuple(each for name in some for each in (("tanh", 0, 0), (name, 0, 1)))), "min")


@pytest.mark.slow
def test_a_gradient_that_is_left_of_a_sum_is_no_gradient() -> None:
    """For a float64 model, no more exact run shows how large rounding errors may be."""
    check_training(Description(blocks=(Pair(), Pair(Conv(dilation=2))), dims=3, dtype="float64"), [])


@pytest.mark.slow
def test_what_rounding_does_in_float64_is_measured_at_every_batch_size() -> None:
    """A feature may happen to vary less over seven rows than over six; its BatchNorm then amplifies rounding more."""
    few = Pair(Conv(kernel=1, bias=False), Norm(running=False), act="relu")
    check_training(Description(blocks=(few,), dims=3, head="linear on 2-D", dtype="float64", seed=6), [])


def spoil_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FoldedWeight.__call__
    monkeypatch.setattr(FoldedWeight, "__call__", lambda self, *tensors: right(self, *tensors) * 1.001)


@pytest.mark.slow
def test_a_fold_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property fails, because the wrong fold is rolled back."""
    spoil_folds(monkeypatch)
    plain = Description(blocks=(Pair(),))
    with pytest.raises(AssertionError, match="rolled back"):
        check(plain, ("fold-conv-bn",), True)


def check(description: Description, plan: tuple[str, ...], with_examples: bool, again: bool = False) -> None:
    """Optimize the described model with the passes, with or without example inputs, and check every promise.

    Args:
        again: optimize the result too, and check that this completes the folds.
    """
    # The modules of all examples share a few forwards, so torch.compile must forget what it has seen of earlier ones.
    torch.compiler.reset()
    # In channels_last, torch's kernel for batch statistics is less exact: its right results may be refused in float32.
    of_the_batch = any(pair.norm.training or not pair.norm.running for pair in description.pairs())
    if of_the_batch and description.dtype == "float32" and "channels-last" in plan:
        description = dataclasses.replace(description, dtype="float64")
    built = build(description)
    model, inputs = built.model, inputs_of(description)
    rows = inputs(description.batch or 2, torch.Generator().manual_seed(1))
    example_inputs = rows if description.batch else inputs
    example_kwargs = None
    if description.scaled:
        # If `example_inputs` were a function, the scale couldn't be resized to other batch sizes.
        example_inputs, example_kwargs = rows, {"scale": torch.linspace(0.5, 1.5, len(rows[0])).to(rows[0].dtype)}

    def optimized(module: nn.Module, passes: tuple[str, ...]) -> nn.Module:
        if not with_examples:
            return optimize(module, [name for name in passes if not pass_named(name.partition(":")[0]).needs_run])
        return optimize(module, passes, example_inputs=example_inputs, example_kwargs=example_kwargs)

    before = tree_of(model)
    try:
        fast = optimized(model, plan)
    except LoadError:
        # This is right only if the model itself raises on its example inputs.
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            model.eval()(*rows, **(example_kwargs or {}))
        return
    check_same(before, tree_of(model), "the caller's module was changed")
    if with_examples:
        # In a low-precision dtype, a fold may lose more than rounding allows. Other random inputs may take a branch
        # that the example inputs don't take.
        may_be_left = description.dtype not in EXACT or description.may_be_unseen
        whole = [pair for pair in built.pairs if pair.is_plain and not is_outside_of_graphs(pair, fast, description)]
        check_folded(whole, plan, fast, may_be_left=may_be_left)

    def compared(result: nn.Module) -> None:
        check_answers(
            model,
            result,
            example_inputs,
            example_kwargs,
            may_be_vacuous=description.dtype not in EXACT,
        )

    compared(fast)
    if again:
        twice = optimized(fast, PASSES if set(plan) & set(OTHERS) else PRESET)
        compared(twice)
        if with_examples and description.dtype in EXACT and not description.may_be_unseen:
            check_folded_by_now(whole, fast, twice)
    check_same(before, tree_of(model), "the caller's module was changed")
    if not bears(build(description).model, rows, example_kwargs or {}):
        # The model can't run at this batch size; it was optimized for others.
        return
    if not answers_alike(fast, copy.deepcopy(fast), rows, example_kwargs or {}):
        # The copy's tensors may be aligned differently, which can change the order of sums; it must still be right.
        compared(copy.deepcopy(fast))
    check_same(before, tree_of(model), "the caller's module was changed")


def bears(model: nn.Module, rows: tuple[Tensor, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the model can run: a BatchNorm in training raises on a single row."""
    try:
        model(*rows, **kwargs)
    except ValueError:
        return False
    return True


# Relative differences below this need no other judge: a few roundings.
NEAR = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def are_near(wanted: Any, got: Any) -> bool:
    """Whether two outputs differ by a few roundings at most; memory alignment may change the order of a sum."""
    mine, theirs = tree_leaves(wanted), tree_leaves(got)
    return len(mine) == len(theirs) and all(is_near(*pair) for pair in zip(mine, theirs, strict=True))


def is_near(wanted: Any, got: Any) -> bool:
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        return bool(wanted == got)
    if wanted.shape != got.shape or wanted.dtype != got.dtype or not wanted.numel():
        return wanted.shape == got.shape and wanted.dtype == got.dtype
    wide = wanted.double()
    difference = (wide - got.double()).abs().max().item()
    return difference <= NEAR.get(wanted.dtype, 0.0) * wide.abs().max().item()


def answers_alike(fast: nn.Module, twin: nn.Module, rows: tuple[Tensor, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result and its copy return the same, at the first call of both."""
    answers: list[Any] = []
    for module in (fast, twin):
        with torch.no_grad():
            answers.append(module(*(row.clone() for row in rows), **kwargs))
    return are_near(*answers)


def is_outside_of_graphs(pair: BuiltPair, fast: nn.Module, description: Description) -> bool:
    """Whether the report says of a layer of the pair that it isn't captured, as in a loop in which a graph breaks.

    There a layer of a class of its own has a graph for itself, and one of torch.nn has none.
    """
    skips = [skip for record in report_of(fast).passes for skip in record.skips if "outside of the graphs" in skip.text]
    assert description.breaks_graphs or not skips, skips
    return any(f"{layer}.".startswith(f"{skip.where}.") for skip in skips for layer in (pair.conv, pair.norm))


def check_folded(pairs: Sequence[BuiltPair], plan: tuple[str, ...], fast: nn.Module, *, may_be_left: bool) -> None:
    """Check that no pass failed, and that each changed the plain pairs as it must."""
    records = {record.name: record for record in report_of(fast).passes}
    failed = [record for record in records.values() if record.status == "failed"]
    assert not failed, f"{failed[0].name} failed: {failed[0].reason}"
    rolled_back = [record for record in records.values() if record.status == "rolled-back"]
    if rolled_back:
        if not may_be_left:
            raise AssertionError(f"{rolled_back[0].name} was rolled back: {rolled_back[0].reason}")
        return
    skips = [skip for record in records.values() for skip in record.skips]
    left = {skip.where for skip in skips if may_be_left or "before pad-channels" in skip.text}
    if "fold-conv-bn" in plan:
        missing = {pair.norm for pair in pairs} - changed_by(records["fold-conv-bn"]) - left
        assert not missing, f"not folded: {missing}, {records['fold-conv-bn'].skips}"
    if "fold-conv-bias" in plan and "fold-conv-bn" not in plan[: plan.index("fold-conv-bias")]:
        wanted = {pair.conv for pair in pairs if pair.has_bias and pair.norm not in left}
        missing = wanted - changed_by(records["fold-conv-bias"]) - left
        assert not missing, f"biases not folded: {missing}, {records['fold-conv-bias'].skips}"


def check_folded_by_now(pairs: Sequence[BuiltPair], *results: nn.Module) -> None:
    """Check that each pair was folded in one of the results."""
    records = [record for result in results for record in report_of(result).passes if record.name == "fold-conv-bn"]
    missing = {pair.norm for pair in pairs}.difference(*map(changed_by, records))
    assert not missing, f"not folded, in {len(records)} runs: {missing}"


def changed_by(record: PassRecord) -> set[str]:
    """The paths of the modules that the pass changed, without the name of an operation that may follow a path."""
    return {change.where.partition(" ")[0] for change in record.changes}


# torch's errors for models that can't be trained, such as a BatchNorm that a loop over the batch calls with one row.
UNTRAINABLE = ("modified by an inplace operation", "Expected more than 1 value per channel when training")


def check_answers(
    model: nn.Module,
    fast: nn.Module,
    example_inputs: Any,
    kwargs: dict[str, Any] | None,
    *,
    may_be_vacuous: bool,
) -> None:
    """Compare the answers at several batch sizes."""
    report = check_parity(model, fast, example_inputs, example_kwargs=kwargs, batch_sizes=BATCH_SIZES, draws=1)
    if report.verdict == "vacuous" and not may_be_vacuous:
        # Some models return only zeros.
        rows = example_inputs if isinstance(example_inputs, tuple) else example_inputs(2, torch.Generator())
        answers = []
        for module in (model, fast):
            with torch.no_grad(), Runs(module, in_eval=True).fresh() as fresh:
                answers.append(fresh(*copy.deepcopy(rows), **(kwargs or {})))
        assert are_near(*answers)
        return
    assert report.verdict != "failed", report.reason


def train_once(model: nn.Module, rows: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    leaves = tree_leaves(model(*rows, **(kwargs or {})))
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def check_training(description: Description, in_eval: list[int]) -> None:
    """Fold the biases of the described model in training, with some modules in eval mode, and check every promise."""
    model, inputs = build(description).model.train(), inputs_of(description)
    modules = list(model.modules())
    for number in in_eval:
        modules[number % len(modules)].eval()
    before = tree_of(model)
    # Over two rows a BatchNorm returns plus and minus one, and its gradients are mostly rounding errors.
    rows = inputs(6, torch.Generator().manual_seed(1))
    kwargs = {"scale": torch.linspace(0.5, 1.5, len(rows[0])).to(rows[0].dtype)} if description.scaled else None
    try:
        fast = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=rows, example_kwargs=kwargs)
    except LoadError as error:
        if any(reason in str(error) for reason in UNTRAINABLE):
            # Some models can't be trained, and raise an error that says why.
            with pytest.raises((RuntimeError, ValueError), match="|".join(UNTRAINABLE)):
                train_once(copy.deepcopy(model), rows, kwargs)
            return
        raise
    check_same(before, tree_of(model), "the caller's module was changed")
    (record,) = report_of(fast).passes
    # In a low-precision dtype, a fold may lose more than rounding allows; other inputs may take another branch.
    may_be_left = description.dtype in HALF or description.may_be_unseen
    allowed = ("applied", "unchanged", *(["rolled-back"] if may_be_left else []))
    assert record.status in allowed, record.reason
    assert list(fast.state_dict()) == list(model.state_dict())
    if record.status != "applied" or description.dtype in HALF:
        return

    def compared(original: nn.Module, result: nn.Module, mode: Any) -> None:
        report = check_parity(original, result, rows, example_kwargs=kwargs, mode=mode, batch_sizes=(6, 9), draws=1)
        assert report.verdict != "failed", f"{mode}: {report.reason}"

    twin = build(description).model
    twin.load_state_dict(fast.state_dict())
    compared(twin, fast, "inference")
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.1)
    compared(model, fast, "training")
    fast.load_state_dict(twin.state_dict())
    compared(twin, fast, "inference")
    deployed = optimize(fast.eval(), ["fold-conv-bn"], example_inputs=rows, example_kwargs=kwargs)
    compared(twin, deployed, "inference")


def check_plan(step: Step, budget: float | str, strategy: Any = "optimal", selective: bool = True) -> None:
    """Plan the described step, and check that it keeps to its budget and is bit-identical."""
    model, rows = enliven(RandomStep(step)).train(), rows_of(step)

    def optimized(budget: float | str) -> nn.Module:
        item = InsertCheckpoints(budget, strategy, selective)
        return optimize(model, [item], mode="training", example_inputs=(rows,))

    before = tree_of(model)
    try:
        result = optimized(budget)
    except RequirementNotMet as error:
        if "none of its outputs needs a gradient" in str(error):
            return
        # The lowest budget that the error names must be possible.
        lowest = re.search(r"memory_budget=([\d.]+) or", str(error))
        if lowest is None:
            raise
        budget = float(lowest[1])
        result = optimized(budget)
    check_same(before, tree_of(model), "the caller's module was changed")
    (record,) = report_of(result).passes
    assert record.status == "applied", record.reason
    peaks = [peak_of(one, (rows,), {}) for one in (copy.deepcopy(model), copy.deepcopy(result))]
    share = 1.0 if budget == "min" else float(budget)
    assert peaks[1] <= share * peaks[0], f"{peaks[1]} bytes of {peaks[0]}, for a budget of {budget}"
    expected, got = (steps_of(copy.deepcopy(one), rows) for one in (model, result))
    for number, pair in enumerate(zip(expected, got, strict=True)):
        assert all(one is None for one in pair) or torch.equal(*pair), f"number {number} differs"


def steps_of(model: nn.Module, rows: Tensor) -> list[Tensor | None]:
    """The loss, gradients and buffers after each of two steps, and the final random state."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, seen = torch.optim.SGD(trained, lr=0.01), list[Tensor | None]()
    torch.manual_seed(1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model(rows))
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(parameter.grad for parameter in trained)]
        seen += [buffer.clone() for buffer in model.buffers()]
    return [*seen, torch.get_rng_state()]
