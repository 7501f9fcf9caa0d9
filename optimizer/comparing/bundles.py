"""Compare two bundles (`compare`): their contents, outputs and latency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimize_export.errors import BundleError
from optimize_export.manifest import damage_of, number, plain
from optimize_export.runtime import Route, own_routes, processor
from optimize_export.wording import listed, quote
from optimizer.bundle import Bundle, GoldenCall, judge_answers, open_bundle
from optimizer.comparing.contents import contents_of, operations_between, weights_between
from optimizer.comparing.running import RunningFile, arrays_of, not_in_numpy, route_of, timed
from optimizer.options import is_to_be_timed
from optimizer.parity import FACTOR

Document = dict[str, Any]
Entry = Mapping[str, Any]


def compare_bundles(path: str | Path, other: str | Path, *, seconds: float = 5.0) -> Document:
    """Compare two bundles on the CPU of this machine. Both are run, each file in a process of its own.

    Args:
        seconds: about how long the latency is measured; with OPTIMIZE_EXPORT_NO_BENCH it isn't.

    Returns:
        `same`, whether all files have the same bytes and the manifests the same facts; `facts`, those that differ;
        `files`, with the differing weights, operations and outputs of each format; `latency` of the files that `load`
        runs; and `notes`. Pairs have the first bundle's value first.

    Raises:
        BundleError: one of them is no bundle, or is damaged.
    """
    both = open_bundle(path), open_bundle(other)
    for bundle in both:
        if damage := damage_of(bundle.path, bundle.manifest):
            raise BundleError(f"{bundle.path} is damaged, and no file is run: {next(iter(damage.values()))}")
    facts = [_facts(bundle.manifest) for bundle in both]
    pairs = {name: [each.get(name, "none") for each in facts] for name in {**facts[0], **facts[1]}}
    notes: list[str] = []
    formats = {format: None for bundle in both for format in _entries(bundle)}
    files = [_compared(format, both, notes) for format in formats]
    found: Document = {
        "bundles": [str(path), str(other)],
        "facts": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        "files": files,
        "latency": None,
        "notes": notes,
    }
    found["same"] = not found["facts"] and all(file["same"] for file in files)
    lack = next((lack for bundle in both if (lack := not_in_numpy(bundle.manifest))), None)
    if found["same"]:
        return dict(plain(found))
    if "inputs" in found["facts"] or lack:
        notes.append(f"outputs and latency aren't compared, because {lack or 'the inputs differ'}")
    else:
        for file in files:
            if file["same"] or None in file["bytes"]:
                continue
            first, second = (_output_names(bundle, file["format"]) for bundle in both)
            if len(first) != len(second):
                notes.append(
                    f"the outputs of {file['path']} aren't compared: there are {len(first)} in one and {len(second)} in the other"
                )
            else:
                with _noted(notes, f"the outputs of {file['path']} aren't compared"):
                    file["outputs"] = _outputs(file["format"], both)
        if is_to_be_timed(None):
            with _noted(notes, "the latency isn't compared"):
                found["latency"] = _latency(both, seconds)
    return dict(plain(found))


@contextmanager
def _noted(notes: list[str], what: str) -> Iterator[None]:
    """Note an error: each runtime and each reader of files has its own, and some derive from Exception alone."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        notes.append(f"{what}: {quote(error, with_type=True)}")


def _entries(bundle: Bundle) -> dict[str, Entry]:
    return {each["format"]: each for each in bundle.manifest["artifacts"]}


def _facts(manifest: Entry) -> dict[str, str]:
    """The facts of a manifest about the model and the build, as texts by name."""
    made, model = manifest["environment"], manifest["model"]
    recommended = (manifest.get("benchmark") or {}).get("recommended")
    applied = [each for each in manifest.get("passes", ()) if each["status"] == "applied"]
    return {
        "program": " ".join(manifest["program"].values()),
        "Python": made["python"],
        "platform": made["platform"],
        **made["libraries"],
        "processor": manifest["device"]["name"],
        "model": model["class"],
        "parameters": f"{model['parameters']:,}",
        "weights of the model": str(model.get("weights_sha256"))[:12],
        "passes": listed([_pass_text(each) for each in applied]) if applied else "none",
        "precision of the original": manifest["golden"].get("precision") or "as written",
        "inputs": ", ".join(map(_tensor_text, manifest["artifacts"][0]["inputs"])),
        "outputs": ", ".join(map(_tensor_text, manifest["artifacts"][0]["outputs"])),
        "recommended": "none" if recommended is None else str(Route.from_json(recommended)),
        "proof": manifest["parity"]["verdict"],
    }


