"""onnxruntime with its telemetry off: the one place that imports it.

From 1.29 on its official builds write an identifier into the home folder and send events. The variable has to be set before
the import, which starts that; the call is for a process that has imported onnxruntime before.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

ort.disable_telemetry_events()

__all__ = ["ort"]
