"""The result of training tuning for people: table, code that runs, TOML both ways, page and files."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from optimize_export.errors import UsageError
from optimizer import optimize, report_of
from optimizer.model import place_of_loss
from optimizer.training import Candidate, Setup, TrainingTuning
from optimizer.training.showing import JSON, PAGE, TOML, lines, read_setup, table_rows
from optimizer.tuning import Latency, Ratio

X = torch.randn(16, 3, 8, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        for block in self.blocks:
            x = block(x)
        return x


def candidate(name, seconds, setup=None, **given):
    rounds = (seconds,) * 7
    gain = Ratio(0.01 / seconds, 0.0099 / seconds, 0.0101 / seconds, 7)
    return Candidate(name, setup or Setup(), Latency(seconds, seconds, rounds), gain, 16 / seconds, **given)


def tuning(setup=None, **given):
    setup = setup or Setup(precision="bf16", passes=("fold-conv-bias",))
    found = {"loss_error": 0.0012, "gradient_cosine": 0.99987, "loss_change": 0.01, "loss_spread": 0.02}
    candidates = (
        candidate("as it is", 0.01, peak=3 << 20, standing="original"),
        candidate("fused optimizer", 0.009, Setup(optimizer="fused"), standing="bit-identical", peak=3 << 20),
        candidate("fold-conv-bias", 0.008, standing="within rounding", taken=True, differences={"loss_times": 0.7}),
        Candidate("bf16 autocast", setup, taken=True, standing="declared difference"),
        candidate("fp16 autocast", 0.006, standing="refused", peak=1 << 20, note="its loss isn't finite"),
        Candidate("whole compiled", note="it takes longer than the time for tuning"),
        candidate("recommended", 0.005, setup, standing="declared difference", peak=2 << 20)
        if setup != Setup()
        else candidate("as it is", 0.01, standing="original"),
    )
    last = replace(candidates[-1], differences=found)
    given = {"notes": ("<a note>",), **given}
    return TrainingTuning("Net", "cpu", 16, 1, 7, 12.5, (*candidates[:-1], last), setup, **given)


# The table -----------------------------------------------------------------------------------------------------------


def test_the_table_has_every_candidate_with_its_figures():
    told = table_rows(tuning())
    assert told[2] == (
        "fold-conv-bias *",
        "8 ms",
        "2,000",
        "1.25 (1.24 to 1.26)",
        "",
        "within rounding (0.7 times the noise)",
        "",
    )
    assert told[5][1:] == ("", "", "", "", "not proven", "it takes longer than the time for tuning")
    assert told[6][5] == (
        "declared difference (loss 0.0012, cosine 0.999870, loss after the steps +1 %, between seeds 2 %)"
    )
    text = str(tuning())
    assert "recommended: fold-conv-bias + bf16 autocast: 2.00 (1.98 to 2.02) times as fast as the step as it is" in text
    assert "peak 2.0 MiB instead of 3.0 MiB" in text
    assert "note: <a note>" in text
    assert text.rstrip().endswith("optimizer.zero_grad()")


def test_the_times_are_those_of_one_moment():
    """Each was timed next to the step as it is, which took longer in busy moments."""
    made = tuning()
    busy = replace(made.candidates[1], latency=Latency(0.09, 0.09, (0.09,) * 7), samples=16 / 0.09)
    told = table_rows(replace(made, candidates=(made.candidates[0], busy, *made.candidates[2:])))
    assert told == table_rows(made)
    larger = replace(busy, setup=Setup(batch_size=64), samples=64 / 0.09)
    assert table_rows(replace(made, candidates=(made.candidates[0], larger)))[1][1:3] == ("36 ms", "1,778")


def test_nothing_that_pays_is_said_so():
    made = tuning(Setup())
    made = replace(made, candidates=made.candidates[:3])
    assert "recommended: the step as it is; nothing that was tried pays here" in [*lines(made)]
    assert '<tr class="ship"><td class="n">1</td><td>as it is' in made._repr_html_()


# The code ------------------------------------------------------------------------------------------------------------

# Each with the sizes of the batches that its loop runs.
SIZES = {
    Setup(): [16],
    Setup(precision="bf16", channels_last=True, passes=("fold-conv-bias",), optimizer="fused", workers=0): [16],
    Setup(precision="tf32", optimizer="foreach", set_to_none=False, cudnn_benchmark=True): [16],
    Setup(precision="fp16", batch_size=8, accumulate=2): [4] * 4,
    Setup(passes=("fold-conv-bias", "insert-checkpoints:memory_budget=0.9"), accumulate=4): [4] * 4,
}
SETUPS = [*SIZES]


@pytest.mark.parametrize("setup", SETUPS)
def test_the_code_to_paste_trains_as_it_is(setup):
    torch.manual_seed(0)
    model, sizes = Net(), []

    def training_step(model, batch):
        images, labels = batch
        sizes.append(len(images))
        assert images.is_contiguous(memory_format=torch.channels_last) or not setup.channels_last
        return nn.functional.cross_entropy(model(images), labels)

    dataset = TensorDataset(X, torch.arange(16) % 8)
    loader = torch.utils.data.DataLoader(dataset, 16)
    before = [one.clone() for one in model.parameters()]
    settings = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    names = {"model": model, "training_step": training_step, "example_inputs": (X,)}
    code = tuning(setup, optimizer="SGD").code
    try:
        exec(code, {**names, "dataset" if "(dataset" in code else "loader": dataset if "(dataset" in code else loader})
    finally:
        torch.set_float32_matmul_precision(settings[0])
        torch.backends.cudnn.benchmark = settings[1]
    assert sizes == SIZES[setup]
    assert any(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(torch.isfinite(one).all() for one in model.parameters())


def test_the_code_with_an_unknown_optimizer_and_compiled_blocks(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    paths = tuple(f"blocks.{number}" for number in range(3))
    code = tuning(Setup(compile="blocks", optimizer="fused"), optimizer="Lion", blocks=paths).code
    assert "# Yours: model, training_step, loader, optimizer." in code
    assert "# Make your optimizer with fused=True." in code
    model = Net()
    names = {"model": model, "training_step": lambda model, batch: model(batch).sum(), "loader": [X]}
    exec(code, {**names, "optimizer": torch.optim.SGD(model.parameters(), 0.1)} | {"__name__": "pasted"})
    assert compiled == [*model.blocks]


def test_the_code_takes_the_loss_from_what_the_step_returns_and_keyword_arguments():
    made = tuning(Setup(passes=("fold-conv-bias",)), loss='["loss"]', example=("example_kwargs",), optimizer="SGD")
    names = {"model": Net(), "training_step": lambda model, x: {"loss": model(x).sum()}, "loader": [X]}
    exec(made.code, {**names, "example_kwargs": {"x": X}})
    assert place_of_loss({"loss": X.sum()}) == '["loss"]'
    assert place_of_loss((X.sum(), X)) == "[0]"
    assert place_of_loss(X.sum()) == ""


def test_the_code_for_a_gpu_moves_the_model_and_the_batches():
    setup = Setup(precision="fp16", pin_memory=True, workers=4, compile="whole")
    code = replace(tuning(setup), device="NVIDIA H200").code
    compile(code, "pasted", "exec")
    for part in (
        'model.to("cuda")\nmodel.compile()',
        'value.to("cuda", non_blocking=True)',
        "DataLoader(dataset, batch_size=16, num_workers=4, persistent_workers=True, pin_memory=True)",
        'torch.amp.GradScaler("cuda")',
        "scaler.scale(loss).backward()",
    ):
        assert part in code


# TOML ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", [*SETUPS, Setup(compile="blocks", workers=2, pin_memory=True)])
def test_the_toml_is_read_as_it_was_written(tmp_path, setup):
    (tmp_path / TOML).write_text(tuning(setup).to_toml(), encoding="utf-8")
    assert read_setup(tmp_path / TOML) == read_setup(tmp_path) == setup


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "doesn't exist"),
        ("x =", "isn't valid TOML"),
        ("[tool]\nx = 1", r"it has no table \[setup\]"),
        (
            '[made]\nby = "optimize-export 9"\n[setup]\nfuture = 1',
            "was made by optimize-export 9, .* no setting future",
        ),
        ('[setup]\nprecision = "fp4"', 'precision can\'t be "fp4"'),
        ("[setup]\npasses = [1]", r"passes can't be \[1\]"),
        ("[setup]\nworkers = true", "workers can't be true"),
    ],
)
def test_what_is_no_training_toml_is_told(tmp_path, text, told):
    path = tmp_path / "my.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=told):
        optimize(Net(), choices=path, mode="training")


def test_optimize_takes_the_passes_of_a_file_or_a_tuning_and_tells_the_rest(tmp_path):
    setup = Setup(precision="bf16", passes=("fold-conv-bias",), optimizer="fused", workers=2)
    tuning(setup).save(tmp_path / "my.toml")
    fast = optimize(Net(), choices=tmp_path / "my.toml", mode="training", example_inputs=(X,))
    (record,) = report_of(fast).passes
    assert (record.name, record.status) == ("fold-conv-bias", "applied")
    notes = [note for note in report_of(fast).notes if "my.toml" in note]
    assert notes == [
        "The choices of my.toml that your training loop makes: run the step under `torch.autocast` with torch.bfloat16; "
        "pass `fused=True` to the optimizer; pass `num_workers=2` to the DataLoader."
    ]
    same = optimize(Net(), choices=tuning(setup), mode="training", example_inputs=(X,))
    assert [record.status for record in report_of(same).passes] == ["applied"]
    assert notes[0].replace("my.toml", "tune_training") in report_of(same).notes
    with pytest.raises(UsageError, match="passes and choices"):
        optimize(Net(), ["fold-conv-bias"], choices=tmp_path / "my.toml", mode="training")
    with pytest.raises(UsageError, match='mode="training"'):
        optimize(Net(), choices=tmp_path / "my.toml")


# Files and pages -----------------------------------------------------------------------------------------------------


def test_the_files_are_written_together_and_replace_nothing(tmp_path, monkeypatch):
    made = tuning()
    made.save(tmp_path / "out" / "tuned")
    folder = tmp_path / "out" / "tuned"
    assert {each.name for each in folder.iterdir()} == {TOML, JSON, PAGE}
    assert TrainingTuning.from_json(json.loads((folder / JSON).read_text(encoding="utf-8"))) == made
    with pytest.raises(UsageError, match="already exists"):
        made.save(folder)
    monkeypatch.setattr("pathlib.Path.write_bytes", _full)
    with pytest.raises(OSError, match="full"):
        made.save(tmp_path / "half.toml")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def _full(self, *_, **__):
    self.touch()
    raise OSError("full")


def test_the_page_escapes_and_shows_all():
    made = tuning()
    html = made._repr_html_()
    assert "&lt;a note&gt;" in html
    assert "<a note>" not in html
    assert html.count("<tr") == 8
    # The points of the plot: those with a time and a peak; the refused one is hollow.
    assert html.count("<circle") == 4
    assert 'circle class="refused"' in html
    assert "torch.autocast(&#34;cpu&#34;, torch.bfloat16)" in html
    assert "2.00 times" in html
