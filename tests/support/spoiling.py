"""Exporters that are hindered: their files are spoilt when they are proven, or a route of theirs fails."""

import torch


def spoiling(monkeypatch, exporter, spoil):
    """Have the exporter's class hand each file to `spoil`, by its path, after it was proven."""
    right = exporter.export

    def export_and_spoil(self, request, directory):
        artifact = right(self, request, directory)
        spoil(artifact.path)
        return artifact

    monkeypatch.setattr(exporter, "export", export_and_spoil)


def only_the_old_onnx_exporter(monkeypatch):
    """Have torch's ONNX exporter of now fail, so that the files are those of the one before it."""
    real = torch.onnx.export

    def old_only(*args, **options):
        if options["dynamo"]:
            raise RuntimeError("not today")
        return real(*args, **options)

    monkeypatch.setattr(torch.onnx, "export", old_only)
