"""Check case by case whether folding BatchNorms is right: by this project, and by what a user would use instead.

    python benchmarks/correctness.py --json build/correctness.json --markdown build/correctness.md

Every contender gets the same model and, as an example, the same inputs at batch size 2. Its result is then called at
batch sizes 2, 1 and 5 and on unseen inputs, and compared with the model in float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from contenders import FUSE, JIT, LABELS, OURS, sentence_of
from hard_cases import CASES, Case, Inputs
from measure import caption, command, prepared, refuse_unknown
from table import Table, publish
from torch import nn
from torch.autograd import profiler_legacy
from torch.fx.experimental.optimization import fuse
from torch.fx.proxy import TraceError

from exporters.isolation import silent, torchscript_allowed
from optimize_export.errors import OptimizeExportError
from optimizer import optimize, report_of
from passes.errors import PassesError

RIGHT, WRONG, REFUSED, CRASHED = "right", "wrong", "refused", "crashed"
VERDICTS = (RIGHT, WRONG, REFUSED, CRASHED)

INDUCTOR = "inductor"

# The allowed error: this many times eager's own error, plus this many ulps of the output's largest value. Folding
# rounds weights that the model itself didn't round.
TIMES_EAGER = 8.0
ULPS = 4.0

# (batch size, number of the draw). The contenders get the first one as an example.
CALLS = ((2, 0), (1, 0), (5, 0), (2, 1))

Call = Callable[..., Any]
Make = Callable[[nn.Module, Inputs], Call]


@dataclass(frozen=True)
class Contender:
    """One way to fold.

    Attributes:
        label: its name in the table.
        make: makes a callable from a model in eval and example inputs.
        refusals: the errors by which it refuses a model.
        plain: whether its output is a flat tuple of the model's tensors.
        notes: returns what it reports itself about BatchNorms that it left alone.
    """

    label: str
    make: Make
    refusals: tuple[type[Exception], ...]
    plain: bool = False
    notes: Callable[[Any], list[str]] = lambda call: []


@dataclass
class Outcome:
    """The result of one contender on one case.

    Attributes:
        verdict: one of `VERDICTS`.
        reason: a sentence, if the verdict isn't "right".
        folded: the number of BatchNorms of the first call that no longer run; None if there was no call.
        error: the largest finite error divided by the allowed one, over all outputs and calls; None if there is none.
        notes: what the contender reports itself about BatchNorms that it left alone.
    """

    verdict: str
    reason: str = ""
    folded: int | None = None
    error: float | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """The expected results of a case.

    Attributes:
        norms: the number of BatchNorms that run in the first call.
        structures: the structure of the outputs of each call.
        truths: the outputs of each call in float64.
        allowed: the largest allowed error of each output.
    """

    norms: int
    structures: list[str]
    truths: list[list[torch.Tensor]]
    allowed: list[float]

    @classmethod
    def of(cls, case: Case) -> Expected:
        """Run two new copies of the model in eager mode, one of them in float64."""
        model, double = case.build(), case.build().double()
        norms, structures, truths, errors = 0, [], [], []
        kinds: list[torch.dtype] = []
        for number, inputs in enumerate(_calls(case)):
            output, count = counted(lambda inputs=inputs: _called(model, inputs))
            structure, values = flat(output)
            truth = flat(_called(double, _in_float64(inputs)))[1]
            if number == 0:
                norms, kinds = count, [value.dtype for value in values]
            structures.append(structure)
            truths.append(truth)
            errors.append([_distance(value, true) for value, true in zip(values, truth, strict=True)])
        allowed = [
            TIMES_EAGER * max(error[index] for error in errors)
            + ULPS * torch.finfo(kind).eps * max(truth[index].abs().max().item() for truth in truths)
            for index, kind in enumerate(kinds)
        ]
        return cls(norms, structures, truths, allowed)


def counted(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, and the number of BatchNorms that ran in it, including those in TorchScript."""
    # torch.profiler would count the same, but prints lines at each start. A torch mode breaks TorchScript.
    with profiler_legacy.profile() as profile:
        output = call()
    return output, sum(event.name == "aten::batch_norm" for event in profile.function_events)


