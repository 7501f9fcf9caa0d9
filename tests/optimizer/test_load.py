"""A bundle as a callable: the original's arguments and outputs, the choice of the artifact, and refusals."""

import collections
import dataclasses
import json
import logging
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from changed_bundles import edit_manifest, seal
from tiny_models import Net as OfFunction
from tiny_models import enliven
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import optimize_export.runtime.loading as loading
import optimize_export.runtime.route as route
from optimize_export.errors import BundleError, DeviceError, UsageError
from optimize_export.manifest import MANIFEST, SUMS
from optimize_export.runtime import Route, cpus, open_route, processor
from optimize_export.runtime.openvino_runner import OpenvinoRunner
from optimizer import Bundle, LoadedModel, export, load

RUNTIMES = [("onnx", "onnxruntime"), ("onnx", "openvino"), ("torchscript", "torch"), ("pt2", "torch")]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Scored:
    score: Any
    name: str
    weight: float


class Everything(nn.Module):
    """Takes nested arguments and constants, and returns every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self,
        x: torch.Tensor,
        pair: tuple[torch.Tensor, torch.Tensor],
        extra: Any = None,
        scale: float = 2.0,
        cap: float = math.inf,
        flag: Any = None,
    ) -> dict[Any, Any]:
        y = self.layer(x) * scale + pair[0] - pair[1] + extra["shift"][0] * extra["shift"][1]
        return {
            "logits": y,
            "pair": Pair(y + 1, [y.sum(1), None]),
            "listed": [y * 2, (y * 3,)],
            "scored": Scored(y - 1, "name", 0.5),
            "hidden": BaseModelOutput(last_hidden_state=y * 4, hidden_states=(y * 5,)),
            "max": y.max(1),
            "ordered": collections.OrderedDict(b=y * 6, a=y * 7),
            7: y * 8,
            "cap": cap,
            "count": 3,
            "complex": 1 + 2j,
            "dtype": torch.float32,
            "none": None,
        }


def call(size: int, seed: int = 0) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """A call in another order than that of forward's parameters."""
    random = torch.Generator().manual_seed(seed)
    x, left, right, first, second = (torch.randn(size, 4, generator=random) for _ in range(5))
    extra = {"shift": [first, second]}
    return (x,), {"flag": None, "extra": extra, "pair": (left, right), "scale": 2.0, "cap": math.inf}


def arrays(value: Any) -> Any:
    """The same value with numpy arrays in place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: arrays(each) for key, each in value.items()}
    return type(value)(map(arrays, value)) if isinstance(value, list | tuple) else value


def assert_same(got: Any, wanted: Any) -> None:
    """Compare structure, classes and constants exactly, and numbers nearly; numpy arrays count as tensors."""
    if isinstance(wanted, torch.Tensor):
        assert str(got.dtype).removeprefix("torch.") == str(wanted.dtype).removeprefix("torch.")
        numpy.testing.assert_allclose(numpy.asarray(got), wanted.numpy(force=True), rtol=1e-4, atol=1e-5)
        return
    if isinstance(wanted, torch.dtype):
        assert got == str(wanted)
        return
    assert type(got) is type(wanted)
    if isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(wanted):
        assert_same(vars(got), vars(wanted))
    else:
        assert got == wanted


def everything() -> Everything:
    torch.manual_seed(0)
    return Everything().eval()


def exported(folder: Path, model: nn.Module, *args: Any, formats: tuple[str, ...], **kwargs: Any) -> Bundle:
    return export(
        model, example_inputs=args, example_kwargs=kwargs, output=folder / "net", formats=formats, effort="quick"
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """One TorchScript file, which is quick to make."""
    args, kwargs = call(3)
    return exported(tmp_path_factory.mktemp("one"), everything(), *args, **kwargs, formats=("torchscript",))


@pytest.fixture(scope="module")
def run(bundle: Bundle) -> LoadedModel:
    return load(bundle)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """All formats; only for slow tests."""
    args, kwargs = call(3)
    folder = tmp_path_factory.mktemp("every")
    return exported(folder, everything(), *args, **kwargs, formats=("torchscript", "onnx", "pt2"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.bn(self.conv(image))).mean((2, 3)) * weight)


def net() -> Net:
    torch.manual_seed(0)
    return enliven(Net()).eval()


def images(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(size)
    return torch.randn(size, 3, 8, 8, generator=random), torch.rand(size, 1, generator=random)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A model of plain tensors in one TorchScript file."""
    return exported(tmp_path_factory.mktemp("flat"), net(), *images(2), formats=("torchscript",))


