"""Serve a bundle over HTTP by LitServe, which collects requests into batches.

    pip install litserve
    python serve.py dist/net [PORT]
    curl localhost:8000/predict --json '{"image": [[[0.0, ...], ...], ...]}'

A batch may hold rows of different users, so build the bundle with --row-independence: it checks that no row of an output
depends on the other rows.
"""

import sys
from typing import Any

import litserve
import numpy

from optimize_export import load

SHAPE = (3, 32, 32)


class BundleAPI(litserve.LitAPI):
    """One row per request. Its input is named "image", as in net.py."""

    def __init__(self, bundle: str) -> None:
        super().__init__(max_batch_size=8, batch_timeout=0.005)
        self.bundle = bundle

    def setup(self, device: str) -> None:
        """Load the bundle; each worker does so once. This checks the hashes and warms up."""
        self.run = load(self.bundle, device=device)

    def decode_request(self, request: dict[str, Any]) -> numpy.ndarray | None:
        """Read one row; None if it isn't one, since an exception would fail all requests of the batch."""
        try:
            row = numpy.asarray(request["image"], numpy.float32)
        except (KeyError, OverflowError, TypeError, ValueError):
            return None
        return row if row.shape == SHAPE else None

    def batch(self, inputs: list[numpy.ndarray | None]) -> tuple[list[bool], numpy.ndarray]:
        """Join the rows of the waiting requests, with zeros for those that have none."""
        rows = [numpy.zeros(SHAPE, numpy.float32) if row is None else row for row in inputs]
        return [row is not None for row in inputs], numpy.stack(rows)

    def predict(self, batch: tuple[list[bool], numpy.ndarray]) -> tuple[list[bool], numpy.ndarray]:
        """Run the model on a batch."""
        known, rows = batch
        return known, self.run(rows)

    def unbatch(self, output: tuple[list[bool], numpy.ndarray]) -> list[numpy.ndarray | None]:
        """Split the output into rows."""
        return [row if is_known else None for is_known, row in zip(*output, strict=True)]

    def encode_response(self, output: numpy.ndarray | None) -> dict[str, Any]:
        """Write one row."""
        if output is None:
            return {"error": f'send {{"image": …}} with numbers in the shape {list(SHAPE)}'}
        return {"output": output.tolist()}


if __name__ == "__main__":
    bundle, port = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8000
    litserve.LitServer(BundleAPI(bundle), accelerator="cpu").run(port=port)
