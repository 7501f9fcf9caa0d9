"""Load models and example inputs from users' files."""

import dataclasses
import inspect
import pickle
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from user_folder import refused

from optimize_export.errors import LoadError, UsageError
from optimizer.command.early_checks import parse_target
from optimizer.command.loading import load

# Which model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "chosen", "width"),
    [
        ("model = Net(5)\ndef get_model(): return Net(6)", "model", 5),
        ("model = Net", "model", 3),
        ("def model(): return Net(7)", "model", 7),
        ("def build_model(): return Net(6)", "build_model", 6),
        ("def create_model(width=9): return Net(width)", "create_model", 9),
        ("", "Net", 3),
        ("class Demanding(nn.Module):\n    def __init__(self, n): ...\n    def forward(self, x): ...", "Net", 3),
        ("class Base(nn.Module): pass", "Net", 3),
        ("from torch.nn import Flatten", "Net", 3),
    ],
)
def test_the_model_is_chosen_in_the_documented_order(write, text, chosen, width):
    loaded = load(str(write(text)))
    assert loaded.source == f"model.py:{chosen}"
    assert loaded.model.linear.out_features == width


def test_a_name_after_the_colon_and_by_option(write):
    path = write("small = Net(1)\nclass Zoo:\n    big = Net(8)\ndef model(): raise RuntimeError('not asked for')")
    assert load(f"{path}:small").model.linear.out_features == 1
    assert load(str(path), name="small").source == "model.py:small"
    assert load(f"{path}:Zoo.big", name="Zoo.big").model.linear.out_features == 8
    assert "use only one of them" in refused(f"{path}:small", name="Zoo.big", error=UsageError)


@pytest.mark.parametrize(
    ("spec", "label", "name"),
    [
        ("a/no_such.py:build", None, None),
        ("C:\\models\\net.py", "net.py", None),
        ("C:\\models\\net.py:build", "net.py", "build"),
        ("pkg.mod:build", "pkg.mod", "build"),
        ("pkg.mod", "pkg.mod", None),
    ],
)
def test_targets_are_read(spec, label, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if label is None or "\\" in spec:
        with pytest.raises(LoadError, match="There is no file") as caught:
            parse_target(spec)
        assert ":build" not in str(caught.value)
        return
    target = parse_target(spec)
    assert (target.label, target.name, target.file) == (label, name, None)


@pytest.mark.parametrize("spec", ["", "model.py:", ":model", "model.py:3x", "model.py:a b"])
def test_targets_that_make_no_sense(spec):
    with pytest.raises(UsageError):
        parse_target(spec)


def test_an_importable_module_of_the_current_folder(write, monkeypatch, tmp_path):
    write("def tiny(): return Net(2)", "zoo/nets.py")
    write("", "zoo/__init__.py", net=False, inputs=False)
    monkeypatch.chdir(tmp_path)
    loaded = load("zoo.nets:tiny")
    assert loaded.source == "zoo.nets:tiny"
    assert loaded.model.linear.out_features == 2
    assert "no module zoo.missing here" in refused("zoo.missing:tiny")
    assert "no module nowhere here" in refused("nowhere:tiny")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("x = 1", "has no model: it has no `model`, no get_model / build_model / create_model"),
        ("class A(nn.Module):\n  def __init__(self, a, b): ...\n  def forward(self): ...", "A needs a, b"),
        ("model = 3", "model in model.py is an int, not an nn.Module"),
        ("model = None", "is None, not an nn.Module"),
        ("def build_model(width): ...", "build_model in model.py is a function that needs arguments (width)"),
        (
            "class A(nn.Module):\n  def __init__(self, width): ...\nmodel = A",
            "the class A that needs arguments (width)",
        ),
        ("class model: pass", "is the class model, which isn't an nn.Module"),
        ("def get_model(): return nn.Identity(), 3", "returned a tuple, not an nn.Module; return the model only"),
        ("def get_model():\n    raise ValueError('two\\nlines')", "failed: ValueError: two lines (model.py line 4)"),
        ("def get_model(): raise KeyError", "get_model() in model.py failed: KeyError (model.py line 3)."),
        ("def get_model(): ...\ndef build_model(): ...", "has 2 factories: get_model, build_model; choose one, such"),
    ],
)
def test_models_that_cant_be_had(write, text, part):
    path = write("\nfrom torch import nn\n" + textwrap.dedent(text), net=False, inputs=False)
    assert part in refused(str(path))


