"""Library models: MODEL is `timm:NAME`, `torchvision:NAME` or `transformers:FOLDER-OR-HUB-NAME`.

    timm           timm.create_model(NAME, pretrained=True)
    torchvision    torchvision.models.get_model(NAME, weights="DEFAULT")
    transformers   the class that the config names, or else AutoModel: from_pretrained(NAME, dtype=torch.float32)

With `--weights`, the model is created with random weights; loading the file then replaces all of them. Each library is
imported only for its own models.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimize_export.errors import LoadError
from optimize_export.wording import dtype_name, listed
from optimizer.command.errors import errors_of_user_code
from optimizer.command.inputs import Preprocessing

_ROWS, _LENGTH = 2, 16
# The side of the images if the model's config has none; such models take any size.
_SIDE = 224


@dataclass(frozen=True)
class LibraryModel:
    """A library model, with example inputs that fit it; without any if they aren't known."""

    name: str
    """Without the path of a local folder."""
    module: nn.Module
    args: tuple[torch.Tensor, ...] = ()
    kwargs: dict[str, torch.Tensor] = field(default_factory=dict)
    preprocessing: Preprocessing | None = None
    notes: tuple[str, ...] = ()
    """Sentences for the user about decisions made while loading."""

    def model(self) -> tuple[nn.Module, str]:
        return self.module, self.name

    def inputs(self) -> tuple[tuple[torch.Tensor, ...] | None, dict[str, Any]]:
        return self.args or None, self.kwargs

    def calibration(self, example: torch.Tensor | None) -> None:
        """None: a library has no calibration inputs."""


def library_model(library: str, name: str, *, pretrained: bool, seed: int) -> LibraryModel:
    """Create a library model in eval mode; not pretrained if weights will be loaded into it. `seed`: of its inputs."""
    with errors_of_user_code(f"The package {library} couldn't be imported", Path.cwd()):
        importlib.import_module(library)
    what = f"{library}:{name} couldn't be created"
    if library == "transformers" and not Path(name).is_dir():
        what = f"{name} isn't a folder here, and couldn't be loaded from the hub or its cache"
    elif library != "transformers" and pretrained:
        what += " with its pretrained weights (without a network, pass your own with --weights FILE)"
    create = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}[library]
    with errors_of_user_code(what, Path.cwd()):
        made = create(name, pretrained, torch.Generator().manual_seed(seed))
    made.module.eval()
    return made


def open_lengths(kwargs: Mapping[str, Any]) -> dict[str, dict[int, str | None]] | None:
    """The dims that are dynamic by default: batch and length of `input_ids` and of tensors with the same shape."""
    ids = kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] < 2:
        return None
    alike = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and value.shape == ids.shape]
    return {name: {0: "batch", 1: "time"} for name in alike}


def _timm(name: str, pretrained: bool, generator: torch.Generator) -> LibraryModel:
    import timm
    from timm.data import create_transform, resolve_data_config

    # A name with a colon is one on the hub (hf-hub:) or a folder (local-dir:).
    if ":" not in name and not timm.is_model(name):
        _refuse_unknown("timm", name, timm.list_models())
    model = timm.create_model(name, pretrained=pretrained)
    config = resolve_data_config({}, model=model)
    transform = create_transform(**config, is_training=False)
    shown = Path(name).name if name.startswith("local-dir:") else name
    preprocessing = Preprocessing(f"timm:{shown}", "image", lambda image: {"0": transform(image)[None]})
    return LibraryModel(shown, model, (_images(generator, *config["input_size"]),), {}, preprocessing)


def _torchvision(name: str, pretrained: bool, generator: torch.Generator) -> LibraryModel:
    from torchvision import models

    if name not in models.list_models():
        _refuse_unknown("torchvision.models", name, models.list_models())
    weights = models.get_model_weights(name).DEFAULT
    takes = inspect.signature(models.get_model_builder(name)).parameters
    # Without this, models for segmentation and detection download the weights of their backbone.
    others = {"weights_backbone": None} if "weights_backbone" in takes else {}
    model = models.get_model(name, weights=weights if pretrained else None, **others)
    transform = weights.transforms()
    sides = {"ImageClassification": "crop_size", "SemanticSegmentation": "resize_size"}.get(type(transform).__name__)
    if sides is None:  # the model takes videos, pairs of images or lists of images
        return LibraryModel(name, model)
    preprocessing = Preprocessing(f"torchvision:{name}", "image", lambda image: {"0": transform(image)[None]})
    side = getattr(transform, sides)[0]
    return LibraryModel(name, model, (_images(generator, 3, side, side),), {}, preprocessing)


