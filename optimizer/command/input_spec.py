"""Parse `--input`, and draw the tensors that it describes."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from optimize_export.errors import LoadError, UsageError
from optimize_export.wording import dtype_name, quote

_EXAMPLE = "2x3x224x224, float32[2,3,224,224], mask=bool[2,128] or ids=int64[2,128]:0..30000"

_BODY = re.compile(r"(?:(?P<sizes>[0-9]+(?:x[0-9]+)*)|(?P<dtype>\w+)\[(?P<shape>[^\]]*)\])(?::(?P<range>.*))?")
# Short names: f16, fp16, bf16, i64, u8, c64, ...
_SHORT_DTYPE = re.compile(r"(f|fp|bf|i|u|c)(\d+)")
_KINDS = {"f": "float", "fp": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex"}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})", re.IGNORECASE)


@dataclass(frozen=True)
class InputSpec:
    """One `--input`: `[NAME=]SHAPE` or `[NAME=]DTYPE[SHAPE]`, both with an optional `:LOW..HIGH`.

    Without a range, floats are drawn from the standard normal distribution, integers uniformly from 0 to 9, and
    booleans with equal probability. A range excludes its upper end, so `ids=int64[2,128]:0..30000` suits a vocabulary
    of 30000.
    """

    name: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        try:
            return self._draw(generator)
        except (RuntimeError, MemoryError) as error:
            raise LoadError(f"The input {self} couldn't be created: {quote(error)}.") from error

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        if self.dtype.is_complex:
            return torch.randn(self.shape, generator=generator, dtype=self.dtype)
        if self.dtype.is_floating_point:
            if self.low is None or self.high is None:
                precise = torch.float64 if self.dtype is torch.float64 else torch.float32
                return torch.randn(self.shape, generator=generator, dtype=precise).to(self.dtype)
            unit = torch.rand(self.shape, generator=generator, dtype=torch.float64)
            return unit.mul_(self.high - self.low).add_(self.low).to(self.dtype)
        low, high = (0, 2 if self.dtype is torch.bool else 10) if self.low is None else (self.low, self.high or 0)
        return torch.randint(int(low), int(high), self.shape, generator=generator).to(self.dtype)

    def __str__(self) -> str:
        named = f"{self.name}=" if self.name else ""
        return f"{named}{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


def parse_input(text: str) -> InputSpec:
    """Parse one `--input`; raise a `UsageError` that quotes it and shows a valid example."""
    head, equals, rest = text.strip().partition("=")
    name, body = (head.strip(), rest.strip()) if equals else (None, head)
    if name is not None and not name.isidentifier():
        _refuse(text, f"{name!r} is not the name of an argument")
    found = _BODY.fullmatch(body)
    if found is None:
        _refuse(text, "the syntax is invalid")
    sizes = found["sizes"].split("x") if found["sizes"] else [size.strip() for size in found["shape"].split(",")]
    shape = [] if sizes == [""] else sizes
    if wrong := [size for size in shape if not re.fullmatch("0*[1-9][0-9]{0,9}", size)]:
        _refuse(text, f"{wrong[0]!r} is not a size; every size must be 1 or more")
    written = found["dtype"] or "float32"
    dtype = _dtype_named(written)
    if dtype is None:
        known = [dtype_name(each) for each in vars(torch).values() if isinstance(each, torch.dtype)]
        near = difflib.get_close_matches(written, known, 1)
        _refuse(text, f"{written!r} is not a dtype" + (f" (did you mean {near[0]}?)" if near else ""))
    limits = () if found["range"] is None else _parse_range(text, found["range"], dtype)
    return InputSpec(name, dtype, tuple(map(int, shape)), *limits)


def draw_inputs(specs: Sequence[InputSpec], seed: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Draw the positional arguments, in order, and the keyword arguments, by name."""
    names = [spec.name for spec in specs if spec.name is not None]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--input sets {', '.join(twice)} twice; set each input once.")
    generator = torch.Generator().manual_seed(seed)
    drawn = [(spec.name, spec.draw(generator)) for spec in specs]
    positional = tuple(tensor for name, tensor in drawn if name is None)
    return positional, {name: tensor for name, tensor in drawn if name is not None}


def _refuse(text: str, reason: str) -> NoReturn:
    raise UsageError(f"--input {text!r}: {reason}; a valid one looks like {_EXAMPLE}.")


def _dtype_named(name: str) -> torch.dtype | None:
    short = _SHORT_DTYPE.fullmatch(name)
    found = getattr(torch, f"{_KINDS[short[1]]}{short[2]}" if short else name, None)
    quantized = isinstance(found, torch.dtype) and dtype_name(found).startswith(("q", "bits"))
    return found if isinstance(found, torch.dtype) and not quantized else None


def _parse_range(text: str, range_text: str, dtype: torch.dtype) -> tuple[float, float]:
    found = _RANGE.fullmatch(range_text.strip())
    if found is None:
        _refuse(text, f"{range_text!r} is not a range LOW..HIGH")
    low, high = float(found["low"]), float(found["high"])
    if not low < high:
        _refuse(text, "the range is empty (its upper end is excluded)")
    if dtype.is_complex:
        _refuse(text, "complex numbers can't have a range")
    if dtype.is_floating_point:
        if max(-low, high) > torch.finfo(dtype).max:
            _refuse(text, f"the range doesn't fit {dtype_name(dtype)}")
        return low, high
    if not (low.is_integer() and high.is_integer()):
        _refuse(text, "a range of integers needs integer ends")
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if low < least or high - 1 > min(most, 2**53):
        _refuse(text, f"the range doesn't fit {dtype_name(dtype)}")
    return low, high
