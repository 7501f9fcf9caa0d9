"""An exporter whose files are spoilt when they are proven."""


def spoiling(monkeypatch, exporter, spoil):
    """Have the exporter's class hand each file to `spoil`, by its path, after it was proven."""
    right = exporter.export

    def export_and_spoil(self, request, directory):
        artifact = right(self, request, directory)
        spoil(artifact.path)
        return artifact

    monkeypatch.setattr(exporter, "export", export_and_spoil)
