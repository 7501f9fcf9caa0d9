"""Write the result of `verify` and `diagnose` for CI: JUnit XML for test reports, SARIF 2.1.0 for code scanning.

Both are made from the command's JSON document, also from that of an error. Paths are relative to the repository, which
SARIF calls `%SRCROOT%`. No path of this machine is in them.
"""

import hashlib
import linecache
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from optimize_export.errors import BundleError, UsageError, printable
from optimize_export.manifest import describe_program, local_roots, replace_file, to_json_text, without_local_paths
from optimizer.command.early_checks import library_of
from optimizer.options import DiagnoseOptions, Options, VerifyOptions

Document = Mapping[str, Any]

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SOURCE, _OUTSIDE = "%SRCROOT%", "%OUTSIDE%"
_BASES = {
    _SOURCE: {"description": {"text": "The root of the repository, or else the folder in which the command ran."}},
    _OUTSIDE: {"description": {"text": "A folder outside of the repository, such as that of an installed package."}},
}
# Those of `verify` and of an error; a diagnosis brings its own.
_RULES = (
    {
        "name": "bundle",
        "level": "error",
        "description": "Files or golden data of a bundle are damaged or prove nothing.",
    },
    {"name": "artifact", "level": "error", "description": "A file isn't proven to compute the same as the original."},
    {"name": "no-result", "level": "error", "description": "The command ended by an error, so nothing was checked."},
)


@dataclass(frozen=True)
class _Check:
    """Something that the command checked: a test case of JUnit, and a result of SARIF if it has a sentence."""

    group: str
    name: str
    file: Path
    sentence: str = ""
    """"" if there is nothing to report."""
    fails: bool = False
    """Whether the command fails for it."""
    rule: str = ""
    """The rule in SARIF; "" for a part of another check."""
    level: str = "error"
    line: int = 0
    modules: tuple[str, ...] = ()


