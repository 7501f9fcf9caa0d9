"""Render the command's JSON document as text for people."""

import io
import math
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotext
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exporters.errors import ExporterError
from exporters.registry import exporter_named
from optimizer.diagnosis import diagnosis_lines
from optimizer.parity import WITHIN_BUDGET, accuracy_text, allowed_share
from optimizer.profiling import profile_lines
from optimizer.report import reason_shown, remark_lines
from optimizer.showing import count_text, number_text, percent_text, rate_text, seconds_text, size_text
from optimizer.training import TABLE_COLUMNS, TrainingTuning, recommendation, table_rows

# Without a terminal, lines are almost never wrapped, so that `grep` finds them whole.
_WIDE = 4096

# Prefix of the metadata that this program writes into every file (`exporters.metadata`).
_OURS = "optimize_export."

_PROFILED = {
    "original": ("profile of the original", "module"),
    "optimized": ("profile of the optimized model", "module"),
    "onnx": ("profile of model.onnx", "node"),
}

Document = Mapping[str, Any]


def as_text(document: Document, *, terminal: bool, details: bool = False) -> str:
    """Render the result as lines, with colours and the screen's width only on a terminal.

    With `details`, also show routes, tensors, and the errors of every output and call.
    """
    stream = io.StringIO()
    width = shutil.get_terminal_size().columns if terminal else _WIDE
    # On a dumb terminal, rich uses the width only if a height is given too.
    console = Console(
        file=stream, force_terminal=terminal, width=width, height=25, highlight=False, emoji=False, markup=False
    )
    for line in _lines(document, details=details):
        if isinstance(line, Table):
            # No name or number is broken: a narrower screen wraps the lines itself.
            least = console.measure(line, options=console.options.update(width=_WIDE)).minimum
            console.width = max(width, least)
            console.print(line)
            continue
        for part in [line] if isinstance(line, Text) else _wrapped(line, width) or [""]:
            console.print(part, soft_wrap=True)  # a path broken over two lines can't be copied
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


def _lines(document: Document, *, details: bool) -> Iterable[Table | Text | str]:
    if "available_passes" in document:
        yield _available(document["available_passes"])
        return
    if "diagnosis" in document:
        yield from diagnosis_lines(document["diagnosis"])
    tuned = TrainingTuning.from_json(document["training"]) if "training" in document else None
    if tuned is not None:
        yield table(TABLE_COLUMNS, table_rows(tuned), wraps=True)
        yield from ("", recommendation(tuned), *(f"note: {note}" for note in tuned.notes))
    report = document.get("report", {})
    if document.get("passes"):
        yield _passes(document["passes"], details=details)
        for each in document["passes"]:
            yield from remark_lines(each)
        yield ""
    artifacts = document.get("artifacts", ())
    missing = document.get("missing") or {}
    if artifacts or missing:
        yield _files(artifacts, missing)
        yield ""
    if benchmark := document.get("benchmark"):
        yield from benchmark_lines(benchmark)
        yield ""
    if service := document.get("service"):
        yield from _service_lines(service)
        yield ""
    if upgrade := document.get("upgrade"):
        yield from _upgrade_lines(upgrade)
        yield ""
    if comparison := document.get("comparison"):
        yield from _comparison_lines(comparison)
    for name, profile in document.get("profile", {}).items():
        yield from map(Text, profile_lines(profile, *_PROFILED[name]))
        yield ""
    if details and any("route" in artifact for artifact in artifacts):
        yield _artifacts(artifacts)
        yield ""
    elif details and any("calls" in artifact for artifact in artifacts):
        yield _ran(artifacts)
        yield ""
    outputs = [
        (artifact, output)
        for artifact in artifacts
        for output in (artifact.get("parity") or artifact).get("outputs", ())
        if "max_error" in output and (details or output.get("problem"))
    ]
    if outputs:
        yield _parity(outputs)
        yield ""
    if details and any(output.get("calls") for _, output in outputs):
        yield _every_call(outputs)
        yield ""
    for artifact in artifacts:
        if rows := (artifact.get("parity") or {}).get("rows"):
            yield _rows(artifact["format"], rows)
    for artifact in artifacts:
        if given := [item for item in artifact.get("metadata", {}).items() if not item[0].startswith(_OURS)]:
            yield _metadata(artifact["format"], given)
    for artifact in artifacts:
        if (place := artifact.get("divergence")) is not None:
            yield _differs(artifact["format"], place)
    warnings = report.get("warnings", ())
    for warning in warnings:
        yield Text(f"warning: {warning}", style="yellow")
    for note in document.get("notes", ()):
        if note not in warnings:
            yield f"note: {note}"
    if "before" in report:
        yield from _gained(report)
    if "sha256sums" in document:
        yield f"SHA-256 for verify --expect: {document['sha256sums']}"
    if "report_page" in document:
        yield Text(f"report: {document['report_page']}")
    if "output" in document:
        yield Text(f"written: {document['output']}")
    if tuned is not None:
        # The document's code has its line breaks escaped. A text isn't wrapped.
        yield from map(Text, ("", *tuned.code.splitlines()))
    if "bundle" in document:
        yield Text(f"bundle: {document['bundle']}")
    if "commit_url" in document:
        yield Text(f"pushed: {document['commit_url']}")
    if "triton_model" in document:
        yield Text(f"model of Triton: {document['triton_model']}")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * 4, break_long_words=False, break_on_hyphens=False)


