"""torch's settings for the speed of float32 on a GPU. They belong to the process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GpuSettings:
    """The settings that files and the original run under."""

    # Whether matrix products, and the layers of cuDNN, may round their factors as TF32 does.
    matmul: bool
    cudnn: bool
    # Whether cuDNN times its algorithms for each new input shape.
    benchmark: bool

    @classmethod
    def now(cls) -> GpuSettings:
        """The settings in force."""
        matmul, cudnn = _allowed() or (node.fp32_precision == "tf32" for node in _nodes()[:2])
        return cls(matmul, cudnn, torch.backends.cudnn.benchmark)

    def put_in_force(self) -> None:
        """Change the settings of the process to these, where they differ."""
        if GpuSettings.now() == self:
            return
        backends = torch.backends
        backends.cudnn.benchmark = self.benchmark
        if _allowed() is not None:
            backends.cuda.matmul.allow_tf32 = self.matmul
            backends.cudnn.allow_tf32 = self.cudnn
            return
        for node, tf32 in zip(_nodes(), (self.matmul, self.cudnn, self.cudnn), strict=True):
            node.fp32_precision = "tf32" if tf32 else "ieee"


def _allowed() -> tuple[bool, bool] | None:
    """Whether TF32 is allowed in matrix products and in cuDNN; None if these attributes can't be read."""
    try:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError:
        # torch refuses to read them after the settings were made through `fp32_precision`.
        return None


def _nodes() -> tuple[Any, Any, Any]:
    """The objects in which torch keeps `fp32_precision`: of matrix products, convolutions and recurrent layers."""
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