class CIReports:
    """The files for CI that a call asks for. Old ones are removed at once, so that no job reads them.

    Raises:
        UsageError: a file is in the bundle itself, which it would damage.
        BundleError: an old file can't be removed.
    """

    def __init__(self, options: Options) -> None:
        asked = isinstance(options, VerifyOptions | DiagnoseOptions)
        given = {name: getattr(options, name, None) if asked else None for name in ("junit", "sarif")}
        # The user's code may change the current folder.
        self._paths = {name: path.absolute() for name, path in given.items() if path is not None}
        if not self._paths:
            return
        self._here = here = Path.cwd()
        self._root = next((each for each in (here, *here.parents) if (each / ".git").exists()), here)
        self._roots = local_roots(self._root)
        if isinstance(options, DiagnoseOptions):
            self._command, self._fail_on = "diagnose", options.fail_on
            self._target = _file_of(options.load.model)
        elif isinstance(options, VerifyOptions):
            self._command, self._target = "verify", options.bundle.absolute()
        for name, path in self._paths.items():
            if self._command == "verify" and Path(os.path.realpath(path)).is_relative_to(
                os.path.realpath(self._target)
            ):
                raise UsageError(f"--{name} {path} is inside the bundle, which it would damage: choose another folder.")
        for path in self._paths.values():
            with _written(path):
                path.unlink(missing_ok=True)
                # Now, because an error after minutes of work would lose the result.
                path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, document: Document) -> None:
        """Write the files, each in one step. BundleError if one can't be written."""
        if not self._paths:
            return
        checks = [self._cleaned(each) for each in self._checks(document)]
        for name, path in self._paths.items():
            data = self._junit(checks) if name == "junit" else self._sarif(document, checks)
            with _written(path):
                replace_file(path, data)

    def _checks(self, document: Document) -> Iterator[_Check]:
        if "diagnosis" in document:
            yield from self._diagnosed(document)
        elif "upgrade" in document:
            for each in document["upgrade"]["sets"]:
                yield from self._verified(each, f" with {each['name']}")
        elif "artifacts" in document:
            yield from self._verified(document)
        else:
            error = document["error"]
            yield _Check(self._command, error["kind"], self._target, error["message"], True, "no-result")

    def _cleaned(self, check: _Check) -> _Check:
        """With texts that XML may have, and without the folders of this machine."""
        texts = {each: printable(getattr(check, each)) for each in ("group", "name", "sentence")}
        modules = tuple(map(printable, check.modules))
        return replace(check, **without_local_paths(texts, self._roots), modules=modules)

    def _diagnosed(self, document: Document) -> Iterator[_Check]:
        levels, findings = [*document["diagnosis"]["levels"]], document["diagnosis"]["findings"]
        failing = levels[: levels.index(self._fail_on) + 1] if self._fail_on else []
        for rule in document["rules"]:
            found = [each for each in findings if each["rule"] == rule["name"]]
            if not found:
                yield _Check(self._command, rule["name"], self._target)
            for each in found:
                file = Path(self._here, each["file"]) if each["file"] else self._target
                name, told, level = f"{rule['name']} {each['where']}".strip(), each["sentence"], each["level"]
                fails, modules = level in failing, tuple(each["modules"])
                yield _Check(self._command, name, file, told, fails, rule["name"], level, each["line"], modules)

    def _verified(self, document: Document, versions: str = "") -> Iterator[_Check]:
        bundle, artifacts = self._target, document["artifacts"]
        known = {each["problem"] for each in artifacts}
        others = " ".join(each for each in document["problems"] if each not in known)
        # In SARIF, only the sentence can name the set.
        start = f"{versions.strip()}: " if versions else ""
        others = others and start + others
        yield _Check(f"{bundle.name}{versions}", "bundle", bundle / "manifest.json", others, bool(others), "bundle")
        for each in artifacts:
            file, group = bundle / each["path"], f"{bundle.name}/{each['path']}{versions}"
            said = start + each["problem"] if each["problem"] else ""
            yield _Check(group, each["path"], file, said, not each["ok"], "artifact")
            for output in (each["parity"] or each)["outputs"]:
                told = "" if each["ok"] else output["problem"] or ""
                yield _Check(group, output["name"], file, told, bool(told))

    def _junit(self, checks: list[_Check]) -> bytes:
        suites = ElementTree.Element("testsuites")
        suite = ElementTree.SubElement(suites, "testsuite", name=f"optimize-export {self._command}")
        counts: Counter[str] = Counter(failure=0, error=0)
        for each in checks:
            case = ElementTree.SubElement(suite, "testcase", classname=each.group, name=each.name)
            if each.fails:
                kind = "error" if each.rule == "no-result" else "failure"
                counts[kind] += 1
                told = ElementTree.SubElement(case, kind, message=each.sentence, type=each.rule or "output")
                told.text = each.sentence
            elif each.sentence:
                ElementTree.SubElement(case, "system-out").text = f"{each.level}: {each.sentence}"
        for element in (suites, suite):
            element.attrib |= {
                "tests": str(len(checks)),
                "failures": str(counts["failure"]),
                "errors": str(counts["error"]),
            }
        ElementTree.indent(suites)
        return bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)) + b"\n"

    def _sarif(self, document: Document, checks: list[_Check]) -> bytes:
        told = [each for each in checks if each.sentence and each.rule]
        ran = not any(each.rule == "no-result" for each in told)
        rules = [*(document["rules"] if "rules" in document else _RULES[:2] if ran else _RULES[2:])]
        program, seen = describe_program(), Counter[str]()
        invocation: dict[str, Any] = {"executionSuccessful": ran, "exitCode": int(document.get("exit_code", 0))}
        if not ran:
            said = [{"level": "error", "message": {"text": each.sentence}} for each in told]
            invocation["toolExecutionNotifications"] = said
        driver = {"name": program["name"], "version": program["version"], "rules": [*map(_rule, rules)]}
        index = {each["name"]: number for number, each in enumerate(rules)}
        results = [{**self._result(each, seen), "ruleIndex": index[each.rule]} for each in told]
        run = {
            "tool": {"driver": driver},
            "invocations": [invocation],
            "originalUriBaseIds": _BASES,
            "results": results,
        }
        return to_json_text({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}).encode("utf-8")

    def _result(self, check: _Check, seen: Counter[str]) -> dict[str, Any]:
        place = self._place(check.file)
        physical: dict[str, Any] = {"artifactLocation": place}
        if check.line:
            physical["region"] = {"startLine": check.line}
        location: dict[str, Any] = {"physicalLocation": physical}
        if check.modules:
            names = [each or "the model itself" for each in check.modules]
            location["logicalLocations"] = [{"fullyQualifiedName": each, "kind": "member"} for each in names]
        # The text of the line, not its number: lines above it come and go.
        code = linecache.getline(str(check.file), check.line).strip() if check.file.is_file() else ""
        identity = "\n".join(
            (check.rule, place["uri"], check.group + check.name if not check.line else code, *check.modules)
        )
        seen[identity] += 1
        mark = hashlib.sha256(_utf8(f"{identity}\n{seen[identity]}")).hexdigest()
        return {
            "ruleId": check.rule,
            "level": check.level,
            # A viewer would show x[0](y) as a link.
            "message": {"text": re.sub(r"\[(?=[^\]]*\]\()", r"\\[", check.sentence)},
            "locations": [location],
            "partialFingerprints": {"optimizeExport/v1": mark},
        }

    def _place(self, file: Path) -> dict[str, str]:
        packages, path = "/site-packages/", Path(os.path.normpath(file))
        if path.is_relative_to(self._root) and packages not in path.as_posix():
            return {"uri": quote(_utf8(path.relative_to(self._root).as_posix())), "uriBaseId": _SOURCE}
        inside = path.as_posix().rpartition(packages)[2] if packages in path.as_posix() else path.name
        return {"uri": quote(_utf8(inside)), "uriBaseId": _OUTSIDE}


def _utf8(text: str) -> bytes:
    """Any text, also the name of a file that isn't UTF-8."""
    return text.encode("utf-8", "backslashreplace")


def _file_of(model: str) -> Path:
    """The file that a finding or an error without a line is shown at."""
    place = model.rpartition(":")[0] or model
    if library_of(model) is not None:
        return Path("/site-packages", place)
    return Path(place if place.endswith(".py") else f"{place.replace('.', '/')}.py").absolute()


def _rule(rule: Mapping[str, str]) -> dict[str, Any]:
    whole = " ".join(rule["description"].split())
    text = {"text": whole}
    return {
        "id": rule["name"],
        "shortDescription": {"text": whole.partition(". ")[0].rstrip(".")},
        "fullDescription": text,
        "help": text,
        "defaultConfiguration": {"level": rule["level"]},
    }


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BundleError(f"{path} can't be written: {error.strerror or error}.") from error
