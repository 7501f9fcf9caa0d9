"""The names for writing a `TensorPass`, which changes the weights of layer pairs. `passes` exports them too."""

from passes.program.arithmetic import are_finite, exact, float64, scale_of
from passes.program.matching import Affine, BatchNorm, ChannelScale, Convolution, Pair
from passes.program.moved_bias import mean_without
from passes.program.tensor_pass import TensorPass
from passes.program.tensor_rewriting import TensorRewriter
from passes.program.tensors import TensorRef

__all__ = [
    "Affine",
    "BatchNorm",
    "ChannelScale",
    "Convolution",
    "Pair",
    "TensorPass",
    "TensorRef",
    "TensorRewriter",
    "are_finite",
    "exact",
    "float64",
    "mean_without",
    "scale_of",
]