def _pass_text(record: Entry) -> str:
    options = "".join(f":{name}={value}" for name, value in record["options"].items())
    return f"{record['name']}{options}"


def _tensor_text(tensor: Entry) -> str:
    return f"{tensor['name']} {tensor['dtype']}[{','.join(map(str, tensor['shape']))}]"


# Files ----------------------------------------------------------------------------------------------------------------


def _compared(format: str, both: Sequence[Bundle], notes: list[str]) -> Document:
    """The contents of the files of a format, without running them; only their sizes if one can't be read or is missing."""
    entries = [_entries(bundle).get(format) for bundle in both]
    hashes = [{each["path"]: each["sha256"] for each in bundle.manifest["files"]} for bundle in both]
    held = [entry and [known[path] for path in entry["files"]] for entry, known in zip(entries, hashes, strict=True)]
    found: Document = {
        "format": format,
        "path": next(entry["path"] for entry in entries if entry),
        "bytes": [entry and entry["bytes"] for entry in entries],
        "same": held[0] == held[1],
        **dict.fromkeys(("weights", "operations", "outputs")),
    }
    if found["same"] or None in found["bytes"]:
        return found
    with _noted(notes, f"the weights and operations of {found['path']} aren't compared"):
        first, second = (contents_of(format, bundle.path / _entries(bundle)[format]["path"]) for bundle in both)
        if first is not None and second is not None:
            found["weights"] = weights_between(first, second)
            found["operations"] = operations_between(first, second)
    return found


def _output_names(bundle: Bundle, format: str) -> list[str]:
    return [each["name"] for each in _entries(bundle)[format]["outputs"]]


def _outputs(format: str, both: Sequence[Bundle]) -> list[Document]:
    """The outputs of both files on the golden inputs of the first bundle, by its names.

    Outputs of the second bundle are matched by name if both have the same names, and by position otherwise.
    """
    calls, golden = both[0].golden(), both[0].manifest["golden"]
    answers = []
    for bundle in both:
        with closing(_running(bundle, route_of(bundle.manifest, format), calls[0])) as file:
            answers.append(file.outputs(calls))
    names, others = (_output_names(bundle, format) for bundle in both)
    if {*names} == {*others}:
        answers[1] = [tuple(each[others.index(name)] for name in names) for each in answers[1]]
    # The first file's outputs take the place of the original's. A lossy file isn't judged by its budget here.
    expected = [
        replace(call, outputs=dict(zip(call.outputs, own, strict=True)))
        for call, own in zip(calls, answers[0], strict=True)
    ]
    entry = {**_entries(both[0])[format], "accuracy": None}
    parity = judge_answers(entry, golden, expected, answers[1], FACTOR, "cpu", {}).parity
    assert parity is not None
    noises = {each["name"]: number(each["noise"]) for each in golden["outputs"]}
    return [
        {
            "name": each.name,
            "max_difference": each.max_error,
            "in_noise": each.max_error / noises[each.name] if noises[each.name] else None,
            "problem": each.problem,
        }
        for each in parity.outputs
    ]


def _latency(both: Sequence[Bundle], seconds: float) -> Document:
    """The latency of the files that `load` runs, in turn."""
    call, routes = both[0].golden()[0], []
    for bundle in both:
        recommended = (bundle.benchmark or {}).get("recommended")
        routes.append(Route.from_json(recommended) if recommended else own_routes(_entries(bundle))[0])
    first, second = (_running(bundle, route, call) for bundle, route in zip(both, routes, strict=True))
    with closing(first), closing(second):
        found = timed(second, first, seconds)
    told = {"routes": [*map(str, routes)], "seconds": [found.before, found.seconds], "processor": processor()}
    return {**told, "ratio": vars(found.ratio)}


def _running(bundle: Bundle, route: Route, call: GoldenCall) -> RunningFile:
    return RunningFile(bundle.path / _entries(bundle)[route.format]["path"], route, arrays_of(call), str(bundle.path))
