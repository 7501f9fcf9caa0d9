"""The stages of an export: measure the original, write and prove each file, and build the manifest."""

from optimizer.exporting.artifact_parity import ArtifactParity
from optimizer.exporting.graph_files import remove
from optimizer.exporting.job import (
    ExportJob,
    copy_for_export,
    exporters_of,
    opened,
    optimize_again,
    with_checked_folders,
)
from optimizer.exporting.measuring import MeasuredExport, measure
from optimizer.exporting.writing import WrittenFiles, add_report, profiled, write_data, write_files

__all__ = [
    "ArtifactParity",
    "ExportJob",
    "MeasuredExport",
    "WrittenFiles",
    "add_report",
    "copy_for_export",
    "exporters_of",
    "measure",
    "opened",
    "optimize_again",
    "profiled",
    "remove",
    "with_checked_folders",
    "write_data",
    "write_files",
]
