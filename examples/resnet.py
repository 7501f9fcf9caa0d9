"""ResNet-50, as transformers builds it from a configuration, with weights and statistics that are worth comparing.

    optimize-export examples/resnet.py --output dist/resnet

Nothing is downloaded: the weights are drawn. A freshly initialised network outputs almost nothing, and its BatchNorms
almost nothing else than their input, so both get real values here.
"""

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification


def give_real_values(model: nn.Module, seed: int = 0) -> None:
    """Draw BatchNorm parameters and statistics, then take the statistics that the network's own activations have."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                # The last BatchNorm of each residual branch is kept small, as training leaves it: else sums explode.
                low, high = (0.1, 0.3) if name.endswith("layer.2.normalization") else (0.5, 1.5)
                module.weight.uniform_(low, high, generator=generator)
                module.bias.uniform_(-0.3, 0.3, generator=generator)
                module.momentum = None
    model.train()
    with torch.no_grad():
        for _ in range(2):
            model(pixel_values=torch.randn(8, 3, 96, 96, generator=generator))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1


def get_model() -> nn.Module:
    """The model in eval."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    give_real_values(model)
    return model.eval()


def get_example_inputs() -> tuple[torch.Tensor, ...]:
    """One batch of two images."""
    return (torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1)),)
