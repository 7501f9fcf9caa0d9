"""Write a self-contained reproduction of a wrong file, which needs neither the model nor this project."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from exporters.base import Artifact
from optimizer.faults.locating import Located
from optimizer.parity import GoldenEntry, ParityReport

_README = """# What is wrong with {file}

{reason}
{place}

`inputs.pt` contains the inputs of the call at {where}. `expected.pt` contains the original's outputs for them, computed
in float64 and rounded once. `python reproduce.py` runs the file and shows the error of each output. It needs only {needs},
and exits with 1 if an error is larger than allowed.
"""

_SCRIPT = '''"""Run {file} on the inputs next to it, and show the errors of its outputs."""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
DEVICE = {device!r}
INPUTS = {inputs!r}
ALLOWED = {allowed!r}  # the largest error of each output, in the file's order


{run}

def main():
    given, expected = (torch.load(HERE / name, weights_only=True) for name in ("inputs.pt", "expected.pt"))
    wrong = False
{seeded}    for (name, allowed), got in zip(ALLOWED.items(), run([given[name] for name in INPUTS]), strict=True):
        want, got = expected[name], got.cpu()
        same = got.shape == want.shape
        wide = torch.complex128 if want.is_complex() else torch.float64
        # inf - inf is NaN, so equal elements are left out.
        apart = (got != want) & ~(got.isnan() & want.isnan()) if same else None
        error = float((got.to(wide) - want.to(wide))[apart].abs().max()) if same and apart.any() else 0.0
        bad = not same or not error <= allowed
        wrong = wrong or bad
        shapes = "" if same else f", its shape is {{list(got.shape)}} instead of {{list(want.shape)}}"
        print(f"{{name}}: off by {{error:.2e}}, {{allowed:.1e}} is allowed{{shapes}}: {{'wrong' if bad else 'right'}}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
'''

_RUN = {
    "onnx": """def run(tensors):
    import onnxruntime

    provider = "CPUExecutionProvider" if DEVICE == "cpu" else "CUDAExecutionProvider"
    session = onnxruntime.InferenceSession(HERE / "{file}", providers=[provider])
    names = [each.name for each in session.get_inputs()]
    values = session.run(None, {{name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}})
    return [torch.from_numpy(value) for value in values]
""",
    "torchscript": """def run(tensors):
    with torch.no_grad():
        outputs = torch.jit.load(HERE / "{file}", map_location=DEVICE)(*(tensor.to(DEVICE) for tensor in tensors))
    return list(outputs) if isinstance(outputs, tuple) else [outputs]
""",
    "pt2": """def run(tensors):
    from torch.export.passes import move_to_device_pass

    program = torch.export.load(HERE / "{file}")
    if DEVICE != "cpu":
        program = move_to_device_pass(program, DEVICE)
    with torch.no_grad():
        outputs = program.module()(*(tensor.to(DEVICE) for tensor in tensors))
    return list(outputs) if isinstance(outputs, tuple) else [outputs]
""",
    "aoti": """def run(tensors):
    from torch._inductor import aoti_load_package

    with torch.no_grad():
        outputs = aoti_load_package(str(HERE / "{file}"))(*(tensor.to(DEVICE) for tensor in tensors))
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]
""",
}


def write_reproduction(
    directory: Path,
    artifact: Artifact,
    inputs: Sequence[torch.Tensor],
    golden: GoldenEntry,
    where: str,
    report: ParityReport,
    located: Located,
) -> str:
    """Write the reproduction to the folder `directory`/FORMAT.

    If the folder can't be written, nothing of it remains and no error is raised, because that would hide the failure of
    the artifact.

    Args:
        inputs: of the file at the call `where`, such as "batch size 3, draw 1"; `golden` has the original's outputs there.

    Returns:
        A sentence that names the folder, or the reason why there is none.
    """
    if artifact.format not in _RUN:
        return f"There is no reproduction script for {artifact.format} files."
    file = artifact.path.name
    given = dict(zip((spec.name for spec in artifact.inputs), inputs, strict=True))
    # The file and the original have their outputs in the same order.
    outputs = dict(zip((spec.name for spec in artifact.outputs), golden.outputs.values(), strict=True))
    allowed = {name: judged.tolerance for name, judged in zip(outputs, report.outputs, strict=False)}
    needs = "torch and onnxruntime" if artifact.format == "onnx" else "torch"
    seeded = "" if golden.seed is None else f"    torch.manual_seed({golden.seed})  # the model draws random numbers\n"
    texts = {
        "reproduce.py": _SCRIPT.format(
            file=file,
            device=torch.device(report.device).type,
            inputs=list(given),
            allowed=allowed,
            run=_RUN[artifact.format].format(file=file),
            seeded=seeded,
        ),
        "README.md": _README.format(file=file, reason=report.reason, place=f"\n{located}", where=where, needs=needs),
    }
    try:
        _write(directory / artifact.format, artifact.files, {"inputs": given, "expected": outputs}, texts)
    except (OSError, RuntimeError) as error:
        # Name only the error number: `write_bundle` would mistake the error's text for a disk error of the bundle.
        reason = f"error {error.errno}" if isinstance(error, OSError) else "torch.save failed"
        return f"The folder {directory} couldn't be written ({reason})."
    return f"{directory / artifact.format} contains a self-contained reproduction: run reproduce.py there."


def _write(
    folder: Path, copied: Sequence[Path], tensors: Mapping[str, Mapping[str, torch.Tensor]], texts: Mapping[str, str]
) -> None:
    folder.mkdir(parents=True)
    try:
        for path in copied:
            shutil.copyfile(path, folder / path.name)
        for name, values in tensors.items():
            # Copies, because a view is saved with all the memory that it is a part of.
            torch.save({key: tensor.detach().cpu().clone() for key, tensor in values.items()}, folder / f"{name}.pt")
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
