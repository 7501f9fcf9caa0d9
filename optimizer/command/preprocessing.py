"""Images and text files as inputs of library models, preprocessed as in the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from optimize_export.errors import LoadError
from optimize_export.wording import quote
from optimizer.command.early_checks import SUFFIXES
from optimizer.command.user_errors import errors_of_user_code

Kind = Literal["image", "text"]


@dataclass(frozen=True)
class Preprocessing:
    """Converts an image or texts to the tensors of a call, as the model's library does.

    Attributes:
        label: the model, for messages.
        convert: takes a PIL image in RGB, or a list of texts; returns tensors by the names of forward's arguments, or
            by their positions ("0", "1", …).
    """

    label: str
    kind: Kind
    convert: Callable[[Any], dict[str, torch.Tensor]]


def kind_of(path: Path) -> Kind | None:
    """The kind of a file by its suffix; None for files of tensors and others."""
    kinds: tuple[Kind, ...] = ("image", "text")
    return next((kind for kind in kinds if path.suffix.lower() in SUFFIXES[kind]), None)


def preprocessed(path: Path, kind: Kind, preprocessing: Preprocessing | None) -> dict[str, torch.Tensor]:
    """Read an image or a text file, and convert it to tensors.

    Raises:
        LoadError: the model's preprocessing isn't known or is for the other kind of file; or the file can't be read, is
            empty or can't be converted.
    """
    described = {"image": "an image", "text": "a text file"}
    if preprocessing is None:
        raise LoadError(
            f"{path.name} is {described[kind]}, and the model's preprocessing of it isn't known: save the tensors of a "
            "call in a .safetensors file, named after forward's arguments."
        )
    if preprocessing.kind != kind:
        raise LoadError(
            f"{path.name} is {described[kind]}, but {preprocessing.label} takes {described[preprocessing.kind]} "
            f"({' '.join(SUFFIXES[preprocessing.kind])}) or the tensors of a call (.safetensors .npz)."
        )
    content = _image_in(path) if kind == "image" else _lines_of(path)
    with errors_of_user_code(f"{path.name} couldn't be preprocessed for {preprocessing.label}", Path.cwd()):
        return preprocessing.convert(content)


def _image_in(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise LoadError(f"Pillow, which reads {path.name}, isn't installed: pip install pillow.") from error
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise LoadError(f"The image {path.name} couldn't be read: {quote(error)}.") from error


def _lines_of(path: Path) -> list[str]:
    """The texts in a file: its lines without the blank ones."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise LoadError(f"The text file {path.name} couldn't be read as UTF-8: {quote(error)}.") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise LoadError(f"The text file {path.name} is empty: write one text per line.")
    return texts
