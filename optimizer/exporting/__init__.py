"""The stages of an export: measure the original, write and prove each file, and build the manifest."""

from optimizer.exporting.arguments import check_folders, exporters_of, opened
from optimizer.exporting.calibration import CalibrationCall, calibration_of
from optimizer.exporting.choices import read_choices
from optimizer.exporting.choosing import choose
from optimizer.exporting.data import add_report, profiled, write_data
from optimizer.exporting.job import ExportJob
from optimizer.exporting.measuring import measure
from optimizer.exporting.references import measured_reference, sizes_of
from optimizer.exporting.vacuous import is_vacuous
from optimizer.exporting.writing import WrittenFiles, write_files

__all__ = [
    "CalibrationCall",
    "ExportJob",
    "WrittenFiles",
    "add_report",
    "calibration_of",
    "check_folders",
    "choose",
    "exporters_of",
    "is_vacuous",
    "measure",
    "measured_reference",
    "opened",
    "profiled",
    "read_choices",
    "sizes_of",
    "write_data",
    "write_files",
]