def outcome_of(contender: Contender, case: Case, expected: Expected | None = None) -> Outcome:
    """Make the contender from a new copy of the case's model, call it, and judge it.

    - Wrong: an output of a call differs from the model's, or the contender has changed the model itself.
    - Refused: the contender says that it doesn't support the model or the call, or its result is right but folds
      nothing.
    - Right: its result is right, and folds.
    - Crashed: any other error.
    """
    expected = Expected.of(case) if expected is None else expected
    model = case.build()
    before = _state(model)
    outcome = Outcome(RIGHT)
    try:
        with _quiet():
            call = contender.make(model, case.inputs(*CALLS[0]))
            if changed := _changed(before, _state(model)):
                return dataclasses.replace(outcome, verdict=WRONG, reason=f"the model itself is changed: {changed}")
            outcome.notes = contender.notes(call)
            for number, inputs in enumerate(_calls(case)):
                if wrong := _judge_call(call, inputs, number, contender, expected, outcome):
                    return dataclasses.replace(outcome, verdict=WRONG, reason=wrong)
    except contender.refusals as error:
        return dataclasses.replace(outcome, verdict=REFUSED, reason=sentence_of(error))
    except Exception as error:  # noqa: BLE001 - any error is the contender's result; the row says so
        return dataclasses.replace(outcome, verdict=CRASHED, reason=sentence_of(error))
    if not outcome.folded:
        return dataclasses.replace(outcome, verdict=REFUSED, reason="; ".join(outcome.notes) or "left as it was")
    return outcome


def _judge_call(
    call: Call, inputs: Inputs, number: int, contender: Contender, expected: Expected, outcome: Outcome
) -> str:
    """Why this call is wrong; "" if it is right. Also records the number of folds and the error in the outcome."""
    output, count = counted(lambda: _called(call, inputs))
    structure, values = flat(output)
    if number == 0:
        outcome.folded = expected.norms - count
    batch, draw = CALLS[number]
    where = f"batch {batch}{', unseen inputs' if draw else ''}"
    truth = expected.truths[number]
    if len(values) != len(truth) or (structure != expected.structures[number] and not contender.plain):
        return f"{where}: the outputs are {structure} instead of {expected.structures[number]}"
    for index, (value, true) in enumerate(zip(values, truth, strict=True)):
        distance, allowed = _distance(value, true), expected.allowed[index]
        if math.isfinite(distance):
            outcome.error = max(outcome.error or 0.0, distance / allowed)
        if not distance <= allowed:
            return f"{where}: output {index} is off by {distance:.2g}, and {allowed:.2g} is allowed"
    return ""


def _state(model: nn.Module) -> dict[str, Any]:
    """The state that a tool must not change: values, classes and training flags."""
    state: dict[str, Any] = {f"{path}.class": type(module) for path, module in model.named_modules()}
    state |= {f"{path}.training": module.training for path, module in model.named_modules()}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return state | {name: tensor.detach().clone() for name, tensor in tensors}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            return name
        old, new = before[name], after[name]
        if type(old) is not type(new) or not (torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new):
            return name
    return ""


def _calls(case: Case) -> Iterator[Inputs]:
    for batch, number in CALLS:
        yield case.inputs(batch, number)


def _called(call: Call, inputs: Inputs) -> Any:
    with torch.no_grad():
        return call(*inputs[0], **inputs[1])


