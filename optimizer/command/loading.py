"""Load the module that the user names on the command line, and its example inputs.

    path/model.py            the `model` of the file; else its get_model / build_model / create_model; else the only
                             nn.Module subclass that is defined there and needs no arguments
    path/model.py:NAME       NAME is an instance, a class that needs no arguments or a factory
    package.module:NAME      the same in an importable module; the current folder is on the path
    timm:NAME                a library model (see `library_models`)

Every error is a `LoadError`, or a `UsageError` if an option is wrong. The message is one sentence that names the place
in the user's file. The file runs as in `python model.py`: its folder is first on the path, and `import optimizer` there
finds the user's module (see `user_code`). The block `if __name__ == "__main__":` doesn't run.
"""

import importlib
import importlib.util
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from optimize_export.errors import LoadError, UsageError
from optimize_export.wording import a_type, listed
from optimizer.accuracy import Aggregate, Evaluate, misfit
from optimizer.command.early_checks import (
    A_LIBRARYS,
    SUFFIXES,
    Target,
    files_of,
    parse_target,
    split_library,
)
from optimizer.command.errors import errors_of_user_code
from optimizer.command.inputs import Preprocessing, draw_inputs, parse_input, read_calls
from optimizer.command.library_models import LibraryModel, library_model, open_lengths
from optimizer.command.user_code import put_first
from optimizer.model import (
    Call,
    FurtherInputs,
    Samples,
    leaves_of,
    load_weights,
    refuse_circular_modules,
    refuse_empty_tensors,
    refuse_unmade_module,
    required_arguments,
)
from optimizer.tuning import rows_in, some_of, spread

FACTORY_NAMES = ("get_model", "build_model", "create_model")
ExampleInputs = tuple[Any, ...] | Callable[[int, torch.Generator], Call]
_ABSENT = object()


@dataclass(frozen=True)
class Training:
    """What the user's file says about training."""

    step: Callable[..., object]
    """`training_step`: without arguments, or of the model and a batch, and then it returns the loss."""
    batch: Any = None
    """`training_batch`; None for the loader's, or the example inputs."""
    loader: Iterable[Any] | None = None
    optimizer: torch.optim.Optimizer | None = None
    """Over the parameters of the model."""

    @property
    def takes_batch(self) -> bool:
        return len(required_arguments(self.step)) == 2

    @property
    def misfit(self) -> str:
        """Why the step can't be called, as a clause; "" if it can."""
        needed = required_arguments(self.step)
        told = f"training_step needs {listed(needed)}; it takes the model and a batch, or no arguments"
        return "" if len(needed) in (0, 2) else told


@dataclass
class Loaded:
    """The user's model, with the inputs to run it on."""

    model: nn.Module
    example_inputs: ExampleInputs | None
    """A tuple, or a function of a batch size and a generator that returns a call."""
    example_kwargs: dict[str, Any]
    source: str
    """The name of the model, without an absolute path."""
    notes: tuple[str, ...] = ()
    """Sentences about decisions that were made while loading."""
    folder: Path = field(default_factory=Path.cwd)
    """The folder of the user's file, or the current folder for an importable module."""
    further_inputs: FurtherInputs = ()
    """More calls, from `--inputs`."""
    calibration: Sequence[Any] | None = None
    """Calls for static quantization, from `--calibration` or the file's get_calibration_inputs()."""
    evaluate: Evaluate | None = None
    """The file's `evaluate(run)`, if it was asked for."""
    aggregate: Aggregate | None = None
    """The file's `aggregate(statistics)`, likewise; None if it has none."""
    training: Training | None = None
    """What the file says about training, if it was asked for; None if it has no `training_step`."""
    dynamic: dict[str, dict[int, str | None]] | None = None
    """The dims that are dynamic unless the user chooses others; None for the batch alone."""
    build: dict[str, Any] = field(default_factory=dict)
    """What the bundle is built from, for its manifest."""

    def first_call(self, seed: int = 0) -> Call:
        """The user's own call; an example function is called with batch size 2."""
        return self.samples(seed).given

    def samples(self, seed: int = 0, device: torch.device | None = None) -> Samples:
        """All calls that the model runs on."""
        return Samples(
            self.example_inputs or (),
            self.example_kwargs,
            further_inputs=self.further_inputs,
            seed=seed,
            device=device,
        )


