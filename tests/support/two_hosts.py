"""Two hosts on one machine: what a slow link between them costs, sharded over all ranks and inside each host.

    host 0: ranks 0 1  ----  veth pair, tc tbf  ----  host 1: ranks 2 3

Each host is a network namespace with a torchrun of its own (--nnodes 2). Needs Linux, root, `ip` and `tc`.
What crosses the link is counted three times: by the formula, by the communicators, and by the kernel on the device.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from minizero import Comm, Zero3, all_reduce, barrier
from minizero.memory import predict_sent

DEVICE = "link0"  # its name in both namespaces
ADDRESSES = ("10.213.0.1", "10.213.0.2")
WIDTH, LAYERS, PARAMETERS = 512, 4, 4 * 512 * 512
FACTORS = {"full, F = 4": None, "hybrid, F = 2": 2}


class NoNamespaces(RuntimeError):
    """This machine does not let us make hosts."""


def command(*words):
    """Run it; `NoNamespaces` where that is not permitted, or there is no such program."""
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoNamespaces(f"{' '.join(words)}: {getattr(error, 'stderr', '') or error}") from error


@contextlib.contextmanager
def hosts():
    """The names of two network namespaces, joined by a pair of devices; removed in the end, whatever happens."""
    for path in Path("/run/netns").glob("minizero-*"):  # of a run that was killed
        if not Path("/proc", path.name.split("-")[1]).exists():
            subprocess.run(["ip", "netns", "delete", path.name], capture_output=True)
    names = [f"minizero-{os.getpid()}-{number}" for number in range(2)]
    made = []
    try:
        for name in names:
            command("ip", "netns", "add", name)
            made.append(name)
        pair = ("type", "veth", "peer", "name", DEVICE, "netns", names[1])
        command("ip", "link", "add", DEVICE, "netns", names[0], *pair)
        for name, address in zip(names, ADDRESSES):
            command("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            command("ip", "-n", name, "link", "set", DEVICE, "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
            command("ip", "netns", "exec", name, *shaping("1gbit"))
        yield names
    finally:
        for name in made:  # the devices go with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def shaping(rate):
    """The command that limits what leaves this host: a token bucket, in front of at most 0.4 s of waiting packets."""
    bucket = "rate", rate, "burst", "256kb", "latency", "400ms"
    return "tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf", *bucket


def measure(rate, steps, patience=300.0):
    """A dict for each sharding, at a rate such as "100mbit": a step's seconds, bytes that left host 0."""
    with tempfile.TemporaryDirectory() as folder, hosts() as names:
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        }
        jobs = []
        try:
            for number, (name, address) in enumerate(zip(names, ADDRESSES)):
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
                torchrun += ["--node-rank", str(number), "--master-addr", ADDRESSES[0], "--master-port", "29500"]
                torchrun += ["--local-addr", address, __file__, folder, str(steps), rate]
                log = open(f"{folder}/log-{number}", "w")  # noqa: SIM115
                jobs.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", name, *torchrun],
                        env=environment,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            end = time.monotonic() + patience
            for number, job in enumerate(jobs):
                try:
                    code = job.wait(max(1.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = "no end"
                if code != 0:
                    raise RuntimeError(f"host {number}: {code}\n" + Path(f"{folder}/log-{number}").read_text()[-3000:])
        finally:
            for job in jobs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        return json.loads(Path(f"{folder}/found.json").read_text())


# What each rank does.


def rank_main(folder, steps, rate):
    torch.set_num_threads(1)
    with Comm.from_process_group() as comm:
        host = comm.rank // 2
        models = {}
        for name, factor in FACTORS.items():
            module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
            models[name] = Zero3(module, comm, sharding_factor=factor)
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}
        found = []
        if comm.rank % 2 == 0:
            subprocess.run(shaping(rate), check=True, stdout=subprocess.DEVNULL)
        barrier(comm)
        taken = {name: [] for name in models}
        for _ in range(steps + 1):  # the first is a warm-up
            for name in models:  # in turns, so that what else this machine does meets both
                taken[name].append(step(comm, host, models[name], optimizers[name]))
        for name, times in taken.items():
            seconds, counted, sent = zip(*times[1:])
            formula = predict_sent(PARAMETERS, 4, 3) if FACTORS[name] is None else 2 * across_formula(2)
            row = {"seconds": statistics.median(seconds), "counted": counted[0], "kernel": statistics.median(sent)}
            found.append(row | {"formula": formula})
            assert len(set(counted)) == 1
        if comm.rank == 0:
            Path(folder, "found.json").write_text(json.dumps(found))


def across_formula(factor):
    """What a rank sends across groups: the all of `predict_sent` less what stays inside."""
    inside = 4 * 3 * PARAMETERS * (factor - 1) / factor
    return predict_sent(PARAMETERS, 4, 3, sharding_factor=factor) - inside


def step(comm, host, model, optimizer):
    """Seconds of the slowest rank, and bytes that left host 0: as the communicators count them, and as the kernel."""

    def leaving():
        """In the ring of all ranks what rank 1 sends leaves host 0; in a hybrid, all that goes across groups."""
        if model.across is not None:
            return model.across.bytes_sent if host == 0 else 0
        return comm.bytes_sent if comm.rank == 1 else 0

    device = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
    barrier(comm)  # all is sent that was sent before …
    counted, on_device = leaving(), int(device.read_text())
    barrier(comm)  # … and nobody has begun
    start = time.perf_counter()
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    barrier(comm)
    seconds, counted, on_device = time.perf_counter() - start, leaving() - counted, int(device.read_text()) - on_device
    slowest = all_reduce(torch.tensor(seconds, dtype=torch.float64), comm, "max").item()
    on_device = on_device if comm.rank == 0 else 0
    return slowest, *all_reduce(torch.tensor([counted, on_device]), comm).tolist()


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
