"""The report of a bundle as data and as a page: a first screen, and the figures that the manifest doesn't have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from optimize_export.manifest import PROGRAM, REPORT, REPORT_PAGE, local_roots, plain, to_json_text, without_local_paths
from optimizer.parity import accuracy_text, allowed_share
from optimizer.report import reason_shown
from optimizer.showing import (
    accuracy_plot,
    checkpoint_plot,
    fragment,
    memory_plot,
    metric_bar,
    metric_plot,
    page,
    parity_plot,
)

Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class FileSummary:
    """One file of the bundle."""

    path: str
    format: str
    bytes: int
    """The size of all its files."""
    verdict: str
    """One of "ok", "within budget", "failed" and "vacuous"."""
    share: float | None
    """The largest error as a share of the allowed error; None for a lossy file, and with your tolerances."""
    accuracy: Mapping[str, Any] | None
    """The worst figures of a lossy file; None where only rounding is allowed."""

    @property
    def said(self) -> str:
        """The accuracy in words; "" for an exact file."""
        return accuracy_text(self.accuracy) if self.accuracy else ""


@dataclass(frozen=True)
class Summary:
    """The files, their speed-up, their proof and the recommendation."""

    model: str
    ok: bool
    """Whether all requested formats are there and proven."""
    files: tuple[FileSummary, ...]
    missing: Mapping[str, str]
    """The reason for each requested format that isn't there."""
    share: float | None
    """The largest error of the files as a share of the allowed error; None where none is judged by its noise."""
    batch_sizes: tuple[int, ...]
    """Those at which the files were compared with the original."""
    ship: str | None
    """The recommended file and runtime; None if nothing was measured or chosen."""
    reason: str
    seconds: float | None
    """The time of a call of the recommended file; None without times."""
    speed_up: Mapping[str, Any] | None
    eager_seconds: float | None
    """The time of a call of the original."""
    accuracy: str = ""
    """The figures of the recommended way to run if it is lossy; "" otherwise."""


@dataclass(frozen=True)
class ModuleOperations:
    """The operations that one module's own forward calls, without those of its children."""

    module: str
    """The path; "" for the root."""
    kind: str
    before: Mapping[str, int]
    """The number of calls of each operation in the original; empty where nothing was recorded."""
    after: Mapping[str, int]
    """The same in the graph that the files were made from."""


@dataclass(frozen=True)
class ModuleNode:
    """A module in the tree of the page."""

    name: str
    """The last part of its path."""
    own: ModuleOperations
    passes: tuple[str, ...]
    """Those that changed it."""
    children: list[ModuleNode] = field(default_factory=list)

    # The number of operations in it and below.
    @property
    def before(self) -> int:
        return sum(self.own.before.values()) + sum(child.before for child in self.children)

    @property
    def after(self) -> int:
        return sum(self.own.after.values()) + sum(child.after for child in self.children)


@dataclass(frozen=True)
class BundleReport:
    """The content of `report.json`, which the page shows next to the manifest."""

    summary: Summary
    optimize: Mapping[str, Any] | None
    """The report of `optimize` as JSON, without what the manifest has; None if there was none."""
    graph: tuple[ModuleOperations, ...]
    """The modules in the order of their first call; empty if nothing was captured."""
    profile: Mapping[str, Any]
    """The profiles as in `profile.json`; empty if none was asked for."""
    unproven: tuple[Mapping[str, Any], ...]
    """The files that were written, not proven and removed, in the form of the manifest's `artifacts`."""


def summary_of(manifest: Manifest) -> Summary:
    """The first screen of a manifest."""
    files = tuple(map(_file, manifest["artifacts"]))
    benchmark = manifest.get("benchmark") or {}
    figures = benchmark.get("figures", ())
    recommended = benchmark.get("recommended")
    chosen = next((each for each in figures if recommended is not None and each["route"] == recommended), None)
    eager: Manifest = next((each for each in figures if each["name"] == "eager"), {})
    missing = manifest.get("missing", {})
    return Summary(
        model=manifest["model"]["class"],
        ok=manifest["parity"]["ok"] and not missing,
        files=files,
        missing=missing,
        share=max((file.share for file in files if file.share is not None), default=None),
        batch_sizes=tuple(manifest["parity"].get("batch_sizes", ())),
        ship=chosen["name"] if chosen else None if recommended is None else _route_text(recommended),
        reason=benchmark.get("reason", ""),
        seconds=chosen["seconds"] if chosen else None,
        speed_up=chosen["speed_up"] if chosen else None,
        eager_seconds=eager.get("seconds"),
        accuracy=accuracy_text(chosen["accuracy"]) if chosen and chosen["accuracy"] else "",
    )


def _file(artifact: Mapping[str, Any]) -> FileSummary:
    parity = artifact.get("parity") or {}
    return FileSummary(
        path=artifact["path"],
        format=artifact["format"],
        bytes=artifact["bytes"],
        verdict=parity.get("verdict", "ok"),
        share=None if artifact.get("accuracy") else allowed_share(parity),
        accuracy=artifact.get("accuracy"),
    )


