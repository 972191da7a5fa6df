"""What the rehearsal does not run, or runs shorter: each by name, with its reason.

Devices alone are judged, and what has no tensor of an engine on them need not run.
"""

# Of each notebook: words that only the cell has, and why it is left out. What needs its names is left out with it.
CELLS = {
    "01b_collectives_cost": {"for way in (0, 1)": "compares with NCCL, which threads do not have"},
    "02c_zero_choices": {"beside_pytorch.measure": "PyTorch's own engines need processes"},
    "04_mixed_precision": {"skipped = [step": "trains for long"},
    "04b_masters_sums_bytes": {
        "experiments.train_classifier": "trains on the CPU only",
        '"sequential")': "adds up on the CPU only",
        "experiments.train_batch_norm": "trains on the CPU only",
        "experiments.train_softmax": "trains on the CPU only",
        'card.figures("train"': "measures the time of a card",
        "tell_rates(run)": "tells them",
    },
    "05_recompute": {
        "sizes, make = (3, 21": "measures the time of deep networks",
        "cases = [": "measures the memory of deep networks",
        "deep_gpt = small_gpt(n)": "measures the memory of deep networks",
        'card.figures("recompute"': "measures the time of deep networks, and of a card",
    },
    "05b_which_inputs": {
        "fit(chain, few, 1)": "measures the memory of deep networks",
        "budget, amount, _ in found": "judges them",
    },
    "06_gradient_accumulation": {
        "class One(nn.Module)": "trains on the CPU only, for long",
        "at_40 = {": "judges a training that is shortened",
        "tools.with_pytorch, 2": "PyTorch's own engines need processes",
    },
    "09_all_together": {
        "def largest(": "measures deep networks, without numbers",
        "free = {": "measures deep networks, without numbers",
        'found["and offload"]': "judges them",
    },
}

# Of each notebook: what makes a cell long, or needs a cell that is left out, and what stands in for it.
SHORTER = {
    "01b_collectives_cost": {"rows, other = (4096 if": "rows, other = (64 if"},
    "04_mixed_precision": {
        "steps=200": "steps=2",
        "[::199]": "[:2]",
        "batches(40)": "batches(2)",
        "for x, y in batches(200):\n    loss": "for x, y in batches(2):\n    loss",
        "for x, y in batches(200):\n    with": "for x, y in batches(2):\n    with",
        "assert sum(losses[-20:]) / 20 < 1.75": "",
    },
    "04b_masters_sums_bytes": {", (torch.bfloat16, 32))": ")"},
    "05_recompute": {"(16, 64, 144, 256, 576, 1024)": "(16, 64)"},
    "06_gradient_accumulation": {
        "(size, device=device)": "(size, sequences=128, device=device)",
        "torchrun(tools.race, 2)": "World(2).run(tools.race, 1)",
    },
    "07_flash_attention": {"repeats=10 * 2048 // n": "repeats=1", "repeats=10)": "repeats=1)"},
    "07b_flash_backward": {"repeats=2)": "repeats=1)", "repeats=3 * 2048 // n": "repeats=1", "range(60)": "range(1)"},
}

# Of tests/gpu: what is not run, and the tests whose assertions on values may fail, since only a card has those.
INTERPRETED_FOR_MINUTES = (
    "test_as_accurate_as_plain_attention",
    "test_every_head_dim_fits_this_gpu",
    "test_any_length_and_dtype",
    "test_bands_of_nan_around_every_buffer_stay_outside",
    "test_nan_and_infinity_reach_the_rows_that_see_them_and_no_others",
    "test_offsets_past_two_to_the_31",
    "test_results_have_the_strides_that_the_operator_promises",
    "test_the_dropout_mask_is_everybodys",
)
GPU_TESTS = {
    "test_engines.py::test_one_rank_of_torchrun": "starts a process that talks over NCCL",
    "test_flash.py::test_under_compile": "torch.compile looks at the real device",
    "test_flash.py::test_the_kernels_are_compiled": "they are interpreted",
    **dict.fromkeys((f"test_flash.py::{name}" for name in INTERPRETED_FOR_MINUTES), "interpreted, it takes minutes"),
}
GPU_VALUES = {
    "test_the_ledger_counts_what_the_allocator_hands_out": "there is no allocator of a card",
    "test_between_steps_offload_takes_the_states_off_the_card": "there is no allocator of a card",
    "test_tensors_of_more_than_two_to_the_31_elements": "its tensors are small here",
    "test_memory_grows_linearly": "there is no allocator of a card",
}
