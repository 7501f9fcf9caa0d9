"""A user's metric: how `evaluate` is run for the original and candidates, and what is refused."""

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from exporters.base import Adapter
from optimize_export.errors import UsageError
from optimizer.accuracy import EvaluateError, Evaluation, NotScored, PairedTest, RowDims, Task, check_evaluate
from optimizer.options import ExportSettings, parse_accuracy

CPU = torch.device("cpu")
BUDGET = parse_accuracy("drop<=2%")
ROWS = 4000


def inputs(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))


X = inputs()


class Net(nn.Module):
    """The class of a row is its largest value."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if not len(x):
            raise ValueError("no rows")
        return {"scores": x, "norm": x.norm(dim=1)}


LABELS = X.argmax(1)
Runner = Callable[..., tuple[torch.Tensor, ...]]


def loses(share: float) -> Runner:
    """A candidate that gives this share of rows another class, by their content."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hit = torch.frac(x.abs().sum(1) * 1000) < share
        return torch.where(hit[:, None], -x, x), x.norm(dim=1)

    return run


def hits(run: Any, batch: int = 100, x: torch.Tensor = X, labels: torch.Tensor = LABELS) -> Iterator[torch.Tensor]:
    for start in range(0, len(x), batch):
        yield run(x[start : start + batch])["scores"].argmax(1) == labels[start : start + batch]


def evaluation(evaluate: Any = hits, aggregate: Any = None, *, whole: bool = False) -> Evaluation:
    made = Evaluation(
        Task(evaluate, aggregate, Adapter(Net().eval(), (X[:2],)), CPU, lambda tensors: None, RowDims((0,)), whole)
    )
    made.start()
    return made


def judged(of: Evaluation, runner: Runner, part: Any = "final", alpha: float = 0.05) -> Any:
    return of.metric("it", runner, PairedTest(0.02, alpha, of.aggregate), part, BUDGET)


# Verdicts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "verdict"), [(0.0, "within"), (0.003, "within"), (0.2, "outside")])
def test_a_drop_is_within_or_outside_the_budget(share, verdict):
    found = judged(evaluation(), loses(share))
    assert found.verdict == verdict
    assert found.score == 1.0
    assert found.examples < ROWS
    assert (found.drop > 0.02) is (verdict == "outside")
    assert found.upper > found.drop
    assert (found.confidence, found.budget, found.percent) == (0.95, 0.02, True)
    assert (found.why_not is None) is (verdict == "within")


def test_too_few_examples_are_an_answer_with_how_many_would_do():
    few = evaluation(lambda run: hits(run, x=X[:60], labels=LABELS[:60]))
    found = judged(few, loses(0.0))
    assert found.verdict == "undecided"
    assert found.of == found.examples < 60
    assert 60 < found.needed < 400
    assert found.why_not is not None
    assert found.why_not.startswith(
        "too few examples to decide whether the metric drops at most 2 points: drop 0 points"
    )
    assert found.why_not.endswith(f"about {found.needed} would do")


@pytest.mark.parametrize(("share", "stays"), [(0.0, True), (0.05, False)])
def test_where_a_quick_test_cant_decide_the_drop_so_far_counts(share, stays):
    test = PairedTest(0.02, 1e-9)
    found = evaluation().metric("it", loses(share), test, "search", BUDGET, lambda: test.count >= 100)
    assert (found.verdict, found.of) == ("undecided", None)
    assert 100 <= found.examples < 200
    assert (found.why_not is None) is stays
    assert stays or found.why_not.startswith("the metric may drop 2 points, and it has drop ")
    few = judged(evaluation(lambda run: hits(run, x=X[:60], labels=LABELS[:60])), loses(0.0), "search")
    assert (few.verdict, few.why_not) == ("undecided", None)


def test_the_figures_are_told_in_points_or_in_the_unit_of_the_score():
    found = judged(evaluation(), loses(0.003))
    assert str(found).startswith(f"drop {100 * found.drop:.3g} points, at most {100 * found.upper:.3g} (95 %, ")
    assert str(found).endswith(" examples) from 100 %")
    plain = parse_accuracy("drop<=0.02")
    found = evaluation().metric("it", loses(0.003), PairedTest(0.02, 0.05), "final", plain)
    assert str(found).startswith(f"drop {found.drop:.3g}, at most {found.upper:.3g} (95 %, ")


