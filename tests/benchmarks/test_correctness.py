"""The benchmark of correctness: its judge tells right from wrong, and its cases match their descriptions."""

import json
from functools import partial

import pytest
import torch
from benchmark_runs import imported, run_benchmark
from torch import nn

CASES = ["conv2d", "conv called twice", "branch on data"]


run = partial(run_benchmark, "correctness")


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


def test_a_right_fold_is_right(verdict):
    assert verdict(folded_by_hand) == ("right", 1, "")


def test_what_folds_nothing_is_refused(verdict):
    assert verdict(lambda model, example: model) == ("refused", 0, "left as it was")


def test_an_error_that_says_no_is_refused_and_another_one_is_a_crash(verdict):
    def raises(model, example):
        raise NotImplementedError("no such layers")

    assert verdict(raises, refusals=(NotImplementedError,)) == ("refused", None, "NotImplementedError: no such layers")
    assert verdict(raises) == ("crashed", None, "NotImplementedError: no such layers")


def test_a_batch_norm_that_is_left_out_is_wrong(verdict):
    kind, _, reason = verdict(lambda model, example: nn.Sequential(model[0], model[2]))
    assert kind == "wrong"
    assert reason.startswith("batch 2: output 0 is off by ")


def test_a_weight_that_is_off_by_a_ten_thousandth_is_wrong(verdict):
    def off(model, example):
        fast = folded_by_hand(model, example)
        with torch.no_grad():
            fast[0].weight[3, 2, 1, 0] *= 1.0001
        return fast

    assert verdict(off)[0] == "wrong"


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


def test_a_frozen_branch_is_wrong(verdict):
    kind, _, reason = verdict(lambda model, example: lambda x: model.bn(model.conv(x)).tanh() - 1, "branch on data")
    assert kind == "wrong"
    assert reason.startswith("batch 2, unseen inputs: ")


def test_outputs_that_are_no_numbers_or_of_another_kind_are_wrong(verdict):
    for change in (
        lambda y: y * torch.nan,
        lambda y: y.double(),
        lambda y: y[:, :3],
        lambda y: (y,),
        lambda y: {"y": y},
        lambda y: None,
    ):
        kind, _, _ = verdict(lambda model, example, change=change: lambda x: change(model(x)))
        assert kind == "wrong"


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


def test_a_case_is_the_same_at_every_call(correctness):
    for case in correctness.CASES.values():
        first, second = case.build().state_dict(), case.build().state_dict()
        assert all(torch.equal(first[name], second[name]) for name in first), case.name


def test_the_inputs_of_a_case_are_not_those_of_its_other_draw(correctness):
    case = correctness.CASES["conv2d"]
    (first,), (again,), (other,) = (case.inputs(2, number)[0] for number in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("correctness")
    process = run(
        f"--cases={';'.join(CASES)}",
        f"--json={folder / 'correctness.json'}",
        f"--markdown={folder / 'correctness.md'}",
        "--check",
    )
    return json.loads((folder / "correctness.json").read_text()), (folder / "correctness.md").read_text(), process


def test_tells_what_became_of_every_contender(done):
    figures, markdown, process = done
    assert process.returncode == 0, process.stderr
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
