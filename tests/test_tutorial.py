"""The tutorial does what it says: its blocks run in order, and each result that it shows comes up."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?:`(\w+\.py)`:\n\n)?```(\w+)\n(.*?)```", re.DOTALL)
FIGURE = re.compile(r"\d[\d.]* (?:µs|ms|s|%|KiB|MiB|bytes|times|rounds)(?!\w)|\d+\.\d+")


def lines_of(text: str) -> list[str]:
    """The lines without the figures that differ from run to run, and without the columns' widths."""
    return [" ".join(FIGURE.sub("#", line).split()) for line in text.splitlines() if line.strip()]


def absent(shown: str, output: str) -> list[str]:
    """The lines that the tutorial shows and the output doesn't have, where … stands for any text.

    Which file is fastest depends on the machine.
    """
    found = lines_of(output)
    lines = [line for line in lines_of(shown) if not line.startswith("ship ")]
    patterns = {line: re.compile(".+".join(map(re.escape, line.split("…")))) for line in lines}
    return [line for line in lines if not any(patterns[line].fullmatch(each) for each in found)]


def test_a_line_that_does_not_come_up_is_found():
    shown = "fold-conv-bn    applied  2        0\nmodel.onnx  80 KiB  ok, 20 % of the allowed error"
    output = "fold-conv-bn  applied  2   0\nmodel.onnx   81 KiB  ok, 9 % of the allowed error"
    assert absent(shown, output) == []
    assert absent(shown.replace("2", "3", 1), output) == ["fold-conv-bn applied 3 0"]
    assert absent(shown, "") == lines_of(shown)
    assert absent("note: measured on … (cpu)", "note: measured on AMD EPYC (cpu)") == []
    assert absent("note: measured on …", "an error before note: measured on AMD EPYC") == ["note: measured on …"]
    assert absent("the first half", "the first half of a line") == ["the first half"]


@pytest.mark.slow
def test_the_tutorial(tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    # The tests don't time files, but the tutorial shows the times.
    environment.pop("OPTIMIZE_EXPORT_NO_BENCH", None)
    output = ""
    for name, language, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")):
        if language == "python":
            (tmp_path / name).write_text(text, encoding="utf-8")
        elif language == "bash":
            command = ["bash", "-e", "-c", text]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            output = done.stderr + done.stdout
            assert done.returncode == 0, f"{text}\n{output}"
        else:
            assert language == "text"
            assert absent(text, output) == [], output
