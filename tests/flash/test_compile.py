"""The kernels compiled for GPUs that are not here, in a process of its own: they fit, and use the matrix units."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from flash.gpus import GPUS, PROCESSORS, TABLE
from flash.options import Options

pytest.importorskip("triton", reason="Triton is not installed here")
from flash import compile, launch  # noqa: E402
from flash.compile import COMBINATIONS, HEAD_DIMS, TARGETS, count_copies, shortest_loop  # noqa: E402

# Instructions a score of kernels of FlexAttention's structure, with these blocks; the fewer of Triton 3.6 and 3.7.
FLEX = {
    ("forward", 64): 11.62, ("dkdv", 64): 11.91, ("dq", 64): 8.94, ("forward", 128): 10.50, ("dkdv", 128): 14.91,
    ("dq", 128): 8.39, ("forward", 128, "causal"): 13.69, ("dq", 128, "causal"): 10.34,
}  # fmt: skip
MATRIX = {"sm_80": "mma", "sm_89": "mma", "sm_90": "wgmma", "gfx942": "mfma"}


def compile_rows(folder, *arguments, timeout=1500):
    """The table of `python -m flash.compile`, as dicts; compiled code goes to `folder`."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "flash.compile", "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows):
    for row in rows:
        gpu, kernel, sixteen_bits = row["gpu"], row["kernel"], row["dtype"] != "float32"
        assert row["registers"] > 0 and 0 < row["shared"] <= PROCESSORS[gpu].sram, row
        assert kernel != "delta" or row["spilled"] == 0, row
        assert sixteen_bits or gpu == "gfx942" or row["instructions"] == "-", f"a product in TF32: {row}"
        if sixteen_bits and kernel != "delta":  # which is a sum for each row, no product of matrices
            # dK and dV at head dim 256: blocks of 64 keys, which wgmma needs, do not fit into Hopper's registers.
            matrix = "mma" if (gpu, kernel, row["head_dim"]) == ("sm_90", "dkdv", 256) else MATRIX[gpu]
            assert row["instructions"].startswith(f"{matrix} × "), row
            assert row["copies"] == 1, row
            assert row["serialised"] == "no", row
            if gpu == "sm_90" and row["head_dim"] in (64, 128) and row["options"] != "everything":
                case = kernel, row["head_dim"]
                assert float(row["a_score"]) < FLEX.get((*case, row["options"]), FLEX[case]), row
                assert row["spilled"] <= (84 if case == ("dkdv", 64) else 0), row
            elif row["head_dim"] in (64, 128) and gpu != "gfx942":
                assert row["spilled"] <= (4 if kernel == "forward" else 256), row


@pytest.mark.pretend
def test_hopper_multiplies_with_wgmma_spills_next_to_nothing_and_computes_no_number_twice(tmp_path):
    """With options and without: they have their own entries in the table.

    The other sizes, dtypes and GPUs have their turn in `test_every_kernel_for_every_gpu`.
    """
    rows = compile_rows(tmp_path, "--gpus", "sm_90", "--head-dims", "64", "128")
    assert len(rows) == 4 * 2 * 3  # kernels (forward, delta, dkdv, dq), head dims, options
    rows += compile_rows(tmp_path, "--gpus", "sm_90", "--head-dims", "64", "--dtypes", "float32", "--options", "plain")
    check(rows)
    assert list(tmp_path.rglob("*.cubin")), "TRITON_CACHE_DIR is where the code goes"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("gpu", TARGETS)
def test_every_kernel_for_every_gpu(gpu, dtype, tmp_path):
    rows = compile_rows(tmp_path, "--gpus", gpu, "--dtypes", dtype, timeout=3600)
    assert len(rows) == 4 * len(HEAD_DIMS) * len(COMBINATIONS)
    check(rows)


DOT = "tt.dot %k, %q : x -> tensor<{}xf32, #l>".format
GROUP = "ttng.warp_group_dot %k, %q : x -> tensor<{}xf32, #l>".format


@pytest.mark.parametrize(
    ("layout", "product", "copies"),
    [
        ("nvidia_mma<{warpsPerCTA = [4, 1], instrShape = [16, 8]}>", DOT("64x64"), 1),
        ("nvidia_mma<{warpsPerCTA = [8, 1], instrShape = [16, 8]}>", DOT("64x64"), 2),
        ("nvidia_mma<{warpsPerCTA = [1, 8], instrShape = [16, 8]}>", DOT("64x32"), 2),
        ("nvidia_mma<{warpsPerCTA = [8, 1], instrShape = [16, 32, 16]}>", GROUP("64x32"), 2),
        ("amd_mfma<{warpsPerCTA = [8, 1, 1], instrShape = [32, 32, 2]}>", DOT("2x32x32"), 4),
        ("blocked<{sizePerThread = [1, 4], threadsPerWarp = [4, 8], warpsPerCTA = [8, 1]}>", DOT("32x32"), 1),
    ],
)
def test_copies_are_read_from_the_layout(layout, product, copies):
    assert count_copies(f"#l = #ttg.{layout}\n    %s = {product} loc(#loc)\n") == copies


