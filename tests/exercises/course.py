"""The exercises in their order. This file has what a list shows, so that the list loads nothing else."""

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
TASKS = "tests.exercises.tasks"  # the folder of targets that are no part of a package
NO_TRITON = "This exercise needs Triton, which exists for Linux, WSL or Colab only. It blocks nothing: go on."


class Text(NamedTuple):
    """What an exercise is about; the steps to follow; hints that give away more and more.

    after: what the package does differently, and what to read next. For who has passed.
    bug: edits of the reference, pairs of old and new text, if the student mends a function, or fills a gap in one.
    takeaway: what one remembers of a run to mend, in a sentence, for the book's page `museum`.
    """

    about: str
    plan: list[str]
    hints: list[str]
    after: str
    bug: tuple[tuple[str, str], ...] = ()
    takeaway: str = ""


class Exercise(NamedTuple):
    """target: the function or method that the student writes. core: part of the short course.

    place: the folder that defines the target in any of its files: a package's, or TASKS. If two files do, the one that
    is meant.
    """

    number: int
    name: str
    title: str
    place: str
    target: str
    minutes: int
    core: bool = False

    @property
    def id(self) -> str:
        return f"{self.number:02}"

    @property
    def file(self) -> str:
        return f"{self.id}_{self.name}.py"

    @property
    def function(self) -> str:
        return self.target.split(".")[-1]

    @property
    def notebook(self) -> str:
        """The notebook that shows the idea."""
        for last, notebook in NOTEBOOKS.items():
            if self.number <= last:
                return notebook
        raise ValueError(f"exercise {self.number} is in no row of NOTEBOOKS: add one, {self.number}: its notebook")

    @property
    def runs(self) -> str:
        """What runs with the student's function inside."""
        return "check" if self.place == TASKS else "package"

    def is_method(self) -> bool:
        return "." in self.target

    def text(self) -> Text:
        """What a student reads. The exercise's module is parsed for it, and not imported."""
        tree = ast.parse((Path(__file__).parent / f"e{self.file}").read_text(encoding="utf-8"))
        values = {
            statement.targets[0].id: ast.literal_eval(statement.value)
            for statement in tree.body
            if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and statement.targets[0].id in ("PLAN", "HINTS", "AFTER", "BUGGY", "GAP", "TAKEAWAY")
        }
        about, plan, hints, after = ast.get_docstring(tree) or "", values["PLAN"], values["HINTS"], values["AFTER"]
        return Text(about, plan, hints, after, values.get("BUGGY") or values.get("GAP", ()), values.get("TAKEAWAY", ""))

    def load(self) -> ModuleType:
        """The exercise's module: PLAN, HINTS, AFTER, WRONG, draw(), result()."""
        return importlib.import_module(f"tests.exercises.e{self.id}_{self.name}")

    def is_possible(self) -> bool:
        """Whether what the exercise needs is installed."""
        return self.name not in TRITON or importlib.util.find_spec("triton") is not None