# One line per file ----------------------------------------------------------------------------------------------------


def _files(artifacts: Sequence[Document], missing: Mapping[str, str]) -> Table:
    rows = [(each.get("path", each["format"]), _bytes(each), *_verdict(each)) for each in artifacts]
    rows += [(_file_of(format), "", "missing", f": {sentence}") for format, sentence in missing.items()]
    named = [(path, size, Text.assemble((word, _STYLES.get(word, "")), rest)) for path, size, word, rest in rows]
    if not any(size for _, size, _ in named):
        return table((), [(path, verdict) for path, _, verdict in named], wraps=True)
    return table((), named, wraps=True)


def _file_of(format: str) -> str:
    try:
        return getattr(exporter_named(format), "file_name", format)
    except ExporterError:
        return format  # another package's format; the document has the reason why it is missing


def _bytes(artifact: Document) -> str:
    return size_text(artifact["bytes"]) if "bytes" in artifact else ""


def _verdict(artifact: Document) -> tuple[str, str]:
    """The verdict on a file: one word, and the text after it."""
    parity = artifact.get("parity")
    if parity is None and artifact.get("accuracy"):
        return ("failed" if artifact.get("problem") else WITHIN_BUDGET), f": {accuracy_text(artifact['accuracy'])}"
    if parity is None:
        return ("failed", "") if artifact.get("problem") else ("not checked", "")
    verdict = parity["verdict"]
    if artifact.get("accuracy"):
        return verdict, f": {parity['reason']}"
    if verdict == "vacuous":
        return verdict, ": the outputs prove nothing"
    judged = [output for output in parity["outputs"] if output.get("judged", True)]
    if verdict != "ok" or not judged:
        return verdict, ""
    if any(output.get("by_user") for output in judged):
        return verdict, ", within your tolerance"
    share = allowed_share(parity)
    return verdict, f", {percent_text(share)} of the allowed error" if share else ", no error"


def _metadata(format: str, given: Sequence[tuple[str, str]]) -> str:
    texts = (f"{key}={' '.join(value.split())}" for key, value in given)
    return f"metadata of {format}: {', '.join(texts)}"


def _rows(format: str, rows: Document) -> str:
    if not rows["ok"]:
        return f"rows of {format}: {rows['problem']}"
    how = f"{'alone, ' if rows['alone'] else ''}at other positions and among other rows"
    sizes, lacking = ", ".join(map(str, rows["batch_sizes"])), ", ".join(rows["without_rows"])
    text = f"rows of {format}: none depends on the other rows (batch sizes {sizes}; run {how})"
    return f"{text}; not checked, because they have no rows: {lacking}" if lacking else text


