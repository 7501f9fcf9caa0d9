"""Architectures from timm at small image sizes: `timm_member(name)` makes (model in eval mode, kwargs of one call).

The batch size is 2. The weights are random, and each BatchNorm has the statistics of its inputs.
"""

from typing import Any

import torch
import torchvision_operators
from torch import nn

torchvision_operators.declare()

# The width and height of the image, and the arguments that make a large architecture small.
_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "efficientnet_b0": (32, {}),
    "regnety_002": (32, {}),
    "mobilenetv3_large_100": (32, {}),
    "densenet121": (32, {}),
    "repvgg_a0": (32, {}),
    "mobilevit_xxs": (64, {}),
    "cspdarknet53": (32, {}),
    "ese_vovnet19b_slim_dw": (32, {}),
    "resnetv2_50": (32, {}),
    "tresnet_m": (32, {}),
    "convnext_atto": (32, {}),
    "resnest14d": (32, {}),
    "seresnext26t_32x4d": (32, {}),
    "ghostnet_050": (32, {}),
    "hrnet_w18_small": (32, {}),
    "res2net50_14w_8s": (32, {}),
    "dla46_c": (32, {}),
    "xception41": (32, {}),
    "inception_v3": (96, {}),
    "inception_v4": (96, {}),
    "nf_resnet26": (32, {}),
    "mixnet_s": (32, {}),
    "lcnet_050": (32, {}),
    "fbnetc_100": (32, {}),
    "mnasnet_small": (32, {}),
    "efficientvit_b0": (64, {}),
    "repghostnet_050": (32, {}),
    "swin_tiny_patch4_window7_224": (64, {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (1, 1, 2, 1)}),
    "vit_tiny_patch16_224": (64, {"img_size": 64, "depth": 3}),
    "levit_128s": (64, {"img_size": 64}),
}
TIMM = tuple(_MODELS)


def timm_member(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Make the model of that name, and the keyword arguments of one call."""
    import timm

    size, arguments = _MODELS[name]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        model = timm.create_model(name, num_classes=10, **arguments)
        _enliven(model)
        _take_statistics(model, _images(8, size))
        return model, {"x": _images(2, size)}


def _images(count: int, size: int) -> torch.Tensor:
    """Noise with another brightness and contrast in each row, because pooled values of plain noise hardly differ."""
    rows = (count, 3, 1, 1)
    return torch.randn(count, 3, size, size) * (0.5 + torch.rand(rows)) + torch.randn(rows)


def _enliven(model: nn.Module) -> None:
    """Draw gains, shifts and layer scales.

    timm starts with gains of 0 or 1, shifts of 0 and layer scales of nearly 0, which would hide what a pass does.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                continue
            is_shift = name.endswith("bias")
            parameter.uniform_(-0.3, 0.3) if is_shift else parameter.uniform_(0.5, 1.5)


def _take_statistics(model: nn.Module, images: torch.Tensor) -> None:
    """Give each BatchNorm the mean and variance of its inputs, and leave the model in eval."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()