def edited(bundle: Bundle, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a bundle with a changed manifest and the sums of that."""
    copy = Path(shutil.copytree(bundle.path, folder / "copy"))
    edit_manifest(copy, change)
    return copy


def recommending(format: str, runtime: str, **settings: Any) -> Callable[[dict[str, Any]], object]:
    recommended = {"format": format, "runtime": runtime, "settings": settings}
    return lambda manifest: manifest.update(benchmark={"recommended": recommended, "batch_sizes": [1, 8]})


# ----------------------------------------------------------------------------------------------- arguments and outputs


def test_outputs_have_the_originals_structure(run: LoadedModel) -> None:
    args, kwargs = call(3)
    assert_same(run(*args, **kwargs), everything()(*args, **kwargs))


@pytest.mark.slow
@pytest.mark.parametrize(("format", "runtime"), RUNTIMES)
def test_each_runtime_gives_the_originals_outputs_at_each_batch(every: Bundle, format: str, runtime: str) -> None:
    run = load(every, format=format, runtime=runtime)
    assert (run.route.format, run.route.runtime, run.device) == (format, runtime, "cpu")
    for size in (1, 3, 6):
        args, kwargs = call(size, seed=size)
        wanted = everything()(*args, **kwargs)
        got = run(*args, **kwargs)
        assert isinstance(got["logits"], torch.Tensor)
        assert_same(got, wanted)
        got = run(*arrays(args), **arrays(kwargs))
        assert isinstance(got["logits"], numpy.ndarray)
        assert isinstance(got["hidden"].hidden_states[0], numpy.ndarray)
        assert_same(got, wanted)
    # Views and arrays that can't be written to are inputs, and outputs are the caller's own.
    x = arrays(args)[0].copy()
    x.flags.writeable = False
    assert_same(run(x[:, ::-1], **arrays(kwargs)), everything()(args[0].flip(1), **kwargs))
    assert_same(run(x, **arrays(kwargs)), wanted)
    first = run(*args, **kwargs)["logits"]
    kept = first.clone()
    run(*(x * 2 for x in args), **kwargs)
    assert torch.equal(first, kept)
    first += 1
    first.mul(torch.ones(4, requires_grad=True)).sum().backward()


def test_positions_follow_the_signature_and_not_the_exported_call(run: LoadedModel) -> None:
    args, kwargs = call(2)
    wanted = everything()(*args, **kwargs)
    assert_same(run(args[0], kwargs["pair"], kwargs["extra"], 2.0, math.inf, None), wanted)
    assert_same(run(args[0], kwargs["pair"], kwargs["extra"]), wanted)
    assert_same(run(args[0], kwargs["pair"], flag=None, extra=kwargs["extra"]), wanted)
    assert_same(run(extra=kwargs["extra"], pair=kwargs["pair"], x=args[0]), wanted)


def test_lists_and_tuples_of_arguments_are_interchangeable(run: LoadedModel) -> None:
    args, kwargs = call(2)
    changed = {"pair": list(kwargs["pair"]), "extra": {"shift": tuple(kwargs["extra"]["shift"])}}
    assert_same(run(*args, **changed), everything()(*args, **kwargs))


REFUSED: list[tuple[str, Callable[[LoadedModel, Any, Any], Any]]] = [
    ("`extra` is missing: the exported call has `x`", lambda run, x, k: run(x, k["pair"])),
    ("no argument `mask`; it has `x`, `flag`", lambda run, x, k: run(x, mask=x, **k)),
    ("`x` is given twice, by position and by name", lambda run, x, k: run(x, x=x, **k)),
    ("7 positional arguments are given, and the model takes 6", lambda run, x, k: run(x, *range(6))),
    ("`scale` is fixed in the file at 2.0, but is 3.0 here", lambda run, x, k: run(x, **{**k, "scale": 3.0})),
    ("`scale` is fixed in the file at 2.0, but is 2 here", lambda run, x, k: run(x, **{**k, "scale": 2})),
    ("`cap` is fixed in the file at inf, but is 1.0 here", lambda run, x, k: run(x, **{**k, "cap": 1.0})),
    ("`flag` is fixed in the file at None, but is of type Tensor here", lambda run, x, k: run(x, **{**k, "flag": x})),
    ("`pair` has 1 items, but had 2", lambda run, x, k: run(x, **{**k, "pair": (x,)})),
    (r"`pair` lacks 0", lambda run, x, k: run(x, **{**k, "pair": None})),
    (r"`extra`\['shift'\]\[1\] was a tensor .* is 1.0 here", lambda run, x, k: run(x, k["pair"], {"shift": [x, 1.0]})),
    ("`extra` lacks 'shift'", lambda run, x, k: run(x, k["pair"], {"moved": [x, x]})),
    ("`x` is float64, but the file takes float32: convert it", lambda run, x, k: run(x.double(), **k)),
    (r"`x` has no values \(meta\): pass a dense tensor", lambda run, x, k: run(x.to("meta"), **k)),
    (r"`x` has the layout torch.sparse_coo: pass a dense tensor", lambda run, x, k: run(x.to_sparse(), **k)),
    ("`x` is int64, but", lambda run, x, k: run(x.numpy().astype(int), **k)),
    (r"`x` is >f4, but", lambda run, x, k: run(x.numpy().astype(">f4"), **k)),
    (r"`x` has the shape \[2, 5\], but the file takes \[batch, 4\]", lambda run, x, k: run(torch.ones(2, 5), **k)),
    (r"`x` has the shape \[4\], but the file takes \[batch, 4\]", lambda run, x, k: run(torch.ones(4), **k)),
    (
        r"`pair_1` has the shape \[1, 4\], but the file takes \[batch, 4\], where batch is 2",
        lambda run, x, k: run(x, **{**k, "pair": (x, x[:1])}),
    ),
]


@pytest.mark.parametrize(("sentence", "wrong"), REFUSED, ids=[sentence for sentence, _ in REFUSED])
def test_a_call_that_does_not_fit_is_refused_in_one_sentence(
    run: LoadedModel, sentence: str, wrong: Callable[..., Any]
) -> None:
    args, kwargs = call(2)
    with pytest.raises(UsageError, match=sentence) as caught:
        wrong(run, args[0], kwargs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 1.0, [[1.0]], "x", {}])
def test_an_argument_that_is_no_tensor_is_refused(flat: Bundle, wrong: Any) -> None:
    sentence = f"`weight` is of type {type(wrong).__name__}: pass a torch tensor or a numpy array"
    with pytest.raises(UsageError, match=sentence):
        load(flat)(images(2)[0], wrong)


def test_flipped_read_only_and_scalar_arrays_are_inputs(flat: Bundle, tmp_path: Path) -> None:
    run, (image, weight) = load(flat), images(2)
    given = image.numpy().copy()
    given.flags.writeable = False
    assert_same(run(given[:, ::-1], weight.numpy()), net()(image.flip(1), weight))
    assert_same(run(given, weight.numpy()), net()(image, weight))
    assert_same(run(image, weight.numpy()), net()(image, weight))
    product = OfFunction(lambda self, x, by: x * by)
    scaled = load(exported(tmp_path, product, torch.randn(3, 4), torch.tensor(2.0), formats=("torchscript",)))
    assert scaled(numpy.ones((1, 4), "float32"), numpy.float32(3)).tolist() == [[3.0] * 4]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "runtime"), RUNTIMES)
def test_threads_do_not_mix_their_calls(every: Bundle, format: str, runtime: str) -> None:
    run = load(every, format=format, runtime=runtime)
    calls = [call(1 + seed % 4, seed) for seed in range(48)]
    wanted = [everything()(*args, **kwargs) for args, kwargs in calls]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda each: run(*each[0], **each[1]), calls))
        got_arrays = list(pool.map(lambda each: run(*arrays(each[0]), **arrays(each[1])), calls))
    for one, other, original in zip(got, got_arrays, wanted, strict=True):
        assert_same(one, original)
        assert_same(other, original)


def test_classes_that_are_not_imported_become_records_and_named_tuples(bundle: Bundle, tmp_path: Path) -> None:
    def rename(manifest: dict[str, Any]) -> None:
        text = json.dumps(manifest["output_structure"])
        text = text.replace("transformers.modeling_outputs", "gone").replace(Pair.__module__ + ".Pair", "gone.Pair")
        manifest["output_structure"] = json.loads(text)

    args, kwargs = call(2)
    got = load(edited(bundle, tmp_path, rename))(*args, **kwargs)
    wanted = everything()(*args, **kwargs)
    assert type(got["pair"]).__name__ == "Pair"
    assert got["pair"]._fields == Pair._fields
    assert_same(got["pair"].left, wanted["pair"].left)
    hidden = got["hidden"]
    assert hidden.hidden_states is hidden["hidden_states"] is hidden[1]
    assert list(hidden) == ["last_hidden_state", "hidden_states"]
    assert_same(hidden[0], wanted["hidden"].last_hidden_state)
    with pytest.raises(AttributeError, match="the output has no 'attentions'; it has last_hidden_state, hidden_states"):
        _ = hidden.attentions


def test_a_manifest_runs_no_code(bundle: Bundle, tmp_path: Path) -> None:
    command = [["0", {"constant": f"touch {tmp_path}/ran"}], ["1", {"constant": -1}]]

    def hostile(manifest: dict[str, Any]) -> None:
        items = manifest["output_structure"]["items"]
        for kind in ("namedtuple", "dataclass"):
            items.append([kind, {"type": "subprocess.Popen", "kind": kind, "items": command}])
        items.append(["lazy", {"type": "this.s", "items": command}])

    args, kwargs = call(2)
    got = load(edited(bundle, tmp_path, hostile))(*args, **kwargs)
    assert got["namedtuple"][1] == got["dataclass"]["1"] == -1
    assert "this" not in sys.modules
    assert not (tmp_path / "ran").exists()


def test_a_bfloat16_model_takes_torch_tensors_only(tmp_path: Path) -> None:
    ids = torch.arange(6).reshape(2, 3)
    # The golden inputs are integers, which numpy has; the output it lacks.
    halves = OfFunction(lambda self, x: self.embed(x) * 2, embed=nn.Embedding(10, 4, dtype=torch.bfloat16))
    run = load(exported(tmp_path / "ids", halves, ids, formats=("torchscript",)))
    assert run(ids).dtype == torch.bfloat16
    with pytest.raises(UsageError, match="`output` is bfloat16, which numpy doesn't have: pass torch tensors"):
        run(ids.numpy())
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    run = load(exported(tmp_path / "linear", model, x, formats=("torchscript",)))
    assert torch.equal(run(x[:1]), model(x[:1]))
    with pytest.raises(UsageError, match="`input` is float32, but the file takes bfloat16: convert it"):
        run(x.float())


def test_a_complex_model_takes_tensors_and_arrays(tmp_path: Path) -> None:
    power = OfFunction(lambda self, z: (z * z.conj()).real)
    z = torch.randn(3, 4, dtype=torch.complex64)
    run = load(exported(tmp_path, power, z, formats=("torchscript",)))
    assert_same(run(z), power(z))
    assert_same(run(z.numpy()), power(z))


# ------------------------------------------------------------------------------------------------- choice of the route


@pytest.mark.slow
def test_without_a_measurement_the_first_choice_is_onnx(every: Bundle) -> None:
    assert load(every).route == Route("onnx", "onnxruntime")
    assert load(every, runtime="torch").route == Route("torchscript", "torch")
    assert load(every).notes == ()


def test_a_file_that_is_compiled_for_fixed_shapes_takes_others_too(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    scaled = OfFunction(lambda self, x, factor: self.linear(x) * factor, linear=nn.Linear(4, 3))
    x, factor = torch.randn(3, 4), torch.tensor(2.0)
    made = exported(tmp_path, scaled, x, factor, formats=("onnx",))
    run = load(edited(made, tmp_path, recommending("onnx", "openvino", shapes="3x4,")))
    assert str(run.route) == "onnx in openvino, fixed shapes"
    runner = run._runner
    assert isinstance(runner, OpenvinoRunner)
    assert runner._any is None, "the golden inputs have the fixed shapes"
    for rows in (3, 5, 1, 3):
        x = torch.randn(rows, 4)
        assert_same(run(x, factor), scaled(x, factor))
    assert runner._any is not None
    with pytest.raises(BundleError, match="are invalid"):
        load(edited(made, tmp_path / "other", recommending("onnx", "openvino", shapes="3x-1")))


@pytest.mark.slow
def test_a_recommended_runtime_that_is_missing_leaves_a_note(
    every: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = edited(every, tmp_path, recommending("onnx", "openvino", threads=1, precision="float32"))
    run = load(path)
    assert run.route == Route("onnx", "openvino", {"threads": 1, "precision": "float32"})
    assert (run.notes, run.batch_sizes) == ((), (1, 8))
    monkeypatch.setattr(route, "is_installed", lambda runtime: runtime != "openvino")
    with caplog.at_level(logging.WARNING, "optimizer"):
        run = load(path)
    assert run.route == Route("onnx", "onnxruntime")
    (note,) = run.notes
    assert "openvino isn't installed here: pip install 'optimize-export[openvino]'" in note
    assert note in caplog.text
    args, kwargs = call(2)
    assert_same(run(*args, **kwargs), everything()(*args, **kwargs))
    with pytest.raises(DeviceError, match=r"can't be run here: .*openvino isn't installed"):
        load(path, runtime="openvino")


@pytest.mark.slow
def test_signals_are_handled_after_models_in_openvino_are_freed(every: Bundle) -> None:
    """OpenVINO sets up the stack of signal handlers, and frees it with its Core."""
    code = f"""if True:
        import gc, os, signal
        from optimize_export import load
        signal.signal(signal.SIGUSR1, lambda number, frame: print("handled"))
        first, second = (load({str(every.path)!r}, runtime="openvino") for _ in range(2))
        del first
        gc.collect()
        del second
        gc.collect()
        os.kill(os.getpid(), signal.SIGUSR1)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_frozen_file_is_right_at_each_batch(flat: Bundle, tmp_path: Path, size: int) -> None:
    run = load(edited(flat, tmp_path, recommending("torchscript", "torch", freeze=True)))
    assert str(run.route) == "torchscript in torch, freeze"
    for number in (size, size + 1, size):
        for _ in range(3):
            assert_same(run(*images(number)), net()(*images(number)))


@pytest.mark.slow
@pytest.mark.parametrize(("format", "runtime"), RUNTIMES[:2])
def test_threads_of_a_call_are_a_setting(every: Bundle, format: str, runtime: str) -> None:
    run = load(every, format=format, runtime=runtime, threads=1)
    assert run.route.settings == {"threads": 1}
    args, kwargs = call(2)
    assert_same(run(*args, **kwargs), everything()(*args, **kwargs))


def test_another_processor_is_a_note(flat: Bundle, tmp_path: Path) -> None:
    def elsewhere(manifest: dict[str, Any]) -> None:
        recommending("torchscript", "torch")(manifest)
        manifest["device"]["name"] = "Another CPU"

    (note,) = load(edited(flat, tmp_path, elsewhere)).notes
    assert f"was chosen on Another CPU, and this machine is {processor()}" in note
    assert load(flat).notes == ()


def test_threads_of_the_user_are_cut_with_a_note(flat: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "affine_cpus", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    (note,) = load(flat, threads=64).notes
    assert note.endswith("has at most 2 threads here, one for each processor that this process may use")
    assert load(flat, threads=2).notes == ()


def test_threads_that_were_chosen_with_more_processors_are_cut_with_a_note(
    flat: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "cgroup_cpus", lambda: 0.5)
    path = edited(flat, tmp_path, recommending("torchscript", "torch", threads=64))
    started: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", started.append)
    assert "has at most 1 thread here" in load(path).notes[0]
    assert started == [1]


def test_a_bundle_for_a_gpu_runs_on_the_cpu_with_a_note(
    flat: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = edited(flat, tmp_path, lambda manifest: manifest["device"].update(type="cuda"))
    run = load(path)
    assert run.device == "cpu"
    (note,) = run.notes
    assert "torchscript in torch isn't used on cuda" in note
    assert load(path, device="cpu").notes == ()
    with pytest.raises(DeviceError, match="torch finds none here"):
        load(path, device="cuda")


@pytest.mark.slow
def test_no_runtime_pretends_to_run_on_a_gpu(every: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="OpenVINO runs on the CPU here, not on cuda"):
        load(every, device="cuda", runtime="openvino")
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(DeviceError, match="has no CUDA provider; install one with `pip install onnxruntime-gpu`"):
        load(every, device="cuda", format="onnx")


def test_a_file_of_a_bundle_isnt_a_bundle(flat: Bundle, tmp_path: Path) -> None:
    for path in (flat.path / MANIFEST, next(flat.path.glob("model.*"))):
        with pytest.raises(BundleError, match=rf"is a file, not a bundle: use the folder of its bundle, {flat.path}\."):
            load(path)
    (tmp_path / "model.onnx").touch()
    with pytest.raises(BundleError, match="is a file, not a bundle: a bundle is a folder with"):
        load(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "gpu"}, "device must be 'auto', 'cpu' or 'cuda', not 'gpu'"),
        ({"device": "cuda:1"}, "set CUDA_VISIBLE_DEVICES=1 before Python starts, and use 'cuda'"),
        ({"device": torch.device("cuda:2")}, "set CUDA_VISIBLE_DEVICES=2 before Python starts"),
        ({"runtime": "tensorrt"}, "There is no runtime 'tensorrt'; the runtimes are onnxruntime, openvino, torch"),
        ({"format": "onnx"}, "The bundle has no 'onnx' artifact; it has torchscript"),
        ({"runtime": "openvino"}, "torchscript doesn't run in openvino"),
        ({"format": "torchscript", "runtime": "onnxruntime"}, "torchscript doesn't run in onnxruntime"),
        ({"threads": 0}, "threads must be a whole number from 1 to 4096, not 0"),
        ({"threads": True}, "not True"),
        ({"threads": "2"}, "not '2'"),
        ({"expect": "abc"}, "expect: 'abc' is not a SHA-256"),
        ({"expect": 7}, "expect: 7 is not a SHA-256"),
    ],
)
def test_options_that_make_no_sense_are_refused(flat: Bundle, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        load(flat, **options)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (recommending("torchscript", "tensorrt"), "The runtime 'tensorrt' is unknown"),
        (recommending("torchscript", "torch", spinning=True), "spinning=True is not a setting of torch"),
        (recommending("torchscript", "torch", freeze=1), "freeze=1 is not a setting of torch"),
        (recommending("torchscript", "torch", threads=0), "threads=0 is not a number from 1 to 4096"),
        (recommending("torchscript", "torch", threads=20000), "threads=20000 is not a number from 1 to 4096"),
        (recommending("torchscript", "openvino", precision="int4"), "are invalid"),
        (recommending("onnx", "onnxruntime"), "recommends onnx, which isn't in `artifacts`"),
        (lambda manifest: manifest.update(benchmark={"recommended": {}}), "`benchmark.recommended.format` is missing"),
        (lambda manifest: manifest.update(benchmark=[]), "`benchmark` must be an object"),
        (lambda manifest: manifest.pop("input_structure"), "lacks `input_structure`"),
        (lambda manifest: manifest.pop("output_structure"), "lacks `output_structure`"),
        (lambda manifest: manifest.update(input_structure=[1]), "`input_structure` of the manifest is broken"),
        (lambda manifest: manifest.update(input_structure={"items": "x"}), "`input_structure` .* is broken"),
        (lambda manifest: manifest["input_structure"]["items"].pop(), r"has the tensors \['image'\], but the file"),
        (lambda manifest: manifest.update(output_structure={"tensor": "y"}), r"has the tensors \['y'\], but the file"),
        (
            lambda manifest: manifest.update(output_structure={"type": 1, "items": []}),
            "`output_structure` .* is broken",
        ),
        (lambda manifest: manifest.update(positional="x"), "`positional` must be a list"),
    ],
)
def test_a_broken_manifest_is_refused(flat: Bundle, tmp_path: Path, change: Any, sentence: str) -> None:
    with pytest.raises(BundleError, match=sentence):
        load(edited(flat, tmp_path, change))


