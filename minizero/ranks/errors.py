"""The errors that end the work of several ranks. None of them leaves a rank waiting for ever."""


class RankFailed(RuntimeError):
    """Another rank failed. `.rank` is the first that did, as far as this rank can see; `__cause__` is its exception."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class CollectiveMismatch(RuntimeError):
    """The ranks were about to do different things. Every rank raises it before it uses any data."""


class CommTimeout(RuntimeError):
    """A rank waited for another longer than the timeout."""
