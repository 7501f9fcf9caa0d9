import io
import json
import threading
import zipfile

import pytest
import torch
from exportable_models import Mlp, Of, exportable, floats, mlp_calls
from tiny_models import enliven
from torch import nn

from exporters import ExportRequest, Pt2Exporter, RouteRefused
from exporters.evidence import gather
from exporters.exported_program import captured, conditions_of_program, take_guards
from exporters.proof import prove_beyond


def export(model, calls, tmp_path, **options):
    return Pt2Exporter().export(ExportRequest(model.eval(), calls, **options), tmp_path)


def records(path):
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def shapes(path, *, open_as):
    """The shapes of the program's inputs and outputs, with `open_as` for open sizes."""
    program = torch.export.load(str(path))
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    names = (*program.graph_signature.user_inputs, *program.graph_signature.user_outputs)
    return [[size if isinstance(size, int) else open_as for size in values[name].shape] for name in names]


# A lock can't be copied, and a strict capture can't trace code that acquires it.
_LOCK = threading.Lock()


def test_dims_are_open_exactly_where_they_change(tmp_path):
    artifact = export(*exportable("rows"), tmp_path)
    assert shapes(artifact.path, open_as="?") == [["?", 3], ["?", 4], ["?"], [4, "?"], [4]]
    assert artifact.route == "export"
    assert artifact.refused == ()


@pytest.mark.slow
def test_a_batch_computed_by_a_division_is_taken_by_the_strict_route(tmp_path):
    class Windows(nn.Module):
        def forward(self, x):
            windows = x.view(-1, 2, 4, 3).sin()
            rows = int(windows.shape[0] / (x.shape[1] / 8))
            return windows.view(rows, -1, 3)

    calls = tuple(((floats(size, 16, 3),), {}) for size in (2, 3, 5))
    artifact = export(Windows(), calls, tmp_path)
    assert artifact.route == "export-strict"
    assert [route for route, _ in artifact.refused] == ["export"]
    for size in (1, 8, 70):
        x = floats(size, 16, 3)
        assert torch.equal(artifact.load()(x)[0], Windows()(x))


class Named(nn.Module):
    def forward(self, **inputs):
        first, second = inputs.values()
        return first * 2 + second


@pytest.mark.parametrize("names", [("Image", "image"), ("lambda", "Lambda"), ("L", "I")])
def test_inputs_of_one_batch_must_agree_and_may_have_any_name(names, tmp_path):
    calls = tuple(((), {name: floats(size, 3) for name in names}) for size in (2, 3))
    artifact = export(Named(), calls, tmp_path)
    assert artifact.route == "export"
    assert torch.equal(artifact.load()(floats(5, 3), floats(5, 3))[0], floats(5, 3) * 3)
    for module in (artifact.load(), torch.export.load(str(artifact.path)).module()):
        with pytest.raises((ValueError, AssertionError)):
            module(floats(4, 3), floats(5, 3))