def _gained(report: Document) -> Iterable[str]:
    before, after, coverage = report["before"], report["after"], report["coverage"]
    if before["parameters"] != after["parameters"]:
        yield f"parameters: {before['parameters']:,} -> {after['parameters']:,}"
    if unreached := coverage["unreached"]:
        others = f" and {len(unreached) - 1:,} more" if unreached[1:] else ""
        yield (
            f"the example inputs don't reach {len(unreached):,} of {coverage['parameterised']:,} modules with weights:"
            f" {unreached[0] or 'the root'}{others}"
        )


# Tables ---------------------------------------------------------------------------------------------------------------


def _passes(passes: Sequence[Document], *, details: bool) -> Table:
    columns = ["pass", "status", "changes", "skips", "reason"]
    rows = [
        [each["name"], each["status"], str(len(each["changes"])), str(len(each["skips"])), reason_shown(each)]
        for each in passes
    ]
    if details:
        columns.insert(4, "seconds")
        for row, each in zip(rows, passes, strict=True):
            row.insert(4, f"{each['seconds']:.2f}")
    return table(columns, rows, wraps=True)


def _artifacts(artifacts: Sequence[Document]) -> Table:
    columns = ("file", "route", "inputs", "outputs", "nodes on")
    rows = [
        (each["path"], each["route"], *map(_tensors, (each["inputs"], each["outputs"])), _placement(each))
        for each in artifacts
    ]
    return table(columns, rows)


def _ran(artifacts: Sequence[Document]) -> Table:
    rows = [(each["path"], each["device"], str(each["calls"]), _placement(each)) for each in artifacts]
    return table(("file", "run on", "calls", "nodes on"), rows)


def _placement(artifact: Document) -> str:
    """The number of nodes that ran on each provider of the runtime."""
    counts = artifact.get("placement") or {}
    return ", ".join(f"{name.removesuffix('ExecutionProvider')} {count}" for name, count in counts.items()) or "-"


_FIGURES = ("mean", "99.9 %", "cosine", "top-1")


def _parity(outputs: Sequence[tuple[Document, Document]]) -> Table:
    """One row per output: its error, the allowed error, and the worst of its other figures over all calls."""
    columns = ("parity of", "output", "error", "allowed", *_FIGURES, "result")
    rows = []
    for artifact, output in outputs:
        # An artifact fails because of a single output, but a vacuous verdict applies to all outputs.
        overall = (artifact.get("parity") or artifact).get("verdict", "ok")
        verdict = "failed" if output.get("problem") else "ok" if overall == "failed" else overall
        error, allowed = _judged(output)
        figures = _figures(output)
        rows.append((artifact["format"], str(output["name"]), error, allowed, *figures, verdict))
    return table(columns, rows)


def _judged(output: Document) -> tuple[str, str]:
    """The error of an output, from the reference, or with a user's tolerance from the original; and the allowed error."""
    allowed = number_text(output.get("tolerance"))
    if output.get("by_user") and output.get("max_difference") is not None:
        return number_text(output["max_difference"]), f"{allowed} (yours)"
    return number_text(output["max_error"]), allowed


def _every_call(outputs: Sequence[tuple[Document, Document]]) -> Table:
    columns = ("parity of", "output", "batch", "draw", "error", *_FIGURES)
    lines = []
    for artifact, output in outputs:
        for call in output.get("calls", ()):
            rows = "-" if call["batch_size"] is None else str(call["batch_size"])
            size = ", ".join([rows, *(f"{name} {size}" for name, size in call.get("sizes", {}).items())])
            error, figures = number_text(call["max_error"]), _figures(call)
            draw = f"{call['draw']} of the calibration, held out" if call.get("held_out") else str(call["draw"])
            lines.append((artifact["format"], str(output["name"]), size, draw, error, *figures))
    return table(columns, lines)


def _figures(of: Document) -> tuple[str, ...]:
    cosine = of.get("cosine")
    return (
        number_text(of.get("mean_error")),
        number_text(of.get("p999_error")),
        "-" if cosine is None else f"{cosine:.6f}",
        _agreement(of.get("agreement"), of.get("undecided", 0)),
    )


