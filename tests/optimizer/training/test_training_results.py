"""The records of a tuned training step."""

from __future__ import annotations

import json

from optimizer.training import Candidate, Setup, TrainingTuning
from optimizer.training.results import DECLARED, ORIGINAL
from optimizer.tuning import Latency, Ratio


def test_the_records_survive_a_json_file() -> None:
    setup = Setup(precision="bf16", passes=("fold-conv-bias",), workers=2, batch_size=64, accumulate=4)
    latency = Latency(0.1, 0.2, (0.1, 0.2))
    row = Candidate(
        "bf16", setup, latency, Ratio(2.0, 1.5, 2.5, 7), 320.0, 1024, DECLARED, {"loss_error": 1e-3}, True, "A note."
    )
    first = Candidate("as it is", latency=latency, standing=ORIGINAL)
    tuning = TrainingTuning("Net", "cpu", 32, 2, 7, 12.5, (first, row), setup, ("Said.",), "SGD")
    assert TrainingTuning.from_json(json.loads(json.dumps(tuning.to_json()))) == tuning


def test_setups_are_combined() -> None:
    one, other = Setup(channels_last=True, passes=("a",)), Setup(precision="bf16", passes=("b", "a"))
    assert one | other == Setup(precision="bf16", channels_last=True, passes=("a", "b"))
    assert Setup() | one == one == one | Setup()