def test_the_examples_that_changed_are_told_by_their_number():
    wrong = {3: 1.0, 7: 0.5, 8: -0.25, 64: 0.75}

    def scores(run: Any) -> Iterator[float]:
        # The first row of each call shows whose outputs these are.
        for number in range(100):
            kept = run(X[number : number + 1])["scores"][0, 0] == X[number, 0]
            yield 1.0 if kept else 1.0 - wrong.get(number, 0.0)

    def other(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, x.norm(dim=1)

    of = evaluation(scores)
    parts = [judged(of, other, part, alpha=1e-9) for part in ("search", "final")]
    assert sum(each.changed_count for each in parts) == len(wrong)
    found = [example for each in parts for example in each.changed]
    assert sorted(found) == [(number, 1.0, 1.0 - drop) for number, drop in sorted(wrong.items())]
    for each in parts:
        drops = [before - after for _, before, after in each.changed]
        assert drops == sorted(drops, reverse=True)
    many = judged(evaluation(), loses(0.2), alpha=1e-9)
    assert len(many.changed) == 20 < many.changed_count == round(many.drop * many.examples)
    aggregated = judged(evaluation(scores, lambda statistics: sum(statistics) / len(statistics)), other)
    assert (aggregated.changed, aggregated.changed_count) == ((), None)


def test_no_example_of_the_search_is_in_the_final_test_and_equal_rows_stay_together():
    twice = torch.cat([X[:500], X[:500].flip(0)])
    of = evaluation(lambda run: hits(run, x=twice, labels=twice.argmax(1)))
    search, final = (judged(of, loses(0.012), part, alpha=1e-9) for part in ("search", "final"))
    assert search.of + final.of == 1000
    assert search.of % 2 == final.of % 2 == 0
    assert 150 < search.of < 350


def test_the_originals_scores_are_computed_once_and_as_far_as_needed():
    calls = []

    def counting(run):
        def counted(x):
            calls.append(len(x))
            return run(x)

        yield from hits(counted)

    of = evaluation(counting)
    assert len(calls) == 4, "the original, and again on its outputs, each a call ahead"
    del calls[2:]
    found = judged(of, loses(0.5))
    assert found.verdict == "outside"
    read = len(calls)
    assert read <= 6, "the original and the candidate, each a call ahead"
    judged(of, loses(0.5))
    assert len(calls) - read == read // 2


def test_scores_may_be_numbers_bools_tensors_arrays_lists_and_pairs_with_weights():
    def each_kind(run):
        for row in range(0, 700, 7):
            outputs = run(X[row : row + 7])["scores"].argmax(1) == LABELS[row : row + 7]
            yield bool(outputs[0])
            yield outputs[1]
            yield float(outputs[2]), 0.5
            yield outputs[3:4].numpy()
            yield outputs[4:5].tolist()
            yield outputs[5:].float(), torch.tensor([2.0, 0.0])

    found = judged(evaluation(each_kind), loses(0.1), alpha=1e-9)
    assert found.score == 1.0
    assert 0.05 < found.drop < 0.2
    assert found.of is not None
    assert found.of < 600, "a weight of 0 is no example"


def test_evaluate_may_return_all_scores_after_all_calls():
    def whole(run):
        return torch.cat(list(hits(run)))

    by_row, at_once = (judged(evaluation(each), loses(0.01), alpha=1e-9) for each in (hits, whole))
    assert (by_row.drop, by_row.verdict) == (at_once.drop, at_once.verdict)


def test_scores_of_a_whole_call_belong_to_all_of_its_rows():
    def means(run):
        for scores in hits(run, batch=8):
            yield scores.float().mean()

    of = evaluation(means)
    of.exclude([(X[:8],), (X[13:14],)])
    found = judged(of, loses(0.0), alpha=1e-9), judged(of, loses(0.0), "search", alpha=1e-9)
    assert sum(each.of for each in found) == ROWS // 8 - 2


def test_an_aggregate_makes_the_metric_of_statistics():
    def confusions(run):
        for start in range(0, ROWS, 50):
            guessed = run(X[start : start + 50])["scores"].argmax(1)
            for guess, label in zip((guessed == 0).tolist(), (LABELS[start : start + 50] == 0).tolist(), strict=True):
                yield guess and label, guess and not label, label and not guess

    def f1(statistics):
        right, false, missed = np.sum(np.array(statistics), axis=0)
        return 2 * right / (2 * right + false + missed)

    found = judged(evaluation(confusions, f1), loses(0.3))
    assert (found.verdict, found.score) == ("outside", 1.0)
    found = judged(evaluation(confusions, f1), loses(0.0))
    assert (found.verdict, found.score, found.drop) == ("within", 1.0, 0.0)


def test_a_stream_takes_constant_memory_but_for_its_scores():
    batches: list[Any] = []

    def stream(run):
        for number in range(60):
            x = torch.randn(100, 3, generator=torch.Generator().manual_seed(number))
            batches.append(weakref.ref(x))
            yield run(x)["scores"].argmax(1) == x.argmax(1)
            alive.append(sum(each() is not None for each in batches))

    alive: list[int] = []
    of = evaluation(stream)
    assert sum(len(call.args[0]) for call in of.calibration()) >= 64
    of.exclude([])
    judged(of, loses(0.02), alpha=1e-9)
    gc.collect()
    assert max(alive) <= 3


def test_each_run_has_its_own_random_state_and_modes():
    modes = []

    def now() -> tuple[bool, ...]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    def augmenting(run):
        with torch.inference_mode(), torch.autocast("cpu"):
            for x, labels in zip(X.split(100), LABELS.split(100), strict=True):
                modes.append(now())
                yield run(x + 0.01 * torch.randn_like(x))["scores"].argmax(1) == labels

    def random_states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    def seen(run: Runner) -> Runner:
        def runner(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            modes.append((*now()[:2], True))
            assert not torch.is_autocast_enabled("cpu"), "a file that is shipped has no autocast"
            return run(*inputs)

        return runner

    before = random_states()
    of = evaluation(augmenting)
    assert now() == (True, False, False)
    for share in (0.3, 0.0):
        # The first ends early, so the original goes on while the second one runs.
        assert judged(of, seen(loses(share)), "final").examples < ROWS
        assert now() == (True, False, False)
    of.close()
    assert random_states() == before
    assert now() == (True, False, False)
    assert set(modes) == {(False, True, True)}


# Calibration ----------------------------------------------------------------------------------------------------------


def test_inputs_of_the_calibration_are_left_out_by_content():
    of = evaluation()
    calls = of.calibration()
    rows = torch.cat([call.args[0] for call in calls])
    assert torch.equal(rows, X[: 8 * len(rows) : 8])
    assert 64 <= len(rows) <= 80
    of.exclude([(rows,)])
    parts = [judged(of, loses(0.0), part, alpha=1e-9).of for part in ("search", "final")]
    assert sum(parts) == ROWS - len(rows)


def test_whole_calls_are_taken_where_the_batch_size_is_fixed():
    of = evaluation(whole=True)
    calls = of.calibration()
    assert [len(call.args[0]) for call in calls] == [100]
    of.exclude([call.args for call in calls])
    parts = [judged(of, loses(0.0), part, alpha=1e-9).of for part in ("search", "final")]
    assert sum(parts) == ROWS - 100


def test_only_some_calls_are_taken_where_a_score_belongs_to_a_whole_call():
    def means(run):
        for scores in hits(run, batch=8):
            yield scores.float().mean()

    of = evaluation(means)
    rows = torch.cat([call.args[0] for call in of.calibration()])
    of.exclude([(rows,)])
    parts = [judged(of, loses(0.0), part, alpha=1e-9).of for part in ("search", "final")]
    assert sum(parts) == ROWS // 8 - len(rows)
    assert len(rows) == 16


def test_a_row_has_the_same_hash_in_every_batch():
    mask, hashes = torch.tensor([[True, False]]), RowDims((0, None)).hashes
    together = hashes([X[:5], mask]).tolist()
    assert together == [int(hashes([X[row : row + 1], mask])[0]) for row in range(5)]
    assert hashes([X[2:4], mask]).tolist() == together[2:4]
    assert len(set(together)) == 5
    assert hashes([X[:2], torch.tensor(1)]).tolist() != hashes([X[:2], torch.tensor(2)]).tolist()
    assert RowDims((1,)).hashes([X[:5].T]).tolist() == RowDims((0,)).hashes([X[:5]]).tolist()
    for odd in (X[:0], X[:2].bfloat16(), X[:2, :0], torch.zeros(2, dtype=torch.bool)):
        assert len(RowDims((0,)).hashes([odd])) == len(odd)
    assert len(RowDims((None,)).hashes([torch.tensor(3.0)])) == 1


def test_a_table_with_as_many_rows_as_the_batch_is_not_cut():
    rows, table = RowDims((0, None)), torch.ones(4, 3)
    assert [len(tensor) for tensor in rows.taken([X[:4], table], slice(0, 4, 2))] == [2, 4]
    hashed = rows.hashes([X[:4], table]).tolist()
    assert hashed == [int(rows.hashes([X[row : row + 1], table])[0]) for row in range(4)]


# What is refused ------------------------------------------------------------------------------------------------------


def nothing(run):
    return iter(())


def no_scores(run):
    for rows in X.split(100):
        yield run(rows)["scores"][:0].argmax(1)


def text(run):
    run(X)
    yield "good"


def table(run):
    yield run(X)["scores"]


def ragged(run):
    yield [[1.0], [1.0, 2.0]]


def triple(run):
    yield 1.0, 1.0, 1.0


def negative(run):
    yield 1.0, -1.0


def late(run):
    for number, scores in enumerate(hits(run)):
        yield scores
        if number == 2:
            raise RuntimeError("gone")


def not_a_number(run):
    scores = run(X)["norm"]
    scores[7] = torch.nan
    yield scores


def raising(run):
    for number, scores in enumerate(hits(run)):
        yield scores / (number < 2) if number < 2 else 1 / 0


def without_calls(run):
    yield from hits(lambda x: {"scores": x})


def at_the_end(run):
    yield torch.cat(list(hits(run))).float().mean()


def of_other_arguments(run):
    yield run(X, X)


def catching(run):
    for rows in X.split(100):
        with contextlib.suppress(Exception):
            yield run(rows, rows)


def on_which_the_model_raises(run):
    yield run(X[:2])["norm"]
    yield run(X[:0])["norm"]


@pytest.mark.parametrize(
    ("evaluate", "told"),
    [
        (nothing, "evaluate yields nothing: it must yield a score for each example."),
        (no_scores, "evaluate yields nothing: it must yield a score for each example."),
        (lambda run: None, "evaluate returns None: it must yield a score for each example."),
        (lambda run: 0.93, "evaluate returns a float: it must yield a score for each example."),
        (lambda run: torch.tensor(0.93), "evaluate returns a Tensor: it must yield a score for each example."),
        (without_calls, "evaluate yields a score before it calls run: "),
        (at_the_end, "evaluate yields 1 score after 40 calls of run with 4,000 rows, and none before: it must yield"),
        (text, "evaluate yields a str as a score: it must yield a number, or a tensor, array or list of one dim"),
        (table, "evaluate yields float32[4000, 3] as a score: it must"),
        (ragged, "evaluate yields a list as a score: it must"),
        (triple, "evaluate yields a tuple of 3 values: it must yield a score, or a pair (score, weight)."),
        (negative, "evaluate yields 1 weights for 1 scores, or a weight below 0"),
        (not_a_number, "evaluate yields nan as the score of example 8: it must be finite."),
        (raising, "evaluate raises after call 3 of run: ZeroDivisionError: division by zero (test_evaluation.py:"),
        (late, "evaluate raises after call 3 of run: RuntimeError: gone (test_evaluation.py:"),
        (of_other_arguments, "evaluate doesn't call run as the model is called: "),
        (catching, "evaluate doesn't call run as the model is called: "),
        (on_which_the_model_raises, "the model raises in call 2 of run: ValueError: no rows."),
    ],
)
def test_an_evaluate_that_fails_for_the_original_is_an_error(evaluate, told):
    with pytest.raises(EvaluateError) as error:
        judged(evaluation(evaluate), loses(0.0))
    assert str(error.value).startswith(told)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("last", [100, 7])
@pytest.mark.parametrize("score", [lambda found: found, lambda found: found.float().mean()])
def test_scores_that_come_after_the_next_call_are_an_error(lag, last, score):
    def late(run):
        scores = []
        for found in hits(run, x=X[: 900 + last], labels=LABELS[: 900 + last]):
            scores.append(score(found))
            if len(scores) > lag:
                yield scores.pop(0)
        yield from scores

    with pytest.raises(EvaluateError, match="evaluate yields the scores of a call of run after the next call: it must"):
        evaluation(late)


def test_calls_before_the_first_scores_may_be_a_gallery():
    def search(run):
        gallery = [run(x)["scores"] for x in X[:300].split(100)]
        for scores in hits(run):
            yield scores & (len(gallery) == 3)

    def pairs(run):
        for one, other in zip(X[:2000].split(100), X[2000:].split(100), strict=True):
            yield run(one)["scores"].argmax(1) != run(other)["scores"].argmax(1)

    assert judged(evaluation(search), loses(0.0)).verdict == "within"
    assert judged(evaluation(pairs), loses(0.0)).verdict == "within"


def test_other_inputs_in_the_second_run_are_an_error():
    generator = torch.Generator().manual_seed(0)

    def shuffled(run):
        order = torch.randperm(ROWS, generator=generator)
        yield from hits(run, x=X[order], labels=LABELS[order])

    with pytest.raises(EvaluateError, match=r"gives run other inputs in its second run \(call 1\).* random generators"):
        judged(evaluation(shuffled), loses(0.0))


def test_other_scores_in_the_second_run_are_an_error():
    generator = torch.Generator().manual_seed(0)

    def noisy(run):
        for scores in hits(run):
            yield scores + torch.rand(len(scores), generator=generator)

    with pytest.raises(
        EvaluateError, match=r"evaluate yields other scores in its second run, for the same outputs: make"
    ):
        evaluation(noisy)
    evaluation(lambda run: (scores + torch.rand(len(scores)) for scores in hits(run)))


def test_more_or_fewer_calls_and_scores_for_the_candidate_are_an_error():
    calls = iter([1, 1, 2])

    def calling_more(run):
        run(X[:100])
        yield [1.0] * 100
        for start in range(next(calls)):
            run(X[start : start + 1])

    def by_class(run):
        for start in range(0, 400, 100):
            guessed = run(X[start : start + 100])["scores"].argmax(1)
            yield (guessed == LABELS[start : start + 100])[guessed == 0]

    def precision(run):
        for start in range(0, ROWS, 100):
            guessed = run(X[start : start + 100])["scores"].argmax(1)
            yield guessed == LABELS[start : start + 100], guessed == 0

    with pytest.raises(EvaluateError, match="calls run 2 times for the original, and more often for it"):
        judged(evaluation(calling_more), loses(0.0))
    with pytest.raises(EvaluateError, match=r"yields \d+ scores for the original and \d+ for it up to call 1 of run"):
        judged(evaluation(by_class), loses(0.3))
    with pytest.raises(EvaluateError, match=r"yields other weights for it than for the original, up to call 1 of run"):
        judged(evaluation(precision), loses(0.3))
    assert judged(evaluation(precision), loses(0.0)).verdict == "within"
    lengths = iter([300, 300, 200])
    with pytest.raises(EvaluateError, match="yields 100 scores for the original and 0 for it up to call 3"):
        judged(evaluation(lambda run: hits(run, x=X[: next(lengths)], labels=LABELS)), loses(0.0))


def test_a_candidate_without_a_score_is_refused_alone():
    def norms(run):
        for start in range(0, ROWS, 100):
            yield run(X[start : start + 100])["norm"]

    def overflowing(x):
        return x, torch.full((len(x),), torch.inf)

    def crashing(x):
        raise RuntimeError("no kernel")

    of = evaluation(norms)
    with pytest.raises(NotScored, match="evaluate yields inf as the score of example 1: it must be finite"):
        judged(of, overflowing)
    with pytest.raises(NotScored, match=r"^it raises in call 1 of run: RuntimeError: no kernel"):
        judged(of, crashing)
    assert judged(of, loses(0.0)).drop == 0


def test_an_aggregate_that_raises_or_gives_no_number_is_an_error():
    def division(statistics):
        return 1 / 0

    with pytest.raises(EvaluateError, match=r"aggregate raises on \d+ statistics: ZeroDivisionError: division by zero"):
        judged(evaluation(hits, division), loses(0.0))
    with pytest.raises(EvaluateError, match=r"aggregate returns None: it must return a number\."):
        judged(evaluation(hits, lambda statistics: None), loses(0.0))
    with pytest.raises(EvaluateError, match="`aggregate` returned nan for"):
        judged(evaluation(hits, lambda statistics: float("nan")), loses(0.0))


def test_evaluate_may_write_to_outputs_that_the_model_holds():
    class WithTable(Net):
        table = torch.ones(2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {**super().forward(x), "table": self.table}

    def writing(run):
        for x in X.split(100):
            yield run(x)["table"].mul_(2).mean().repeat(100) == 2

    of = Evaluation(
        Task(writing, None, Adapter(WithTable().eval(), (X[:2],)), CPU, lambda tensors: None, RowDims((0,)), False)
    )
    found = judged(of, lambda x: (x, x.norm(dim=1), torch.ones(2)))
    assert (found.score, found.drop) == (1.0, 0.0)


def test_an_evaluate_that_fails_before_it_calls_a_candidate_is_an_error():
    data = iter([X, X])

    def once(run):
        x = next(data, None)
        yield run(x[:100])["scores"].argmax(1) == LABELS[:100]

    of = evaluation(once)
    with pytest.raises(
        EvaluateError, match=r"evaluate raises before it calls run: TypeError: 'NoneType' object is not"
    ):
        judged(of, loses(0.0))


def test_a_budget_that_forgot_its_percent_sign_is_told():
    for budget, notes in (("drop<=0.5", 1), ("drop<=50%", 0), ("drop<=0.005", 0)):
        of = evaluation(lambda run: (each * 1.0 for each in hits(run)))
        test = PairedTest(0.5, 0.05)
        of.metric("it", loses(0.1), test, "final", parse_accuracy(budget))
        told = [note for note in of.notes if "between 0 and 1" in note]
        assert len(told) == notes, budget
        assert not told or told == [
            "all scores are between 0 and 1, where drop<=0.5 is 50 points: for 0.5 points write drop<=0.5%"
        ]


def test_a_metric_that_says_nothing_is_told():
    of = evaluation()
    assert judged(of, loses(0.0)).verdict == "within"
    (note,) = of.notes
    assert note.startswith("the original's score is 1 in each of ")
    assert note.endswith("examples: check the labels that evaluate compares with")
    of = evaluation(lambda run: hits(run, labels=LABELS + 10))
    with pytest.raises(
        NotScored, match=r"the original's score is 0 in each of [\d,]+ examples, and no lower for the candidate"
    ):
        judged(of, loses(0.0))
    assert judged(of, loses(0.0), "search").verdict == "within", "the final test may have other examples"
    assert len(of.notes) == 1
    of = evaluation(hits, lambda statistics: 0.0)
    with pytest.raises(
        NotScored, match="the original's metric is 0, and no lower for the candidate, so a budget says nothing"
    ):
        judged(of, loses(0.0))
    of = evaluation(lambda run: hits(run, labels=LABELS.flip(0)))
    judged(of, loses(0.0))
    assert of.notes == ()


def test_evaluate_is_a_function_of_one_argument_and_needs_its_budget():
    exact, drop = parse_accuracy("0.99"), BUDGET
    check_evaluate(None, None, exact)
    check_evaluate(hits, len, drop)
    check_evaluate(lambda *arguments: (), max, drop)
    with pytest.raises(UsageError, match="evaluate has an effect only with a budget"):
        check_evaluate(hits, None, exact)
    with pytest.raises(UsageError, match="a metric needs `evaluate`"):
        check_evaluate(None, None, drop)
    with pytest.raises(
        UsageError, match=r"evaluate is a float; it must be a function of one argument, evaluate\(run\)"
    ):
        check_evaluate(0.9, None, drop)
    with pytest.raises(UsageError, match=r"evaluate takes 2 arguments; it must take one, evaluate\(run\)\."):
        check_evaluate(lambda model, data: (), None, drop)
    with pytest.raises(UsageError, match=r"aggregate takes 0 arguments; it must take one, aggregate\(statistics\)"):
        check_evaluate(hits, lambda: 0.0, drop)

    async def waiting(run):
        yield 1.0

    with pytest.raises(UsageError, match=r"evaluate is an async function; it must be a plain one, evaluate\(run\)"):
        check_evaluate(waiting, None, drop)


# The budget -----------------------------------------------------------------------------------------------------------


def test_a_drop_is_parsed_with_its_unit_and_confidence():
    budget = parse_accuracy("drop<=0.5%")
    assert (budget.drop, budget.percent, budget.confidence, budget.is_exact) == (0.005, True, 0.95, False)
    assert str(budget) == "drop 0.5 points at 95 %"
    budget = parse_accuracy("0.99, drop<=0.3", 0.9)
    assert (budget.cosine, budget.drop, budget.percent, budget.confidence) == (0.99, 0.3, False, 0.9)
    assert str(budget) == "cosine 0.99 and drop 0.3 at 90 %"
    for wrong in ("drop<=0%", "drop<=-1%", "drop<=", "drop=1%", "drop<1%", "drop<=1%,drop<=2%", "drop<=nan"):
        with pytest.raises(UsageError):
            parse_accuracy(wrong)
    for wrong in ("100%", "sure", "20%", 1.5):
        with pytest.raises(UsageError, match="confidence must be from 50% to below 100%"):
            parse_accuracy("drop<=1%", wrong)
    with pytest.raises(UsageError, match="confidence has an effect only with a budget"):
        ExportSettings(output=None, accuracy="0.99", confidence="90%").check()  # type: ignore[arg-type]