def _agreement(share: float | None, undecided: int) -> str:
    # Rounded down, so that 100 % means agreement everywhere.
    shown = "-" if share is None else "100 %" if share == 1 else f"{math.floor(1000 * share) / 10:.1f} %"
    return f"{shown} ({undecided} left out)" if undecided else shown


def _available(passes: Sequence[Document]) -> Table:
    options = [", ".join(f"{name}={value}" for name, value in each["options"].items()) for each in passes]
    rows = [(each["name"], each["summary"], text) for each, text in zip(passes, options, strict=True)]
    return table(("pass", "description", "options"), rows, wraps=True)


def _tensors(tensors: Sequence[Document]) -> str:
    return " ".join(f"{each['name']}[{','.join(map(str, each['shape']))}]" for each in tensors)


def _differs(name: str, place: Mapping[str, Any]) -> str:
    """The place where an artifact first differs from the model, with other possible places."""
    places = (place, *place["also"])
    named = " or ".join(
        f"{each['module'] or 'the model itself'} ({each['line']}, {each['operation']})" for each in places
    )
    return f"{name} first differs at {named}: {place['problem']}"


# The latency and memory of files -------------------------------------------------------------------------------------


def benchmark_lines(benchmark: Document) -> Iterable[Table | str]:
    """A table of all candidates, the recommendation, and the candidates that were dropped."""
    timed = [figure for figure in benchmark["figures"] if figure["seconds"] is not None and not figure["dropped"]]
    with_accuracy = any(figure["accuracy"] for figure in timed)
    if timed:
        columns = ["latency of", "median", "p95", "speed-up", "memory", "size", *["accuracy"] * with_accuracy]
        rows = [[*_row(figure), *[_accuracy(figure)] * with_accuracy] for figure in timed]
        yield table(columns, rows)
    for figure in benchmark["figures"]:
        if figure["dropped"]:
            yield f"not used: {figure['name']}: {figure['dropped']}"
    yield from (f"note: {note}" for note in benchmark["notes"])
    where = [f"batch {size}" for size in benchmark["batch_sizes"]]
    if benchmark["rounds"]:
        threads = benchmark["threads"]
        where += [f"{threads} thread{'' if threads == 1 else 's'} of torch", f"{benchmark['rounds']} rounds"]
    yield benchmark["reason"] + (f" ({', '.join(where)})" if where else "")


def _row(figure: Document) -> list[str]:
    gain = figure["speed_up"]
    return [
        figure["name"],
        seconds_text(figure["seconds"]),
        seconds_text(figure["p95"]),
        "" if gain is None else f"{gain['median']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})",
        "" if figure["memory"] is None else size_text(figure["memory"]),
        "" if figure["bytes"] is None else size_text(figure["bytes"]),
    ]


def _accuracy(figure: Document) -> str:
    return accuracy_text(figure["accuracy"]) if figure["accuracy"] else "rounding only"


# Other versions of the runtimes --------------------------------------------------------------------------------------


def _upgrade_lines(upgrade: Document) -> Iterable[Table | str]:
    """A table with a row for each file in each set, and the exit code and the versions of each set."""
    ran = [each for each in (upgrade["installed"], *upgrade["sets"]) if each["artifacts"]]
    columns = ("with", "file", "latency", "ratio", "memory per 1,000 calls", "bits", "outputs")
    rows = [_upgrade_row(each["name"], file) for each in ran for file in each["artifacts"]]
    if rows:
        yield table(columns, rows, wraps=True)
    known = {name for each in upgrade["sets"] for name in each["libraries"]}
    for each in (*[upgrade["installed"]] * bool(rows), *upgrade["sets"]):
        told = [f"{name} {version}" for name, version in each["libraries"].items() if name in known]
        if each is not upgrade["installed"]:
            told.insert(0, f"exit code {each['exit_code']}")
        if told:
            yield f"{each['name']}: {', '.join(told)}"
        yield from (f"note: {sentence}" for sentence in each["notes"])
    rounds = [file["latency"]["ratio"]["rounds"] for each in ran for file in each["artifacts"] if file["latency"]]
    if rounds:
        processors = f"{upgrade['cpus']} processor{'' if upgrade['cpus'] == 1 else 's'}"
        yield (
            f"ratio: the latency divided by that with the installed versions, in at least {min(rounds)} rounds in turn; in "
            f"parentheses, the bounds of the noise ({upgrade['processor']}, {processors})"
        )


