"""Load weights from a file without running any code from it."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.parameter import is_lazy

from optimize_export.errors import LoadError
from optimize_export.wording import a_type, listed, quote
from optimizer.option_texts import refuse_missing_weights, split_weights

# These come first where several state dicts of a file fit the model.
_FIRST_KEYS = ("state_dict", "model_state_dict", "model")
# Parts of names that DistributedDataParallel and torch.compile add.
_WRAPPERS = ("module", "_orig_mod")
# The number of keys on the way to a state dict.
_DEEPEST = 3
_STATE_DICT = "; use a file written by torch.save(model.state_dict(), ...), or safetensors."


def load_weights(model: nn.Module, path: Path) -> list[str]:
    """Fill the model from a safetensors file or a state dict.

    Returns:
        Notes for the user.

    Raises:
        LoadError: the file can't be read without running code from it, or its tensors don't fit.
    """
    notes: list[str] = []
    path, key = split_weights(path)
    state = _fitting(model, _read_weights(path), key, path, notes)
    own = model.state_dict()
    misshapen = [
        f"{name} (file {list(state[name].shape)}, model {list(tensor.shape)})"
        for name, tensor in own.items()
        if name in state
        and isinstance(tensor, torch.Tensor)
        and not is_lazy(tensor)
        and state[name].shape != tensor.shape
    ]
    if misshapen:
        raise LoadError(f"The weights {path.name} don't fit the model: different shapes in {listed(misshapen)}.")
    dtypes = {name: getattr(tensor, "dtype", None) for name, tensor in own.items()}
    cast = [name for name in own if name in state and getattr(state[name], "dtype", None) != dtypes[name]]
    assign = any(tensor.is_meta for tensor in model.parameters())
    if assign:  # `assign` keeps the dtype of the file, where a copy would cast
        state |= {name: state[name].to(own[name].dtype) for name in cast}
    try:
        missing, unexpected = model.load_state_dict(state, strict=False, assign=assign)
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise LoadError(f"The weights {path.name} don't fit the model: {quote(error)}.") from error
    tied = _tied(model, missing, state)
    problems = [
        f"{kind} {listed(names)}"
        for kind, names in (("missing", [name for name in missing if name not in tied]), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise LoadError(f"The weights {path.name} don't fit the model: {'; '.join(problems)}.")
    if tied:
        notes.append(f"{listed(sorted(tied))} aren't in {path.name}; the model ties them to weights that are.")
    if cast:
        notes.append(f"{len(cast)} tensors of {path.name} were cast to the dtypes of the model ({cast[0]} first).")
    return notes


def _read_weights(path: Path) -> Any:
    refuse_missing_weights(path)
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"The weights {path.name} couldn't be read as safetensors: {quote(error)}.") from error
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt"):
        raise LoadError(
            f"The weights {path.name} are neither a .safetensors file nor a state dict (.pt, .pth, .bin, .ckpt)."
        )
    return _unpickled(path)


def _unpickled(path: Path) -> Any:
    zipped = zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings():
            # torch warns about pickles that its safe reader may not support. If it doesn't support one, an error
            # follows.
            warnings.simplefilter("ignore")
            # No mmap: torch would map compressed records without decompressing them, and read their bytes as numbers.
            return torch.load(path, weights_only=True, map_location="cpu", mmap=False)
    except pickle.UnpicklingError as error:
        if not re.search("Unsupported (global|class)", str(error)) and (zipped or path.read_bytes()[:1] != b"\x80"):
            raise LoadError(f"The weights {path.name} are damaged or not a state dict{_STATE_DICT}") from error
        # torch's safe reader names a class.
        named = re.search(r"GLOBAL ([\w.]+) ", str(error))
        raise LoadError(
            f"The weights {path.name} contain more than tensors{f' ({named[1]})' if named else ''} and aren't loaded, "
            "because unpickling them could run arbitrary code; save only the state dict: torch.save(model.state_dict(), ...)."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        what = "contain a TorchScript program" if "TorchScript" in str(error) else "are damaged or not a state dict"
        # Quote only an OSError: other messages are about opcodes of the pickle or records of the archive.
        why = f": {quote(error)}." if isinstance(error, OSError) else _STATE_DICT
        raise LoadError(f"The weights {path.name} {what}{why}") from error


def _fitting(model: nn.Module, value: Any, key: str, path: Path, notes: list[str]) -> dict[str, torch.Tensor]:
    """The state dict in a file that fits the model: that of the key, or the only one that fits.

    Where none fits, the one that comes first, so that the user learns what doesn't fit.
    """
    if not isinstance(value, Mapping):
        raise LoadError(f"The weights {path.name} contain {a_type(value)}, not a state dict.")
    found = dict(_state_dicts(value))
    if key:
        found = _under(key, found)
        if not found:
            known = listed([each for each in dict(_state_dicts(value)) if each]) or "none"
            raise LoadError(
                f"The weights {path.name} have no state dict under {key}; those in the file are under: {known}."
            )
    if not found:
        raise LoadError(f"The weights {path.name} contain no state dict{_STATE_DICT}")
    ranked = sorted(found, key=lambda each: _FIRST_KEYS.index(each) if each in _FIRST_KEYS else len(_FIRST_KEYS))
    fitted = {each: names for each in ranked if (names := _named_as(model, found[each], path)) is not None}
    if not fitted:
        # A file of one state dict may hold other entries too, such as the number of the epoch.
        return found[max(ranked, key=lambda each: len(set(found[each]) & set(model.state_dict())))]
    first = next(iter(fitted))
    if len(fitted) > 1 and first not in (*_FIRST_KEYS, ""):
        raise LoadError(
            f"The weights {path.name} have several state dicts that fit the model: {listed(list(fitted))}. Choose one, "
            f"as in {path.name}:{first}."
        )
    others = f"; {listed([each for each in fitted if each != first])} would fit too" if len(fitted) > 1 else ""
    if first:
        notes.append(f"The weights were taken from the key {first!r} of {path.name}{others}.")
    state, told = fitted[first]
    notes += told
    return state


def _state_dicts(value: Mapping[Any, Any], key: str = "", depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors of each mapping in a value that has some, by the mapping's keys with dots between them."""
    state = {name: each for name, each in value.items() if isinstance(name, str)}
    tensors = {n: each for n, each in state.items() if isinstance(each, torch.Tensor) or n.endswith("_extra_state")}
    unnamed = any(isinstance(each, torch.Tensor) for name, each in value.items() if name not in state)
    if not unnamed and any(isinstance(each, torch.Tensor) for each in tensors.values()):
        yield key, tensors
    for name, each in state.items() if depth < _DEEPEST else ():
        if isinstance(each, Mapping):
            yield from _state_dicts(each, f"{key}.{name}".lstrip("."), depth + 1)