def _in_float64(inputs: Inputs) -> Inputs:
    def widened(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(widened(value) for value in inputs[0]), {name: widened(value) for name, value in inputs[1].items()}


def flat(output: Any) -> tuple[str, list[torch.Tensor]]:
    """The structure of an output, with the dtypes of its tensors, and the tensors."""
    if isinstance(output, torch.Tensor):
        # Copy the tensor, because the next call may write to it.
        return str(output.dtype).removeprefix("torch."), [output.detach().clone()]
    if isinstance(output, dict):
        return _joined(type(output).__name__, [(f"{key}=", value) for key, value in output.items()])
    if isinstance(output, tuple | list):
        return _joined(type(output).__name__, [("", value) for value in output])
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        named = [(f"{item.name}=", getattr(output, item.name)) for item in dataclasses.fields(output)]
        return _joined(type(output).__name__, named)
    return repr(output), []


def _joined(kind: str, parts: Sequence[tuple[str, Any]]) -> tuple[str, list[torch.Tensor]]:
    inner = [(name, *flat(value)) for name, value in parts]
    text = ", ".join(f"{name}{structure}" for name, structure, _ in inner)
    return f"{kind}({text})", [tensor for _, _, tensors in inner for tensor in tensors]


def _distance(value: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest absolute difference; infinite if the shapes differ or the difference isn't finite."""
    if value.shape != truth.shape:
        return math.inf
    distance = (value.double() - truth).abs().max().item()
    return distance if math.isfinite(distance) else math.inf


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torchscript_allowed(), silent():
        warnings.simplefilter("ignore")
        yield


def _ours(model: nn.Module, example: Inputs) -> Call:
    return optimize(model, example_inputs=example[0], example_kwargs=example[1])


def _notes_of_ours(fast: nn.Module) -> list[str]:
    report = report_of(fast)
    found = [f"{path}: no call of the examples reads it" for path in report.coverage.unreached]
    for item in report.passes:
        if item.name.startswith("fold-"):
            found += [f"{item.name}: {item.reason}"] if item.reason else []
            found += [f"{item.name}, {place.where or 'the root'}: {place.text}" for place in item.skips]
    return found


def _fuse(model: nn.Module, example: Inputs) -> Call:
    return fuse(model)


def _inductor(model: nn.Module, example: Inputs) -> Call:
    from torch._inductor.fx_passes.pre_grad import fuse_conv_bn

    with torch.no_grad():
        return fuse_conv_bn(torch.fx.symbolic_trace(model))


class _FlatOutput(nn.Module):
    """A model that returns a flat tuple of its tensors, for tracers that support no other structure."""

    def __init__(self, model: nn.Module, names: Sequence[str], others: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._names = names
        self._others = others

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positional = tensors[: len(tensors) - len(self._names)]
        named = dict(zip(self._names, tensors[len(positional) :], strict=True))
        return tuple(_tensors_of(self.model(*positional, **named, **self._others)))


def _tensors_of(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, item.name) for item in dataclasses.fields(output)]
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return [tensor for value in values for tensor in _tensors_of(value)]


def _jit(model: nn.Module, example: Inputs) -> Call:
    args, kwargs = example
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    others = {name: value for name, value in kwargs.items() if name not in names}
    with torch.no_grad():
        traced = torch.jit.trace(_FlatOutput(model, names, others), (*args, *(kwargs[name] for name in names)))
        fast = torch.jit.optimize_for_inference(traced)

    def call(*args: Any, **kwargs: Any) -> Any:
        return fast(*args, *(kwargs[name] for name in names))

    return call


CONTENDERS: dict[str, Contender] = {
    OURS: Contender(LABELS[OURS], _ours, (OptimizeExportError, PassesError), notes=_notes_of_ours),
    FUSE: Contender(LABELS[FUSE], _fuse, (TraceError,)),
    INDUCTOR: Contender("inductor's fuse_conv_bn", _inductor, (TraceError,)),
    JIT: Contender(LABELS[JIT], _jit, (torch.jit.TracingCheckError, torch.jit.frontend.NotSupportedError), plain=True),
}


def measure(case: Case, names: Sequence[str]) -> dict[str, Any]:
    """Judge all contenders on one case."""
    expected = Expected.of(case)
    outcomes = {name: outcome_of(CONTENDERS[name], case, expected) for name in names}
    return {
        "case": case.name,
        "hard": case.hard,
        "norms": expected.norms,
        "folds": case.folds,
        "contenders": {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()},
    }


def misses(results: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each case that this project gets wrong, crashes on, or leaves unfolded though it folds exactly."""
    found = []
    for result in results:
        ours = result["contenders"].get(OURS)
        if ours is None:
            continue
        if ours["verdict"] in (WRONG, CRASHED):
            found.append(f"{result['case']}: {ours['verdict']}: {ours['reason']}")
        elif (ours["folded"] or 0) < result["folds"]:
            why = "; ".join(ours["notes"]) or ours["reason"] or "no reason is given"
            found.append(f"{result['case']}: {ours['folded'] or 0} of {result['folds']} folded: {why}")
    return found


def case_table(results: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    headings = ["case", "what is hard", *(CONTENDERS[name].label for name in names), "BatchNorms", "fold exactly"]
    table = Table("Correctness", headings, left=2 + len(names))
    for result in results:
        cells = [_cell(result["contenders"][name], result["folds"]) for name in names]
        table.add(result["case"], result["hard"], *cells, str(result["norms"]), str(result["folds"]))
    table.caption.append(
        f"Right: at batch 2, 1 and 5 and on unseen inputs no output differs from the model in float64 by more than"
        f" {TIMES_EAGER:g} times eager's own error and {ULPS:g} units in the last place of the largest value, and the"
        " model itself is as it was. Refused: nothing is folded and the outputs are right, or an error says that this is"
        " not taken. In brackets: how many BatchNorms were folded, of those that fold exactly."
    )
    return table


def _cell(outcome: dict[str, Any], folds: int) -> str:
    verdict, folded = outcome["verdict"], outcome["folded"]
    if verdict == RIGHT:
        return f"{verdict} ({folded} of {folds})" if folds else f"{verdict} ({folded})"
    return f"**{verdict}**" if verdict in (WRONG, CRASHED) else verdict


def summary_table(results: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    table = Table(
        "Correctness: how many cases", ["", *VERDICTS, "BatchNorms folded rightly, of those that fold exactly"]
    )
    whole = sum(result["folds"] for result in results)
    for name in names:
        outcomes = [result["contenders"][name] for result in results]
        counts = [str(sum(outcome["verdict"] == verdict for outcome in outcomes)) for verdict in VERDICTS]
        folded = sum(
            min(result["contenders"][name]["folded"] or 0, result["folds"])
            for result in results
            if result["contenders"][name]["verdict"] == RIGHT
        )
        table.add(CONTENDERS[name].label, *counts, f"{folded} of {whole}")
    return table


def main() -> int:
    # Small models would run as written, where their graphs are slower.
    os.environ["OPTIMIZE_EXPORT_NO_BENCH"] = "1"
    parser = command(__doc__, check=True)
    parser.add_argument("--cases", default="", help="names, by semicolons (default: all)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="by commas (default: %(default)s)")
    arguments = parser.parse_args()
    cases = [name.strip() for name in arguments.cases.split(";")] if arguments.cases else list(CASES)
    refuse_unknown(parser, "case", cases, CASES, separator="; ")
    names = arguments.contenders.split(",")
    refuse_unknown(parser, "contender", names, CONTENDERS)
    where = prepared(parser, arguments)

    results = []
    for name in cases:
        print(f"{name} …", file=sys.stderr)
        results.append(measure(CASES[name], names))
    missed = misses(results)
    tables = [summary_table(results, names), case_table(results, names)]
    if OURS in names:
        heading = f"Where {LABELS[OURS]} is wrong, crashes, or leaves what folds exactly:"
        tables[0].caption += [heading, *missed] if missed else [f"{heading} nowhere."]
    tables[1].caption.append(caption(where))
    data = {
        "benchmark": "correctness",
        "environment": where,
        "settings": {"cases": cases, "contenders": names},
        "rule": {"times_eager": TIMES_EAGER, "ulps": ULPS, "calls": CALLS},
        "missed": missed,
        "results": results,
    }
    publish(tables, data, arguments.json, arguments.markdown)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