def _route_text(route: Mapping[str, Any]) -> str:
    settings = "".join(f", {name}={value}" for name, value in route["settings"].items())
    return f"{route['format']} in {route['runtime']}{settings}"


def graph_of(
    kinds: Mapping[str, str], before: Iterable[tuple[str, str]], after: Iterable[tuple[str, str]]
) -> tuple[ModuleOperations, ...]:
    """The operations by module, from the path of the module and the name of each; `kinds` are the classes by path."""
    counts: tuple[dict[str, Counter[str]], ...] = ({}, {})
    for found, operations in zip(counts, (before, after), strict=True):
        for path, name in operations:
            found.setdefault(path, Counter())[name] += 1
    # The root, and all modules on the way to a path.
    paths = dict.fromkeys(
        ".".join(path.split(".")[:count])
        for path in (*counts[0], *counts[1])
        for count in range(len(path.split(".")) + 1 if path else 1)
    )
    return tuple(
        ModuleOperations(path, kinds.get(path, ""), dict(counts[0].get(path, {})), dict(counts[1].get(path, {})))
        for path in paths
    )


def tree_of(graph: Sequence[ModuleOperations], passes: Sequence[Mapping[str, Any]]) -> ModuleNode | None:
    """The modules as a tree with the passes that changed them; None for an empty graph."""
    changed: dict[str, list[str]] = {}
    for record in passes:
        for change in record.get("changes", ()) if record["status"] == "applied" else ():
            names = changed.setdefault(change["where"].partition(" ")[0], [])
            if record["name"] not in names:
                names.append(record["name"])
    nodes: dict[str, ModuleNode] = {}
    for own in graph:
        above, _, name = own.module.rpartition(".")
        nodes[own.module] = node = ModuleNode(name, own, tuple(changed.get(own.module, ())))
        if own.module:
            nodes[above].children.append(node)
    return nodes.get("")


def fragment_of(manifest: Manifest) -> str:
    """The first screen and the candidates, for notebooks."""
    return fragment("opening", **facts_of(manifest, BundleReport(summary_of(manifest), None, (), {}, ())))


def facts_of(manifest: Manifest, report: BundleReport) -> dict[str, Any]:
    """What the page shows; the same facts give the same text."""
    figures = (manifest.get("benchmark") or {}).get("figures", ())
    told = ({**each, "said": accuracy_text(each["accuracy"]) if each["accuracy"] else ""} for each in figures)
    known = sorted((each for each in told if each["seconds"] is not None), key=lambda each: each["seconds"])
    timed = [each for each in known if not each["dropped"]]
    refused = [each for each in known if each["dropped"]]
    passes = manifest.get("passes", ())
    metric = _shipped_metric(manifest)
    # A cosine says little where a metric was measured.
    costs = metric_plot if metric else accuracy_plot
    return {
        "program": PROGRAM,
        "manifest": manifest,
        "report": report,
        "summary": report.summary,
        "candidates": timed,
        "longest": max((each["seconds"] for each in timed), default=1.0),
        "refused": refused,
        "dropped": [each for each in figures if each["dropped"]],
        "plots": [plot for draw in (memory_plot, costs) if (plot := draw(timed, refused)) is not None],
        "metric": metric,
        "bar": metric_bar(metric) if metric else None,
        "kept": [
            (each["path"], list(zip_longest(made["kept"], made.get("why", ()), fillvalue="")))
            for each in manifest["artifacts"]
            if (made := each.get("quantization")) and made["kept"]
        ],
        "passes": [{**each, "said": reason_shown(each)} for each in passes],
        "files": [(each, parity_plot(each.get("parity") or {})) for each in (*manifest["artifacts"], *report.unproven)],
        "curves": [
            (each["name"], plot) for each in passes if (plot := checkpoint_plot(each.get("detail"))) is not None
        ],
        "tree": tree_of(report.graph, passes),
    }


def _shipped_metric(manifest: Manifest) -> Mapping[str, Any] | None:
    """The user's metric of the recommended way to run, or of a file; None if there is none."""
    benchmark = manifest.get("benchmark") or {}
    route = benchmark.get("recommended")
    chosen = (each for each in benchmark.get("figures", ()) if route is not None and each["route"] == route)
    found = ((each.get("accuracy") or {}).get("metric") for each in (*chosen, *manifest["artifacts"]))
    return next(filter(None, found), None)


def write_report(folder: Path, manifest: Manifest, graph: tuple[ModuleOperations, ...], **more: Any) -> None:
    """Write `report.json` and the page into the folder of a bundle.

    The manifest still lacks `files`, which have the hash of the page. `more` are the other fields of `BundleReport`; the
    folders of this machine are cut from their texts.
    """
    cut = without_local_paths(plain(more), local_roots(folder))
    report = BundleReport(summary_of(manifest), graph=graph, **cut)
    (folder / REPORT).write_text(to_json_text(asdict(report)), encoding="utf-8", newline="\n")
    (folder / REPORT_PAGE).write_text(page("bundle", **facts_of(manifest, report)), encoding="utf-8", newline="\n")