def test_two_classes_are_listed(write):
    path = write("class Other(Net): pass")
    assert "has 2 nn.Module subclasses without arguments: Net, Other; choose one, such as model.py:Net" in refused(
        str(path)
    )
    assert load(f"{path}:Other").source == "model.py:Other"


def test_a_name_that_isnt_there_is_told(write):
    assert refused(f"{write('def build_model(): ...')}:build_modle") == "model.py has no build_modle."


def test_wrapped_models_pass(write):
    path = write("compiled = torch.compile(Net())\nscripted = torch.jit.script(Net())")
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        assert isinstance(load(f"{path}:scripted").model, torch.jit.ScriptModule)
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        loaded = load(f"{path}:compiled")
    assert type(loaded.model).__name__ == "Net"
    assert loaded.notes == ("compiled was made by torch.compile(module); the module inside it is used.",)


# The file -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            "net.onnx",
            "net.onnx is not a Python file (.py): MODEL is the file that builds the nn.Module; --weights takes",
        ),
        (
            "bert",
            "bert is a folder: MODEL is a Python file (.py), or transformers:bert for a folder that save_pretrained",
        ),
        ("modle.py", "There is no file modle.py."),
        ("gone.onnx", "There is no file gone.onnx."),
        ("bert-base-uncased", "; a library model is timm:NAME, torchvision:NAME or transformers:NAME."),
        ("google/vit-base", "There is no file google/vit-base; a library model is timm:NAME, torchvision:NAME or"),
        ("resnet5000", "There is no module resnet5000 here (MODEL is a path to a .py file, or package.module:factory"),
    ],
)
def test_what_is_no_python_file_is_told(tmp_path, monkeypatch, given, told):
    monkeypatch.chdir(tmp_path)
    Path("bert").mkdir()
    Path("net.onnx").write_bytes(b"")
    assert told in refused(given)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("def f(:\n", "model.py couldn't be loaded: model.py line 1 has a syntax error: invalid syntax."),
        ("x = (1,\n", "line 1 has a syntax error: '(' was never closed."),
        (
            "import no_such_xyz",
            "there is no module no_such_xyz (the folder of the file is on the path; if it is a package:",
        ),
        ("import no_such_xyz", "pip install no_such_xyz) (model.py line 1)."),
        ("from math import no_such_name", "cannot import name 'no_such_name' from 'math'"),
        ("from .blocks import Block", "use package.module:NAME from the folder above the package"),
        ("\n1 / 0", "model.py couldn't be loaded: ZeroDivisionError: division by zero (model.py line 2)."),
        ("import sys\nsys.exit(3)", "model.py couldn't be loaded: it called sys.exit(3)."),
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('x')\np.parse_args()", "sys.exit(2)"),
        ("from sibling import x", "model.py couldn't be loaded: sibling.py line 2 has a syntax error"),
    ],
)
def test_files_that_dont_run(write, text, part):
    write("\nx = = 3", "sibling.py", net=False, inputs=False)
    path = write(text, net=False, inputs=False)
    assert part in refused(str(path))
    assert "model" not in sys.modules


def test_the_file_is_a_module_like_any_other(write, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["optimize-export", "--quiet"])
    write("WIDTH = 6", "sizes.py", net=False, inputs=False)
    path = write(
        """
        from dataclasses import dataclass
        import sys
        import sizes

        @dataclass
        class Config:
            width: "int" = sizes.WIDTH

        if __name__ == "__main__":
            raise AssertionError("not run as a program")
        config = Config()
        arguments = list(sys.argv)
        def build_model(): return Net(Config().width)
        """,
        "my_net.py",
    )
    model = load(str(path)).model
    assert model.linear.out_features == 6
    module = sys.modules[type(model).__module__]
    assert module.__name__ == "my_net"
    assert dataclasses.asdict(module.config) == {"width": 6}
    assert pickle.loads(pickle.dumps(module.config)) == module.config
    assert "self.linear" in inspect.getsource(type(model))
    assert module.arguments == [str(path)]
    assert not (path.parent / "__pycache__").exists()


