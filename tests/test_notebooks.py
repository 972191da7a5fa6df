"""Every notebook runs, is committed as executed, is small, and says nothing of the machine it ran on."""

import asyncio
import base64
import io
import json
import re
from pathlib import Path

import pytest
import zmq.asyncio
from matplotlib.figure import Figure
from PIL import Image

from notebooks.tools.run import FOLDER, Session, execute, lighter

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# A home, a checkout, a temporary folder, an installed package: places that exist on one machine only.
PLACES = re.compile(
    rf"/home/|{re.escape(str(Path.home()))}/|/Users/|/tmp/|site-packages|\.venv|{re.escape(str(FOLDER.parent))}"
)


@pytest.mark.lessons
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path):
    execute(path)  # the assertions are in the notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_with_its_outputs(path):
    text = path.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] == number for number, cell in enumerate(cells, 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert len(text) < 2**20
    assert not PLACES.search(text)


def test_who_waits_for_a_reply_gets_it_though_a_widget_sends_meanwhile():
    async def waits(session):
        with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as client, context.socket(zmq.PAIR) as kernel:
            kernel.bind("inproc://replies")
            client.connect("inproc://replies")
            waiting = client.recv()
            await asyncio.sleep(0.01)  # it waits
            kernel.send(b"a reply")
            session.send(client, "comm_msg", {})
            return await asyncio.wait_for(waiting, 30)

    assert asyncio.run(waits(Session())) == b"a reply"


def test_a_figure_keeps_its_size_and_its_ground_and_has_fewer_bytes():
    figure, written = Figure(figsize=(4, 3)), io.BytesIO()
    figure.add_subplot().plot([1, 3, 2], color="#5E2750", linewidth=4)
    figure.savefig(written)
    light = base64.b64decode(lighter(base64.b64encode(written.getvalue())))
    before, after = (Image.open(io.BytesIO(png)).convert("RGB") for png in (written.getvalue(), light))
    assert after.size == before.size and after.getpixel((0, 0)) == (255, 255, 255)
    assert len(light) < len(written.getvalue()) / 2