def _under(key: str, found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The state dicts under a key, or the tensors whose names begin with it."""
    if inside := {each: state for each, state in found.items() if f"{each}.".startswith(f"{key}.")}:
        return inside
    parts = (
        {n.removeprefix(f"{key}."): each for n, each in state.items() if n.startswith(f"{key}.")}
        for state in found.values()
    )
    return next(({key: part} for part in parts if part), {})


def _named_as(
    model: nn.Module, state: Mapping[str, torch.Tensor], path: Path
) -> tuple[dict[str, torch.Tensor], list[str]] | None:
    """A state dict with the names of the model, and notes on changed ones; None if its names don't fit.

    Wrappers add `module.` or `_orig_mod.` anywhere, and trainers a prefix such as `model.` to all names, next to those
    of the loss.
    """
    own = set(model.state_dict())

    def fits(names: Mapping[str, torch.Tensor]) -> bool:
        missing = own - set(names)
        return set(names) <= own and missing <= _tied(model, missing, names)

    if fits(state):
        return dict(state), []
    bare = {".".join(part for part in name.split(".") if part not in _WRAPPERS): name for name in state}
    some = min(own, default="")
    for names in ({name: name for name in state}, bare if len(bare) == len(state) else {}):
        found = {}
        for prefix in [name.removesuffix(some) for name in names if name == some or name.endswith(f".{some}")]:
            taken = {n.removeprefix(prefix): state[old] for n, old in names.items() if n.startswith(prefix)}
            if fits(taken):
                found[prefix] = taken
        if len(found) > 1:
            ways = [prefix.rstrip(".") for prefix in found]
            raise LoadError(
                f"The weights {path.name} fit the model under several prefixes: {listed(ways)}. Choose one, as in "
                f"{path.name}:{ways[0]}."
            )
        if found:
            ((prefix, taken),) = found.items()
            return taken, _notes_on_names(names, prefix, path)
    return None


def _notes_on_names(names: Mapping[str, str], prefix: str, path: Path) -> list[str]:
    notes = []
    if any(name != old for name, old in names.items()):
        removed = [f"{part}." for part in _WRAPPERS if any(part in old.split(".") for old in names.values())]
        notes.append(
            f"{' and '.join(removed)} {'were' if len(removed) > 1 else 'was'} removed from names in {path.name}."
        )
    if prefix:
        notes.append(f"The prefix {prefix!r} was removed from names in {path.name}.")
    if left := [old for name, old in names.items() if not name.startswith(prefix)]:
        notes.append(f"Left out of {path.name}, because the model has no such tensors: {listed(left)}.")
    return notes


def _tied(model: nn.Module, missing: Iterable[str], state: Mapping[str, Any]) -> set[str]:
    """The missing names whose tensor is in the file under another name."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    filled = {id(tensor) for name, tensor in tensors.items() if name in state}
    return {name for name in missing if name in tensors and id(tensors[name]) in filled}
