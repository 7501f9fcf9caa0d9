"""A ResNet-50 from transformers, with weights and statistics that make comparisons meaningful.

    optimize-export examples/resnet.py --output dist/resnet

Nothing is downloaded: the model is built from a configuration, and its weights are drawn. A freshly initialized network
outputs almost nothing, and its BatchNorms return almost exactly their input. So both get realistic values here.
"""

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification


def give_real_values(model: nn.Module, seed: int = 0) -> None:
    """Draw BatchNorm parameters, then measure the statistics on the network's own activations."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                # The last BatchNorm of each residual branch stays small, as after training. Otherwise sums explode.
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
    """The model in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    give_real_values(model)
    return model.eval()


def get_example_inputs() -> tuple[torch.Tensor, ...]:
    """One batch of two images."""
    return (torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1)),)