def load(
    spec: str,
    *,
    name: str | None = None,
    inputs: Sequence[str] = (),
    input_files: Sequence[Path] = (),
    weights: Path | None = None,
    calibration: Path | None = None,
    calibrates: bool = False,
    evaluates: bool = False,
    trains: bool = False,
    seed: int = 0,
) -> Loaded:
    """Load the model that `spec` names, its weights and its example inputs.

    Calibration calls are those of the path `calibration`; or with `calibrates`, those of the user's file.
    With `evaluates`, its `evaluate` is read too, and with `trains` its training step.

    Runs the user's code after `put_first`, with all random generators seeded with `seed`. The user's modules stay
    importable afterwards; `user_code.names_restored` removes them again.
    """
    specs = [parse_input(text) for text in inputs]
    library = split_library(spec, name)
    target = parse_target(spec, name) if library is None else None
    _seed_everything(seed)
    finder: _Finder | LibraryModel
    if target is not None:
        finder, label = _Finder(_imported(target), target), target.label
    else:
        assert library is not None
        finder, label = library_model(*library, pretrained=weights is None, seed=seed), library[0]
    model, model_name = finder.model()
    refuse_unmade_module(model)
    refuse_circular_modules(model)
    notes = list(finder.notes)
    if isinstance(inner := dict(model.named_children()).get("_orig_mod"), nn.Module):
        notes.append(f"{model_name} was made by torch.compile(module); the module inside it is used.")
        model = inner
    if weights is not None:
        notes += load_weights(model, weights)
    refuse_empty_tensors(model)
    example_inputs, example_kwargs = finder.inputs()
    if specs:
        if target is not None and (example_inputs is not None or example_kwargs):
            notes.append(f"The inputs from --input replace those of {label}.")
        example_inputs, example_kwargs = draw_inputs(specs, seed)
    further: FurtherInputs = ()
    if input_files:
        own = None
        if example_inputs is not None or example_kwargs:
            if target is not None:
                notes.append(f"The inputs from --inputs replace those of {label}.")
            own = Samples(example_inputs or (), example_kwargs, seed=seed).given
        first, *others = read_calls(input_files, model, own, finder.preprocessing)
        example_inputs, example_kwargs = first.args, first.kwargs
        further = [_alike(path, first, call, seed) for path, call in zip(input_files[1:], others, strict=True)]
    if example_inputs is None and not example_kwargs:
        why = f"{label} has no example_inputs and no get_example_inputs(); add one of them to the file or"
        if target is None:
            why = f"The inputs of {label}:{model_name} aren't known;"
        raise LoadError(
            f"{why} pass each input with --input, such as --input 2x3x224x224 or --input ids=int64[2,128]:0..30000."
        )
    source, folder = f"{label}:{model_name}", Path.cwd() if target is None else target.folder
    loaded = Loaded(model, example_inputs, example_kwargs, source, tuple(notes), folder, further)
    _check_inputs(loaded, seed)
    if library is not None and not specs:
        loaded.dynamic = open_lengths(example_kwargs)
    if calibration is not None:
        kind = finder.preprocessing and finder.preprocessing.kind
        files = files_of(calibration, SUFFIXES[kind] if kind else ())
        samples = loaded.samples(seed)
        (call,) = read_calls(files[:1], model, samples.given, finder.preprocessing)
        chosen = [files[number] for number in spread(len(files), rows_in(call, samples.first))]
        loaded.calibration = read_calls(chosen, model, samples.given, finder.preprocessing)
    elif calibrates:
        loaded.calibration = finder.calibration(loaded.samples(seed).first)
    if evaluates:
        loaded.evaluate, loaded.aggregate = _evaluation(finder, label)
    if trains and isinstance(finder, _Finder):
        loaded.training = finder.training(model)
    return loaded


def _evaluation(finder: "_Finder | LibraryModel", label: str) -> tuple[Evaluate, Aggregate | None]:
    how = "`def evaluate(run)`, which calls run as the model and yields a score for each example"
    if not isinstance(finder, _Finder):
        raise LoadError(f"{label} has no evaluate: write a Python file with the model as `model`, and add {how}.")
    found = finder.evaluation()
    if found is None:
        raise LoadError(f"{label} has no evaluate, which a budget for the drop of a metric needs: add {how}.")
    return found


# MODEL ----------------------------------------------------------------------------------------------------------------


def _imported(target: Target) -> ModuleType:
    """Run the user's file or import the user's module; raise `LoadError` if that fails."""
    sys.argv[:] = [str(target.file or target.label)]
    sys.dont_write_bytecode = True
    put_first(target.folder)
    with errors_of_user_code(f"{target.label} couldn't be loaded", target.folder):
        if target.file is not None:
            return _executed(target.file)
        try:
            return importlib.import_module(target.label)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{target.label}.".startswith(f"{error.name}."):
                raise
            raise LoadError(
                f"There is no module {error.name} here (MODEL is a path to a .py file, or package.module:factory with "
                f"the package installed or in the current folder); {A_LIBRARYS}."
            ) from error


