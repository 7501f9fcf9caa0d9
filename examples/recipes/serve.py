"""Serve a bundle over HTTP, and join simultaneous requests into batches.

    pip install starlette uvicorn
    optimize-export bench dist/net --throughput --p95 20ms --save      # measured on the machine that serves
    python serve.py dist/net [PORT]
    curl localhost:8000/predict --json '{"image": [[[0.0, ...], ...], ...]}'
    curl localhost:8000/metrics                                        # OpenMetrics, for Prometheus

A batch may hold rows of different users, so build the bundle with --row-independence: it checks that no row of an output
depends on the other rows.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from optimize_export import QueueFull, load

# One row of the bundle's input, which is named "image" in net.py.
SHAPE = (3, 32, 32)


@asynccontextmanager
async def loaded(app: Starlette) -> AsyncIterator[None]:
    """Load the bundle, which checks its hashes and warms up; at the end, answer the calls that wait."""
    # True takes the settings that --save put into the manifest.
    with load(sys.argv[1], batching=True) as app.state.run:
        yield


async def predict(request: Request) -> Response:
    """Answer one row."""
    try:
        row = numpy.asarray((await request.json())["image"], numpy.float32)
    except ClientDisconnect:
        return Response()  # nobody reads it
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError):
        row = numpy.zeros(0, numpy.float32)
    if row.shape != SHAPE or not numpy.isfinite(row).all():
        return JSONResponse({"error": f'send {{"image": …}} with finite numbers in the shape {list(SHAPE)}'}, 400)
    try:
        output = await request.app.state.run.submit(row[None])
    except QueueFull as error:
        return JSONResponse({"error": str(error)}, 503, {"Retry-After": "1"})
    if not numpy.isfinite(output).all():
        return JSONResponse({"error": "the output isn't finite"}, 422)  # JSON has no such numbers
    return JSONResponse({"output": output[0].tolist()})


async def metrics(request: Request) -> Response:
    """Tell Prometheus how many calls came, how long they took and how many wait."""
    kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    return Response(request.app.state.run.metrics(), headers={"Content-Type": kind})


app = Starlette(routes=[Route("/predict", predict, methods=["POST"]), Route("/metrics", metrics)], lifespan=loaded)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[2]) if len(sys.argv) > 2 else 8000)