def test_a_manifest_without_positions_takes_those_of_the_exported_call(flat: Bundle, tmp_path: Path) -> None:
    run = load(edited(flat, tmp_path, lambda manifest: manifest.pop("positional")))
    assert_same(run(*images(3)), net()(*images(3)))


# --------------------------------------------------------------------------------------------------------- the files


def test_a_damaged_bundle_is_not_loaded(flat: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "open_route", lambda *args: pytest.fail("a file of a damaged bundle was opened"))
    for name in ("model.torchscript.pt", MANIFEST, SUMS):
        copy = Path(shutil.copytree(flat.path, tmp_path / name))
        data = bytearray((copy / name).read_bytes())
        data[-3] ^= 1
        (copy / name).write_bytes(data)
        with pytest.raises(BundleError, match=f"{re.escape(name)}|valid JSON"):
            load(copy)
        (copy / name).unlink()
        with pytest.raises(BundleError, match=rf"{re.escape(name)} is missing|it has no {MANIFEST}"):
            load(copy)


def test_only_the_expected_bundle_is_loaded(flat: Bundle, tmp_path: Path) -> None:
    assert load(flat, expect=flat.sha256sums.upper()).path == flat.path
    changed = edited(flat, tmp_path, lambda manifest: manifest.update(seed=1))
    with pytest.raises(BundleError, match="not the expected bundle"):
        load(changed, expect=flat.sha256sums)
    load(changed)


