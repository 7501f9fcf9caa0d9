"""Checks of the options that need the passes and exporters; they run before the user's code."""

from exporters.metadata import refuse_metadata
from exporters.onnx import refuse_opset
from exporters.registry import exporter_named
from optimize_export.runtime import require_runtime
from optimizer.bundle import check_target
from optimizer.command.early_checks import check_early
from optimizer.command.input_spec import parse_input
from optimizer.options import ExportOptions
from passes.base import Pass
from passes.registry import make_passes, parse_passes


def checked_passes(options: ExportOptions) -> list[Pass]:
    """Make the passes that the options name, and check all options that can be checked without the model.

    The passes are made before the user's modules can take the names of our packages.

    Raises:
        PassesError, ExporterError, OptimizeExportError: an option is invalid, whatever the model is.
    """
    passes = make_passes(None if options.passes is None else parse_passes(options.passes), "inference")
    for name in options.formats:
        exporter_named(name)
    if "onnx" in options.formats:
        require_runtime("onnxruntime")
    refuse_opset(options.opset, options.formats)
    refuse_metadata(options.metadata or {})
    for text in options.inputs:
        parse_input(text)
    check_early(options)
    check_target(options.output, force=options.force)
    return passes
