"""Lossy candidates of models that order or choose by scores: rows are compared as sets where scores are equal for them."""

from functools import cache

import pytest
import torch
from fake_tuning import chooser, fake_clock, fake_quantization, prepare
from torch import nn

from optimizer import export, optimize, rejudge_bundle, report_of, verify_bundle
from optimizer.model import Samples
from optimizer.options import AccuracyBudget
from optimizer.parity import Accuracy, accuracy_between, accuracy_of, measure_reference
from passes.cast_precision import CastPrecision

K = 12
BUDGET = AccuracyBudget(cosine=0.999)


@torch.library.custom_op("order_tests::nms", mutates_args=())
def nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """As torchvision's: the boxes that no better one overlaps by more than the threshold, best first."""
    low, high = torch.maximum(dets[:, None, :2], dets[:, :2]), torch.minimum(dets[:, None, 2:], dets[:, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area = (dets[:, 2:] - dets[:, :2]).prod(-1)
    overlaps = shared / (area[:, None] + area - shared) > iou_threshold
    kept: list[int] = []
    for index in scores.argsort(descending=True, stable=True).tolist():
        if not overlaps[index, kept].any():
            kept.append(index)
    return torch.tensor(kept)


@nms.register_fake
def _(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)


class Detector(nn.Module):
    """Boxes, scores and labels of the cells of a feature map, of which the best K are chosen.

    Attributes:
        error: changes the weights by this share, as half precision or int8 does.
        spread: of the scores; small for scores that are close.
    """

    def __init__(self, error=0.0, spread=1.0):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Conv2d(3, 16, 3)
        self.head = nn.Conv2d(16, 4 + 3, 1)
        self.spread = spread
        generator = torch.Generator().manual_seed(2)
        for parameter in self.parameters():
            parameter.data *= 1 + error * torch.randn(parameter.shape, generator=generator)

    def cells(self, x):
        """Boxes (rows, cells, 4), and scores (rows, cells, classes)."""
        found = self.head(self.body(x).relu()).flatten(2).transpose(1, 2)
        corner, size = (found[..., :2] * 300 + 300).clamp(0, 600), (found[..., 2:4] * 60 + 60).clamp(8, 200)
        return torch.cat([corner, corner + size], -1), (self.spread * 4 * found[..., 4:]).sigmoid()

    def order(self, best):
        return best.topk(K, 1)

    def forward(self, x):
        boxes, scores = self.cells(x)
        best, order = self.order(scores.amax(-1))
        chosen = boxes.gather(1, order[..., None].expand(-1, -1, 4))
        return self.packed(chosen, best, scores.argmax(-1).gather(1, order))

    def packed(self, boxes, scores, labels):
        return {"boxes": boxes, "scores": scores, "labels": labels}


class Sorted(Detector):
    def order(self, best):
        best, order = best.sort(dim=1, descending=True, stable=True)
        return best[:, :K], order[:, :K]


class ByArgsort(Detector):
    def order(self, best):
        order = (-best).argsort(1)[:, :K]
        return best.gather(1, order), order


class Twice(Detector):
    """Chooses twice, as a detector whose second choice is among all classes."""

    def order(self, best):
        first = best.topk(2 * K, 1)
        second = first.values.topk(K, 1)
        return second.values, first.indices.gather(1, second.indices)


class Packed(Detector):
    """All in one tensor, with the scores in column 4."""

    def packed(self, boxes, scores, labels):
        return torch.cat([boxes, scores[..., None], labels[..., None].float()], -1)


class Suppressed(Detector):
    def forward(self, x):
        # Some of all cells, so that small errors suppress no other one.
        boxes, scores = (each.flatten(0, 1)[::6] for each in self.cells(x))
        best = scores.amax(-1)
        kept = torch.ops.order_tests.nms(boxes, best, 0.5)
        return self.packed(boxes[kept], best[kept], scores.argmax(-1)[kept])


class WithoutScores(Detector):
    def packed(self, boxes, scores, labels):
        return {"boxes": boxes}


def given(rows=3):
    return (torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(3)),)


@cache
def found(kind, **options):
    """The reference, the orders in it, and the reference for lossy candidates."""
    reference = measure_reference(kind(**options).eval(), Samples(given()))
    orders = reference.find_orders()
    return reference, orders, reference.in_orders(orders.rows)


def judged(kind, candidate, budget=BUDGET, *, in_orders=True, **options):
    """Why a candidate is outside a budget; None if it is within."""
    reference, orders, lossy = found(kind, **options)
    measurement = (lossy if in_orders else reference).compare(candidate.eval())
    rows = orders.rows if in_orders else ()
    accuracy = accuracy_of(measurement, reference.output_names).and_worse(Accuracy(orders=rows))
    return accuracy.why_not(budget)


class Changed(nn.Module):
    def __init__(self, model, change):
        super().__init__()
        self.model, self.change = model, change

    def forward(self, x):
        return self.change(self.model(x))


KINDS = [Detector, Sorted, ByArgsort, Twice, Packed, Suppressed]


@pytest.mark.parametrize("kind", [*KINDS, WithoutScores])
def test_the_outputs_that_follow_scores_are_found(kind):
    rows, chosen = (getattr(found(kind)[1], name) for name in ("rows", "chosen"))
    (order,) = rows
    names = {Packed: ("output",), WithoutScores: ("boxes",)}.get(kind, ("boxes", "scores", "labels"))
    assert set(order.names) == set(names) == chosen.keys()
    scores = {Packed: ("output", 4), WithoutScores: (None, 0)}.get(kind, ("scores", 0))
    assert (order.scores, order.column) == scores
    assert order.dim == (0 if kind is Suppressed else 1)
    assert order.unjudged == (("output",) if kind is Packed else ("boxes",))
    name = {Sorted: "sort", ByArgsort: "sort", Suppressed: "nms"}.get(kind, "topk")
    assert order.by.startswith(f"{name} in the model's forward (test_orders.py:")


class Labels(Detector):
    def forward(self, x):
        scores = self.cells(x)[1].mean(1)
        return scores, scores.argmax(1), x.sum((1, 2, 3))


class Routed(Detector):
    """Chooses inside: the order of what is chosen doesn't reach the output."""

    def forward(self, x):
        boxes, scores = self.cells(x)
        return boxes.gather(1, scores.amax(-1).topk(K, 1).indices[..., None].expand(-1, -1, 4)).sum(1)


@pytest.mark.parametrize(("kind", "chosen"), [(Labels, {"output_1": "argmax"}), (Routed, {})])
def test_what_has_no_rows_in_an_order_is_compared_by_place(kind, chosen):
    orders = found(kind)[1]
    assert orders.rows == ()
    assert {name: by.split()[0] for name, by in orders.chosen.items()} == chosen


def test_a_model_that_chooses_nothing_has_no_orders():
    reference = measure_reference(nn.Linear(8, 4), Samples((torch.randn(3, 8),)))
    orders = reference.find_orders()
    assert (orders.rows, orders.chosen) == ((), {})


# A detector that computes in bfloat16 has such an error, and keeps its choice of boxes here.
ERROR = 0.004


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_change_places_among_close_scores_are_within_the_budget(kind):
    assert judged(kind, kind(ERROR)) is None
    assert judged(kind, kind(ERROR), in_orders=False) is not None


def test_outputs_without_scores_are_compared_by_place():
    assert "cosine" in judged(WithoutScores, WithoutScores(ERROR))


def changed(out, name, change):
    return {**out, name: change(out[name].clone())}


def with_rows(out, change):
    """Boxes and labels with other rows than their scores."""
    return {name: value if name == "scores" else change(value.clone()) for name, value in out.items()}


def first_twice(rows):
    rows[:, 1] = rows[:, 0]
    return rows


WRONG = {
    "boxes of other rows": lambda out: with_rows(out, lambda rows: rows.roll(1, 1)),
    "the best box in place of the worst": lambda out: with_rows(
        out, lambda rows: rows[:, [K - 1, *range(1, K - 1), 0]]
    ),
    "boxes lose their labels": lambda out: changed(out, "labels", lambda labels: labels.roll(1, 1)),
    "boxes of another image": lambda out: with_rows(out, lambda rows: rows.roll(1, 0)),
    "scaled": lambda out: changed(out, "boxes", lambda boxes: boxes * 1.2),
    "a row twice": lambda out: with_rows(out, first_twice),
    "columns change places": lambda out: changed(out, "boxes", lambda boxes: boxes.roll(1, -1)),
    "ascending": lambda out: {name: value.flip(1) for name, value in out.items()},
    "scores of another scale": lambda out: changed(out, "scores", lambda scores: scores * 0.8),
}


@pytest.mark.parametrize("error", [0.0, ERROR], ids=["exact", "lossy"])
@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_whatever_else_differs_is_outside(change, error):
    def on_whole_batches(out):
        # There is no other image in a batch of one.
        return change(out) if len(out["scores"]) > 1 else out

    assert judged(Detector, Changed(Detector(error), on_whole_batches)) is not None


def test_wrong_scores_in_a_column_do_not_hide_beside_coordinates():
    def change(out):
        out = out.clone()
        out[..., 4] = 1 - (1 - out[..., 4]) * torch.linspace(1, 3, K)
        return out

    assert "cosine" in judged(Packed, Changed(Packed(), change))
    assert judged(Packed, Changed(Packed(), change), in_orders=False) is None


def test_where_scores_are_exact_no_row_moves():
    """Boxes of the next row, where scores are as close as the error of a lossy candidate would be."""
    close = {"spread": 0.01}
    turned = Changed(Detector(**close), lambda out: with_rows(out, lambda rows: rows.roll(1, 1)))
    assert "cosine" in judged(Detector, turned, **close)


def test_another_box_among_the_chosen_is_outside():
    def change(out):
        # The last row is one that the original hasn't chosen.
        return with_rows(out, lambda rows: torch.cat([rows[:, :-1], rows[:, -1:] // 2], 1))

    assert "cosine" in judged(Detector, Changed(Detector(ERROR), change))


def test_only_a_metric_judges_another_number_of_rows():
    fewer = Changed(Suppressed(), lambda out: {name: value[:-1] for name, value in out.items()})
    assert judged(Suppressed, fewer).startswith("another number of rows is chosen: the shape is ")
    by_metric = AccuracyBudget(drop=0.01, confidence=0.95)
    assert judged(Suppressed, fewer, by_metric) is None
    assert judged(Suppressed, fewer, AccuracyBudget(top1=0.5, drop=0.01, confidence=0.95)) is not None
    # Columns are no rows.
    narrow = Changed(Suppressed(), lambda out: {**out, "boxes": out["boxes"][:-1, :3], "scores": out["scores"][:-1]})
    assert judged(Suppressed, narrow, by_metric).startswith("the shape is ")


def test_many_rows_are_matched_one_to_one():
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(2, 300, generator=generator).sort(1, descending=True).values
    boxes = 300 * torch.rand(2, 300, 4, generator=generator)
    order = found(Detector)[1].rows[0]
    noisy, places = (scores + 0.01 * torch.randn(2, 300, generator=generator)).sort(1, descending=True)
    labels = torch.arange(300).expand(2, 300)
    own = {"boxes": boxes, "scores": scores, "labels": labels}
    other = {"boxes": boxes.gather(1, places[..., None].expand(-1, -1, 4)) + 0.5, "scores": noisy, "labels": places}
    seen = order.aligned(own, other)
    assert (seen["labels"] == labels).float().mean() > 0.99
    assert all(row.unique().numel() == 300 for row in seen["labels"])
    assert torch.equal(seen["scores"].sort(1, descending=True).values, noisy)


@pytest.mark.parametrize(
    "kind",
    [type("Boxes", (Detector,), {"packed": lambda self, boxes, scores, labels: {"b": boxes, "s": scores}}), Packed],
)
def test_a_top1_budget_does_not_judge_rows(kind):
    """The largest of sorted scores is always the first one, and the largest coordinate of a box is no class."""
    why = judged(kind, kind(), AccuracyBudget(top1=0.5))
    assert why == "no output has classes, so there is no top-1 agreement"
    assert judged(kind, kind(), AccuracyBudget(cosine=0.9, top1=0.5)) == why


def test_a_top1_budget_of_labels_leaves_no_boxes_unjudged():
    why = judged(Detector, Detector(), AccuracyBudget(top1=0.5))
    assert why == "a top-1 agreement doesn't judge boxes, whose rows are in the order of scores"
    assert judged(Detector, Detector(), AccuracyBudget(cosine=0.9, top1=0.5)) is None


class BestClasses(Detector):
    """A classifier that returns its two best classes."""

    def forward(self, x):
        return tuple(self.cells(x)[1].mean(1).topk(2))


def test_the_best_classes_of_a_classifier_have_a_top1_agreement():
    budget = AccuracyBudget(top1=0.9)
    assert judged(BestClasses, BestClasses(), budget) is None
    wrong = Changed(BestClasses(), lambda out: (out[0], (out[1] + 1) % 3))
    assert judged(BestClasses, wrong, budget) == "share of equal integers 0.0000 is below 0.9"


@pytest.mark.parametrize(("scale", "within"), [(1.0, True), (1.02, True), (0.98, True), (1.2, False), (0.5, False)])
def test_a_cosine_does_not_hide_another_scale(scale, within):
    target = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    accuracy = accuracy_between(["y"], [((target * scale,), (target,))])
    assert accuracy.cosine == pytest.approx(1.0)
    assert (accuracy.why_not(BUDGET) is None) is within
    assert accuracy.is_below(BUDGET) is not within


@pytest.mark.parametrize("cosine", [0.5, 0.9, 0.999, 0.99999])
def test_noise_that_a_cosine_allows_is_allowed(cosine):
    """Noise at a right angle to the output, or along it as well."""
    target, noise = torch.zeros(2), torch.zeros(2)
    target[0], noise[1] = 1.0, (1 / cosine**2 - 1) ** 0.5 * 0.999
    accuracy = accuracy_between(["y"], [((target + noise,), (target,))])
    assert accuracy.why_not(AccuracyBudget(cosine=cosine)) is None


# The choice among files -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("prepared"), ("onnx",), Detector().eval())


@pytest.fixture
def choosing(prepared, tmp_path, monkeypatch):
    fake_clock(monkeypatch).seconds = {"eager": 1.0, "int8": 0.1, "": 0.5}
    return chooser(prepared, tmp_path, monkeypatch)


@pytest.fixture
def rounding(monkeypatch):
    return fake_quantization(monkeypatch)


def test_a_quantized_detector_within_the_budget_is_recommended(choosing, rounding):
    rounding.levels = {"int8-static": 400}
    found = choosing(tune=True, accuracy="0.999")
    assert found.route == "onnx-int8 in onnxruntime", found.dropped
    (order,) = found.entries["onnx-int8"]["accuracy"]["orders"]
    assert (order["names"], order["scores"]) == (["boxes", "scores", "labels"], "scores")


@pytest.mark.parametrize(
    ("accuracy", "why"), [("0.999", "the best has cosine 0."), ("top1=0.5", "a top-1 agreement doesn't")]
)
def test_a_detector_outside_the_budget_is_told_both_ways_out(accuracy, why, choosing, rounding):
    rounding.levels, rounding.finer = {"int8-static": 3}, 1
    reason = choosing(tune=True, accuracy=accuracy).dropped["onnx-int8"]
    assert reason.startswith("outside the budget: ")
    assert why in reason
    assert reason.count("; topk in the model's forward (test_orders.py:") == 1
    assert reason.endswith(
        'judge the model by its metric (`evaluate` with `--accuracy "drop<=0.5%"`), or export it before its '
        "post-processing, without this operation"
    )


def test_a_bundle_with_a_lossy_detector_is_verified_and_judged_again(tmp_path, monkeypatch, rounding):
    monkeypatch.setattr("optimizer.tuning.candidates.missing_compiler", lambda device: "none here")
    monkeypatch.setattr("optimizer.tuning.candidates.with_other_passes", lambda job: ())
    fake_clock(monkeypatch).seconds = {"eager": 1.0, "int8.onnx in onnxruntime": 0.1, "": 0.5}
    rounding.levels = {"int8-static": 400}
    bundle = export(
        Detector().eval(),
        example_inputs=given(),
        output=tmp_path / "out",
        formats=("onnx",),
        tune=True,
        accuracy="0.999",
    )
    for report in (verify_bundle(bundle), rejudge_bundle(bundle)):
        assert report.ok, report
        accuracy = report.artifacts[-1].accuracy
        assert 0.999 < accuracy.cosine < 1
        assert accuracy.orders[0].names == ("boxes", "scores", "labels")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_may_order_close_scores_otherwise(dtype):
    fast = optimize(Detector().eval(), passes=[CastPrecision(dtype, "weights")], example_inputs=given())
    (record,) = report_of(fast).passes
    assert record.status == "applied", record.reason
    # The order of the boxes tells nothing of the layers' precision.
    assert not [change for change in record.changes if "kept in float32" in change.text]