UNREADABLE = {"JSONDecodeError": b"", "UnicodeDecodeError": b"\xff" * 16, "KeyError": b"{}", "TypeError": b"[]"}


@pytest.mark.parametrize("error", UNREADABLE)
def test_golden_data_that_cannot_be_read_can_be_done_without(flat: Bundle, tmp_path: Path, error: str) -> None:
    data = UNREADABLE[error]
    copy = with_golden(flat, tmp_path, (2).to_bytes(8, "little") + data if len(data) == 2 else data)
    with pytest.raises(BundleError, match=rf"golden.safetensors can't be read: {error}.*warm_up=False"):
        load(copy)
    assert_same(load(copy, warm_up=False)(*images(1)), net()(*images(1)))
    (copy / "golden.safetensors").unlink()
    with pytest.raises(BundleError, match=r"golden.safetensors is missing\. Pass warm_up=False"):
        load(copy)


def with_golden(bundle: Bundle, folder: Path, data: bytes) -> Path:
    """A copy of a bundle with other golden data and fitting hashes, as an attacker would make it."""
    copy = Path(shutil.copytree(bundle.path, folder / "copy"))
    (copy / "golden.safetensors").write_bytes(data)
    seal(copy)
    return copy


def with_entry(bundle: Bundle, **change: Any) -> bytes:
    """The golden data of a bundle with another entry of the first input in the header."""
    data = (bundle.path / "golden.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["call0/input/image"] |= change
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shape": [200000000, 8]}, "golden.safetensors can't be read: ValueError a tensor of shape"),
        ({"shape": [200000000, 8], "data_offsets": [0, 6400000000]}, "ValueError a tensor of shape"),
        ({"shape": [-2, -192]}, "ValueError a tensor of shape"),
        ({"data_offsets": [-1536, 0]}, "ValueError a tensor of shape"),
        ({"shape": "x"}, "golden.safetensors can't be read: TypeError"),
        ({"shape": [384]}, r"its golden inputs don't fit its file. `image` has the shape \[384\]"),
        ({"dtype": "I32"}, "its golden inputs don't fit its file. `image` is int32"),
    ],
)
def test_golden_data_are_bounded_by_their_file(
    flat: Bundle, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    data = with_entry(flat, **change)
    with pytest.raises(BundleError, match=sentence):
        load(with_golden(flat, tmp_path, data))
    damaged = Path(shutil.copytree(flat.path, tmp_path / "damaged"))
    (damaged / "golden.safetensors").write_bytes(data)
    with pytest.raises(BundleError, match=r"golden\.safetensors was changed.*warm_up=False"):
        load(damaged, expect=flat.sha256sums)


def test_a_file_that_fails_on_its_golden_inputs_is_one_sentence(flat: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        device, placement, settings = "cpu", None, {}

        def __call__(self, *tensors: Any) -> tuple[Any, ...]:
            raise RuntimeError("indices element\nout of bounds.")

    monkeypatch.setattr(loading, "open_route", lambda *args: Failing())
    with pytest.raises(BundleError, match=r"fails on the golden inputs: indices element out of bounds\. Pass warm_up"):
        load(flat)


def test_a_file_that_a_runtime_cannot_load_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"nothing of a model")
    for format, runtime in RUNTIMES:
        with pytest.raises(DeviceError, match=f"^{runtime} can't load model: ") as caught:
            open_route(path, Route(format, runtime))
        assert "\n" not in str(caught.value)
        # OpenVINO's first lines are places in its source.
        assert "Exception from" not in str(caught.value)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(DeviceError, match=r"it is a link: copy the bundle, with the files instead of links$"):
        open_route(tmp_path / "link", Route("onnx", "openvino"))
    with pytest.raises(DeviceError, match="There is no format 'gguf'"):
        open_route(path, Route("gguf", "torch"))


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "optimize_export.runtime.torch_runner", raising=False)
    monkeypatch.setitem(sys.modules, "exporters.torchscript", None)
    with pytest.raises(DeviceError, match=r"^torch can't load model without exporters: pip install exporters$"):
        open_route(tmp_path / "model", Route("torchscript", "torch"))


def test_a_torchscript_file_imports_no_other_format(every: Bundle) -> None:
    """Each start of a service would wait a second for them."""
    names = ("torch.onnx", "onnx", "sympy", "torch._dynamo", "torch._inductor", "exporters.onnx", "exporters.registry")
    code = f"""
import sys
from optimize_export import load
load({str(every.path)!r}, format="torchscript")
print(sorted(sys.modules.keys() & {set(names)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