def test_what_the_compilers_tools_say(monkeypatch):
    """Products that are serialised; the shortest loop that multiplies matrices, and ends with a jump back."""
    product, jump = "  /*0010*/ HGMMA.64x64x16.F32 R24 ;\n", "  /*0020*/ @P0 BRA `(.L_x_{}) ;\n".format
    sass = f".L_x_0:\n{product * 3}{jump(2)}{jump(0)}.L_x_1:\n{product}{jump(1)}.L_x_2:\n{jump(2)}"
    assert (shortest_loop(sass), shortest_loop(sass.replace("HGMMA", "FFMA"))) == (2, 0)
    monkeypatch.setattr(compile, "knobs", MagicMock())
    for words, serialised in (("", "no"), ("C7515: wgmma.mma_async instructions are serialized due to\n", "yes")):
        report = f"{words}Used 90 registers, 8 bytes spill stores, 12 bytes spill loads"
        monkeypatch.setattr(subprocess, "run", MagicMock(return_value=SimpleNamespace(stderr=report, stdout=sass)))
        assert compile.ask_ptxas("sm_90", ".target sm_90a") == (90, 12, serialised, sass)


def test_a_causal_mask_may_have_blocks_of_its_own(monkeypatch):
    monkeypatch.setattr(launch, "architecture", lambda: "sm_90")
    for kernel, head_dim, rows in (("forward", 128, [128, 64]), ("delta", 128, [128, 64]), ("forward", 256, [128] * 2)):
        options = [Options(None, None, None, 1.0, None, right, False, False, 0.0) for right in (None, 0)]
        assert [launch.choose(kernel, head_dim, 2, each).rows for each in options] == rows


@pytest.mark.parametrize(
    ("gpu", "kernel", "head_dim", "itemsize", "rows", "keys", "most"),
    [
        ("sm_80", "forward", 64, 2, 64, 128, 4),  # 64 rows, 16 to a warp
        ("sm_80", "dkdv", 64, 2, 64, 128, 8),  # 128 keys
        ("sm_90", "dkdv", 128, 2, 128, 64, 4),
        ("small", "dq", 256, 2, 64, 32, 4),  # 32 keys, 8 to a warp
        ("sm_90", "dq", 256, 2, 64, 32, 4),
        ("amd", "dq", 64, 2, 64, 64, 2),  # 64 rows, 32 to a warp
        ("amd", "dkdv", 256, 2, 16, 32, 2),  # 32 keys, 16 to a warp
        ("amd", "dq", 128, 4, 32, 32, 4),  # 4 parts of the head dim
        ("sm_80", "dq", 128, 4, 16, 16, 16),  # no matrix unit: the threads share a block
    ],
)
def test_warps_follow_rows(gpu, kernel, head_dim, itemsize, rows, keys, most, monkeypatch):
    monkeypatch.setattr(launch, "architecture", lambda: gpu)
    wanted = launch.Blocks(rows, keys, 16, 2)
    assert launch.limit_warps(wanted, kernel, head_dim, itemsize) == wanted._replace(warps=most)


@pytest.mark.parametrize(
    ("backend", "arch", "row"),
    [("cuda", 80, "sm_80"), ("cuda", 87, "sm_80"), ("cuda", 89, "small"), ("cuda", 90, "sm_90"), ("cuda", 100, "sm_90"),
     ("cuda", 120, "small"), ("cuda", 999, "small"), ("hip", "gfx942", "amd"), ("hip", "gfx90a", "amd")],
)  # fmt: skip
def test_each_processor_has_its_row(backend, arch, row, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    driver = SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend=backend, arch=arch))
    monkeypatch.setattr(launch.triton.runtime, "driver", SimpleNamespace(active=driver))
    assert launch.architecture() == row
    assert {kind.blocks for kind in PROCESSORS.values()} <= TABLE.keys()
    assert {gpu.kind for gpu in GPUS.values()} <= PROCESSORS.keys()


@pytest.mark.parametrize("gpu", TABLE)
def test_the_table_shows_as_many_warps_as_run(gpu, monkeypatch):
    monkeypatch.setattr(launch, "architecture", lambda: gpu)
    for kernel, sizes in TABLE[gpu].items():
        for head_dim, blocks in sizes.items():
            assert launch.limit_warps(blocks, kernel.split(",")[0], head_dim, 2) == blocks
            assert gpu != "sm_90" or head_dim > 128 or "options" in kernel or blocks in launch.CANDIDATES
