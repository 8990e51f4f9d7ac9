"""Tests of the runtime that are about virtual devices themselves, and what the reference accelerator cannot compute."""

import pytest

__all__ = ["reason_to_skip"]

_HISTOGRAM = "transformers counts the tokens of experts by a histogram of integers, which the CPU does not have"
_FLEX = "torch computes FlexAttention on devices that it knows only"

# Part of a test's name, and why it is not run.
_REASONS = {
    "test_a_sparse_gradient_comes_down": "the reference accelerator has no sparse tensors",
    "test_a_sparse_gradient_is_added": "the reference accelerator has no sparse tensors",
    "test_sparse_and_dense_gradients_of_one_weight": "the reference accelerator has no sparse tensors",
    "test_an_rnn_and_its_flat_weights": "torch takes the fused cell of devices, which the CPU does not have",
    "test_no_grad_and_eval_give_plain_outputs": "torch's meta kernel of a batch norm in eval states other shapes",
    "test_the_caller_s_autocast_holds_in_the_layers": "it is about autocast of the CPU",
    "test_the_fused_stage_is_measured": "its layers take the time of the host",
    "test_one_thread_computes_brief_layers": "one thread computes for virtual devices only",
    "test_a_run_leaves_no_activation_behind": "it asks virtual devices what they hold",
    "test_a_fault_leaves_no_thread_and_no_tensor": "it asks virtual devices what they hold",
    "test_a_fault_in_a_transfer": "it expects the names of virtual devices",
    "test_virtual_devices_have_no_memory_of_their_own": "it asks virtual devices what they hold",
    "test_virtual_devices_are_measured": "it expects the names of virtual devices",
    "test_virtual_devices_share_the_cores": "it asks how virtual devices share the cores",
    "test_a_closed_pipeline_says_so": "it expects the names of virtual devices",
    "test_every_layer_call_of_the_block_is_recorded": "it expects the names of virtual devices",
    "test_a_chain_has_the_loss": "its layers make tensors on the host",
    "test_a_forward_has_the_outputs": "its layers make tensors on the host",
    "test_a_layer_that_draws_may_call_another_pipeline": "its layer adds what is on the host",
    "test_dropout_is_that_of_the_documented_seed": "torch.random.fork_rng warns of several accelerators",
    "test_a_mask_that_reads_the_row_gives_the_outputs_of_the_whole_batch": _FLEX,
    "test_a_mask_whose_class_is_registered_is_cut_the_same": _FLEX,
    "test_a_mask_for_all_rows_goes_whole": _FLEX,
    "trainer/test_classes.py::test_curves_are_those_of_the_plain_trainer[mixtral]": _HISTOGRAM,
    "trainer/test_classes.py::test_resumed_run_ends_with_the_same_bits[mixtral]": _HISTOGRAM,
    "trainer/test_classes.py::test_checkpoint_is_the_model[mixtral]": _HISTOGRAM,
    "trainer/test_classes.py::test_best_model_has_the_weights_of_its_checkpoint[mixtral]": _HISTOGRAM,
    "test_bfloat16_autocast": "autocast of a device rounds other operators than that of the CPU",
    "test_model_has_the_weights_of_the_last_step": "layer norm in bfloat16 has float32 statistics on devices only",
    "test_a_tensor_that_a_layer_kept_is_no_part_of_the_loss": "the loss runs on another device than that layer",
}


def reason_to_skip(item: pytest.Item) -> str | None:
    return next((reason for part, reason in _REASONS.items() if part in item.nodeid), None)
