"""Is the place of a fault named right? Faults of several kinds are planted in random operations of a ResNet-50 and a BERT.

    python benchmarks/locating.py --json build/locating.json --markdown build/locating.md

Both models are optimized and exported to ONNX as `optimize-export` does it; a fault is planted in a copy of the file, in one
operation that is drawn at random, and is taken where it changes the file's outputs at a batch of two or three. Then the
place is looked for as it is when an export fails. It is right where the module and the line are those that torch's exporter
itself wrote down for the operation, before what it wrote was taken out of the file. Where the exporter merged the operation
with others, so that the file has no value between them, several places are named: that is counted apart, and is right where
there are three at most and the operation's is one of them.
"""

from __future__ import annotations

import argparse
import ast
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from measure import caption, environment, positive
from models import bring_to_life
from planted import KINDS, File, Plant
from table import Table, publish
from torch import nn

import exporters.onnx
from exporters.base import Artifact, ExportRequest
from exporters.onnx import OnnxExporter
from exporters.steps import Place, line_of
from optimizer import optimize
from optimizer.divergence import Divergence
from optimizer.locating import first_divergence

GOAL = 38 / 40
BATCHES = (2, 3)
MOST_MERGED = 3

Inputs = Callable[[int], torch.Tensor]


def resnet50() -> tuple[nn.Module, Inputs]:
    """Fifty layers, each a quarter as wide as the original's."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 6, 3], num_labels=10)

    def draw(batch: int) -> torch.Tensor:
        return torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(batch))

    return bring_to_life(ResNetForImageClassification(config), draw(8)), draw


def bert() -> tuple[nn.Module, Inputs]:
    """Four layers of 64."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertModel(BertConfig(**sizes, vocab_size=100, max_position_embeddings=32))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.3, 0.3, generator=generator)

    def draw(batch: int) -> torch.Tensor:
        return torch.randint(0, 100, (batch, 12), generator=torch.Generator().manual_seed(batch))

    return bring_to_life(model), draw


MODELS = {"resnet50": resnet50, "bert": bert}


@dataclass(frozen=True)
class Subject:
    """A file that is right, and the place that torch's exporter itself wrote down for each value in it."""

    artifact: Artifact
    file: File
    places: dict[str, tuple[str, str]]
    inputs: Inputs
    right: list[list[np.ndarray]]


def made(name: str, folder: Path) -> Subject:
    model, inputs = MODELS[name]()
    fast = optimize(model, example_inputs=(inputs(2),))
    calls = tuple(((inputs(batch),), {}) for batch in (2, 3, 1))
    with written_places() as places:
        artifact = OnnxExporter().export(ExportRequest(fast, calls), folder)
    proto = onnx.load(artifact.path)
    names = [name for node in proto.graph.node for name in node.output if name]
    assert artifact.values is not None
    seen = artifact.values(artifact.path, "cpu", names).run((inputs(2),)).values
    floats = frozenset(name for name, value in seen.items() if value.dtype == torch.float32)
    file = File(proto, {name: tuple(value.shape) for name, value in seen.items()}, floats)
    return Subject(artifact, file, places, inputs, [outputs(session_of(proto), inputs(batch)) for batch in BATCHES])


@contextmanager
def written_places() -> Iterator[dict[str, tuple[str, str]]]:
    """Module and line of each value of the file that is exported inside, as torch's exporter wrote them into its model."""
    places: dict[str, tuple[str, str]] = {}
    strip = exporters.onnx._strip

    def read_and_strip(model: ir.Model) -> None:
        places.clear()
        for node in model.graph:
            scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "['', '']"))
            line = line_of(node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))
            path = scopes[-2].removeprefix("model").lstrip(".")
            places.update({str(value.name): (path, line) for value in node.outputs})
        strip(model)

    exporters.onnx._strip = read_and_strip
    try:
        yield places
    finally:
        exporters.onnx._strip = strip


