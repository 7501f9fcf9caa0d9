"""The work of the command, by the functions that `cli` calls. Importing this imports torch."""

from optimizer.command.build import export_model
from optimizer.command.bundles import bench, lay_out, list_passes, rejudge, verify
from optimizer.command.diagnosing import diagnose_model

__all__ = ["bench", "diagnose_model", "export_model", "lay_out", "list_passes", "rejudge", "verify"]
