"""A network with the weights that its package ships: Resemblyzer's voice encoder, judged by how it recognizes 16 speakers.

eSpeak NG, a speech synthesizer, says random words in the voices that it ships, at random speeds and pitches, and noise is added.
As in use, the speaker is the one whose mean embedding is nearest.
"""

from __future__ import annotations

import ctypes
import math
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from package_models import FOLDER, package_member

_CHUNK, _FRAMES, _MELS, _RATE = 256, 160, 40, 16_000
# Resemblyzer's window, hop and loudness.
_WINDOW, _HOP, _DECIBELS = 400, 160, -30
_VOICES = [
    "m1",
    "m3",
    "m5",
    "m7",
    "f1",
    "f5",
    "linda",
    "whisper",
    "croak",
    "klatt",
    "klatt4",
    "Andy",
    "Annie",
    "Gene",
    "Mario",
    "Storm",
]
_WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
]
# The chunk for the mean embeddings of the speakers. No set of examples contains it.
_ENROLLED = 40_000_000


class _Recognizer(nn.Module):
    """The cosine of an utterance with each speaker."""

    def __init__(self, encoder: nn.Module, speakers: torch.Tensor) -> None:
        super().__init__()
        self.encoder, self.speakers = encoder, nn.Linear(speakers.shape[1], speakers.shape[0], bias=False)
        self.speakers.weight = nn.Parameter(speakers)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        cosines: torch.Tensor = self.speakers(self.encoder(mels))
        return cosines


def network() -> nn.Module:
    """The encoder with the mean embedding of each speaker over 256 utterances of all, in eval mode."""
    encoder = package_member("resemblyzer")[0].eval()
    mels, labels = utterances(_ENROLLED)
    with torch.no_grad():
        embeddings = encoder(mels)
    means = torch.stack([embeddings[labels == speaker].mean(0) for speaker in range(len(_VOICES))])
    return _Recognizer(encoder, nn.functional.normalize(means)).eval()


def utterances(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(256, 160, 40) mel spectrograms of 1.6 seconds, and the number of each one's speaker.

    The same number gives the same words and speakers, but not the same bits: the synthesizer continues from its last phase.
    """
    draw = random.Random(number)
    labels = [draw.randrange(len(_VOICES)) for _ in range(_CHUNK)]
    return torch.stack([_mels(_said(_VOICES[each], draw)) for each in labels]), torch.tensor(labels)


def _said(voice: str, draw: random.Random) -> torch.Tensor:
    """The samples of ten words, above two seconds, with noise of 10 to 40 dB below them."""
    speak, rate = _synthesizer()
    samples = torch.from_numpy(speak(" ".join(draw.choices(_WORDS, k=10)), f"en+{voice}", draw))
    count = int(len(samples) * _RATE / rate)
    samples = nn.functional.interpolate(samples[None, None], count, mode="linear")[0, 0]
    noise = torch.randn(count, generator=torch.Generator().manual_seed(draw.randrange(2**31)))
    return samples + noise * samples.std() * 10 ** (-draw.uniform(10, 40) / 20)


def _mels(samples: torch.Tensor) -> torch.Tensor:
    """(160, 40): the power in each band, as librosa's `melspectrogram` computes it."""
    samples = samples * 10 ** (_DECIBELS / 20) / samples.square().mean().sqrt()
    window = torch.hann_window(_WINDOW)
    spectrum = torch.stft(samples, _WINDOW, _HOP, window=window, pad_mode="constant", return_complex=True)
    return (_bank() @ spectrum.abs().square()).T[:_FRAMES]


@cache
def _bank() -> torch.Tensor:
    """Triangles of equal area, evenly spaced on Slaney's mel scale: linear below 1 kHz, logarithmic above."""
    log_step, edge = math.log(6.4) / 27, 15.0
    mels = torch.linspace(0, edge + math.log(_RATE / 2 / 1000) / log_step, _MELS + 2)
    hertz = torch.where(mels < edge, mels * 200 / 3, 1000 * torch.exp(log_step * (mels - edge)))
    low, middle, high = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
    bins = torch.linspace(0, _RATE / 2, _WINDOW // 2 + 1)
    triangles = torch.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clamp(min=0)
    return triangles * 2 / (high - low)


@cache
def _synthesizer() -> tuple[Any, int]:
    """A function of a text, a voice and a source of random numbers that returns samples, and their rate."""
    folder, parts = FOLDER / "espeakng_loader", list[numpy.ndarray]()
    library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
    retrieval, utf8, speed, pitch = 1, 1, 1, 3
    rate = library.espeak_Initialize(retrieval, 0, str(folder / "espeak-ng-data").encode(), 0)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def received(samples: Any, count: int, events: Any) -> int:
        if count > 0:
            parts.append(numpy.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    library.espeak_SetSynthCallback(received)

    def speak(text: str, voice: str, draw: random.Random) -> numpy.ndarray:
        parts.clear()
        library.espeak_SetParameter(speed, draw.randint(130, 190), 0)
        failed = library.espeak_SetVoiceByName(voice.encode())
        library.espeak_SetParameter(pitch, draw.randint(35, 65), 0)
        data = text.encode() + b"\0"
        failed |= library.espeak_Synth(data, len(data), 0, 1, 0, utf8, None, None) | library.espeak_Synchronize()
        if failed or not parts:
            raise RuntimeError(f"eSpeak NG has no voice {voice}.")
        # The library holds no reference to it.
        assert received
        return numpy.concatenate(parts).astype(numpy.float32) / 32768

    return speak, rate
