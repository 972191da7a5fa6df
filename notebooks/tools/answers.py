"""What answers an exercise stays out of sight, in JupyterLab, on GitHub, in slides and book alike."""

from IPython.display import Markdown


def folded(listing, language="python"):
    """The listing behind a click. language: "python", or "diff" for what differs between two functions.

    A cell whose output is hidden (`outputs_hidden`) is hidden in JupyterLab alone.
    """
    summary = "The listing answers an exercise: open it after yours"
    return Markdown(f"<details>\n<summary>{summary}</summary>\n\n```{language}\n{listing}\n```\n\n</details>")
