"""Make torchvision and timm importable, from the folder that `make` installs them into, or as installed.

torchvision's compiled operators may not fit the installed torch, but its Python code refers to them. If they can't be
loaded, they are declared here without implementations. Models that don't call them, which are all of timm's, are built
and run as usual.
"""

import sys
from pathlib import Path

import torch

# As in the Makefile.
FOLDER = Path(sys.prefix) / "timm"
_BOXES = "Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width"
_SIZES = "int batch_size, int channels, int height, int width"
_GRADIENT = (
    "Tensor grad, Tensor rois, {}float spatial_scale, int pooled_height, int pooled_width, {}" + _SIZES + "{} -> Tensor"
)
_DEFORMED = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, int stride_h, int stride_w, int pad_h,"
    " int pad_w, int dilation_h, int dilation_w, int groups, int offset_groups, bool use_mask"
)
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_BOXES}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({_BOXES}) -> (Tensor, Tensor)",
    f"ps_roi_align({_BOXES}, int sampling_ratio) -> (Tensor, Tensor)",
    f"ps_roi_pool({_BOXES}) -> (Tensor, Tensor)",
    f"deform_conv2d({_DEFORMED}) -> Tensor",
    f"_roi_align_backward({_GRADIENT.format('', '', ', int sampling_ratio, bool aligned)')}",
    f"_roi_pool_backward({_GRADIENT.format('Tensor argmax, ', '', ')')}",
    f"_ps_roi_align_backward({_GRADIENT.format('Tensor channel_mapping, ', 'int sampling_ratio, ', ')')}",
    f"_ps_roi_pool_backward({_GRADIENT.format('Tensor channel_mapping, ', '', ')')}",
    f"_deform_conv2d_backward(Tensor grad, {_DEFORMED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_declared: list[torch.library.Library] = []


def declare() -> None:
    """Import torchvision and timm; declare torchvision's operators if it can't be imported without.

    The folder isn't left on `sys.path`, which tests pass on to other processes: there, transformers would find
    torchvision without its operators.

    Raises:
        ImportError: one of them isn't installed.
    """
    if added := FOLDER.is_dir():
        sys.path.append(str(FOLDER))
    try:
        _import_torchvision()
        import timm  # noqa: F401
    finally:
        if added:
            sys.path.remove(str(FOLDER))


def _import_torchvision() -> None:
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        _declared.append(library)
        import torchvision  # noqa: F401
