"""Import OpenVINO with its telemetry off; all other modules import it from here.

At import, OpenVINO sends an event to its makers, from a forked process. Besides the event itself, a fork in the middle
of an export waits until the export is done, and torch's compiler then waits for the fork. Without the package
`openvino_telemetry`, OpenVINO uses an empty stub, so that package is hidden during the import.
"""

import importlib
import sys
from types import ModuleType

_TELEMETRY = "openvino_telemetry"


def openvino() -> ModuleType:
    """The package `openvino`.

    Raises:
        ImportError: it isn't installed, or its libraries can't be loaded.
    """
    if "openvino" in sys.modules or _TELEMETRY in sys.modules:
        return importlib.import_module("openvino")
    # An entry of None makes the import of that name fail.
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules[_TELEMETRY]