def session_of(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def outputs(session: ort.InferenceSession, tensor: torch.Tensor) -> list[np.ndarray]:
    return list(session.run(None, {session.get_inputs()[0].name: tensor.numpy()}))


def shows(subject: Subject, model: onnx.ModelProto) -> bool:
    """Whether a file can be like that, and gives others than before, by more than rounding, or raises."""
    try:
        session = session_of(model)
    except Exception:  # noqa: BLE001 - it is one of many kinds, and says that onnxruntime takes no such file
        return False
    for batch, right in zip(BATCHES, subject.right, strict=True):
        try:
            got = outputs(session, subject.inputs(batch))
        except Exception:  # noqa: BLE001 - likewise
            return True
        for one, other in zip(right, got, strict=True):
            if one.shape != other.shape or not np.abs(one - other).max() <= 1e-4 * np.abs(one).max():
                return True
    return False


@dataclass(frozen=True)
class Trial:
    """One fault, and what was named.

    Attributes:
        verdict: "exact", "merged" (several places, of which it is one), or "wrong".
    """

    kind: str
    value: str
    operation: str
    module: str
    line: str
    verdict: str
    named: str
    seconds: float


def trial(subject: Subject, kind: str, plant: Plant, seed: int, folder: Path) -> Trial:
    """Plant a fault where it shows, and look for it."""
    draw = random.Random(f"{kind} {seed}")
    while True:
        number = draw.choice(subject.file.candidates())
        node = subject.file.model.graph.node[number]
        planted = subject.file.copy()
        value = node.output[0]
        if plant(planted, number, draw) and shows(subject, planted.model):
            break
    path = folder / "planted.onnx"
    onnx.save(planted.model, path)
    module, line = subject.places[value]
    started = time.perf_counter()
    found = looked_for(replace(subject.artifact, path=path), subject.inputs)
    seconds = time.perf_counter() - started
    return Trial(kind, value, node.op_type, module, line, verdict(found, module, line), str(found), seconds)


def looked_for(artifact: Artifact, inputs: Inputs) -> Divergence | None:
    program, values = artifact.program, artifact.values
    assert program is not None
    assert values is not None
    names = [program.name_in_file(step) for step in program.steps]
    calls = ((f"batch size {batch}", (inputs(batch),)) for batch in BATCHES)
    return first_divergence(program, values(artifact.path, "cpu", names), calls)


def verdict(found: Divergence | None, module: str, line: str) -> str:
    def is_right(place: Place) -> bool:
        return place.module == module and (not line or place.line == line)

    if found is None:
        return "wrong"
    if is_right(found.place) and not found.also:
        return "exact"
    places = (found.place, *found.also)
    return "merged" if any(map(is_right, places)) and len(places) <= MOST_MERGED else "wrong"


def summed(trials: Sequence[Trial]) -> dict[str, Any]:
    counts = {word: sum(each.verdict == word for each in trials) for word in ("exact", "merged", "wrong")}
    return {**counts, "right": counts["exact"] + counts["merged"], "planted": len(trials)}


def result_table(results: Sequence[dict[str, Any]]) -> Table:
    headings = ["model", "fault", "planted", "named right", "exactly", "among merged", "slowest"]
    table = Table("Faults that are planted in an ONNX file, and whether their place is named", headings, left=2)
    for each in results:
        figures = [str(each[key]) for key in ("planted", "right", "exact", "merged")]
        table.add(each["model"], each["kind"], *figures, f"{each['seconds']:.1f} s")
    return table


def chosen(parser: argparse.ArgumentParser, given: str | None, known: Sequence[str]) -> list[str]:
    names = given.split(",") if given else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no {unknown[0]!r}: use {', '.join(known)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--kinds", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--faults", type=positive, default=40, help="of each kind in each model")
    parser.add_argument("--threads", type=positive, default=1, help="of torch")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--check", action="store_true", help="exit with 1 where fewer than 38 of 40 are named right")
    arguments = parser.parse_args()
    models = chosen(parser, arguments.models, list(MODELS))
    kinds = chosen(parser, arguments.kinds, list(KINDS))
    torch.set_num_threads(arguments.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    where = environment(arguments.threads)

    results = []
    for name in models:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            print(f"{name} …", file=sys.stderr)
            subject = made(name, folder)
            for kind in kinds:
                trials = [trial(subject, kind, KINDS[kind], seed, folder) for seed in range(arguments.faults)]
                for each in trials:
                    if each.verdict == "wrong":
                        print(f"{name}, {kind}: {each}", file=sys.stderr)
                slowest = max(each.seconds for each in trials)
                rows = [vars(each) for each in trials]
                results.append({"model": name, "kind": kind, **summed(trials), "seconds": slowest, "trials": rows})
    table = result_table(results)
    met = all(each["right"] >= GOAL * each["planted"] for each in results)
    table.caption.append(f"The goal is 38 of 40 of each kind in each model, which is {'met' if met else 'missed'}.")
    table.caption.append(caption(where))
    data = {"benchmark": "locating", "environment": where, "goal": GOAL, "met": met, "results": results}
    publish([table], data, arguments.json, arguments.markdown)
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
