"""Break exporters: spoil their files after the proof, or make one of their routes fail."""

import torch


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
