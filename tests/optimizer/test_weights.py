"""Load weights from users' files."""

import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from user_folder import refused

from exporters.isolation import torchscript_allowed
from optimizer.command.loading import load


@pytest.fixture
def state():
    return {"linear.weight": torch.randn(3, 4), "linear.bias": torch.randn(3)}


def assert_filled(loaded, state):
    assert torch.equal(loaded.model.linear.weight, state["linear.weight"])
    assert torch.equal(loaded.model.linear.bias, state["linear.bias"])


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.pth", "w.bin", "old.pt"])
def test_weights_files(write, tmp_path, state, name):
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=name != "old.pt")
    loaded = load(str(write("")), weights=path)
    assert_filled(loaded, state)
    assert loaded.notes == ()


def test_compressed_weights_files(write, tmp_path, state):
    """Plain `torch.load` decompresses the records; memory-mapping the file would give compressed bytes."""
    torch.save(state, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as stored,
        zipfile.ZipFile(tmp_path / "w.pt", "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))
    assert_filled(load(str(write("")), weights=tmp_path / "w.pt"), state)
    with torch.utils.serialization.config.patch({"load.mmap": True}):
        path = write("with torch.device('meta'):\n    model = Net()")
        assert_filled(load(str(path), weights=tmp_path / "w.pt"), state)


OTHERS = {"linear.weight": torch.ones(3, 4), "linear.bias": torch.ones(3)}
OPTIMIZER = {"state": {0: {"step": torch.ones(()), "exp_avg": torch.ones(3, 4)}}, "param_groups": [{"lr": 0.1}]}
KEYS = ["state_dict", "model", "model_state_dict", "net", "ema", "module", "params", "generator"]


@pytest.mark.parametrize("key", KEYS)
def test_nested_weights(write, tmp_path, state, key):
    torch.save({"epoch": torch.tensor(3), "optimizer": OPTIMIZER, key: state, "best": 0.5}, tmp_path / "w.pt")
    loaded = load(str(write("")), weights=tmp_path / "w.pt")
    assert_filled(loaded, state)
    assert loaded.notes == (f"The weights were taken from the key '{key}' of w.pt.",)


def prefixed(prefix, state):
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("made", "key", "note"),
    [
        (lambda state: {"a": {"b": {"c": state}}}, "", "The weights were taken from the key 'a.b.c' of w.pt."),
        (
            lambda state: {"gen": state, "dis": {"x": torch.ones(2)}},
            "",
            "The weights were taken from the key 'gen' of w.pt.",
        ),
        (lambda state: {"ema": OTHERS, "model": state}, "", "from the key 'model' of w.pt; ema would fit too."),
        (lambda state: {"ema": OTHERS, "model": state}, "model", "from the key 'model' of w.pt."),
        (lambda state: {"g": {"now": state}, "h": {"now": OTHERS}}, "g", "from the key 'g.now' of w.pt."),
        (lambda state: prefixed("g.", state) | prefixed("h.", OTHERS), "g", "from the key 'g' of w.pt."),
        (lambda state: prefixed("model.", state), "", "The prefix 'model.' was removed from names in w.pt."),
        (
            lambda state: prefixed("module._orig_mod.", state),
            "",
            "The prefix 'module._orig_mod.' was removed from names",
        ),
        (
            lambda state: {"state_dict": prefixed("model._orig_mod.", state)},
            "",
            "The prefix 'model._orig_mod.' was removed",
        ),
        (
            lambda state: {name.replace(".", ".module."): each for name, each in state.items()},
            "",
            "module. was removed from names in w.pt.",
        ),
        (
            lambda state: prefixed("model.", state) | {"loss.weight": torch.ones(2)},
            "",
            "Left out of w.pt, because the model has no such tensors: loss.weight.",
        ),
    ],
)
def test_weights_of_trainers(write, tmp_path, state, made, key, note):
    torch.save(made(state), tmp_path / "w.pt")
    loaded = load(str(write("")), weights=tmp_path / (f"w.pt:{key}" if key else "w.pt"))
    assert_filled(loaded, state)
    assert any(note in each for each in loaded.notes)


@pytest.mark.parametrize(
    ("made", "key", "said"),
    [
        (
            lambda state: {"g": state, "ema": OTHERS},
            "",
            "several state dicts that fit the model: g, ema. Choose one, as in w.pt:g.",
        ),
        (
            lambda state: prefixed("g.", state) | prefixed("h.", OTHERS),
            "",
            "several prefixes: g, h. Choose one, as in w.pt:g.",
        ),
        (lambda state: {"g": state}, "x", "have no state dict under x; those in the file are under: g."),
        (lambda state: {"net": state | {"x": torch.ones(1)}, "epoch": 3}, "", "don't fit the model: unexpected x."),
        # A prefix is only removed where all names fit then.
        (
            lambda state: prefixed("module.", state | {"more": torch.ones(1)}),
            "",
            "missing linear.weight, linear.bias; unexpected module.linear.weight, module.linear.bias, module.more",
        ),
        (lambda state: OPTIMIZER, "", "contain no state dict; use a file written by torch.save("),
    ],
)
def test_weights_of_trainers_that_are_refused(write, tmp_path, state, made, key, said):
    torch.save(made(state), tmp_path / "w.pt")
    assert said in refused(str(write("")), weights=tmp_path / (f"w.pt:{key}" if key else "w.pt"))


def test_a_program_isnt_called_weights(write, tmp_path):
    model, weights = nn.Linear(4, 3).eval(), tmp_path / "w.pt"
    torch.save(model, weights)
    said = refused(str(write("")), weights=weights)
    assert "contain more than tensors (torch.nn.modules.linear.Linear) and aren't loaded" in said
    with torchscript_allowed():
        torch.jit.save(torch.jit.trace(model, torch.ones(2, 4)), str(weights))
    assert "contain a TorchScript program; use a file written by torch.save(model.state_dict(), ...)" in refused(
        str(write("")), weights=weights
    )
    torch.save({"net": model.state_dict(), "args": Path("x")}, weights)
    assert "contain more than tensors (pathlib." in refused(str(write("")), weights=weights)


@pytest.mark.parametrize("source", ["", "with torch.device('meta'):\n    model = Net()"])
def test_casts_are_told(write, tmp_path, source):
    weights = {"linear.weight": torch.ones(3, 4, dtype=torch.int64), "linear.bias": torch.ones(3).half()}
    save_file(weights, tmp_path / "w.safetensors")
    loaded = load(str(write(source)), weights=tmp_path / "w.safetensors")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert loaded.notes == ("2 tensors of w.safetensors were cast to the dtypes of the model (linear.weight first).",)


def test_tied_weights_that_the_file_has_once(write, tmp_path):
    path = write(
        "class Tied(Net):\n  def __init__(self):\n    super().__init__()\n    self.out = self.linear\nmodel = Tied()"
    )
    loaded = load(str(path))
    save_model(loaded.model, str(tmp_path / "w.safetensors"))
    again = load(str(path), weights=tmp_path / "w.safetensors", seed=9)
    assert torch.equal(again.model.out.weight, loaded.model.linear.weight)
    assert "the model ties them" in again.notes[0]


def test_a_model_without_values_is_filled_or_refused(write, tmp_path, state):
    path = write("with torch.device('meta'):\n    model = Net()")
    assert "linear.weight, linear.bias of the model have no values (device meta): load weights" in refused(str(path))
    torch.save(state, tmp_path / "w.pt")
    assert_filled(load(str(path), weights=tmp_path / "w.pt"), state)


def test_buffers_without_values_are_refused(write):
    path = write("model = Net()\nmodel.register_buffer('mask', torch.ones(3, device='meta'))")
    assert "mask of the model has no values (device meta)" in refused(str(path))


def test_weights_that_dont_fit(write, tmp_path, state):
    path, weights = str(write("")), tmp_path / "w.pt"
    torch.save(state | {f"more.{index}": torch.ones(1) for index in range(7)}, weights)
    assert "unexpected more.0, more.1, more.2, more.3, more.4 and 2 more." in refused(path, weights=weights)
    torch.save({"linear.bias": state["linear.bias"]}, weights)
    assert "don't fit the model: missing linear.weight." in refused(path, weights=weights)
    torch.save(state | {"linear.weight": torch.ones(5, 4)}, weights)
    assert "different shapes in linear.weight (file [5, 4], model [3, 4])." in refused(path, weights=weights)


def test_weights_that_cant_be_read(write, tmp_path, state):
    path, weights = str(write("")), tmp_path / "w.pt"
    assert "doesn't exist" in refused(path, weights=weights)
    assert "is a folder" in refused(path, weights=tmp_path)
    assert "/dev/null is not a file" in refused(path, weights=Path("/dev/null"))
    weights.write_bytes(pickle.dumps({"x": Path}))
    assert "contain more than tensors and aren't loaded" in refused(path, weights=weights)
    for text in (b"weights, honestly", b"hello world", b"", b"0\n", b"(lp0\n", b"PK\x03\x04"):
        weights.write_bytes(text)
        said = refused(path, weights=weights)
        assert said.startswith("The weights w.pt are damaged or not a state dict; use a file written by torch.save("), (
            text
        )
    torch.save(state, weights)
    weights.write_bytes(weights.read_bytes()[:300])
    assert "are damaged or not a state dict" in refused(path, weights=weights)
    torch.save([torch.ones(3)], weights)
    assert "contain a list, not a state dict" in refused(path, weights=weights)
    torch.save({"epoch": 3}, weights)
    assert "contain no state dict" in refused(path, weights=weights)
    torch.save({}, weights)
    assert "contain no state dict" in refused(path, weights=weights)
    safe = tmp_path / "w.safetensors"
    save_file(state, safe)
    safe.write_bytes(safe.read_bytes()[:-4])
    assert "couldn't be read as safetensors" in refused(path, weights=safe)
    (tmp_path / "w.txt").write_bytes(b"x")
    assert "neither a .safetensors file nor a state dict" in refused(path, weights=tmp_path / "w.txt")
