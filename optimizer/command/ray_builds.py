"""`build --on ray`: each model is built on a machine of a Ray cluster that has the resources in the config.

    this machine                                a machine of the cluster
    the current folder ──── runtime_env ──────▶ a copy in a temporary folder
    the sizes of the old bundle ──────────────▶ for --if-changed
                                                the command of the build, in its own process
    stdout, exit code, log ◀───────────────────
    check the hashes, exchange ◀── in parts ─── the bundle, and the folders of --profile-dir and --debug-dir

Each build is an actor, which keeps the files until they are fetched in parts; over `ray://`, a task can't return parts. If its
process or machine is lost, the build is tried again.
"""

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from optimize_export.errors import BundleError, DeviceError, OptimizeExportError, UsageError, failure_document
from optimize_export.manifest import PROGRAM, damage_of, read_manifest, version_of
from optimizer.bundle import STAGING, check_target, new_folder
from optimizer.command.build import Document, document_of, side_by_side
from optimizer.command.commands import option_names
from optimizer.command.early_checks import check_new_folders, existing_files, written_folders
from optimizer.command.output import with_options
from optimizer.command.ray_builder import Builder
from optimizer.command.up_to_date import compared_files
from optimizer.options import NO_BENCH, BuildOptions, ExportOptions

_TRIES = 3
_PART_BYTES = 64 << 20
# These shape a build; other variables describe a machine.
_VARIABLES = ("SOURCE_DATE_EPOCH", "OMP_NUM_THREADS", "OPTIMIZE_EXPORT_")


class _Stopped(Exception):
    """The caller has left, so its builds must not go on."""


def builds_on_ray(options: BuildOptions, tell: Callable[[str], object]) -> Generator[tuple[str, Document, str]]:
    """Like `build.builds`, on a cluster.

    Raises:
        UsageError: Ray isn't installed, or a build would write outside the current folder.
        DeviceError: the cluster can't be reached, or none of its machines has the resources of a model.
    """
    models = {name: options.models[name] for name in options.commands}
    written = [path for model in models.values() for path in written_folders(model)]
    for path in written:
        if path.is_absolute() or os.path.normpath(path).startswith(os.pardir):
            raise UsageError(
                f"A build with --on can only write inside the current folder: make {path} a relative path in it."
            )
    with _connected(str(options.on), [*map(str, written), *options.folders]) as ray:
        for name in models:
            _refuse_unmeetable(ray, name, options.resources[name])
        stopped = Event()

        def build(name: str) -> tuple[Document, str]:
            return _Build(ray, name, models[name], options, stopped, tell).documented()

        yield from side_by_side(build, models, len(models) or 1, stopped.set)


@contextlib.contextmanager
def _connected(address: str, left_out: list[str]) -> Iterator[Any]:
    """Yield the module `ray`, connected to the cluster, whose machines get the current folder without `left_out`."""
    # Ray would report its use to its makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UsageError(
            f"--on {address} needs Ray, which isn't installed: pip install 'optimize-export[ray]'."
        ) from error
    excluded = [f"/{os.path.normpath(path)}" for path in left_out] + [STAGING]
    excluded += [f"/{found.parent.name}" for found in Path.cwd().glob("*/pyvenv.cfg")]
    # By value, because it must run there before anything is imported: it checks the version of that machine.
    ray.cloudpickle.register_pickle_by_value(sys.modules[Builder.__module__])
    try:
        try:
            # Without an address, Ray takes RAY_ADDRESS, the cluster that runs on this machine, or starts one.
            place = os.environ.get("RAY_ADDRESS", "") if address == "ray" else address
            host, colon, port = place.removeprefix("ray://").rpartition(":")
            if colon:
                # Ray itself tries for half a minute, or for more than ten minutes without `ray://`.
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what Ray warns of is in its errors too
                ray.init(
                    None if address == "ray" else address,
                    runtime_env={"working_dir": str(Path.cwd()), "excludes": excluded},
                    log_to_driver=False,
                    logging_level="ERROR",
                )
        except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
            # Where an address is given, Ray doesn't read the token that the cluster asks for by default.
            hint = (
                " If the cluster asks for a token, set RAY_AUTH_MODE=token." if type(error) is ConnectionError else ""
            )
            raise DeviceError(f"--on {address}: Ray can't be used: {_first_line(error)}{hint}") from error
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)
        # Ray writes the end of a machine to stdout, whatever `log_to_driver` says; nothing public prevents that.
        ray._private.worker._worker_logs_enabled = False
        yield ray
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[Builder.__module__])
        ray.shutdown()


def _refuse_unmeetable(ray: Any, name: str, resources: Mapping[str, float]) -> None:
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    machines = [{key: amount for key, amount in each.items() if key != "object_store_memory"} for each in found]
    asked = {"CPU": 1, **resources}
    if any(all(machine.get(key, 0) >= amount for key, amount in asked.items()) for machine in machines):
        return
    names = sorted({key for machine in machines for key in machine if not key.startswith("node:")})
    most = {key: max(machine.get(key, 0) for machine in machines) for key in names}
    wish, have = (", ".join(f"{key} = {amount:.12g}" for key, amount in each.items()) for each in (asked, most))
    raise DeviceError(
        f"The model {name} asks for a machine with {wish}, but the cluster has none; its largest amounts are {have}."
    )


