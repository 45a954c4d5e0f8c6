"""The errors of fetching: one that ends a fetch, with its reason, and one that another try may mend."""

from kvferry_runtime.model.errors import ModelError, RemoteCodeError
from kvferry_wire.fetch import FetchReason


class FetchError(ModelError):
    """A model could not be got. The message is one line and says what to do; ``reason`` is for programs."""

    def __init__(self, message: str, reason: FetchReason = FetchReason.FAILED) -> None:
        super().__init__(" ".join(message.split()))
        self.reason = reason

    @classmethod
    def of_model(cls, error: ModelError) -> "FetchError":
        """What came is no model that can be served."""
        remote_code = isinstance(error, RemoteCodeError)
        return cls(str(error), FetchReason.REMOTE_CODE if remote_code else FetchReason.REFUSED)


class TryAgainError(Exception):
    """A transfer broke off in a way that often passes. ``wait_s``: what the server asks for, if it does."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s
