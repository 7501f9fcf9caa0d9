"""Two builds of one input, in separate processes and folders, give the same bundle, byte for byte."""

import json
import os
import subprocess
import sys

import pytest

MODEL = """
import torch
from torch import nn
from torch.nn import functional

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.heads = nn.ModuleDict({name: nn.Linear(8, 4) for name in ("logits", "boxes", "mask", "depth")})

    def forward(self, image, mask=None):
        tokens = functional.gelu(self.norm(self.conv(image))).flatten(2).transpose(1, 2)
        tokens, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        pooled = tokens.mean(1) if mask is None else (tokens * mask.flatten(1).unsqueeze(-1)).mean(1)
        found = {name: head(pooled) for name, head in self.heads.items()}
        return found | {"best": found["logits"].argmax(1)}

torch.manual_seed(0)
model = Net()
example_inputs = (torch.randn(2, 3, 6, 6),)
example_kwargs = {"mask": torch.rand(2, 6, 6)}
"""


# A branch on data: TorchScript scripts this model, as it can't be traced.
SCRIPTED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.second = nn.Linear(4, 6, bias=False)

    def forward(self, x):
        if x.sum() > 0:
            return self.first(x)
        return self.second(x)

torch.manual_seed(0)
model = Net()
example_inputs = (torch.randn(2, 4),)
"""


# Builds each bundle of the arguments, which are names and formats in turn.
BUILD = """
import sys
from optimizer.command.cli import main

for name, formats in zip(sys.argv[1::2], sys.argv[2::2]):
    options = ["--formats", formats, "--device", "cpu", "--metadata", "author=Jane"]
    if code := main([f"{name}.py", "--output", f"out/{name}", *options]):
        sys.exit(code)
"""


def built(folder, seed, root, models):
    """Build the bundles in `folder` in one process, and return the files of each by path."""
    (folder / "tmp").mkdir(parents=True)
    for name, (_, model) in models.items():
        (folder / f"{name}.py").write_text(model)
    arguments = [each for name, (formats, _) in models.items() for each in (name, formats)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "PYTHONHASHSEED": seed,
        "TMPDIR": str(folder / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "tmp" / "cache"),
        "SOURCE_DATE_EPOCH": "86400",
    }
    command = [sys.executable, "-c", BUILD, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {
        name: {path.name: path.read_bytes() for path in (folder / "out" / name).rglob("*") if path.is_file()}
        for name in models
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "models",
    [
        {"net": ("torchscript,onnx,pt2", MODEL), "scripted": ("torchscript", SCRIPTED)},
        pytest.param({"net": ("aoti", MODEL)}, marks=pytest.mark.zoo),
    ],
    ids=lambda models: "-".join(models),
)
def test_a_second_build_gives_the_same_bytes(models, tmp_path, pytestconfig):
    builds = (tmp_path / "a", "1"), (tmp_path / "somewhere" / "else", "2")
    first, second = (built(*build, pytestconfig.rootpath, models) for build in builds)
    for name, (formats, _) in models.items():
        mine, theirs = first[name], second[name]
        assert name == "net" or b"Final[" in mine["model.torchscript.pt"]
        assert [path for path in mine.keys() | theirs.keys() if mine.get(path) != theirs.get(path)] == []
        assert len(mine) == 6 + formats.count(",") + 1
        manifest = json.loads(mine["manifest.json"])
        assert manifest["created"] == "1970-01-02T00:00:00Z"
        # Durations differ between builds, so they are left out if SOURCE_DATE_EPOCH asks for the same bytes.
        report = json.loads(mine["report.json"])
        assert {each["seconds"] for each in (*manifest["passes"], report["optimize"])} == {None}
