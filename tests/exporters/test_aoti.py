"""AOTInductor packages. Compilation is slow, so most tests share one package."""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from exportable_models import Branch, Mlp, floats, mlp_calls
from local_paths import found_paths
from tiny_models import enliven
from torch import nn

import exporters.aoti
from exporters import (
    Adapter,
    AotiExporter,
    ExportError,
    ExportRequest,
    OtherMachine,
    aoti_compile,
    exporter_named,
)


def export(model, calls, folder, **options):
    return AotiExporter().export(ExportRequest(model.eval(), calls, **options), folder)


class Everything(nn.Module):
    """Adds rows in pairs; takes integers, a mask, float16 and a constant, as keyword arguments and in a dict.

    Also returns an input, a constant, a view of another output, and one value twice.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, ids, *, extra, scale=1.0):
        hidden = self.embedding(ids).masked_fill(~extra["keep"].unsqueeze(-1), 0.0).sum(1)
        hidden = self.norm(self.linear(hidden).relu()) * scale
        half = extra["half"] * 2
        pairs = hidden.view(-1, 2, 6).sum(1)
        return {
            "pairs": pairs,
            "twice": torch.cat([hidden, hidden]),
            "half": half,
            "best": hidden.argmax(1),
            "ids": ids,
            "flat": half.view(-1),
            "again": extra["half"] * 2,
            "table": self.table,
        }


OPEN_DIMS = {
    "ids": {0: "batch", 1: "time"},
    "extra_keep": {0: "batch", 1: "time"},
    "extra_half": {0: "batch"},
}


def everything_call(size, length=5):
    ids = torch.arange(size * length).reshape(size, length) % 11
    return ((ids,), {"extra": {"keep": ids % 3 != 0, "half": floats(size, 3, seed=size).half()}, "scale": 2.0})


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return enliven(Everything()).eval()


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory):
    """A package made with a new cache and a new folder for temporary files, which must both stay empty."""
    places = {name: tmp_path_factory.mktemp(name) for name in ("cache", "temporary")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(places["cache"]))
        patch.setattr(tempfile, "tempdir", str(places["temporary"]))
        sizes = [(4, 5), (6, 5), (2, 5), (4, 7), (4, 3), (6, 7)]
        calls = tuple(everything_call(*each) for each in sizes)
        given = {"open_dims": OPEN_DIMS, "metadata": {"author": "Jane"}}
        made = export(model, calls, tmp_path_factory.mktemp("aoti"), **given)
    assert {name: list(place.iterdir()) for name, place in places.items()} == {"cache": [], "temporary": []}
    assert list(made.path.parent.iterdir()) == [made.path]
    return made


@pytest.fixture
def inputs(model):
    adapter = Adapter(model, *everything_call(4))
    return lambda *sizes: adapter.flatten_inputs(*everything_call(*sizes))


def test_it_computes_what_the_model_computes_at_any_batch_and_length(model, artifact, inputs):
    found = AotiExporter.read_metadata(artifact.path)
    assert (found["author"], found["optimize_export.model"]) == ("Jane", "Everything")
    assert found["optimize_export.inputs"] == json.dumps([spec.name for spec in artifact.inputs])
    assert artifact.format == "aoti"
    assert artifact.route == "aotinductor"
    assert [(spec.name, spec.dtype, spec.shape) for spec in artifact.inputs] == [
        ("ids", "int64", ("batch", "time")),
        ("extra_keep", "bool", ("batch", "time")),
        ("extra_half", "float16", ("batch", 3)),
    ]
    assert [spec.name for spec in artifact.outputs] == [
        "pairs", "twice", "half", "best", "ids_out", "flat", "again", "table",
    ]  # fmt: skip
    adapter, loaded = Adapter(model, *everything_call(4)), artifact.load()
    assert (loaded.device, loaded.placement) == ("cpu", None)
    for sizes in ((2, 5), (4, 5), (8, 9), (64, 1)):
        expected = adapter.run(inputs(*sizes))
        for wanted, got in zip(expected, loaded(*inputs(*sizes)), strict=True):
            assert got.dtype == wanted.dtype
            assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_outputs_outlive_the_package_and_inputs_may_lie_anyhow(artifact, inputs):
    loaded = artifact.load()
    given = inputs(4)
    outputs = loaded(*given)
    before = [output.clone() for output in outputs]
    del loaded
    given[0].zero_()
    assert all(torch.equal(*pair) for pair in zip(before, outputs, strict=True))
    ids, keep, half = inputs(8)
    expected = artifact.load()(ids[::2], keep[::2], half[::2])
    spread = artifact.load()(ids.t().contiguous().t()[::2], keep.expand(2, 8, 5)[1, ::2], half[::2].t().clone().t())
    assert all(torch.equal(*pair) for pair in zip(expected, spread, strict=True))
    # Its memory holds the values with the other sign.
    negated = artifact.load()(ids[::2], keep[::2], torch._neg_view(-half)[::2])
    assert all(torch.equal(*pair) for pair in zip(expected, negated, strict=True))


def test_loaded_for_graphs_it_computes_the_same(artifact, inputs):
    loaded = AotiExporter.for_graphs(artifact.path, "cpu")
    for size in (4, 2, 4):
        assert all(map(torch.equal, loaded(*inputs(size)), artifact.load()(*inputs(size))))


def test_other_inputs_are_refused_before_they_are_read(artifact, inputs):
    loaded = artifact.load()
    ids, keep, half = inputs(4)
    for given, sentence in (
        ((ids, keep, half[:, :2]), r"Input `extra_half` of the file is float16\[4, 3\], but got float16\[4, 2\]"),
        ((ids, keep, half.float()), r"but got float32\[4, 3\]"),
        ((ids, keep[:2], half), r"Input `extra_keep` of the file is bool\[4, 5\], but got bool\[2, 5\]"),
        ((ids, keep[0], half), r"but got bool\[5\]"),
        ((ids, keep), "takes 3 tensors, not 2"),
        ((ids[:0], keep[:0], half[:0]), r"Input `ids` has the shape \[0, 5\]: compiled code needs elements"),
        # The model takes rows in pairs.
        (inputs(5), r"wasn't compiled for inputs of these sizes: .*L\['ids'\]\.size\(\)\[0\].* doesn't"),
    ):
        with pytest.raises(ValueError, match=sentence):
            loaded(*given)


def test_the_package_tells_nothing_of_this_machine(artifact, tmp_path):
    assert not found_paths(artifact.path, tmp_path)
    with zipfile.ZipFile(artifact.path) as archive:
        names = [name.rpartition("/")[2] for name in archive.namelist()]
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 0, 0, 0, 0, 0)}
        assert all(archive.read(name) == b"" for name in archive.namelist() if name.endswith(".cpp"))
    own = ["model.wrapper_metadata.json", "model.wrapper.so", "model.wrapper.cpp", "metadata.json"]
    assert sorted(names) == sorted(
        [*own, "archive_format", "archive_version", "version", "byteorder", "serialization_id"]
    )


@pytest.mark.zoo
def test_a_second_reproducible_export_writes_the_same_bytes_whatever_the_number_of_threads(
    model, tmp_path, monkeypatch
):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    before, made = torch.get_num_threads(), []
    try:
        for further in (0, 1):
            torch.set_num_threads(before + further)
            folder = tmp_path / str(further)
            folder.mkdir()
            made.append(export(model, tuple(map(everything_call, (4, 6, 2))), folder).path)
    finally:
        torch.set_num_threads(before)
    assert made[0].read_bytes() == made[1].read_bytes()
    with zipfile.ZipFile(made[0]) as archive:
        (library,) = [name for name in archive.namelist() if name.endswith(".so")]
        assert b"GOMP_parallel" in archive.read(library)


_PLAIN = """
import sys, torch
model = torch._inductor.aoti_load_package(sys.argv[1])
for size in (2, 8):
    ids = torch.ones(size, 5, dtype=torch.int64)
    print([tuple(output.shape) for output in model(ids, ids > 0, torch.ones(size, 3, dtype=torch.float16))])