_rows = [
    # Ranks that talk.
    ("pad", "Pad a tensor until N divides it", "minizero.engines", "pad", 10, False),
    ("chunk", "This rank's chunk of a flat buffer", "minizero.engines", "Unit.chunk", 10, False),
    ("broadcast", "Broadcast along a binomial tree", "minizero.ranks", "broadcast", 25, False),
    ("all_gather", "Ring all-gather", "minizero.ranks", "ring_all_gather", 20, False),
    ("reduce_scatter", "Ring reduce-scatter", "minizero.ranks", "ring_reduce_scatter", 30, True),
    ("all_reduce", "All-reduce from the two rings", "minizero.ranks", "all_reduce", 25, False),
    # Data parallelism, and what ZeRO shards.
    ("views", "Parameters as views of a flat buffer", TASKS, "flatten", 20, False),
    ("ddp_hook", "DDP: average in backward, in buckets", "minizero.engines", "CoreDDP.reduce", 40, True),
    ("zero1_keep", "ZeRO-1: what a rank keeps", "minizero.engines", "CoreZero1.keep", 20, False),
    ("zero1_step", "ZeRO-1: after the step", "minizero.engines", "CoreZero1.gather", 20, False),
    ("zero2_free", "ZeRO-2: reduce, and free", TASKS, "backward", 25, True),
    ("zero3_unshard", "ZeRO-3: unshard a unit", TASKS, "unshard", 40, True),
    ("zero3_reshard", "ZeRO-3: reshard it", TASKS, "reshard", 25, False),
    ("hybrid", "Sharding factor: groups of ranks", TASKS, "hybrid_step", 25, False),
    ("memory_formulas", "The bytes of each stage", "minizero.memory", "predict", 25, True),
    # Numbers in 16 bits.
    ("decode", "What 16 bits stand for", "precision", "decode_one", 25, False),
    ("split", "A float64 in three fields", "precision", "split", 15, False),
    ("round_even", "Rounding to nearest, ties to even", "precision.one_number", "round_off", 30, True),
    ("subnormals", "Where the normal numbers end", TASKS, "nearest", 25, False),
    ("encode", "A number into its bits", "precision", "encode_one", 45, False),
    ("sticky", "Shift right, and remember", "precision", "shift_right", 15, False),
    ("add", "FP16 addition on bits", "precision", "add", 30, False),
    ("multiply", "FP16 multiplication on bits", "precision", "multiply", 25, False),
    # Training with them.
    ("lost_update", "How small an update is lost", TASKS, "border", 25, False),
    ("unscale", "Loss scaling: unscale, once", "precision", "LossScaler.unscale_", 25, False),
    ("dynamic_scaler", "The dynamic loss scale", "precision", "DynamicLossScaler._adapt", 20, True),
    ("master_weights", "FP32 master weights", "precision", "MasterWeights.step", 25, False),
    ("fp32_accumulation", "Dot product: which accumulator", "precision", "dot", 20, False),
    # Activations.
    ("checkpoint", "Checkpoint: forward again", "minizero.recompute", "ByFunction.backward", 30, True),
    ("sqrt_schedule", "Every k-th input, and √n", "minizero.schedules", "every_k", 20, False),
    ("optimal_schedule", "The least memory of a chain", "minizero.schedules", "least_budget", 40, False),
    ("accumulation", "Gradient accumulation by tokens", "minizero", "accumulate", 25, True),
    # Attention without the scores, and models of time.
    ("online_softmax", "Online softmax", "flash", "online_softmax", 25, True),
    ("tiled_forward", "FlashAttention forward, in tiles", "flash", "forward_tiles", 55, False),
    ("lse_backward", "Backward from the logsumexp", "flash", "backward_tiles", 40, False),
    ("triton_forward", "The forward kernel in Triton", "flash", "forward_kernel", 40, False),
    ("triton_dkdv", "The dK, dV kernel in Triton", "flash", "dkdv_kernel", 40, False),
    ("triton_dq", "The dQ kernel in Triton", "flash", "dq_kernel", 30, False),
    ("traffic", "Bytes between HBM and SRAM", "flash", "hbm_bytes", 55, False),
    ("alpha_beta", "Seconds of a ring: α and β", "minizero.simulate", "Cluster.ring", 25, False),
    # Later ones; most replace nothing in the package.
    ("attention_backward", "Attention backward, by hand", TASKS, "attention_backward", 30, False),
    ("predict_peak", "The peak of a step, predicted", TASKS, "predict_peak", 35, False),
    ("bug_accumulation", "Find the bug: accumulation on ranks", TASKS, "train_on_windows", 25, False),
    ("bug_clipping", "Find the bug: clipping on ranks", TASKS, "train_on_shards", 20, False),
    ("bug_loss_scale", "Find the bug: a loss scale, and clipping", TASKS, "train_scaled", 20, False),
    ("bug_random", "Find the bug: random numbers on ranks", TASKS, "train_on_noise", 25, False),
    ("zero3_hooks", "ZeRO-3: the four hooks", "minizero.engines", "watch", 40, False),
    ("chunked_loss", "The loss in chunks", "minizero.chunked_loss", "loss_and_gradients", 25, False),
    ("bug_recompute", "Find the bug: recompute", TASKS, "train_recomputed", 20, False),
    ("bug_muon", "Find the bug: Muon on shards", TASKS, "train_with_muon", 20, False),
    ("bug_held_back", "Find the bug: accumulation that sends once", TASKS, "train_held_back", 20, False),
    ("bug_state_bits", "Find the bug: states of 8 or 32 bits", TASKS, "train_8bit", 20, False),
    ("bug_spike", "Find the bug: a spike on one rank", TASKS, "train_without_spikes", 20, False),
    ("bug_decay", "Find the bug: weight decay in BF16", TASKS, "train_in_bf16", 20, False),
    ("bug_zero2", "Find the bug: ZeRO-2 by name only", TASKS, "train_zero2", 20, False),
    ("ring_hop", "Ring attention: the backward of a hop", "minizero.ring_attention", "add_gradients", 25, False),
    ("block_scale", "One scale for 32 numbers", TASKS, "encode_block", 30, False),
]
COURSE = [Exercise(number, *row) for number, row in enumerate(_rows, 1)]
# The last exercise on what a notebook shows.
NOTEBOOKS = {
    2: "01_collectives",
    3: "01b_collectives_cost",
    5: "01_collectives",
    6: "01b_collectives_cost",
    13: "02b_zero_engines",
    14: "02c_zero_choices",
    15: "02_zero",
    20: "03_fp16_bits",
    23: "03b_fp16_sums",
    24: "04b_masters_sums_bytes",
    26: "04_mixed_precision",
    28: "04b_masters_sums_bytes",
    29: "05_recompute",
    31: "05b_which_inputs",
    32: "06_gradient_accumulation",
    34: "07_flash_attention",
    35: "07b_flash_backward",
    36: "07c_flash_kernel",
    38: "07b_flash_backward",
    39: "07_flash_attention",
    40: "08_scale",
    41: "07b_flash_backward",
    42: "02c_zero_choices",
    43: "06_gradient_accumulation",
    44: "02_zero",
    45: "04_mixed_precision",
    46: "01b_collectives_cost",
    47: "02b_zero_engines",
    48: "00_where_memory_goes",
    49: "05_recompute",
    50: "02d_own_loop",
    51: "06_gradient_accumulation",
    52: "04b_masters_sums_bytes",
    53: "04_mixed_precision",
    54: "04b_masters_sums_bytes",
    55: "02_zero",
    56: "07d_long_texts",
    57: "03b_fp16_sums",
}
TRITON = {"triton_forward", "triton_dkdv", "triton_dq"}


def find(word: str) -> Exercise:
    """The exercise of a number (`5`, `05`), a name, or a file. `ValueError` if there is none."""
    stem = Path(word).stem
    for exercise in COURSE:
        if stem in (str(exercise.number), exercise.id, exercise.name, Path(exercise.file).stem):
            return exercise
    raise ValueError(f"there is no exercise {word!r}: give a number from 01 to {COURSE[-1].id}, or a name")
