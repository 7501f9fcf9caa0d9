"""The stages of an export: measure the original, write and prove each file, and build the manifest."""

from optimizer.exporting.copies import copy_for_export, optimize_again
from optimizer.exporting.graph_files import remove
from optimizer.exporting.job import ExportJob, exporters_of, opened, with_checked_folders
from optimizer.exporting.measuring import MeasuredExport, measure
from optimizer.exporting.references import is_vacuous, measured_reference, sizes_of
from optimizer.exporting.writing import WrittenFiles, add_report, profiled, write_data, write_files

__all__ = [
    "ExportJob",
    "MeasuredExport",
    "WrittenFiles",
    "add_report",
    "copy_for_export",
    "exporters_of",
    "is_vacuous",
    "measure",
    "measured_reference",
    "opened",
    "optimize_again",
    "profiled",
    "remove",
    "sizes_of",
    "with_checked_folders",
    "write_data",
    "write_files",
]
