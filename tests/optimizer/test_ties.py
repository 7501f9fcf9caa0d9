"""Outputs that equal scores put in order or choose: compared as sets, or not at all, and everything else by place."""

from collections import Counter

import pytest
import torch
from torch import nn

from exporters.errors import ExporterError
from optimizer import export, verify_bundle
from optimizer.model.inputs import Samples
from optimizer.parity import check_parity, judge, measure_reference

N, K = 24, 6


class Detector(nn.Module):
    """Boxes of a linear layer, chosen by rounded scores: many of them are equal.

    Attributes:
        k: the number of chosen boxes; N for all.
        last: which of several equal scores wins; None leaves it to torch.
    """

    def __init__(self, k=N, last=None, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.box = nn.Linear(8, 4)
        self.k, self.last, self.dtype = k, last, dtype

    def scores(self, boxes):
        return (boxes[..., 0] * 3).round().to(self.dtype)

    def order(self, scores):
        if self.last is None:
            return scores.topk(self.k, dim=1).indices
        given = scores.flip(1) if self.last else scores
        order = given.sort(dim=1, descending=True, stable=True).indices[:, : self.k]
        return N - 1 - order if self.last else order

    def forward(self, x):
        boxes = self.box(x)
        scores = self.scores(boxes)
        order = self.order(scores)
        return {
            "scores": scores.gather(1, order),
            "boxes": boxes.gather(1, order[..., None].expand(-1, -1, 4)),
            "labels": order,
        }


class Changed(Detector):
    """A detector with a change of its results."""

    def __init__(self, change, **options):
        super().__init__(last=False, **options)
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


class Sorted(Detector):
    def order(self, scores):
        return scores.sort(dim=1, descending=True).indices[:, : self.k] if self.last is None else super().order(scores)


class Distinct(Detector):
    def scores(self, boxes):
        return boxes[..., 0]


def given(rows=3):
    return (torch.randn(rows, N, 8, generator=torch.Generator().manual_seed(1)),)


def edges(scores):
    """For each row, the places whose score differs from the next one."""
    return [(row[1:] != row[:-1]).nonzero().flatten().tolist() for row in scores]


def two_of_different_ties(out):
    """Boxes and labels with two places exchanged that have different scores."""
    found = {name: value.clone() for name, value in out.items()}
    for row, places in enumerate(edges(out["scores"])):
        for name in ("boxes", "labels") if places else ():
            a = places[0]
            found[name][row, [a, a + 1]] = out[name][row, [a + 1, a]]
    return found


def one_twice(out):
    """The first box of each tie in place of the second one."""
    boxes = out["boxes"].clone()
    equal = out["scores"][:, 1:] == out["scores"][:, :-1]
    boxes[:, 1:][equal] = boxes[:, :-1][equal]
    return out | {"boxes": boxes}


def by_boxes_alone(out):
    """All boxes of the first tie turned, and not their labels."""
    boxes = out["boxes"].clone()
    for row, places in enumerate(edges(out["scores"])):
        for start, end in zip([-1, *places], [*places, N - 1], strict=True):
            boxes[row, start + 1 : end + 1] = boxes[row, start + 1 : end + 1].flip(0)
    return out | {"boxes": boxes}


WRONG = {
    "elements of different ties change places": two_of_different_ties,
    "an element of a tie comes twice": one_twice,
    "boxes lose their labels": by_boxes_alone,
    "columns change places": lambda out: out | {"boxes": out["boxes"].roll(1, -1)},
    "ascending": lambda out: {name: value if name == "scores" else value.flip(1) for name, value in out.items()},
    "scaled": lambda out: out | {"boxes": out["boxes"] * 1.001},
}


@pytest.mark.parametrize(
    ("kind", "last", "dtype"),
    [
        (Detector, False, torch.float32),
        (Detector, True, torch.int64),
        (Sorted, True, torch.float32),
        (Sorted, False, torch.int64),
    ],
)
def test_the_order_within_ties_is_free_and_named(kind, last, dtype):
    report = check_parity(kind(dtype=dtype), kind(dtype=dtype, last=last), given())
    assert report.ok, report.reason
    named = [note for note in report.notes if "were compared as sets: equal scores" in note]
    assert len(named) == 2
    assert not any("weren't compared" in note for note in report.notes)


def test_ties_are_found_next_to_an_operator_that_calls_others():
    class Chosen(Detector):
        def scores(self, boxes):
            return super().scores(torch.cond(boxes.sum() > 0, torch.sin, torch.cos, (boxes,)))

    report = check_parity(Chosen(), Chosen(last=True), given())
    assert report.ok, report.reason
    assert any("were compared as sets" in note for note in report.notes)


@pytest.fixture(scope="module")
def detector():
    return measure_reference(Detector(), Samples(given()))


@pytest.mark.parametrize("change", [None, *WRONG.values()], ids=["unchanged", *WRONG])
def test_whatever_else_differs_is_wrong(detector, change):
    report = judge(detector.compare(Changed(change or (lambda out: out))))
    assert report.verdict == ("failed" if change else "ok")


def test_a_tie_that_chooses_is_left_out_and_the_rest_compared():
    report = check_parity(Detector(K), Detector(K, last=True), given())
    assert report.ok, report.reason
    named = [note for note in report.notes if "weren't compared: equal scores (topk) choose" in note]
    assert [note.split()[3] for note in named] == ["boxes", "labels"]
    # Whatever is above the tie is compared.
    assert check_parity(Detector(K), Changed(two_of_different_ties, k=K), given()).verdict == "failed"
    first = [places[0] + 1 if places else 0 for places in edges(Detector(K)(*given())["scores"])]
    assert any(first)

    def first_wrong(out):
        boxes = out["boxes"].clone()
        for row, count in enumerate(first):
            boxes[row, :count] += 1
        return out | {"boxes": boxes}

    assert check_parity(Detector(K), Changed(first_wrong, k=K), given()).verdict == "failed"


def test_different_scores_are_compared_by_place():
    assert check_parity(Distinct(), Distinct(last=False), given()).ok

    def turned(out):
        return {name: value.flip(1) if name != "scores" else value for name, value in out.items()}

    class Turned(Distinct):
        def forward(self, x):
            return turned(super().forward(x))

    report = check_parity(Distinct(), Turned(), given())
    assert report.verdict == "failed"
    assert not any("equal scores" in note for note in report.notes)


def test_argmax_over_equal_counts():
    def counted(x):
        return nn.functional.one_hot(x[..., 0].gt(0).long() + 2 * x[..., 1].gt(0).long(), 4)[:, :4].sum(1)

    def first(x):
        return counted(x), counted(x).argmax(1)

    def last(x):
        return counted(x), 3 - counted(x).flip(1).argmax(1)

    for candidate in (first, last):
        report = check_parity(first, candidate, given(16))
        assert report.ok, report.reason
        assert any("equal scores (argmax)" in note for note in report.notes)
    wrong = check_parity(first, lambda x: (first(x)[0], (first(x)[1] + 1) % 4), given(16))
    assert wrong.verdict == "failed"


class Suppressed(nn.Module):
    """Non-maximum suppression in one dimension, written in torch: a fixed number of rounds."""

    def __init__(self, last=None):
        super().__init__()
        self.last = last

    def forward(self, x):
        where, scores = x[..., 0] * 10, (x[..., 1] * 2).round()
        kept = []
        for _ in range(4):
            best = scores.flip(1).argmax(1) if self.last else scores.argmax(1)
            best = (N - 1 - best if self.last else best)[:, None]
            kept.append(where.gather(1, best))
            scores = scores.masked_fill((where - kept[-1]).abs() < 2, -torch.inf)
        return torch.cat(kept, 1), x.sum(1)


def test_suppression_by_equal_scores_is_left_out_and_the_rest_compared():
    report = check_parity(Suppressed(), Suppressed(last=True), given())
    assert report.ok, report.reason
    assert any("equal scores (argmax) choose" in note for note in report.notes)
    wrong = check_parity(Suppressed(), lambda x: (Suppressed()(x)[0], x.sum(1) * 1.001), given())
    assert wrong.verdict == "failed"


RAN = Counter()


class Counted(nn.Module):
    """Counts its forwards by dtype."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        out = self.model(x)
        RAN[(out["boxes"] if isinstance(out, dict) else out).dtype] += 1
        return out


def test_only_models_that_choose_by_scores_run_more_often():
    ran = {}
    for name, model in {"none": nn.Linear(8, 4), "distinct": Distinct(), "equal": Detector()}.items():
        RAN.clear()
        calls = len(measure_reference(Counted(model), Samples(given())).original.calls)
        ran[name] = RAN[torch.float32] / calls
    # Integers are perturbed at all calls, too.
    assert ran["distinct"] <= ran["none"] + 2
    assert ran["equal"] == ran["distinct"] + 1


def test_ties_at_one_batch_size_only():
    class Few(Detector):
        def scores(self, boxes):
            return super().scores(boxes) if len(boxes) == 5 else boxes[..., 0]

    report = check_parity(Few(), Few(last=True), given())
    assert report.ok, report.reason
    assert any("were compared as sets" in note for note in report.notes)
    reference = measure_reference(Few(), Samples(given()))
    assert {one.batch_size for one in reference.original.calls if one.ties} == {5}
    assert not judge(reference.compare(Detector(last=True))).ok


def test_a_file_that_breaks_ties_differently_is_exported_and_verified(tmp_path):
    bundle = export(Detector(K).eval(), example_inputs=given(), output=tmp_path / "out", formats=("onnx",), bench=False)
    assert any("equal scores (topk)" in note for note in bundle.manifest["notes"])
    assert verify_bundle(bundle.path).ok


class OrderedRows(nn.Module):
    """Puts rows in the order of rounded scores, and computes other rows above a batch size."""

    limit, note = 20, "as sets"

    def __init__(self, factor):
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 6), factor

    def ordered(self, rows):
        scores, order = (rows * 2).round().sort(-1, descending=True)
        return scores, order

    def forward(self, x):
        rows = self.layer(x)
        scores, order = self.ordered(rows)
        if x.shape[0] > self.limit:
            rows = rows * self.factor
        return scores, rows.gather(-1, order)


class ChosenRows(OrderedRows):
    limit, note = 40, "weren't compared"

    def ordered(self, rows):
        scores, best = (rows * 2).round().max(-1)
        return scores, best[:, None]


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("kind", [OrderedRows, ChosenRows])
def test_outputs_that_ties_order_or_choose_are_compared_where_the_model_takes_another_path(kind, factor, tmp_path):
    torch.manual_seed(0)
    model, options = kind(factor).eval(), {"output": tmp_path / "out", "formats": ("onnx",), "bench": False}
    x = torch.randn(2, 8) * (2 if kind is OrderedRows else 4)
    if factor == 1:
        assert any(kind.note in note for note in export(model, example_inputs=x, **options).manifest["notes"])
        return
    with pytest.raises(ExporterError, match=rf"at batch size {kind.limit + 1} .* output `output_1` is wrong"):
        export(model, example_inputs=x, **options)
