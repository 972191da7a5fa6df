"""The lab: α and β of a made-up network, the bus bandwidth as nccl-tests counts it, and a prediction with it."""

import json
import os
import subprocess
import sys

import pytest

from minizero import lab
from minizero.ranks import timing
from minizero.simulate.__main__ import main
from minizero.simulate.clusters import CLUSTERS
from minizero.simulate.machine import with_measured
from tests.support.helpers import run

ALPHA, BETA = 2e-5, 3e9


@pytest.fixture
def network(monkeypatch):
    def seconds(comm, operations):
        hops = {operation: lab.TIMES[operation] * (comm.size - 1) for operation in operations}
        return {name: {"our ring": {2**k: n * (ALPHA + 2**k / BETA) for k in (10, 16, 22)}} for name, n in hops.items()}

    monkeypatch.setattr(lab, "time_collectives", seconds)


@pytest.mark.parametrize("size", [2, 4])
def test_alpha_is_a_hops_and_the_bus_bandwidth_is_nccl_tests(network, size):
    found = run(size, lab.measure)[0]
    assert (found["ranks"], found["ranks_per_host"]) == (size, size)
    # nccl-tests: S/t times (N - 1)/N, twice that for all-reduce. S: the bytes of the whole tensor.
    for operation, factor in (("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)):
        its = found["operations"][operation]["our ring"]
        assert (its["alpha"], its["beta"]) == (pytest.approx(ALPHA), pytest.approx(BETA))
        for nbytes, seconds, bandwidth in its["points"]:
            assert bandwidth == pytest.approx(size * nbytes / seconds * factor * (size - 1) / size)
    assert lab.draw(found).startswith(b"\x89PNG")


@pytest.mark.parametrize("on_a_host, place, other", [(4, "inside", "between"), (2, "between", "inside")])
def test_the_simulator_takes_the_link(network, tmp_path, capsys, on_a_host, place, other):
    (file := tmp_path / "lab.json").write_text(json.dumps(run(4, lab.measure)[0] | {"ranks_per_host": on_a_host}))
    before, cluster = CLUSTERS["h100"], with_measured(CLUSTERS["h100"], file)
    share = BETA / (1 if place == "inside" else on_a_host)
    link = getattr(cluster, place)
    assert (link.latency, link.bandwidth) == (pytest.approx(ALPHA), pytest.approx(share))
    assert getattr(cluster, other) == getattr(before, other) and cluster.base_latency == 0
    if place == "inside":  # a ring of 4 in a host takes what was measured
        assert cluster.ring(4 * 2**22, 4) == pytest.approx(3 * (ALPHA + 2**22 / BETA))
    assert main(["--model", "mpt-7b", "--gpus", "16", "--measured", str(file)]) == 0
    assert "measured with 4 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, "{}", "no json", '{"ranks": 2, "ranks_per_host": 2, "operations": []}'])
def test_another_file_is_refused(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "lab.json").write_text(text)
    assert main(["--measured", str(tmp_path / "lab.json")]) == 2
    assert "give the lab.json that python -m minizero.lab wrote" in capsys.readouterr().err


def test_each_call_sends_a_hops_bytes_and_makes_what_its_name_says():
    def sent(comm):
        found = {}
        for operation, by_whom in timing.calls(comm, 1024).items():
            before = comm.bytes_sent
            made = by_whom["our ring"]().nbytes
            found[operation] = made / 1024, (comm.bytes_sent - before) / 1024
        return found

    assert run(4, sent)[0] == {"all-gather": (4, 3), "reduce-scatter": (1, 3), "all-reduce": (4, 6)}


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_the_lab_runs_under_torchrun(tmp_path, size):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += ["-m", "minizero.lab", "--output", str(tmp_path / "lab")]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "lab" / "lab.json").read_text())
    assert found["ranks"] == size and (tmp_path / "lab" / "lab.png").exists()
    assert all(list(by_whom) == ["our ring", "PyTorch's own"] for by_whom in found["operations"].values())
