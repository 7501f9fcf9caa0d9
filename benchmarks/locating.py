"""Check that the place of a fault is found: plant faults of several kinds at random places of a ResNet-50 and a BERT.

    python benchmarks/locating.py --json build/locating.json --markdown build/locating.md

Both models are optimized and exported as `optimize-export` does it. A fault is planted in a copy of a file, or a wrong
pass runs between the others, at a random place. The fault counts if it changes the outputs at batch size 2 or 3. Then
its place is searched for, as after a failed export or for a pass that is rolled back. The answer is right if it has the
module and the line that torch's exporter itself recorded for the operation, before these records were removed from the
file. For a pass, and for a pt2 file, it must have the right module, and a line that
the exporter recorded for this module.

If the exporter has merged an operation with others, an ONNX file has no value between them, and several places are
named. Such answers are counted separately. They are right if there are at most three places, and the operation's is one
of them.
"""

from __future__ import annotations

import argparse
import ast
import copy
import logging
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from measure import caption, command, environment, positive
from models import bring_to_life
from planted import KINDS, SCALE, File, Plant, ScaleWeight
from table import Table, publish
from torch import nn

import exporters.onnx
from exporters import Pt2Exporter
from exporters.base import Artifact, ExportRequest
from exporters.isolation import silent
from exporters.onnx import OnnxExporter
from exporters.places import Place, line_of
from optimizer import optimize, report_of
from optimizer.faults import locate_in_file
from optimizer.faults.locating import Divergence
from optimizer.model.inputs import Samples
from optimizer.parity import Reference, measure_reference
from passes.registry import PRESETS

GOAL = 38 / 40
BATCHES = (2, 3)
MOST_MERGED = 3

Inputs = Callable[[int], torch.Tensor]


def resnet50(width: float) -> tuple[nn.Module, Inputs]:
    """A ResNet-50, with 50 layers."""
    from transformers import ResNetConfig, ResNetForImageClassification

    stem, *hidden = (round(width * size) for size in (64, 256, 512, 1024, 2048))
    config = ResNetConfig(embedding_size=stem, hidden_sizes=hidden, depths=[3, 4, 6, 3], num_labels=10)

    def draw(batch: int) -> torch.Tensor:
        return torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(batch))

    return bring_to_life(ResNetForImageClassification(config), draw(8)), draw


def bert(width: float) -> tuple[nn.Module, Inputs]:
    """A BERT with four layers, which have size 64 at a width of 0.25."""
    from transformers import BertConfig, BertModel

    hidden = round(256 * width / 4) * 4
    sizes = {"hidden_size": hidden, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 2 * hidden}
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
class Exported:
    """A correct ONNX file, and the place that torch's exporter itself recorded for each value in it."""

    artifact: Artifact
    file: File
    places: dict[str, tuple[str, str]]
    right: list[list[np.ndarray]]


