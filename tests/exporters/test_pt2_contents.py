"""Archives that would run code of whoever made them."""

import contextlib
import io
import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from exportable_models import Mlp, mlp_calls

from exporters import ExportRequest, Pt2Exporter, UnsafeFile
from exporters.pt2_contents import refuse_unsafe

MODEL, WEIGHTS, EXAMPLES = "models/model.json", "data/weights/model_weights_config.json", "data/sample_inputs/model.pt"


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The records of a file, by their path below the top folder."""
    artifact = Pt2Exporter().export(ExportRequest(Mlp().eval(), mlp_calls(2, 3)), tmp_path_factory.mktemp("pt2"))
    with zipfile.ZipFile(artifact.path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def changed(exported, tmp_path):
    """Writes the file with some records exchanged."""

    def write(**records):
        path = tmp_path / "model.pt2"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in {**exported, **records}.items():
                archive.writestr(f"archive/{name}", data)
        return path

    return write


def edited(data, *place, value):
    """A JSON document with one entry exchanged."""
    document = json.loads(data)
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    assert place[-1] in inner or isinstance(inner, list)
    inner[place[-1]] = value
    return json.dumps(document)


def test_a_file_written_again_is_loaded(changed):
    path = changed()
    refuse_unsafe(path)
    assert Pt2Exporter.load(path, "cpu")(torch.ones(5, 3))[0].shape == (5, 4)


def test_example_inputs_that_run_code_are_never_unpickled(changed, tmp_path):
    buffer = io.BytesIO()
    torch.save(((Runs(tmp_path / "ran"),), {}), buffer)
    path = changed(**{EXAMPLES: buffer.getvalue()})
    with pytest.raises(UnsafeFile, match=r"model\.pt2 holds example inputs that aren't plain tensors"):
        Pt2Exporter.load(path, "cpu")
    assert not (tmp_path / "ran").exists()
    # What is refused here does run where nobody looks, whatever comes of it then.
    with contextlib.suppress(Exception):
        torch.export.load(str(path))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["use_pickle", "path_name"])
def test_weights_that_run_code_are_never_unpickled(place, exported, changed, tmp_path):
    value = {"use_pickle": True, "path_name": "opaque_obj_0"}[place]
    config = edited(exported[WEIGHTS], "config", "model.first.weight", place, value=value)
    path = changed(**{WEIGHTS: config, "data/weights/weight_0": pickle.dumps(Runs(tmp_path / "ran"))})
    with pytest.raises(UnsafeFile, match=r"holds `model\.first\.weight` as a pickle"):
        Pt2Exporter.load(path, "cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "record",
    [
        "data/aotinductor/model/model.wrapper.so",
        "data/constants/opaque_obj_0",
        "data/constants/custom_obj_0",
        "data/constants/model.pt",
        "data/weights/model.pt",
        "serialized_state_dict.pt",
        "version",
        "models/other.json",
        "extra/other.json",
    ],
)
def test_records_that_a_program_has_no_need_of_are_refused(record, changed):
    with pytest.raises(UnsafeFile, match=f"holds {record}, which isn't loaded from a stranger"):
        refuse_unsafe(changed(**{record: b"x"}))


RUNS = "__import__('os')"
NODE = ("graph_module", "graph", "nodes", 0)
SIGNATURE = ("graph_module", "module_call_graph", 0, "signature")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("guards_code",), [RUNS]),
        (("guards_code",), ["L['x\"'].size()[0] == 1"]),
        (("guards_code",), ["L['y'].size()[0] == 1"]),
        ((*NODE, "target"), "torch.hub.load"),
        ((*NODE, "target"), "_operator.methodcaller"),
        ((*NODE, "target"), "math.__loader__.load_module"),
        ((*NODE, "name"), f"x={RUNS}"),
        ((*NODE, "outputs", 0, "as_tensor", "name"), f"x\n    {RUNS}"),
        ((*SIGNATURE, "forward_arg_names"), [f"x={RUNS}"]),
        ((*SIGNATURE, "in_spec"), '[1, {"type": "collections.defaultdict", "context": "{}", "children_spec": []}]'),
        (("range_constraints",), {RUNS: {"min_val": 2, "max_val": None}}),
        (("graph_module", "graph", "sym_int_values"), {"s": {"as_expr": {"expr_str": RUNS, "hint": None}}}),
        (("graph_module", "graph", "sym_int_values"), {"s": {"as_expr": {"expr_str": "exit(3)", "hint": None}}}),
        (("graph_module", "graph", "sym_int_values"), {"s": {"as_expr": {"expr_str": "S('exit()')", "hint": None}}}),
        (("graph_module", "signature", "input_specs", 0, "parameter", "parameter_name"), f'a"){RUNS}#'),
    ],
)
def test_texts_that_become_code_are_refused(place, value, exported, changed):
    path = changed(**{MODEL: edited(exported[MODEL], *place, value=value)})
    with pytest.raises(UnsafeFile, match=r"which isn't loaded from a stranger"):
        refuse_unsafe(path)


def test_sizes_are_read(exported, changed):
    sizes = {"s": {"as_expr": {"expr_str": "Max(2*Symbol('s77', integer=True) + 1, -3)", "hint": None}}}
    refuse_unsafe(changed(**{MODEL: edited(exported[MODEL], "graph_module", "graph", "sym_int_values", value=sizes)}))


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_archive_is_refused(data, tmp_path):
    path = tmp_path / "model.pt2"
    path.write_bytes(data)
    with pytest.raises(UnsafeFile, match=r"model\.pt2 is no program that torch\.export saved"):
        refuse_unsafe(path)


def test_two_records_of_one_name_are_refused(changed):
    path = changed()
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(f"archive/{MODEL}", b"{}")
    with pytest.raises(UnsafeFile, match="two records of one name"):
        refuse_unsafe(path)
