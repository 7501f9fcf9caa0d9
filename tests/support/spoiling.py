"""Break exporters: spoil their files after the proof, or make one of their routes fail."""

import onnx
import torch
from onnx import numpy_helper

from exporters.isolation import torchscript_allowed


def scale_onnx(path, name, factor):
    """Multiply an initializer of an ONNX file."""
    model = onnx.load(path)
    scale_initializer(model.graph, name, factor)
    onnx.save(model, path)


def scale_initializer(graph, name, factor):
    tensor = next(each for each in graph.initializer if each.name == name)
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(values * values.dtype.type(factor), name))


def scale_torchscript(path, names, factor):
    """Multiply the first of these weights that a TorchScript file has."""
    with torchscript_allowed(), torch.no_grad():
        module = torch.jit.load(path)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        next(tensors[name] for name in names if name in tensors).mul_(factor)
        module.save(path)


def scale_pt2(path, name, factor):
    """Multiply a weight of a pt2 file."""
    program = torch.export.load(path)
    with torch.no_grad():
        program.state_dict[name].mul_(factor)
    torch.export.save(program, path)


def spoiling(monkeypatch, exporter, spoil):
    """Make the exporter's class pass each file's path to `spoil`, after the proof of the file."""
    right = exporter.export

    def export_and_spoil(self, request, directory):
        artifact = right(self, request, directory)
        spoil(artifact.path)
        return artifact

    monkeypatch.setattr(exporter, "export", export_and_spoil)


def only_the_old_onnx_exporter(monkeypatch):
    """Make torch's current ONNX exporter fail, so that the files come from the old one."""
    real = torch.onnx.export

    def old_only(*args, **options):
        if options["dynamo"]:
            raise RuntimeError("not today")
        return real(*args, **options)

    monkeypatch.setattr(torch.onnx, "export", old_only)