@pytest.mark.parametrize("name", ["torch.py", "my-net.py", "random.py", "2nd.py"])
def test_file_names_that_are_taken_or_no_names(write, name):
    before = sys.modules["torch"]
    assert load(str(write("", name))).model.linear.out_features == 3
    assert sys.modules["torch"] is before


def test_random_weights_are_those_of_the_seed(write):
    path = str(write(""))
    first, again, other = (load(path, seed=seed).model.linear.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# Inputs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "args", "kwargs"),
    [
        ("example_inputs = torch.ones(2, 4)", 1, []),
        ("example_inputs = [torch.ones(2, 4)]", 1, []),
        ("example_inputs = (torch.ones(2, 4), None)", 2, []),
        ("example_inputs = {'x': torch.ones(2, 4)}", 0, ["x"]),
        ("example_inputs = {'x': torch.ones(2, 4)}\nexample_kwargs = {'y': 3}", 0, ["x", "y"]),
        ("example_inputs = (torch.ones(2, 4),)\ndef example_kwargs(): return {'y': 3}", 1, ["y"]),
        ("example_kwargs = {'x': torch.ones(2, 4)}", 0, ["x"]),
        ("def get_example_inputs(): return torch.ones(2, 4)", 1, []),
        ("def example_inputs(): return {'x': torch.ones(2, 4)}", 0, ["x"]),
        ("def example_inputs(batch_size, generator): return torch.ones(batch_size, 4)", 1, []),
        ("def example_inputs(n, generator): return {'x': torch.ones(n, 4)}", 0, ["x"]),
        ("def get_example_inputs(n, generator):\n    return torch.randn(n, 4, generator=generator), 1", 2, []),
    ],
)
def test_inputs_of_the_file(write, text, args, kwargs):
    loaded = load(str(write(text, inputs=False)))
    call = loaded.first_call()
    assert len(call.args) == args
    assert list(call.kwargs) == kwargs
    tensor = call.args[0] if call.args else call.kwargs["x"]
    assert tensor.shape == (2, 4)


def test_a_function_of_inputs_is_asked_for_any_batch_size(write):
    text = "def example_inputs(batch_size, generator): return torch.randn(batch_size, 4, generator=generator)"
    draw = load(str(write(text, inputs=False))).example_inputs
    (first,), (again,) = (draw(7, torch.Generator().manual_seed(1)).args for _ in range(2))
    assert first.shape == (7, 4)
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "has no example_inputs and no get_example_inputs(); add one of them to the file or pass each input"),
        ("example_inputs = 3", "example_inputs in model.py is an int; it must be a tensor, a tuple or a list"),
        ("import numpy\nexample_inputs = numpy.ones(3)", "torch.from_numpy converts it to a tensor"),
        ("import numpy\nexample_inputs = (numpy.ones(3),)", "contain a numpy array; torch.from_numpy converts it"),
        ("example_inputs = (1, 2)", "contain no tensor"),
        ("example_inputs = {3: torch.ones(2)}", "has the key 3, which isn't the name of an argument"),
        ("example_inputs = {'x': torch.ones(2)}\nexample_kwargs = {'x': 3}", "x is in both example_inputs and"),
        ("example_kwargs = 3", "example_kwargs in model.py is an int, not a dict"),
        ("def get_example_inputs():\n    return 1 / 0", "get_example_inputs() in model.py failed: ZeroDivisionError"),
        ("def example_inputs(n, generator): return None", "is None; it must be"),
    ],
)
def test_inputs_that_cant_be_had(write, text, part):
    assert part in refused(str(write(text, inputs=False)))


def test_inputs_given_by_option_replace_those_of_the_file(write):
    loaded = load(str(write("")), inputs=["x=5x4"])
    assert loaded.example_kwargs["x"].shape == (5, 4)
    assert loaded.example_inputs == ()
    assert loaded.notes == ("The inputs from --input replace those of model.py.",)
    assert load(str(write("", inputs=False)), inputs=["5x4"]).notes == ()
    assert "sets x twice" in refused(str(write("")), inputs=["x=5x4", "x=2x4"], error=UsageError)