def _transformers(name: str, pretrained: bool, generator: torch.Generator) -> LibraryModel:
    import transformers

    shown = Path(name).resolve().name if Path(name).is_dir() else name
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    saved, config.dtype = config.dtype, torch.float32
    config.use_cache = False  # files can't carry a cache from call to call
    known = getattr(transformers, (config.architectures or [""])[0], None)
    cls: Any = known if isinstance(known, type) and issubclass(known, nn.Module) else transformers.AutoModel
    notes = []
    if pretrained:
        # Weights may be in half precision, which not every runtime computes in; float32 holds their values exactly.
        options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
        model, report = cls.from_pretrained(name, config=config, **options)
        if absent := sorted(report["missing_keys"]):
            raise LoadError(f"The weights of transformers:{shown} lack {listed(absent)}, which {cls.__name__} needs.")
        if saved not in (None, torch.float32):
            notes.append(f"The weights of {shown} are in {dtype_name(saved)}, and were loaded in float32.")
    else:
        model = transformers.AutoModel.from_config(config) if cls is transformers.AutoModel else cls(config)
    takes = inspect.signature(model.forward).parameters
    kwargs = _inputs_of(model.main_input_name, config, takes, generator)
    preprocessing, label = None, f"transformers:{shown}"
    if "input_ids" in kwargs:
        tokenizer = functools.cache(lambda: _tokenizer(name))  # loaded when the first text comes
        preprocessing = Preprocessing(label, "text", lambda texts: _tokens(tokenizer(), texts, kwargs))
    elif kwargs:
        load = transformers.AutoImageProcessor.from_pretrained
        processor = functools.cache(lambda: load(name, trust_remote_code=False))
        preprocessing = Preprocessing(
            label,
            "image",
            lambda image: {"pixel_values": processor()(images=image, return_tensors="pt")["pixel_values"]},
        )
    return LibraryModel(shown, model, (), kwargs, preprocessing, tuple(notes))


def _inputs_of(main: str, config: Any, takes: Iterable[str], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The example inputs of a model for texts or images; none for other models."""
    vocabulary = getattr(config, "vocab_size", None)
    if config.is_encoder_decoder:
        return {}
    if main == "pixel_values" and "input_ids" not in takes:
        side = getattr(config, "image_size", None) or _SIDE
        height, width = side if isinstance(side, list | tuple) else (side, side)
        return {main: _images(generator, getattr(config, "num_channels", 3), height, width)}
    if main != "input_ids" or "pixel_values" in takes or vocabulary is None:
        return {}
    special = (value for key, value in config.to_dict().items() if key.endswith("_token_id"))
    ends = sorted({-1, vocabulary, *(each for each in special if isinstance(each, int) and 0 <= each < vocabulary)})
    # The longest range of ids without special tokens, which some models search for.
    before, after = max(itertools.pairwise(ends), key=lambda pair: pair[1] - pair[0])
    ids = torch.randint(before + 1, after, (_ROWS, _LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, _LENGTH * 3 // 4 :] = 0  # otherwise a file that ignores the mask would pass
    return {"input_ids": ids, "attention_mask": mask} if "attention_mask" in takes else {"input_ids": ids}


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    # Without their files, some tokenizers have an empty vocabulary.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise LoadError(f"{Path(name).name} has no tokenizer: save it there with tokenizer.save_pretrained.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _tokens(tokenizer: Any, texts: list[str], example: Iterable[str]) -> dict[str, torch.Tensor]:
    tokens = tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, truncation=True)
    return {key: tokens[key] for key in example if key in tokens}


def _images(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(_ROWS, *shape, generator=generator)


def _refuse_unknown(module: str, name: str, known: Iterable[str]) -> None:
    near = difflib.get_close_matches(name, sorted(known), 3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{module}.list_models() lists all."
    raise LoadError(f"{module.partition('.')[0]} has no model {name!r}; {hint}")
