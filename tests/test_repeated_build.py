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


def built(folder, seed, formats, root, model):
    """Build a bundle in `folder` with the command, and return its files by path."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "net.py").write_text(model)
    command = [sys.executable, "-m", "optimizer", "net.py", "--output", "out", "--formats", formats, "--device", "cpu"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "PYTHONHASHSEED": seed,
        "TMPDIR": str(folder / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "tmp" / "cache"),
        "SOURCE_DATE_EPOCH": "86400",
    }
    done = subprocess.run(
        [*command, "--metadata", "author=Jane"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out = folder / "out"
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "model"),
    [
        ("torchscript,onnx,pt2", MODEL),
        ("torchscript", SCRIPTED),
        pytest.param("aoti", MODEL, marks=pytest.mark.zoo),
    ],
    ids=["three", "scripted", "aoti"],
)
def test_a_second_build_gives_the_same_bytes(formats, model, tmp_path, pytestconfig):
    first = built(tmp_path / "a", "1", formats, pytestconfig.rootpath, model)
    second = built(tmp_path / "somewhere" / "else", "2", formats, pytestconfig.rootpath, model)
    assert model is MODEL or b"Final[" in first["model.torchscript.pt"]
    assert [path for path in first.keys() | second.keys() if first.get(path) != second.get(path)] == []
    assert len(first) == 6 + formats.count(",") + 1
    manifest = json.loads(first["manifest.json"])
    assert manifest["created"] == "1970-01-02T00:00:00Z"
    # Durations differ between builds, so they are left out if SOURCE_DATE_EPOCH asks for the same bytes.
    report = json.loads(first["report.json"])
    assert {each["seconds"] for each in (*manifest["passes"], report["optimize"])} == {None}
