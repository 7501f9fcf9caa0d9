"""Import onnxruntime with its telemetry off; all other modules import it from here.

From version 1.29 on, official builds write an identifier into the home folder and send events. This starts at import,
so the variable must be set before. The call covers processes that have already imported onnxruntime.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

ort.disable_telemetry_events()

__all__ = ["ort"]