def _upgrade_row(name: str, file: Document) -> tuple[str | Text, ...]:
    word, rest = _verdict(file)
    latency, memory, same = file["latency"], file["memory"], file["identical"]
    return (
        name,
        f"{file['path']} in openvino" if file["runtime"] == "openvino" else file["path"],
        seconds_text(latency["seconds"]) if latency else "-",
        _ratio_text(latency["ratio"]) if latency else "-",
        _growth_text(memory["resident"]) if memory else "-",
        "-" if same is None else "the same" if same else "different",
        Text.assemble((word, _STYLES.get(word, "")), rest),
    )


def _ratio_text(found: Document) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _growth_text(growth: Document) -> str:
    told = f"{growth['mean'] / 1000:+.3g} ± {growth['error'] / 1000:.3g} KB"
    return f"{told}, a leak" if growth["leaks"] else told


# Two bundles ----------------------------------------------------------------------------------------------------------


def _comparison_lines(found: Document) -> Iterable[Table | str]:
    """A table of what differs, then the weights and outputs of each file, and the latency."""
    first, second = found["bundles"]
    if found["same"]:
        yield f"{first} and {second} are the same: files, versions, passes and recommendation"
        return
    rows, latency = [(name, *pair) for name, pair in found["facts"].items()], found["latency"]
    for file in found["files"]:
        if not file["same"]:
            rows.append((file["path"], *("-" if size is None else size_text(size) for size in file["bytes"])))
        pairs = (file["operations"] or {"pairs": {}})["pairs"]
        rows += [(f"{file['path']}: {name}", *map(str, pair)) for name, pair in pairs.items()]
    if latency:
        rows.append(("latency", *map(seconds_text, latency["seconds"])))
    yield table(("", first, second), rows)
    for file in found["files"]:
        yield from (f"{file['path']}: {line}" for line in _file_lines(file))
    if latency:
        yield (
            f"latency: {second} takes {_ratio_text(latency['ratio'])} times as long as {first}, in "
            f"{latency['ratio']['rounds']} rounds in turn; in parentheses, the bounds of the noise "
            f"({', then '.join(dict.fromkeys(latency['routes']))}; {latency['processor']})"
        )


def _file_lines(file: Document) -> Iterable[str]:
    if file["same"]:
        yield "the same bytes"
    if weights := file["weights"]:
        changed = weights["changed"]
        parts = [f"{len(changed)} of {weights['number'][0]} weights changed"] * bool(changed)
        kinds = ("removed", "added", "renamed")
        parts += [f"{count_text(len(weights[kind]), 'weight')} {kind}" for kind in kinds if weights[kind]]
        if sized := [each for each in changed if each["max_difference"] is not None]:
            most = max(sized, key=lambda each: float(each["max_difference"]))
            parts.append(
                f"{most['name']} changed the most, by {number_text(most['max_difference'])} where its largest value is "
                f"{number_text(most['largest'])}"
            )
        yield ", ".join(parts) or "the same weights"
    if operations := file["operations"]:
        parts = [f"{len(operations[kind])} {kind}" for kind in ("removed", "added") if operations[kind]]
        # Constants of torch's files are arguments, which aren't compared.
        has_attributes = str(file["format"]).startswith("onnx")
        how = ", with their attributes" if has_attributes else ", without their arguments"
        yield f"operations{how}: {', '.join(parts)}" if parts else f"the same operations{how}"
    for output in file["outputs"] or ():
        if not output["max_difference"] or isinstance(output["max_difference"], str):
            # JSON has infinity as a text: the shapes differ, for example.
            yield output["problem"] or f"the same output {output['name']}"
        else:
            share = "" if output["in_noise"] is None else f", {number_text(output['in_noise'])} times its noise"
            yield f"output {output['name']} differs by at most {number_text(output['max_difference'])}{share}"