@dataclass
class Subject:
    """A model, and its artifacts, which are made on first use in a folder."""

    model: nn.Module
    inputs: Inputs
    folder: Path
    right: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.right = self.answers(self.model)

    @cached_property
    def fast(self) -> nn.Module:
        return optimize(self.model, example_inputs=(self.inputs(2),))

    @cached_property
    def lines(self) -> dict[str, set[str]]:
        """The lines that torch's exporter recorded for the operations of each module of the original."""
        with tempfile.TemporaryDirectory() as folder, written_places() as places:
            OnnxExporter().export(self.request(self.model), Path(folder))
        lines: dict[str, set[str]] = {}
        for module, line in places.values():
            lines.setdefault(module, set()).add(line)
        return lines

    @cached_property
    def reference(self) -> Reference:
        return measure_reference(self.model, Samples((self.inputs(2),)), batch_sizes=BATCHES, draws=1)

    @cached_property
    def onnx(self) -> Exported:
        with written_places() as places:
            artifact = OnnxExporter().export(self.request(self.fast), self.folder)
        proto = onnx.load(artifact.path)
        names = [name for node in proto.graph.node for name in node.output if name]
        assert artifact.values is not None
        seen, _ = artifact.values(artifact.path, "cpu", names).run((self.inputs(2),))
        floats = frozenset(name for name, value in seen.items() if value.dtype == torch.float32)
        file = File(proto, {name: tuple(value.shape) for name, value in seen.items()}, floats)
        right = [outputs(session_of(proto), self.inputs(batch)) for batch in BATCHES]
        return Exported(artifact, file, places, right)

    @cached_property
    def pt2(self) -> Artifact:
        return Pt2Exporter().export(self.request(self.fast), self.folder)

    def request(self, model: nn.Module) -> ExportRequest:
        return ExportRequest(model, tuple(((self.inputs(batch),), {}) for batch in (2, 3, 1)))

    def answers(self, model: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
        """The first output at each batch size."""
        with torch.no_grad():
            given = [model(self.inputs(batch)) for batch in BATCHES]
        return [each if isinstance(each, torch.Tensor) else next(iter(flat(each))) for each in given]

    def shows(self, model: Callable[[torch.Tensor], Any]) -> bool:
        """Whether the outputs of a model differ from those of this one by more than rounding."""
        return any(differ(*pair) for pair in zip(self.right, self.answers(model), strict=True))


def flat(output: Any) -> Sequence[torch.Tensor]:
    return tuple(output.values()) if isinstance(output, dict) else tuple(output)


def differ(right: Any, got: Any) -> bool:
    return right.shape != got.shape or not abs(right - got).max() <= 1e-4 * abs(right).max()


@contextmanager
def written_places() -> Iterator[dict[str, tuple[str, str]]]:
    """Yield module and line of each value of the file that is exported inside, as torch's exporter recorded them."""
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
    """Whether the file can be loaded, and then raises or has outputs that differ by more than rounding."""
    try:
        session = session_of(model)
    except Exception:  # noqa: BLE001 - errors of many kinds mean that onnxruntime can't load the file
        return False
    for batch, right in zip(BATCHES, subject.onnx.right, strict=True):
        try:
            got = outputs(session, subject.inputs(batch))
        except Exception:  # noqa: BLE001 - as above
            return True
        if any(differ(*pair) for pair in zip(right, got, strict=True)):
            return True
    return False


@dataclass(frozen=True)
class Trial:
    """One fault, and the place that was named for it.

    Attributes:
        value: where it was planted: a value or node of a file, a layer, or a parameter.
        verdict: "exact", "merged" (several places, including the right one), or "wrong".
    """

    kind: str
    value: str
    operation: str
    module: str
    line: str
    verdict: str
    named: str
    seconds: float


Draw = Callable[[Subject, int], Trial]
"""Plant a fault of one kind where it has an effect, and search for its place; the number of the trial is the seed."""


def in_onnx(kind: str, plant: Plant, subject: Subject, seed: int) -> Trial:
    """Plant a fault in an operation of an ONNX file."""
    draw = random.Random(f"{kind} {seed}")
    right = subject.onnx.file
    while True:
        number = draw.choice(right.candidates())
        node = right.model.graph.node[number]
        planted = right.copy()
        value = node.output[0]
        if plant(planted, number, draw) and shows(subject, planted.model):
            break
    path = subject.folder / "planted.onnx"
    onnx.save(planted.model, path)
    module, line = subject.onnx.places[value]
    started = time.perf_counter()
    found = looked_for(subject, replace(subject.onnx.artifact, path=path))
    seconds = time.perf_counter() - started
    return Trial(kind, value, node.op_type, module, line, verdict(found, module, line), str(found), seconds)


def in_pass(kind: str, subject: Subject, seed: int) -> Trial:
    """Run a wrong pass between those of the preset. Only it must be rolled back, with the right place named."""
    draw = random.Random(f"{kind} {seed}")
    names = [path for path, module in subject.model.named_modules() if module._parameters.get("weight") is not None]
    while True:
        layer, at = draw.choice(names), draw.randint(0, len(PRESETS["inference"]))
        if subject.shows(scaled(subject.model, layer)):
            passes = [*PRESETS["inference"][:at], ScaleWeight(layer), *PRESETS["inference"][at:]]
            fast = optimize(subject.model, passes, example_inputs=(subject.inputs(2),))
            record = next(record for record in report_of(fast).passes if record.name == ScaleWeight.name)
            if record.status != "unchanged":
                break
    others = [each.name for each in report_of(fast).passes if each.status == "rolled-back" and each is not record]
    named = _NAMED.search(record.reason)
    right = record.status == "rolled-back" and not others and named is not None
    right = right and named["module"] == layer and named["line"] in subject.lines.get(layer, {named["line"]})
    kind_of = type(subject.model.get_submodule(layer)).__name__
    lines = ", ".join(sorted(subject.lines.get(layer, ())))
    told = f"{record.status}: {record.reason}{''.join(f'; {name} too' for name in others)}"
    return Trial(kind, layer, kind_of, layer, lines, "exact" if right else "wrong", told, report_of(fast).seconds)


# The wording of a report.
_NAMED = re.compile(r"It first differs at (?P<module>\S+)(?:, call \d+)? \((?P<line>[^,()]*), \w+\): ")


def scaled(model: nn.Module, layer: str) -> nn.Module:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_submodule(layer).weight.detach().mul_(SCALE)
    return changed


def in_pt2(kind: str, subject: Subject, seed: int) -> Trial:
    """Plant a fault in a parameter of a pt2 file."""
    draw = random.Random(f"{kind} {seed}")
    artifact, path = subject.pt2, subject.folder / "planted.pt2"
    while True:
        with silent():
            program = torch.export.load(str(artifact.path))
            names = [name for name, value in program.state_dict.items() if value.is_floating_point()]
            parameter = draw.choice(names)
            with torch.no_grad():
                program.state_dict[parameter].mul_(SCALE)
            torch.export.save(program, path)
        loaded = artifact.loader(path, "cpu")
        if subject.shows(lambda tensor, loaded=loaded: loaded(tensor)[0]):
            break
    module = parameter.removeprefix("model.").rpartition(".")[0]
    return timed(kind, parameter, subject, module, replace(artifact, path=path))


def timed(kind: str, value: str, subject: Subject, module: str, artifact: Artifact) -> Trial:
    """Search for a fault whose module is known. Any line that was recorded for this module is right."""
    started = time.perf_counter()
    found = looked_for(subject, artifact)
    seconds = time.perf_counter() - started
    lines = subject.lines.get(module, set())
    right = found is not None and found.module == module and not found.also and (found.line in lines or not lines)
    kind_of = type(subject.model.get_submodule(module)).__name__
    words = "exact" if right else "wrong"
    return Trial(kind, value, kind_of, module, ", ".join(sorted(lines)), words, str(found), seconds)


DRAWS: dict[str, tuple[str, Draw]] = {
    **{kind: ("ONNX file", partial(in_onnx, kind, plant)) for kind, plant in KINDS.items()},
    "scales a weight by 1 %": ("pass", partial(in_pass, "scales a weight by 1 %")),
    "state off by 1 %": ("pt2 file", partial(in_pt2, "state off by 1 %")),
}


def looked_for(subject: Subject, artifact: Artifact) -> Divergence | None:
    """Search for the place as a failed export does."""

    def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
        return args

    measurement = subject.reference.compare(artifact.load(), flatten=flatten)
    return locate_in_file(artifact, subject.reference, measurement, subject.fast, flatten, "cpu").divergence


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
    headings = ["model", "in", "fault", "planted", "named right", "exactly", "among merged", "slowest"]
    table = Table("Faults that are planted in files and passes, and whether their place is named", headings, left=3)
    for each in results:
        figures = [str(each[key]) for key in ("planted", "right", "exact", "merged")]
        table.add(each["model"], each["in"], each["kind"], *figures, f"{each['seconds']:.1f} s")
    return table


def chosen(parser: argparse.ArgumentParser, given: str | None, known: Sequence[str]) -> list[str]:
    names = given.split(",") if given else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no {unknown[0]!r}: use {', '.join(known)}")
    return names


def main() -> int:
    parser = command(__doc__, check=True)
    parser.add_argument("--models", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--kinds", help=f"of {', '.join(DRAWS)} (default: all)".replace("%", "%%"))
    parser.add_argument(
        "--width", type=float, default=0.25, help="of the models; 1 is that of a ResNet-50 (default: 0.25)"
    )
    parser.add_argument("--faults", type=positive, default=40, help="of each kind in each model")
    arguments = parser.parse_args()
    models = chosen(parser, arguments.models, list(MODELS))
    kinds = chosen(parser, arguments.kinds, list(DRAWS))
    torch.set_num_threads(arguments.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    where = environment(arguments.threads)

    results = []
    for name in models:
        with tempfile.TemporaryDirectory() as text:
            print(f"{name} …", file=sys.stderr)
            subject = Subject(*MODELS[name](arguments.width), Path(text))
            for kind in kinds:
                home, draw = DRAWS[kind]
                trials = [draw(subject, seed) for seed in range(arguments.faults)]
                for each in trials:
                    if each.verdict == "wrong":
                        print(f"{name}, {kind}: {each}", file=sys.stderr)
                slowest = max(each.seconds for each in trials)
                rows = [vars(each) for each in trials]
                told = {"model": name, "in": home, "kind": kind, **summed(trials)}
                results.append({**told, "seconds": slowest, "trials": rows})
    table = result_table(results)
    met = all(each["right"] >= GOAL * each["planted"] for each in results)
    table.caption.append(f"The goal is 38 of 40 of each kind in each model, which is {'met' if met else 'missed'}.")
    table.caption.append(caption(where))
    data = {
        "benchmark": "locating",
        "environment": where,
        "width": arguments.width,
        "goal": GOAL,
        "met": met,
        "results": results,
    }
    publish([table], data, arguments.json, arguments.markdown)
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
