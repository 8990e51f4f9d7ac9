"""Tests of the runtime that are about virtual devices themselves, and what the reference accelerator cannot compute."""

import pytest

_FLEX = "torch computes FlexAttention on devices that it knows only"

_VIRTUAL = "it compares with a process that has virtual devices, and kernels of this one round otherwise"
_SPARSE = "the reference accelerator has no sparse tensors"

# Part of a test's name, and why it is not run.
_REASONS = {
    "test_a_sparse_gradient_comes_down": _SPARSE,
    "test_a_sparse_gradient_is_added": _SPARSE,
    "test_sparse_and_dense_gradients_of_one_weight": _SPARSE,
    "test_the_caller_s_autocast_holds_in_the_layers": "it is about autocast of the CPU",
    "test_a_model_may_be_wrapped_under_autocast": "it is about autocast of the CPU",
    "test_a_run_that_is_stopped_goes_on_to_the_same_bits": _VIRTUAL,
    "test_two_processes_have_the_bits_of_one": _VIRTUAL,
    "test_killed_ranks_go_on_by_themselves": _VIRTUAL,
    "test_one_process_with_as_many_groups_has_the_same_bits": _VIRTUAL,
    "test_the_fused_stage_is_measured": "its layers take the time of the host",
    "test_one_thread_computes_brief_layers": "one thread computes for virtual devices only",
    "test_every_way_to_name_devices": "it expects the names of virtual devices",
    "test_virtual_devices_have_no_memory_of_their_own": "it asks virtual devices what they hold",
    "test_virtual_devices_are_measured": "it expects the names of virtual devices",
    "test_virtual_devices_share_the_cores": "it asks how virtual devices share the cores",
    "test_a_mask_that_reads_the_row_gives_the_outputs_of_the_whole_batch": _FLEX,
    "test_a_mask_whose_class_is_registered_is_cut_the_same": _FLEX,
    "test_a_mask_for_all_rows_goes_whole": _FLEX,
}

# Part of the name of a test that is about some numbers of devices, these numbers, and why.
_NUMBERS = {
    "test_the_loop_of_the_first_tutorial_runs": ([2], "it divides by the microbatches that two devices have"),
    "test_the_number_of_microbatches_is_gone_on_with": ([2], "two devices have three microbatches"),
    "test_each_copy_takes_its_microbatches": ([4], "three copies and the stage before are on four devices"),
    "test_a_layer_that_writes_a_buffer_is_refused": ([2, 4], "on one device a stage has one copy"),
    "test_a_computed_plan_copies_a_heavy_head": ([4], "on fewer devices a copy does not pay"),
    "test_a_fault_in_a_transfer": ([2], "it counts the copies of the second of two devices"),
    "test_a_fault_in_a_layer": ([1, 2], "on more devices a recomputation starts before the last forward has ended"),
}


def reasons() -> set[str]:
    return {*_REASONS.values(), *(reason for _, reason in _NUMBERS.values())}


def reason_to_skip(item: pytest.Item, devices: int | None) -> str | None:
    """Why a test is not run."""
    for part, reason in _REASONS.items():
        if part in item.nodeid:
            return reason
    for part, (numbers, reason) in _NUMBERS.items():
        if part in item.nodeid and devices not in (*numbers, None):
            return reason
    return None
