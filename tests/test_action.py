"""The GitHub Action: its inputs reach the command as they are, and none is run by a shell."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = ACTION["runs"]["steps"]
INPUTS = {name: each.get("default", "") for name, each in ACTION["inputs"].items()}
HOSTILE = ["$(touch made)", "`touch made`", "; touch made", "' \" \\ * a  b", "-n", "${{ github.token }}"]


def inputs_in(value: Any) -> set[str]:
    return set(re.findall(r"inputs\.([\w-]+)", str(value)))


def test_no_step_has_an_expression_in_its_shell_code() -> None:
    scripts = [step for step in STEPS if "run" in step]
    assert len(scripts) == 2
    assert all("${{" not in step["run"] and step["shell"] == "bash" for step in scripts)
    assert inputs_in(STEPS) == INPUTS.keys()


@pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="the sdist has no workflows")
def test_actions_are_pinned_as_in_the_workflows() -> None:
    used = {step["uses"] for step in STEPS if "uses" in step}
    workflows = "".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    known = dict(re.findall(r"uses: ([\w/-]+)@(\S+)", workflows))
    assert used == {f"actions/setup-python@{known['actions/setup-python']}", "github/codeql-action/upload-sarif@v4"}
    (upload,) = (step for step in STEPS if "upload-sarif" in step.get("uses", ""))
    assert upload["if"].startswith("always() && inputs.sarif != ''")
    # Code scanning keeps the last upload of a category.
    assert inputs_in(upload["with"]["category"]) == {"command", "sarif"}


def step_named(name: str) -> dict[str, Any]:
    return next(step for step in STEPS if step.get("name") == name)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("code", [0, 6])
def test_every_argument_arrives_as_it_is(tmp_path: Path, code: int) -> None:
    step = step_named("Run it")
    given = {
        **INPUTS,
        "command": "verify",
        "sarif": HOSTILE[0],
        "arguments": "\n".join(["dist/net", "", *HOSTILE]) + "\n",
    }
    done = run(step, given, tmp_path, "optimize-export", code)
    assert done == (code, ["verify", f"--sarif={HOSTILE[0]}", "dist/net", *HOSTILE])
    done = run(step, {**INPUTS, "command": HOSTILE[0], "junit": "a b.xml"}, tmp_path, "optimize-export", code)
    assert done == (code, [HOSTILE[0], "--junit=a b.xml"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_project_is_installed_from_the_folder_of_the_action(tmp_path: Path) -> None:
    step = step_named("Install optimize-export")
    assert step["env"]["FOLDER"] == "${{ github.action_path }}"
    done = run(step, {**INPUTS, "extras": HOSTILE[1]}, tmp_path, "python", 0)
    assert done == (0, ["-m", "pip", "install", "--quiet", f"/the action[{HOSTILE[1]}]"])
    done = run(step, {**INPUTS, "extras": ""}, tmp_path, "python", 0)
    assert done == (0, ["-m", "pip", "install", "--quiet", "/the action"])
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"\n{INPUTS['extras']} = [" in extras


def run(step: dict[str, Any], given: dict[str, str], folder: Path, program: str, code: int) -> tuple[int, list[str]]:
    """Run a step as GitHub does, with a program that keeps its arguments; return the exit code and these."""
    (folder / program).write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > told\nexit {code}\n", encoding="utf-8")
    (folder / program).chmod(0o755)
    known = {f"${{{{ inputs.{name} }}}}": text for name, text in given.items()}
    known["${{ github.action_path }}"] = "/the action"
    environment = {name: known[text] for name, text in step["env"].items()}
    (folder / "step.sh").write_text(step["run"], encoding="utf-8")
    environment["PATH"] = f"{folder}:/usr/bin:/bin"
    command = [shutil.which("bash") or "bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    assert {path.name for path in folder.iterdir()} == {"optimize-export", "python", "step.sh", "told"} & {
        program,
        "step.sh",
        "told",
    }
    return done.returncode, (folder / "told").read_text(encoding="utf-8").split("\0")[:-1]


def test_the_page_about_the_build_step_has_a_job_that_uses_it() -> None:
    page = (ROOT / "docs" / "build.md").read_text(encoding="utf-8")
    (job,) = re.findall(r"```yml\n(.*?)```", page, re.DOTALL)
    (uses,) = (step for step in yaml.safe_load(job)["jobs"]["models"]["steps"] if "optimize-export" in step["uses"])
    assert uses["with"].keys() <= INPUTS.keys()
    assert yaml.safe_load(job)["jobs"]["models"]["permissions"]["security-events"] == "write"
    assert len(job.splitlines()) <= 12
