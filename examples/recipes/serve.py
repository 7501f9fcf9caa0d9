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

from optimizer import load


class BundleAPI(litserve.LitAPI):
    """One row per request. Its input is named "image", as in net.py."""

    def __init__(self, bundle: str) -> None:
        super().__init__(max_batch_size=8, batch_timeout=0.005)
        self.bundle = bundle

    def setup(self, device: str) -> None:
        """Load the bundle; each worker does so once. This checks the hashes and warms up."""
        self.run = load(self.bundle, device=device)

    def decode_request(self, request: dict[str, Any]) -> numpy.ndarray:
        """Read one row, float32 of the shape [3, 32, 32]."""
        return numpy.asarray(request["image"], numpy.float32)

    def batch(self, inputs: list[numpy.ndarray]) -> numpy.ndarray:
        """Join the rows of the waiting requests."""
        return numpy.stack(inputs)

    def predict(self, batch: numpy.ndarray) -> numpy.ndarray:
        """Run the model on a batch."""
        return self.run(batch)

    def unbatch(self, output: numpy.ndarray) -> list[numpy.ndarray]:
        """Split the output into rows."""
        return list(output)

    def encode_response(self, output: numpy.ndarray) -> dict[str, Any]:
        """Write one row."""
        return {"output": output.tolist()}


if __name__ == "__main__":
    bundle, port = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8000
    litserve.LitServer(BundleAPI(bundle), accelerator="cpu").run(port=port)
