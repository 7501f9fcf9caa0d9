"""The recipe of an HTTP service: its answers, its errors and its metrics."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from optimize_export import load
from optimizer import export

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).resolve().parent.parent / "examples" / "recipes"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(RECIPES))
    try:
        import net
    finally:
        sys.path.remove(str(RECIPES))
    output = tmp_path_factory.mktemp("serve") / "net"
    export(
        net.get_model(),
        example_inputs=net.get_example_inputs(),
        output=output,
        formats=("onnx",),
        row_independence=True,
        effort="quick",
    )
    return output


@pytest.fixture(scope="module")
def port(bundle: Path) -> Iterator[int]:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, RECIPES / "serve.py", bundle, str(number)], stderr=subprocess.PIPE
    ) as served:
        try:
            end = time.monotonic() + 120
            while True:
                try:
                    ask(number, "GET", "/metrics")
                    break
                except ConnectionRefusedError:
                    assert served.poll() is None
                    assert time.monotonic() < end
                    time.sleep(0.1)
            yield number
        finally:
            served.terminate()
            _, told = served.communicate(timeout=60)
    assert b"Traceback" not in told
    assert b"Application shutdown complete" in told


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, str, str]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()


def test_each_request_gets_the_answer_of_its_row(bundle: Path, port: int) -> None:
    rows = numpy.random.default_rng(0).standard_normal((64, 3, 32, 32)).astype(numpy.float32)
    endless = numpy.full_like(rows[0], numpy.nan).tolist()
    wrong = [{"image": rows[0, :2].tolist()}, {"picture": 1}, {"image": "text"}, [1], 7, {"image": endless}]
    requests: list[Any] = [{"image": row.tolist()} for row in rows]
    for place, each in enumerate(wrong):
        requests.insert(10 * place, each)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: ask(port, "POST", "/predict", each), requests))
    refused = [found.pop(10 * place) for place in reversed(range(len(wrong)))]
    for status, _, text in refused:
        assert (status, "send {" in json.loads(text)["error"]) == (400, True)
    wanted = load(bundle)(rows)
    for (status, _, text), row in zip(found, wanted, strict=True):
        assert status == 200
        numpy.testing.assert_allclose(json.loads(text)["output"], row, rtol=1e-4, atol=1e-5)

    status, kind, text = ask(port, "GET", "/metrics")
    assert (status, kind) == (200, "application/openmetrics-text; version=1.0.0; charset=utf-8")
    samples = {
        (each.name, each.labels.get("outcome")): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if "le" not in each.labels
    }
    assert samples["optimize_export_calls_total", "answered"] == 64
    assert samples["optimize_export_batch_rows_sum", None] == 64
    assert samples["optimize_export_waiting_calls", None] == 0


def test_what_json_cannot_have_is_no_error_of_the_server(port: int) -> None:
    for body in (b"[" * 200_000, b'{"image":' + b"[" * 200_000, b"\xff", b""):
        assert ask(port, "POST", "/predict", body)[0] == 400
    largest = numpy.full((3, 32, 32), 3e38, numpy.float32).tolist()
    status, _, text = ask(port, "POST", "/predict", {"image": largest})
    assert (status, json.loads(text)) == (422, {"error": "the output isn't finite"})


def test_clients_that_go_away_leave_the_others_alone(bundle: Path, port: int) -> None:
    row = numpy.ones((3, 32, 32), numpy.float32)
    body = json.dumps({"image": row.tolist()}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    # Some go within their request, some before the answer.
    for end in (len(head) + 100, len(head) + len(body)) * 8:
        with closing(socket.create_connection(("127.0.0.1", port), timeout=60)) as connection:
            connection.sendall((head + body)[:end])
    wanted = load(bundle)(row[None])[0]
    for _ in range(8):
        status, _, text = ask(port, "POST", "/predict", {"image": row.tolist()})
        assert status == 200
        numpy.testing.assert_allclose(json.loads(text)["output"], wanted, rtol=1e-4, atol=1e-5)
