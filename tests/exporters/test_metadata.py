import json
import zipfile

import onnx
import onnxruntime as ort
import pytest
import torch
from exportable_models import Mlp, floats, mlp_calls
from spoiling import only_the_old_onnx_exporter

import exporters.onnx
from exporters import ExportRequest, MetadataError, exporter_named
from exporters.isolation import torchscript_allowed
from exporters.metadata import EXTRA_FILE, OURS, refuse_metadata

FORMATS = ("torchscript", "onnx", "pt2")
GIVEN = {"license": "MIT", "author": "Žofie 日本", "notes": "two\nlines = one value", "empty": ""}


def export(format, folder, **options):
    return exporter_named(format).export(ExportRequest(Mlp().eval(), mlp_calls(2, 3), **options), folder)


def by_its_runtime(format, path):
    """The metadata of a file as a program reads them that doesn't know this one."""
    if format == "onnx":
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        return session.get_modelmeta().custom_metadata_map
    files = {EXTRA_FILE: ""}
    if format == "pt2":
        torch.export.load(path, extra_files=files)
    else:
        with torchscript_allowed():
            torch.jit.load(path, _extra_files=files)
    return json.loads(files[EXTRA_FILE])


@pytest.mark.parametrize("format", FORMATS)
def test_what_was_given_is_in_the_file_with_names_and_versions(format, tmp_path):
    exporter = exporter_named(format)
    artifact = export(format, tmp_path, metadata=GIVEN, input_names=("picture",), output_names=("scores",))
    found = exporter.read_metadata(artifact.path)
    # The order in which they are given leaves no trace.
    assert list(found) == sorted(found)
    assert {key: text for key, text in found.items() if not key.startswith(OURS)} == GIVEN
    ours = {key: text for key, text in found.items() if key.startswith(f"{OURS}.")}
    assert ours == {
        "optimize_export.program": ours["optimize_export.program"],
        "optimize_export.torch": torch.__version__,
        "optimize_export.model": "Mlp",
        "optimize_export.inputs": '["picture"]',
        "optimize_export.outputs": '["scores"]',
    }
    assert ours["optimize_export.program"].startswith("optimize-export ")
    assert artifact.load()(floats(5, 3))[0].shape == (5, 4)
    assert GIVEN.items() <= by_its_runtime(format, artifact.path).items()


def test_files_with_weights_beside_them_and_those_of_the_old_exporter_hold_them_too(tmp_path, monkeypatch):
    monkeypatch.setattr(exporters.onnx, "EXTERNAL_DATA_FROM", 10)
    only_the_old_onnx_exporter(monkeypatch)
    artifact = export("onnx", tmp_path, metadata=GIVEN)
    assert (artifact.route, len(artifact.files)) == ("torchscript", 2)
    artifact.files[1].unlink()
    assert GIVEN.items() <= exporter_named("onnx").read_metadata(artifact.path).items()


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_without_any_says_nothing_and_a_broken_one_is_one_sentence(format, tmp_path):
    path, broken = tmp_path / "plain", tmp_path / "broken"
    if format == "onnx":
        onnx.save(onnx.ModelProto(), path)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model/version", "3")
    assert exporter_named(format).read_metadata(path) == {}
    broken.write_bytes(b"\xff" * 64)
    with pytest.raises(MetadataError, match=r"^The metadata of broken can't be read: "):
        exporter_named(format).read_metadata(broken)


@pytest.mark.parametrize("content", ["[1]", '{"a": 1}', "{"])
def test_an_archive_with_other_things_in_their_place_is_one_sentence(content, tmp_path):
    with zipfile.ZipFile(tmp_path / "odd.pt2", "w") as archive:
        archive.writestr(f"model/extra/{EXTRA_FILE}", content)
    with pytest.raises(MetadataError, match=r"^The metadata of odd\.pt2 (aren't strings by key\.|can't be read: )"):
        exporter_named("pt2").read_metadata(tmp_path / "odd.pt2")


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ("author=Jane", r"^Metadata must be a dict of strings, such as .*, not 'author=Jane'\.$"),
        ({1: "x"}, r"^The metadata key 1 is not a string\.$"),
        ({"": "x"}, r"^The metadata key '' is empty: use a name\.$"),
        ({" ": "x"}, r"^The metadata key ' ' is empty"),
        ({"a\nb": "x"}, r"^The metadata key 'a\\nb' contains a newline, NUL or a similar character"),
        ({"a\0": "x"}, r"^The metadata key 'a\\x00' contains a newline, NUL or a similar character"),
        ({"optimize_export": "x"}, "^The metadata key 'optimize_export' is reserved for this program"),
        ({"optimize_export.torch": "x"}, "^The metadata key 'optimize_export.torch' is reserved for this program"),
        ({"a": 1}, r"^The metadata value of 'a' must be a string, not 1\.$"),
        ({"a": None}, "^The metadata value of 'a' must be a string, not None"),
        ({"a": "x\0y"}, r"^The metadata value of 'a' contains NUL, where readers would cut it off\.$"),
        ({"a": "\udcff"}, r"^The metadata of 'a' aren't valid Unicode: they contain half a surrogate pair\.$"),
        ({"\udcff": "a"}, r"^The metadata of '\\udcff' aren't valid Unicode"),
    ],
)
def test_what_no_file_can_say_is_one_sentence(metadata, sentence):
    with pytest.raises(MetadataError, match=sentence):
        refuse_metadata(metadata)
    refuse_metadata({"optimize_exporter": "x", "my.optimize_export.torch": "y", "model": "z", **GIVEN})
