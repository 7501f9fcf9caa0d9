"""The names of the options: what to use for a name that other tools have, and for an argument that a message names.

The library's messages speak Python, such as `static_batch=True`; the command says `--static-batch` instead.
"""

import re
from collections.abc import Set
from typing import Any

_QUANTIZE = "--accuracy 0.999 with --calibration, which tries int8 and half precision within that accuracy"
_PRECISION = (
    "--passes cast-precision:dtype=float16, or --accuracy 0.999, which tries lower precisions within that accuracy"
)
# The names that other tools use, and the options that do it here.
_ELSEWHERE = {
    ("quantize", "quantization", "quant", "int8", "int4", "8bit", "qint8", "ptq", "static-quant"): _QUANTIZE,
    ("half", "fp16", "float16", "bf16", "bfloat16", "precision", "dtype", "amp"): _PRECISION,
    ("o", "out", "out-dir", "output-dir", "output-path", "output-file", "save", "dest"): "--output",
    ("batch", "batch-size", "b", "bs", "max-batch"): "--batch-sizes, or --static-batch for one fixed size",
    ("dynamic-batch", "dynamic-axes", "dynamic-shapes", "dynamic-dims"): (
        "--dynamic for other dims (the batch is dynamic without an option)"
    ),
    ("shape", "shapes", "input-shape", "input-shapes", "input-size", "size", "imgsz", "img-size"): "--input",
    ("s", "silent", "q"): "--quiet",
    ("v", "verbose", "vv"): "--details, or --debug for tracebacks",
    ("V",): "--version",
    ("f", "format", "to", "export", "include", "backend", "target"): "--formats",
    ("onnx", "torchscript", "jit", "pt2", "aoti", "openvino", "tensorrt"): "--formats",
    ("gpu", "cuda", "d"): "--device cuda",
    ("cpu",): "--device cpu",
    ("checkpoint", "ckpt", "pretrained", "state-dict", "w"): "--weights",
    ("overwrite", "y", "yes"): "--force",
    ("tolerance", "tol", "eps"): "--atol and --rtol",
    ("benchmark", "time", "speed"): "--tune, or optimize-export bench BUNDLE",
    ("check", "validate", "test"): "optimize-export verify BUNDLE (each export is checked without an option)",
    ("compile",): "--formats aoti, which torch's compiler writes",
    ("p", "fuse", "fold", "simplify", "optimize", "optimise", "O", "O2", "O3", "pass"): "--passes",
    ("opset-version",): "--opset",
    ("name", "class", "factory", "entry"): "--model",
    ("example-inputs", "i", "data"): "--input or --inputs",
    ("calib", "calibration-data", "calib-data"): "--calibration",
    ("threads", "num-threads"): "--tune, which tries numbers of threads",
}
_BY_NAME = {name: advice for names, advice in _ELSEWHERE.items() for name in names}
# Where the library can't name an argument, because only the command reads weights.
_PHRASES = {
    "load trained weights": "load trained weights (--weights FILE)",
    "load weights into it first": "load weights into it first (--weights FILE)",
}
_ARGUMENT, _OPTION = re.compile(r"`(\w+)=([^`]*)`"), re.compile(r"--[a-z-]+")


def advice_for(name: str, known: Set[str]) -> str:
    """What to use for an option that other tools have; empty if there is nothing, or if it isn't among those known."""
    plain = name.lstrip("-").replace("_", "-")
    advice = next((_BY_NAME[each] for each in (plain, plain.lower()) if each in _BY_NAME), "")
    return advice if set(_OPTION.findall(advice)) <= known else ""


def with_options(message: str, known: Set[str]) -> str:
    """A message of the library with the command's options for the arguments that it names in backticks."""
    for phrase, advice in _PHRASES.items():
        message = message.replace(phrase, advice)
    return _ARGUMENT.sub(lambda found: _option(found, known), message)


def all_with_options(value: Any, known: Set[str]) -> Any:
    """The same for every text of a JSON document."""
    if isinstance(value, str):
        return with_options(value, known)
    if isinstance(value, dict):
        return {key: all_with_options(each, known) for key, each in value.items()}
    return [all_with_options(each, known) for each in value] if isinstance(value, list | tuple) else value


def _option(found: re.Match[str], known: Set[str]) -> str:
    name, value = f"--{found[1].replace('_', '-')}", found[2]
    if value == "False":
        name = f"--no-{name.removeprefix('--')}"
    if name not in known:
        return found[0]
    if value in ("True", "False", "…"):
        return name
    return f"{name} {value.strip('()').replace(', ', ',')}"
