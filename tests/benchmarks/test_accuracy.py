"""The trained networks' data, and the tables of the accuracy benchmark; training takes minutes, so no test does it."""

import pytest
import torch
from benchmark_runs import imported


def test_a_chunk_is_the_same_in_each_draw_and_no_other_part_has_it():
    with imported("trained") as trained:
        drawn = {trained._pictures: (256, 3, 40, 40), trained._texts: (256, 32), trained.pitch.tones: (256, 1024)}
        for chunk, shape in drawn.items():
            network = trained.Trained("any", torch.nn.Identity(), chunk is trained._texts, chunk)
            parts = [next(network.test()), next(network.validation()), next(network.calibration()), chunk(0)]
            assert {tuple(inputs.shape) for inputs, _ in parts} == {shape}
            classes = 360 if chunk is trained.pitch.tones else trained.CLASSES
            assert all(bool(((labels >= 0) & (labels < classes)).all()) for _, labels in parts)
            assert len({inputs.double().sum().item() for inputs, _ in parts}) == 4
            assert torch.equal(next(network.test())[0], parts[0][0])
        assert sum(len(labels) for _, labels in network.test(1000)) == 1024


@pytest.mark.zoo
def test_the_voice_encoder_knows_the_speakers():
    with imported("trained") as trained:
        network = trained.trained("voices")
        inputs, labels = next(network.test())
    assert inputs.shape == (256, 160, 40)
    with torch.no_grad():
        right = network.model(inputs).argmax(1) == labels
    # By chance it would be a 16th.
    assert right.double().mean() > 0.85


@pytest.mark.parametrize("name", ["mobilenet_v3", "efficientnet", "resnet", "vit", "text"])
def test_each_network_learns(name):
    with imported("trained") as trained:
        trained.declare_torchvision()
        recipe = trained.RECIPES[name]
        torch.manual_seed(0)
        model = trained._Hybrid(trained.resnet()) if name == "vit" else recipe.build()
        inputs, labels = (trained._texts if recipe.is_text else trained._pictures)(0)
        optimizer = torch.optim.AdamW(model.parameters(), recipe.rate)
        losses = []
        for _ in range(4):
            losses.append(torch.nn.functional.cross_entropy(model(inputs[:16]), labels[:16]))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0]


def test_a_file_whose_bound_is_above_the_budget_counts_as_float():
    with imported("accuracy") as accuracy:

        def figures(upper, speed_up):
            spread = {"median": speed_up, "low": speed_up, "high": speed_up}
            return {"choice": "", "top1": 0.9, "drop": 0.001, "upper": upper, "seconds": 1.0, "speed_up": spread}

        results = [
            {"model": name, "contenders": {"float32": figures(0.0, 1.0), "ours": figures(0.004, 2.0), "nncf": figures(upper, 3.0)}}
            for name, upper in (("a", 0.004), ("b", 0.006))
        ]  # fmt: skip
        versions = {
            "cpu": "x",
            "cpus": 1,
            "threads": 1,
            "device": "cpu",
            "load_before": 0,
            "python": "3",
            "versions": {},
        }
        table, means = accuracy.tables_of(results, {**versions, "date": "today"})
        assert ("b", "NNCF's quantize, in onnxruntime", "90.00%", "+0.10", "0.60", "3.00", "") in table.rows
        assert ("**optimize-export, drop<=0.5%**", "2.00", "2 of 2") in means.rows
        assert ("NNCF's quantize, in onnxruntime", "1.73", "1 of 2") in means.rows
