"""The user's module: its working copy, its inputs, and runs that leave no trace."""

from exporters.isolation import eager_only
from optimize_export.structure import clone, first_difference, leaves_of, rebuild
from optimizer.model.dynamic import BATCH, ENOUGH, Dynamic, OpenDims, Sizes, Taken, ladder, open_dims, two_batch_sizes
from optimizer.model.inputs import Call, ExampleInputs, FurtherInputs, Samples, keeps_values
from optimizer.model.module_tree import REGISTRIES, is_script, modules_of, reachable_modules, unregistered_modules
from optimizer.model.preparation import check_model, on_device, one_call, resolved_device, samples_of
from optimizer.model.reentrant import gradients_by_backward, is_reentrant
from optimizer.model.runs import AsItIs, Runs, RunsOfCopy, Source, called, errors_of_model, named_tensors, refuse_arrays
from optimizer.model.settings import (
    in_turn,
    one_at_a_time,
    outside_inference_mode,
    pinned_by,
    pinned_settings,
    random_state,
    rare_collection,
    release_memory,
    seed_torch,
    unsynchronised,
)
from optimizer.model.weights import (
    load_weights,
    refuse_circular_modules,
    refuse_empty_tensors,
    refuse_unmade_module,
    refuse_unrunnable,
)
from optimizer.model.working_copy import Mode, WorkingCopy, is_plain, private_state, working_copy

__all__ = [
    "BATCH",
    "ENOUGH",
    "REGISTRIES",
    "AsItIs",
    "Call",
    "Dynamic",
    "ExampleInputs",
    "FurtherInputs",
    "Mode",
    "OpenDims",
    "Runs",
    "RunsOfCopy",
    "Samples",
    "Sizes",
    "Source",
    "Taken",
    "WorkingCopy",
    "called",
    "check_model",
    "clone",
    "eager_only",
    "errors_of_model",
    "first_difference",
    "gradients_by_backward",
    "in_turn",
    "is_plain",
    "is_reentrant",
    "is_script",
    "keeps_values",
    "ladder",
    "leaves_of",
    "load_weights",
    "modules_of",
    "named_tensors",
    "on_device",
    "one_at_a_time",
    "one_call",
    "open_dims",
    "outside_inference_mode",
    "pinned_by",
    "pinned_settings",
    "private_state",
    "random_state",
    "rare_collection",
    "reachable_modules",
    "rebuild",
    "refuse_arrays",
    "refuse_circular_modules",
    "refuse_empty_tensors",
    "refuse_unmade_module",
    "refuse_unrunnable",
    "release_memory",
    "resolved_device",
    "samples_of",
    "seed_torch",
    "two_batch_sizes",
    "unregistered_modules",
    "unsynchronised",
    "working_copy",
]
