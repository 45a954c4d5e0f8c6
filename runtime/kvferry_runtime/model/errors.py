"""The one error of everything that reads a model."""


class ModelError(Exception):
    """A model cannot be used: unknown, incomplete, damaged or not supported.

    The message names the file, the field or tensor, what was given and what is accepted.
    """


class RemoteCodeError(ModelError):
    """The model brings code of its own, which is never run."""