def test_sizes_that_the_file_was_not_made_for_are_refused(tmp_path):
    artifact = export(Mlp(), mlp_calls(2, 3), tmp_path)
    loaded = artifact.load()
    for inputs, sentence in (
        ((floats(2, 4),), r"Input `x` of the file is float32\[2, 3\], but got float32\[2, 4\]"),
        ((floats(2, 3, 3),), r"but got float32\[2, 3, 3\]"),
        ((floats(2, 3).double(),), r"but got float64\[2, 3\]"),
        ((floats(2, 3), floats(2, 3)), "takes 1 tensors, not 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            loaded(*inputs)
    plain = torch.export.load(str(artifact.path)).module()
    assert plain(floats(7, 3)).shape == (7, 4)
    with pytest.raises(AssertionError, match=r"Guard failed: x\.size\(\)\[1\] == 3"):
        plain(floats(2, 4))
    with pytest.raises(AssertionError, match=r"Guard failed: len\(x\.size\(\)\) == 2"):
        plain(floats(2, 3, 3))


def test_batches_that_the_model_refuses_are_refused_and_no_others(tmp_path):
    # It takes rows in pairs, and fails for an odd number.
    grouped = Of(lambda x: x.view(-1, 2, 3).sum(1))
    calls = tuple(((floats(size, 3),), {}) for size in (4, 6))
    artifact = export(grouped, calls, tmp_path)
    # torch.export's guards exclude 2 rows, but this guard is dropped, because the program is right for them.
    for size in (2, 4, 8, 70):
        assert torch.equal(artifact.load()(floats(size, 3))[0], grouped(floats(size, 3)))
    with pytest.raises(AssertionError, match=r"Guard failed: .*x\.size\(\)\[0\] % "):
        artifact.load()(floats(5, 3))


def test_what_a_model_does_in_its_first_call_alone_is_no_hindrance(tmp_path):
    class Prepared(nn.Module):
        def __init__(self):
            super().__init__()
            self.ready = False

        def forward(self, x):
            if not self.ready:
                with _LOCK:
                    self.ready = True
            return x.repeat(len(x), 1)

    model = Prepared()
    artifact = export(model, mlp_calls(2, 3), tmp_path)
    assert artifact.route == "export-strict"
    assert not model.ready
    assert torch.equal(artifact.load()(floats(5, 3))[0], floats(5, 3).repeat(5, 1))


def test_the_file_has_the_weights_as_bytes_and_nothing_of_the_user(tmp_path):
    x, model = torch.tensor([[1.2345678, 2.3456789, 3.4567891]] * 2), enliven(Mlp())
    held = records(export(model, (((x,), {}), ((floats(3, 3),), {})), tmp_path).path)
    assert not [name for name, data in held.items() if x[0].numpy().tobytes()[:4] in data]
    (example,), keywords = torch.load(io.BytesIO(held["data/sample_inputs/model.pt"]))
    assert (example == 0).all()
    assert keywords == {}
    nodes = json.loads(held["models/model.json"])["graph_module"]["graph"]["nodes"]
    assert {key for node in nodes for key in node["metadata"]} <= {"nn_module_stack", "torch_fn"}
    weights = sorted(data for name, data in held.items() if name.startswith("data/weights/weight_"))
    assert weights == sorted(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    config = json.loads(held["data/weights/model_weights_config.json"])["config"]
    assert not any(payload["use_pickle"] for payload in config.values())


@pytest.mark.gpu
def test_a_file_from_a_gpu_runs_on_both(tmp_path):
    model, calls = exportable("conv_net")
    moved = tuple((tuple(tensor.cuda() for tensor in args), kwargs) for args, kwargs in calls)
    artifact = export(model.cuda(), moved, tmp_path)
    x = floats(7, 3, 6, 6)
    expected = model(x.cuda()).detach().cpu()
    for device in ("cpu", "cuda"):
        (y,) = artifact.load(device)(x)
        assert y.device.type == device
        assert torch.allclose(y.cpu(), expected, atol=1e-4)
    config = json.loads(records(artifact.path)["data/weights/model_weights_config.json"])["config"]
    assert {payload["tensor_meta"]["device"]["type"] for payload in config.values()} == {"cpu"}


def up_to(rows, factor):
    """A model that takes another branch above a number of rows, which multiplies by `factor`."""
    return Of(lambda x: x * 2 if x.shape[0] <= rows else x * factor)


def test_a_batch_too_large_to_try_may_be_one_that_the_file_refuses(tmp_path):
    calls = tuple(((floats(size, 64),), {}) for size in (2, 3))
    loaded = export(up_to(880801, 3), calls, tmp_path).load()
    assert torch.equal(loaded(floats(7, 64))[0], floats(7, 64) * 2)
    with pytest.raises(AssertionError, match=r"Guard failed: x\.size\(\)\[0\] <= 880801"):
        loaded(floats(1, 64).expand(880802, 64))

    # Without the guard, the file would take that batch.
    evidence = gather(ExportRequest(up_to(880801, 3).eval(), calls))
    program, _ = captured(evidence, strict=False)
    conditions = conditions_of_program(program, evidence)
    take_guards(program)
    with pytest.raises(RouteRefused, match=r"at batch size 880802 .*: the inputs would be too large"):
        prove_beyond(evidence, lambda x: (program.module()(x),), conditions, ())


@pytest.mark.slow
def test_two_conditions_on_the_same_bound_are_proven_by_the_same_batches(tmp_path):
    # The third batch beyond the bound would be too large to try: 108 numbers a row.
    calls = tuple(((floats(size, 108),), {}) for size in (2, 3))
    loaded = export(up_to(65535, 2), calls, tmp_path).load()
    x = floats(1, 108).expand(65536, 108)
    assert torch.equal(loaded(x)[0], x * 2)