# Calls a second ------------------------------------------------------------------------------------------------------

# The settings besides calls one by one that are shown.
_BEST_SHOWN = 4
_PLOT_SIZE = (72, 18)
_TIMES = ("p50", "p95", "p99", "processor")


def _service_lines(service: Document) -> Iterable[Table | Text | str]:
    """A table of calls one by one and the best settings, the plot of their rates against p95, and the choice."""
    target, chosen = service["target"], service["chosen"]
    shown = [each for each in service["figures"] if each["load"] and not each["dropped"]][: 1 + _BEST_SHOWN]
    columns = ("calls", "a second", *_TIMES, "memory")
    yield table(columns, [_service_row(each, is_chosen=each["setting"] == chosen) for each in shown])
    if target is None:
        yield "* the choice; callers back to back, as many as fill the batches twice"
    else:
        yield f"* the choice; at the highest rate tried that has a p95 of {seconds_text(target)}, or else the lowest"
    if any(each["at_rates"] for each in shown):
        yield ""
        yield from map(Text, _rates_plot({each["name"]: each["at_rates"] for each in shown}))
    yield from (f"not used: {each['name']}: {each['dropped']}" for each in service["figures"] if each["dropped"])
    yield from (f"note: {note}" for note in service["notes"])
    cpus = service["cpus"]
    yield f"{service['reason']} ({cpus} processor{'' if cpus == 1 else 's'})"


def _service_row(figure: Document, *, is_chosen: bool) -> list[str]:
    load, memory = figure["load"], figure["memory"]
    times = ["-" if isinstance(load[name], str) else seconds_text(load[name]) for name in _TIMES]
    name = f"{figure['name']}{' *' if is_chosen else ''}"
    return [name, rate_text(load["offered"] or load["rate"]), *times, "" if memory is None else size_text(memory)]


def _rates_plot(curves: Mapping[str, Sequence[Document]]) -> list[str]:
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(*_PLOT_SIZE)
    plotext.title("p95 of calls that come at a rate")
    plotext.xlabel("calls a second")
    plotext.ylabel("p95, ms")
    # An overloaded service answers ever later, which would flatten all other curves.
    plotext.yscale("log")
    for marker, (name, loads) in zip("ox+#*", curves.items(), strict=False):
        # JSON has infinity as a text: no call was answered.
        if points := [(each["offered"], 1000 * each["p95"]) for each in loads if not isinstance(each["p95"], str)]:
            plotext.plot(*zip(*points, strict=True), marker=marker, label=name)
    return [line.rstrip() for line in plotext.uncolorize(plotext.build()).splitlines()]


# Rows in columns ------------------------------------------------------------------------------------------------------

# The least width of a column of sentences.
_NARROWEST = 24
_STYLES = {
    "applied": "green",
    "ok": "green",
    "rolled-back": "yellow",
    "vacuous": "yellow",
    "within budget": "yellow",
    "bit-identical": "green",
    "refused": "red",
    "failed": "red",
    "missing": "red",
}


def table(titles: Sequence[str], rows: Sequence[Sequence[str | Text]], *, wraps: bool = False) -> Table:
    """Align the rows in columns. Where the last column `wraps`, it has sentences, which may be broken at their spaces."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(titles), header_style="bold")
    for place, cells in enumerate(zip(*rows, strict=True)):
        title = titles[place] if titles else ""
        texts, least, is_prose = [title, *map(str, cells)], 0, wraps and place == len(rows[0]) - 1
        if is_prose:
            texts, least = " ".join(texts).split(), _NARROWEST
        made.add_column(title, no_wrap=not is_prose, min_width=max([least, *map(cell_len, texts)]))
    for row in rows:
        made.add_row(*(Text(cell, style=_STYLES.get(cell, "")) if isinstance(cell, str) else cell for cell in row))
    return made