@dataclass
class _Build:
    """The build of one model, as this machine sees it."""

    ray: Any
    name: str
    model: ExportOptions
    options: BuildOptions
    stopped: Event
    tell: Callable[[str], object]
    started: float = field(default_factory=time.perf_counter)
    log: str = ""
    has_machine: bool = False

    def documented(self) -> tuple[Document, str]:
        """Build, and put the result in its place; return the JSON document and the log."""
        try:
            check_new_folders(self.model)
            check_target(self.model.output, force=self.model.force)
            document = self._tried_again()
        except OptimizeExportError as error:
            sentence = with_options(str(error), option_names())
            self.log += f"{PROGRAM}: error: {sentence}\n"
            document = failure_document(error.exit_code, type(error).__name__, sentence)
        return {**document, "seconds": round(time.perf_counter() - self.started, 3)}, self.log

    def _tried_again(self) -> Document:
        lost = self.ray.exceptions.RayActorError
        try:
            for _ in range(_TRIES - 1):
                try:
                    return self._once()
                except lost as error:
                    self.log += (
                        f"{PROGRAM}: the build is tried again, because its worker was lost: {_first_line(error)}\n"
                    )
            return self._once()
        except self.ray.exceptions.RayError as error:
            times = f" in {_TRIES} tries" if isinstance(error, lost) else ""
            raise DeviceError(f"Ray couldn't run the build{times}: {_first_line(error)}") from error
        except ConnectionError as error:
            raise DeviceError("The connection to the cluster was lost during the build.") from error

    def _once(self) -> Document:
        resources = dict(self.options.resources[self.name])
        known = {"num_cpus": resources.pop("CPU", 1), "num_gpus": resources.pop("GPU", 0)}
        known |= {"memory": resources.pop("memory")} if "memory" in resources else {}
        # Two threads, because `stop` is called while `build` runs.
        actor = self.ray.remote(Builder).options(**known, resources=resources, max_concurrency=2).remote()
        self.has_machine = False
        try:
            named = [str(path) for path in existing_files(self.model)]
            problem = self._result(actor.problem.remote(version_of(PROGRAM), named))
            self.has_machine = True
            if problem:
                raise DeviceError(problem)
            self.tell(self.name)
            self.started = time.perf_counter()
            arguments, changed = self.options.commands[self.name], []
            if self.model.if_changed:
                old = compared_files(self.model.output)
                compared = self._result(actor.compared.remote(pickle.dumps(self.model), old))
                changed, document = compared or ([], {})
                if document:
                    return document
                if changed and "--quiet" not in arguments:
                    self.log += f"{PROGRAM}: building {self.model.output}: {', '.join(changed)}\n"
                # The old bundle isn't on that machine. The options of the command line come before the name.
                arguments = [*arguments[:-1], "--no-if-changed", arguments[-1]] if changed else arguments
            folders = written_folders(self.model)
            call = actor.build.remote(arguments, self._environment(), [*map(str, folders)], os.getcwd())
            out, code, log, files = self._result(call)
            self.log += log
            document = document_of(out, code)
            if changed and "stages" in document:
                document |= {"up_to_date": False, "changed": changed}
            # A build that was killed at its end may leave a bundle, and no hash.
            for folder in folders if "sha256sums" in document else folders[1:]:
                inside = {path: size for path, size in files.items() if Path(path).is_relative_to(folder)}
                self._fetch(actor, folder, inside, document)
            return document
        finally:
            # Without its connection, Ray raises a bare `Exception`, and the cluster ends the actor.
            if self.ray.is_initialized():
                with contextlib.suppress(self.ray.exceptions.RayError):
                    if self.has_machine:
                        self.ray.get(actor.stop.remote(), timeout=20)
                self.ray.kill(actor)

    def _result(self, call: Any) -> Any:
        while not self.ray.wait([call], timeout=0.5)[0]:
            if self.stopped.is_set():
                raise _Stopped
            # The last machine of the kind may be lost before the build has one.
            if not self.has_machine:
                _refuse_unmeetable(self.ray, self.name, self.options.resources[self.name])
        return self.ray.get(call)

    def _environment(self) -> dict[str, str | None]:
        """The variables of the build; None for one that must not be set."""
        resources, here = self.options.resources[self.name], Path.cwd()
        # Ray sets it to the number of the CPUs that were asked for.
        found: dict[str, str | None] = {} if "CPU" in resources else {"OMP_NUM_THREADS": None}
        # Builds that share a machine disturb each other's times. With `resources`, the config says what they share.
        found |= {} if resources else {NO_BENCH: "1"}
        found |= {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
        paths = map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        local = [path.relative_to(here) if path.is_relative_to(here) else path for path in paths]
        return {**found, "PYTHONPATH": os.pathsep.join(map(str, local))}

    def _fetch(self, actor: Any, folder: Path, files: Mapping[str, int], document: Document) -> None:
        """Put a folder of the build's machine in its place here, once it is whole."""
        is_bundle = folder == self.model.output
        if not files:
            return
        with new_folder(folder.absolute(), force=is_bundle and self.model.force) as staging:
            for path, size in files.items():
                place = staging / Path(path).relative_to(folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as file:
                    for start in range(0, size, _PART_BYTES):
                        file.write(self._result(actor.part.remote(path, start, _PART_BYTES)))
            if is_bundle and (damage := damage_of(staging, read_manifest(staging), expect=document["sha256sums"])):
                raise BundleError(f"{folder} came back damaged from the cluster: {next(iter(damage.values()))}")


def _first_line(error: BaseException) -> str:
    text = str(error).removeprefix("Failed to set up runtime environment.").strip() or type(error).__name__
    return f"{text.splitlines()[0].rstrip('.')}."
