"""The benchmark of correctness: its judge tells right from wrong, and its cases match their descriptions."""

import pytest
import torch
from benchmark_runs import imported, written
from torch import nn

CASES = ["conv2d", "conv called twice", "branch on data"]


@pytest.fixture(scope="module")
def correctness():
    with imported("correctness") as module:
        yield module


@pytest.fixture
def verdict(correctness):
    """Judge a function that makes a callable from a model and its example inputs."""

    def judged(make, case="conv2d", refusals=()):
        outcome = correctness.outcome_of(correctness.Contender("mine", make, refusals), correctness.CASES[case])
        return outcome.verdict, outcome.folded, outcome.reason

    return judged


def folded_by_hand(model, example):
    """Fold the model's first convolution and BatchNorm."""
    conv = torch.nn.utils.fuse_conv_bn_eval(model[0], model[1])
    return nn.Sequential(conv, model[2])


def test_a_right_fold_is_right_and_what_folds_nothing_is_refused(verdict):
    assert verdict(folded_by_hand) == ("right", 1, "")
    assert verdict(lambda model, example: model) == ("refused", 0, "left as it was")


def test_an_error_that_says_no_is_refused_and_another_one_is_a_crash(verdict):
    def raises(model, example):
        raise NotImplementedError("no such layers")

    assert verdict(raises, refusals=(NotImplementedError,)) == ("refused", None, "NotImplementedError: no such layers")
    assert verdict(raises) == ("crashed", None, "NotImplementedError: no such layers")


def off(model, example):
    fast = folded_by_hand(model, example)
    with torch.no_grad():
        fast[0].weight[3, 2, 1, 0] *= 1.0001
    return fast


def changed(change):
    return lambda model, example: lambda x: change(model(x))


@pytest.mark.parametrize(
    ("make", "case", "reason"),
    [
        (lambda model, example: nn.Sequential(model[0], model[2]), "conv2d", "batch 2: output 0 is off by "),
        (off, "conv2d", ""),
        # A frozen branch.
        (lambda model, example: lambda x: model.bn(model.conv(x)).tanh() - 1, "branch on data", "batch 2, unseen inputs: "),
        *((changed(change), "conv2d", "") for change in (
            lambda y: y * torch.nan, torch.Tensor.double, lambda y: y[:, :3], lambda y: (y,), lambda y: {"y": y},
            lambda y: None,
        )),
    ],
)  # fmt: skip
def test_what_is_wrong_is_called_wrong(verdict, make, case, reason):
    kind, _, said = verdict(make, case)
    assert kind == "wrong"
    assert said.startswith(reason)


def test_another_batch_and_unseen_inputs_are_looked_at(verdict):
    def only_of(test, where):
        def make(model, example):
            fast = folded_by_hand(model, example)
            return lambda x: fast(x) if test(x, example[0][0]) else fast(x) * 1.5

        kind, _, reason = verdict(make)
        assert kind == "wrong"
        assert reason.startswith(where)

    only_of(lambda x, example: len(x) == 2, "batch 1: ")
    only_of(lambda x, example: len(x) != 5, "batch 5: ")
    only_of(lambda x, example: len(x) != 2 or torch.equal(x, example), "batch 2, unseen inputs: ")


def test_a_model_that_is_changed_is_wrong(verdict):
    def values(model, example):
        model[1].running_mean += 1e-3
        return model

    def modes(model, example):
        fast = folded_by_hand(model, example)
        model[1].train()
        return fast

    def modules(model, example):
        fast = folded_by_hand(model, example)
        model[1] = nn.Identity()
        return fast

    for make in (values, modes, modules):
        kind, _, reason = verdict(make)
        assert kind == "wrong"
        assert reason.startswith("the model itself is changed: ")


def test_every_case_is_what_it_says(correctness):
    for case in correctness.CASES.values():
        expected = correctness.Expected.of(case)
        assert 0 <= case.folds <= expected.norms, case.name
        assert expected.norms > 0, case.name
        assert all(allowed > 0 for allowed in expected.allowed), case.name
        first, unseen = expected.truths[0][0], expected.truths[-1][0]
        assert (first - unseen).abs().max() > 10 * expected.allowed[0], case.name


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return written("correctness", tmp_path_factory.mktemp("correctness"), f"--cases={';'.join(CASES)}", "--check")


def test_tells_what_became_of_every_contender(done):
    figures, markdown, process = done
    assert figures["missed"] == []
    found = {
        result["case"]: {
            name: (outcome["verdict"], outcome["folded"]) for name, outcome in result["contenders"].items()
        }
        for result in figures["results"]
    }
    right, wrong = ("right", 1), ("wrong", 1)
    assert found["conv2d"] == {"ours": right, "fuse": right, "inductor": right, "jit": right}
    assert found["conv called twice"] == {"ours": right, "fuse": wrong, "inductor": wrong, "jit": right}
    assert found["branch on data"]["ours"] == right
    assert found["branch on data"]["fuse"] == ("refused", None)
    for case in CASES:
        assert f"| {case} |" in markdown
        assert case in process.stdout
    assert figures["environment"]["date"] in markdown


def test_check_fails_where_a_fold_is_missed(tmp_path, correctness):
    results = [
        {"case": "a", "folds": 1, "contenders": {"ours": {"verdict": "refused", "folded": 0, "reason": "no", "notes": []}}},
        {"case": "b", "folds": 0, "contenders": {"ours": {"verdict": "wrong", "folded": 1, "reason": "off", "notes": []}}},
        {"case": "c", "folds": 0, "contenders": {"ours": {"verdict": "crashed", "folded": None, "reason": "E", "notes": []}}},
        {"case": "d", "folds": 0, "contenders": {"ours": {"verdict": "refused", "folded": 0, "reason": "", "notes": []}}},
        {"case": "e", "folds": 1, "contenders": {"ours": {"verdict": "right", "folded": 1, "reason": "", "notes": []}}},
    ]  # fmt: skip
    assert correctness.misses(results) == ["a: 0 of 1 folded: no", "b: wrong: off", "c: crashed: E"]
