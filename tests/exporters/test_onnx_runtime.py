import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import exporters

RUN = """
import sys
from exporters import load_artifact
import torch
from pathlib import Path
(output,) = load_artifact("onnx", Path(sys.argv[1]))(torch.zeros(2, 4))
print(tuple(output.shape))
"""


@pytest.mark.slow
def test_onnxruntime_leaves_nothing_in_the_home_folder(tmp_path):
    home, file = tmp_path / "home", tmp_path / "model.onnx"
    home.mkdir()
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 4)) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", value[:1], value[1:])
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), file)
    kept = {
        name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    }

    done = subprocess.run(
        [sys.executable, "-c", RUN, str(file)],
        env={**kept, "HOME": str(home)},
        cwd=Path(exporters.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "(2, 4)\n", done.stderr
    assert list(home.rglob("*")) == []