try:
    model(ids, ids > 0, torch.ones(size, 4, dtype=torch.float16))
except RuntimeError as error:
    print("refused")
assert not {"exporters", "optimize_export", "optimizer", "passes"} & set(sys.modules)
"""


@pytest.mark.slow
def test_a_process_that_knows_nothing_of_this_project_runs_it(artifact, tmp_path):
    environment = {**os.environ, "AOTI_RUNTIME_CHECK_INPUTS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-I", "-c", _PLAIN, str(artifact.path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "".join(
        f"[({size // 2}, 6), ({2 * size}, 6), ({size}, 3), ({size},), ({size}, 5), ({3 * size},), ({size}, 3), (6,)]\n"
        for size in (2, 8)
    ) + "refused\n"  # fmt: skip


def test_another_machine_is_refused(artifact, monkeypatch):
    (note,) = artifact.notes
    assert note.startswith("Made for cpu: ")
    assert note.endswith(f", {sys.platform}, torch {torch.__version__}.")
    refused = r"^model\.aoti\.pt2 was compiled for cpu: .*, but the {} here {}: export it on the machine where"
    with pytest.raises(OtherMachine, match=refused.format("target", "is cuda")):
        artifact.load("cuda")
    needs = exporters.aoti.package_metadata(artifact.path)["optimize_export"]["needs"]
    assert needs, "a processor without vector instructions shows nothing here"
    with monkeypatch.context() as patch:
        major, minor = map(int, torch.__version__.split(".")[:2])
        newer = f"{major}.{minor + 1}.0"
        patch.setattr(torch, "__version__", newer)
        with pytest.raises(OtherMachine, match=refused.format("target", f"is torch {newer}")):
            artifact.load()
        # Another patch release has the same binary interface.
        patch.setattr(torch, "__version__", f"{major}.{minor}.99")
        artifact.load()
    able = {name: has for name, has in torch.cpu.get_capabilities().items() if name.replace("_", "") != needs[0]}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    with pytest.raises(OtherMachine, match=refused.format("processor", f"has no {needs[0]}")):
        artifact.load()
    monkeypatch.setattr(exporters.aoti.platform, "machine", lambda: "riscv64")
    with pytest.raises(OtherMachine, match=refused.format("target", "is riscv64")):
        artifact.load()


def test_a_package_of_others_is_not_run(artifact, tmp_path):
    path = tmp_path / "model.aoti.pt2"
    with zipfile.ZipFile(artifact.path) as archive, zipfile.ZipFile(path, "w") as copy:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith("_metadata.json"):
                metadata = {key: value for key, value in json.loads(data).items() if key != "optimize_export"}
                data = json.dumps(metadata).encode()
            copy.writestr(name, data)
    with pytest.raises(OtherMachine, match=r"model\.aoti\.pt2 isn't a package of this program"):
        AotiExporter.load(path, "cpu")


@pytest.mark.zoo
@pytest.mark.parametrize("time", [0, 1])
def test_what_long_sums_round_is_no_other_way(time, tmp_path):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 4)

        def forward(self, ids):
            x = (self.embedding(ids if time else ids.T).abs() + 1).unsqueeze(1)
            return self.head(nn.functional.scaled_dot_product_attention(x, x, x).squeeze(1).mean(1))

    def ids(size):
        return torch.randint(0, 50, (2, size) if time else (size, 2), generator=generator)

    model = enliven(Attention()).eval()
    generator = torch.Generator().manual_seed(0)
    calls = tuple(((ids(size),), {}) for size in (12, 8, 20))
    export(model, calls, tmp_path, open_dims={"ids": {time: "time"}}, dynamic_batch=False)
    loaded = exporter_named("aoti").load(tmp_path / AotiExporter.file_name, "cpu")
    many = ids(9000)
    assert torch.allclose(loaded(many)[0], model(many), rtol=1e-3, atol=1e-4)


def test_each_output_has_memory_of_its_own(artifact, inputs):
    loaded, (ids, keep, half) = artifact.load(), inputs(4)
    half.requires_grad_()
    expected = [output.clone() for output in loaded(ids, keep, half)]
    for _ in range(2):
        outputs = loaded(ids, keep, half)
        assert not any(output.requires_grad for output in outputs)
        for output, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(output, wanted)
            output.fill_(7)
        assert all(map(torch.equal, (ids, keep, half), inputs(4)))


def test_memory_is_copied_only_where_something_else_has_it():
    loaded = object.__new__(exporters.aoti.LoadedPackage)
    given, made = floats(2, 3), floats(2, 3)
    constant = torch.frombuffer(bytearray(24), dtype=torch.float32)
    taken = {given.untyped_storage().data_ptr()}
    outputs = [loaded._own(each, taken) for each in (made, given.view(-1), constant, made.view(-1))]
    assert [output.data_ptr() == made.data_ptr() for output in outputs] == [True, False, False, False]
    assert outputs[1].data_ptr() != given.data_ptr()
    assert outputs[2].data_ptr() != constant.data_ptr()


def test_a_branch_on_data_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(exporters.aoti, "compile_here", None)
    calls = tuple(((sign * floats(size, 3).abs(),), {}) for size, sign in ((2, 1), (3, -1)))
    with pytest.raises(
        ExportError, match=r"\(aotinductor and aotinductor-strict: the model branches on the values of its"
    ):
        export(enliven(Branch()), calls, tmp_path)


def test_without_a_compiler_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(exporters.aoti, "gather", None)
    with pytest.raises(
        ExportError, match="aoti: AOTInductor needs a C\\+\\+ compiler, and there is no 'no-such-compiler'"
    ):
        export(Mlp(), mlp_calls(2, 3), tmp_path)


@pytest.mark.gpu
def test_a_package_for_a_gpu_runs_there_and_nowhere_else(tmp_path):
    model = enliven(Mlp()).cuda()
    calls = tuple((tuple(tensor.cuda() for tensor in args), kwargs) for args, kwargs in mlp_calls(2, 3, 5))
    artifact = export(model, calls, tmp_path)
    x = floats(7, 3)
    (y,) = artifact.load("cuda")(x)
    assert y.is_cuda
    assert torch.allclose(y, model(x.cuda()), atol=1e-4)
    assert torch.cuda.get_device_name() in artifact.notes[0]
    assert not found_paths(artifact.path, tmp_path)
    with pytest.raises(OtherMachine, match=r"was compiled for cuda: .*, but the target here is cpu"):
        artifact.load("cpu")
    assert exporter_named("aoti").load(Path(artifact.path), "cuda").device == "cuda"


def test_the_compiler_is_not_asked_for_the_instructions_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "echo")
    script = aoti_compile._compiler(tmp_path)
    called = subprocess.run([script, "a b", "-march=native", "-O2"], capture_output=True, text=True, check=True)
    assert called.stdout.startswith("a b -O2 -fsigned-zeros")
    assert "native" not in called.stdout


def test_sources_are_compiled_without_addresses(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "cat")
    source = tmp_path / "model.wrapper.cpp"
    source.write_text("<function f at 0x7fad477f56c0>, <method g at 0x55d0>\n")
    script = Path(aoti_compile._compiler(tmp_path))
    # Without the flags of a compiler, which cat has not.
    script.write_text(script.read_text().rpartition(" -fsigned-zeros")[0] + "\n")
    assert subprocess.check_output([script, source], text=True) == "<function f>, <method g>\n"
