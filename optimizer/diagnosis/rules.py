"""All rules, in the order in which their findings of one level are reported."""

from __future__ import annotations

from optimizer.diagnosis.attention import hand_written_attention
from optimizer.diagnosis.chains import activation_by_hand, in_place_in_chain, unfused_chain
from optimizer.diagnosis.kernels import (
    bias_before_norm,
    channels_not_multiple_of_8,
    layout_flip,
    rows_not_multiple_of_8,
    scale_computed,
    weight_computed,
)
from optimizer.diagnosis.layers import batch_norm_per_process, data_parallel, not_in_eval, training_mode, unregistered
from optimizer.diagnosis.rule import Rule
from optimizer.diagnosis.settings import cudnn_benchmark, deterministic, tf32_off
from optimizer.diagnosis.steps import gradients_zeroed, loader_without_workers, pageable_copy, reentrant_checkpoint
from optimizer.diagnosis.values import (
    data_dependent_branch,
    fixed_device,
    float64_leak,
    moved_from_host,
    tensor_from_array,
    unregistered_tensor,
    value_read,
)

RULES: tuple[Rule, ...] = (
    unregistered,
    training_mode,
    value_read,
    data_dependent_branch,
    tensor_from_array,
    moved_from_host,
    unregistered_tensor,
    fixed_device,
    float64_leak,
    hand_written_attention,
    activation_by_hand,
    unfused_chain,
    bias_before_norm,
    scale_computed,
    layout_flip,
    data_parallel,
    batch_norm_per_process,
    reentrant_checkpoint,
    loader_without_workers,
    pageable_copy,
    gradients_zeroed,
    in_place_in_chain,
    channels_not_multiple_of_8,
    rows_not_multiple_of_8,
    weight_computed,
    not_in_eval,
    cudnn_benchmark,
    tf32_off,
    deterministic,
)
