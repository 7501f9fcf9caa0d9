"""Load weights from a file without running any code from it, and refuse models without weights."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.parameter import is_lazy

from optimizer.errors import LoadError
from optimizer.options import refuse_missing_weights
from optimizer.wording import a_type, listed, quote

WRAPPER_KEYS = ("state_dict", "model_state_dict", "model")
WRAPPER_PREFIXES = ("module.", "_orig_mod.")
_STATE_DICT = "; use a file written by torch.save(model.state_dict(), ...), or safetensors."


def load_weights(model: nn.Module, path: Path) -> list[str]:
    """Fill the model from a safetensors file or a state dict.

    Returns:
        Notes for the user.

    Raises:
        LoadError: the file can't be read without running code from it, or its tensors don't fit.
    """
    notes: list[str] = []
    state = _read_weights(path, notes)
    state = _without_prefix(model, state, path, notes)
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
    cast = [name for name, tensor in own.items() if name in state and _cast(state[name], tensor)]
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


def _read_weights(path: Path, notes: list[str]) -> dict[str, torch.Tensor]:
    refuse_missing_weights(path)
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"The weights {path.name} couldn't be read as safetensors: {quote(error)}.") from error
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt"):
        raise LoadError(f"The weights {path.name} are neither a .safetensors file nor a state dict (.pt, .pth, .bin).")
    return _unwrapped(_unpickled(path), path, notes)


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
        raise LoadError(
            f"The weights {path.name} contain more than tensors and aren't loaded, because unpickling them could "
            "run arbitrary code; save only the state dict: torch.save(model.state_dict(), ...)."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if "TorchScript" in str(error):
            raise LoadError(
                f"The weights {path.name} are a TorchScript program; save a state dict: torch.save(model.state_dict(), ...)."
            ) from error
        if "legacy .tar" in str(error):
            raise LoadError(
                f"The weights {path.name} are in torch's old .tar format, which could run arbitrary code; load them "
                "with an old torch and save the state dict again: torch.save(model.state_dict(), ...)."
            ) from error
        # Quote only an OSError: other messages are about opcodes of the pickle or records of the archive.
        why = f": {quote(error)}." if isinstance(error, OSError) else _STATE_DICT
        raise LoadError(f"The weights {path.name} are damaged or not a state dict{why}") from error


def _unwrapped(value: Any, path: Path, notes: list[str]) -> dict[str, torch.Tensor]:
    if isinstance(value, Mapping) and not any(isinstance(each, torch.Tensor) for each in value.values()):
        key = next((key for key in WRAPPER_KEYS if isinstance(value.get(key), Mapping)), None)
        if key is not None:
            notes.append(f"The weights were taken from the key {key!r} of {path.name}.")
            value = value[key]
    if not isinstance(value, Mapping):
        raise LoadError(f"The weights {path.name} contain {a_type(value)}, not a state dict.")
    if unnamed := [key for key in value if not isinstance(key, str)]:
        raise LoadError(
            f"The weights {path.name} contain no state dict: the key {unnamed[0]!r} isn't the name of a "
            f"parameter{_STATE_DICT}"
        )
    others = [str(key) for key, each in value.items() if not isinstance(each, torch.Tensor)]
    others = [key for key in others if not key.endswith("_extra_state")]
    if others or not value:
        what = f"no tensor under {listed(others)}" if others else "nothing"
        raise LoadError(f"The weights {path.name} contain no state dict: there is {what}.")
    return dict(value)


def _without_prefix(
    model: nn.Module, state: dict[str, torch.Tensor], path: Path, notes: list[str]
) -> dict[str, torch.Tensor]:
    """Strip a wrapper's prefix from all names, only if all names then fit."""
    own = set(model.state_dict())
    for prefix in WRAPPER_PREFIXES:
        if own == set(state) or not all(name.startswith(prefix) for name in state):
            continue
        stripped = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        if set(stripped) <= own and not _untied(model, own - set(stripped), stripped):
            notes.append(f"The prefix {prefix!r} of all names in {path.name} was removed.")
            return stripped
    return state


def _tied(model: nn.Module, missing: Sequence[str], state: Mapping[str, Any]) -> set[str]:
    """The missing names whose tensor is in the file under another name."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    filled = {id(tensor) for name, tensor in tensors.items() if name in state}
    return {name for name in missing if name in tensors and id(tensors[name]) in filled}


def _untied(model: nn.Module, missing: set[str], state: Mapping[str, Any]) -> set[str]:
    return missing - _tied(model, sorted(missing), state)


def _cast(given: torch.Tensor, own: Any) -> bool:
    return isinstance(own, torch.Tensor) and isinstance(given, torch.Tensor) and given.dtype != own.dtype


def refuse_unrunnable(model: nn.Module) -> None:
    """Raise `LoadError` if a run would fail for lack of weights, or would give the module some permanently."""
    refuse_unmade_module(model)
    refuse_circular_modules(model)
    refuse_lazy_modules(model)
    refuse_empty_tensors(model)


def refuse_unmade_module(model: nn.Module) -> None:
    """Raise `LoadError` if the constructor of `nn.Module` didn't run, so that the module can't have weights."""
    if not hasattr(model, "_parameters"):
        raise LoadError(
            f"{type(model).__name__} doesn't call the constructor of nn.Module: add super().__init__() to its __init__."
        )


def refuse_circular_modules(model: nn.Module) -> None:
    """Raise `LoadError` if a module is its own descendant: `eval`, `state_dict` and others would never end."""
    done = set[int]()
    # Each module of the current path, its name in the module before it, and an iterator over its remaining children.
    path = [(model, "", model.named_children())]
    while path:
        module, _, children = path[-1]
        name, child = next(children, ("", None))
        if child is None:
            done.add(id(module))
            path.pop()
            continue
        if (above := next((depth for depth, (one, *_) in enumerate(path) if one is child), None)) is not None:
            names = [name for _, name, _ in path[1:]]
            holder = ".".join([*names, name])
            held = ".".join(names[:above]) or f"the {type(model).__name__} itself"
            raise LoadError(
                f"{holder} of the model is {held}: a module can't be its own descendant. Hold it in a tuple, such as "
                f"self.{name} = (module,)."
            )
        if id(child) not in done:
            path.append((child, name, child.named_children()))


def refuse_empty_tensors(model: nn.Module) -> None:
    """Raise `LoadError` if parameters or buffers are on the meta device and have no values to compute with."""
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise LoadError(
            f"{listed(empty)} of the model {'has' if len(empty) == 1 else 'have'} no values (device meta): load weights "
            "into it first, or build the model on the CPU."
        )


def refuse_lazy_modules(model: nn.Module) -> None:
    """Raise `LoadError` if a lazy module has no weights yet: the first run would change the caller's module."""
    lazy = [
        f"{path or 'the model'} ({type(module).__name__})"
        for path, module in model.named_modules()
        if any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]
    if lazy:
        raise LoadError(
            f"{listed(lazy)} {'has' if len(lazy) == 1 else 'have'} no weights yet: run the model once to initialize "
            "them, and remove modules that it never calls."
        )
