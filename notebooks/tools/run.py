"""Execute notebooks: `python -m notebooks.tools.run` runs all of them in place, and what they show is committed.

First it writes each notebook's setup cell anew; with `--setup` it does only that. What differs between two machines
and says nothing (times of cells, the kernel's version) is left out. Figures keep 256 colours, a third of their bytes.
"""

import argparse
import base64
import io
import sys
import tempfile
import time
from pathlib import Path

import jupyter_client
import nbformat
import zmq.asyncio
from nbclient import NotebookClient
from PIL import Image

from notebooks.tools import setup_cell

FOLDER = Path(__file__).parents[1]
PATIENCE = 1800  # for a cell: what takes longer hangs


class Session(jupyter_client.session.Session):
    """A message that nbclient sends for a widget could take away what wakes the client for a reply: it looks again."""

    def send(self, stream, *message, **options):
        sent = super().send(stream, *message, **options)
        if isinstance(stream, zmq.asyncio.Socket):
            stream.get(zmq.EVENTS)  # wakes who waits, if something has come
        return sent


class Manager(jupyter_client.AsyncKernelManager):
    """Starts a kernel with such a session. Its sockets are files: a port that was free may be another's by then."""

    def __init__(self, **options):
        self.folder = tempfile.TemporaryDirectory()
        super().__init__(**options, transport="ipc", ip=f"{self.folder.name}/kernel")
        self.session = Session(parent=self)


def execute(path, **options):
    """The notebook, executed in its own folder; an error in a cell is raised with its traceback.

    `options` go to nbclient: `allow_errors=True` runs what stands after such a cell, too.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=PATIENCE, resources=resources, kernel_manager_class=Manager, **options).execute()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = lighter(output.data["image/png"])
    return notebook


def lighter(figure):
    """A PNG in base64 with 256 colours at most: a drawing has few, and those at the edges of its letters."""
    image, written = Image.open(io.BytesIO(base64.b64decode(figure))), io.BytesIO()
    image.convert("RGB").quantize(256).save(written, "png", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def main():
    parser = argparse.ArgumentParser(prog="python -m notebooks.tools.run", description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all")
    parser.add_argument("--setup", action="store_true", help="write the setup cells only, and run nothing")
    options = parser.parse_args()
    for path in options.notebooks or sorted(FOLDER.glob("*.ipynb")):
        setup_cell.write(path)
        if options.setup:
            continue
        start = time.monotonic()
        nbformat.write(execute(path), path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s, {path.stat().st_size / 2**20:.2f} MiB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