def _executed(file: Path) -> ModuleType:
    name = file.stem
    if not name.isidentifier() or name in sys.modules or name in sys.stdlib_module_names:
        name = "user_model_" + re.sub(r"\W", "_", name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


# The contents of the user's module ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Finder:
    module: ModuleType
    target: Target
    preprocessing: Preprocessing | None = None
    notes: tuple[str, ...] = ()

    def model(self) -> tuple[nn.Module, str]:
        name = self.target.name or self._chosen_name()
        value = self._attribute(name)
        return self._instance(value, name), name

    def inputs(self) -> tuple[ExampleInputs | None, dict[str, Any]]:
        kwargs = self._keyword_inputs()
        name = self._first("example_inputs", "get_example_inputs")
        if name is None:
            return None, kwargs
        value = self._held(name)
        if callable(value) and not isinstance(value, torch.Tensor | Mapping):
            if len(required_arguments(value)) == 2:  # a batch size and a generator
                return self._drawn_by(value, name), kwargs
            value, name = self._call(value, name), f"{name}()"
        call = self._as_call(value, name)
        if twice := [key for key in call.kwargs if key in kwargs]:
            raise LoadError(f"{twice[0]} is in both {name} and example_kwargs of {self.target.label}; set it once.")
        return call.args, {**call.kwargs, **kwargs}

    def calibration(self, example: torch.Tensor | None) -> list[Any] | None:
        """The calls of the file's `calibration_inputs` or `get_calibration_inputs()`; None if it has neither.

        Args:
            example: the first tensor with dims of the example inputs.
        """
        name = self._first("calibration_inputs", "get_calibration_inputs")
        if name is None:
            return None
        value, label = self._held(name), self.target.label
        with errors_of_user_code(f"{name} in {label} failed", self.target.folder):
            return some_of(value, example, f"{label}: {name}", LoadError)

    def evaluation(self) -> tuple[Evaluate, Aggregate | None] | None:
        """The file's `evaluate` and `aggregate`; None if it has no `evaluate`."""
        held = {name: self._held(name) for name in ("evaluate", "aggregate")}
        if held["evaluate"] is _ABSENT:
            return None
        for name, value in held.items():
            if value is not _ABSENT and (wrong := misfit(name, value)):
                raise LoadError(f"{self.target.label}: {wrong}.")
        return held["evaluate"], None if held["aggregate"] is _ABSENT else held["aggregate"]

    def training(self, model: nn.Module) -> Training | None:
        """The file's `training_step`, and with what it runs; None if it has none."""
        step, label = self._held("training_step"), self.target.label
        if not callable(step):
            return None
        if not Training(step).takes_batch:
            return Training(step)
        loader = self._made("make_loader", "loader", "train_loader")
        if loader is not None and not isinstance(loader, Iterable):
            raise LoadError(f"The loader of {label} is {a_type(loader)}; it must be a DataLoader, or yield batches.")
        optimizer = self._made("make_optimizer", "optimizer", given=(model.parameters(),))
        # `import optimizer` in the user's file is a module of theirs.
        if isinstance(optimizer, ModuleType):
            optimizer = None
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise LoadError(f"The optimizer of {label} is {a_type(optimizer)}, not a torch.optim.Optimizer.")
        batch = self._held("training_batch")
        return Training(step, None if batch is _ABSENT else batch, loader, optimizer)

    def _made(self, factory: str, *names: str, given: tuple[Any, ...] = ()) -> Any:
        """What the file's factory returns, else the first of its attributes with these names; None without any."""
        if callable(make := self._held(factory)):
            return self._call(partial(make, *given), factory)
        name = self._first(*names)
        return None if name is None else self._held(name)

    def _chosen_name(self) -> str:
        if self._held("model") is not _ABSENT:
            return "model"
        factories = [name for name in FACTORY_NAMES if callable(self._held(name))]
        if factories:
            return self._only(factories, "factories")
        classes = [value for value in vars(self.module).values() if self._defines(value)]
        free = list(dict.fromkeys(cls.__name__ for cls in classes if not required_arguments(cls)))
        if free:
            return self._only(free, "nn.Module subclasses without arguments")
        demanding = [f"{cls.__name__} needs {listed(required_arguments(cls))}" for cls in classes]
        found = f" ({'; '.join(demanding[:5])})" if demanding else ""
        raise LoadError(
            f"{self.target.label} has no model: it has no `model`, no {' / '.join(FACTORY_NAMES)} and no nn.Module "
            f"subclass without required arguments{found}; add one of them, or name the model as "
            f"{self.target.label}:NAME."
        )

    def _only(self, names: list[str], kind: str) -> str:
        if len(names) > 1:
            raise LoadError(
                f"{self.target.label} has {len(names)} {kind}: {listed(names)}; choose one, "
                f"such as {self.target.label}:{names[0]}."
            )
        return names[0]

    def _defines(self, value: object) -> bool:
        return (
            isinstance(value, type)
            and issubclass(value, nn.Module)
            and value.__module__ == self.module.__name__
            and value.forward is not nn.Module.forward
            and not inspect.isabstract(value)
        )

    def _attribute(self, name: str) -> Any:
        value: Any = self.module
        for part in name.split("."):
            value = self._held(part, value)
            if value is _ABSENT:
                raise LoadError(f"{self.target.label} has no {name}.")
        return value

    def _held(self, name: str, holder: Any = None) -> Any:
        """An attribute of the user's module, or of an object in it; `_ABSENT` if there is none.

        A `__getattr__` may raise anything, so errors become a `LoadError`.
        """
        with errors_of_user_code(f"{name} in {self.target.label} couldn't be read", self.target.folder):
            return getattr(self.module if holder is None else holder, name, _ABSENT)

    def _first(self, *names: str) -> str | None:
        """The first of these names that the user's module has."""
        return next((name for name in names if self._held(name) is not _ABSENT), None)

    def _instance(self, value: Any, name: str) -> nn.Module:
        if isinstance(value, nn.Module):
            return value
        if isinstance(value, type) and not issubclass(value, nn.Module):
            raise LoadError(f"{name} in {self.target.label} is the class {value.__name__}, which isn't an nn.Module.")
        if not callable(value):
            raise LoadError(f"{name} in {self.target.label} is {a_type(value)}, not an nn.Module.")
        if required := required_arguments(value):
            kind = f"the class {value.__name__}" if isinstance(value, type) else "a function"
            raise LoadError(
                f"{name} in {self.target.label} is {kind} that needs arguments ({listed(required)}); add a function "
                "build_model() that passes them and returns the model."
            )
        built = self._call(value, name)
        if isinstance(built, nn.Module):
            return built
        hint = "; return the model only" if isinstance(built, tuple) else ""
        raise LoadError(f"{name}() in {self.target.label} returned {a_type(built)}, not an nn.Module{hint}.")

    def _call(self, function: Callable[[], Any], name: str) -> Any:
        with errors_of_user_code(f"{name}() in {self.target.label} failed", self.target.folder):
            return function()

    def _keyword_inputs(self) -> dict[str, Any]:
        value = self._held("example_kwargs")
        if value is _ABSENT:
            return {}
        if callable(value) and not isinstance(value, Mapping):
            value = self._call(value, "example_kwargs")
        if not isinstance(value, Mapping):
            raise LoadError(f"example_kwargs in {self.target.label} is {a_type(value)}, not a dict.")
        return dict(self._as_call(value, "example_kwargs").kwargs)

    def _as_call(self, value: Any, name: str) -> Call:
        if isinstance(value, Mapping):
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise LoadError(
                    f"{name} in {self.target.label} has the key {wrong[0]!r}, which isn't the name of an argument."
                )
            return Call((), dict(value))
        if isinstance(value, torch.Tensor):
            return Call((value,), {})
        if isinstance(value, tuple | list):
            return Call(tuple(value), {})
        hint = "; torch.from_numpy converts it to a tensor" if isinstance(value, numpy.ndarray) else ""
        raise LoadError(
            f"{name} in {self.target.label} is {a_type(value)}; it must be a tensor, a tuple or a list of "
            f"arguments, or a dict of keyword arguments{hint}."
        )

    def _drawn_by(self, function: Callable[..., Any], name: str) -> Callable[[int, torch.Generator], Call]:
        def draw(batch_size: int, generator: torch.Generator) -> Call:
            called = f"{name}({batch_size}, generator)"
            with errors_of_user_code(f"{called} in {self.target.label} failed", self.target.folder):
                value = function(batch_size, generator)
            return self._as_call(value, called)

        return draw


def _alike(path: Path, first: Call, call: Call, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a further call as a pair, after a check that it differs from the first call only in its rows."""
    pair = (call.args, call.kwargs)
    try:
        _ = Samples(first.args, first.kwargs, further_inputs=(pair,), seed=seed).further
    except UsageError as error:
        raise LoadError(f"{path.name}: {error}") from error
    return pair


def _check_inputs(loaded: Loaded, seed: int) -> None:
    try:
        call = loaded.first_call(seed)
    except UsageError as error:
        # The file is wrong here, not an option.
        raise LoadError(f"{loaded.source}: {error}") from error
    leaves = leaves_of((call.args, call.kwargs)).values
    if any(isinstance(leaf, numpy.ndarray) for leaf in leaves):
        raise LoadError(
            f"The example inputs of {loaded.source} contain a numpy array; torch.from_numpy converts it to a tensor."
        )
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise LoadError(f"The example inputs of {loaded.source} contain no tensor.")


def _seed_everything(seed: int) -> None:
    """Seed all random generators, so that random weights are the same in every run."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
