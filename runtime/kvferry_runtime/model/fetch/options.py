"""What a fetch may do, and what it found."""

from pathlib import Path
from typing import Literal

import msgspec

from kvferry_wire.limits import DEFAULT_LIMITS, Limits

Show = Literal["auto", "none"]  # auto: a bar on a terminal, else a line each ten seconds


class FetchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of whoever asks for a model."""

    show: Show = "auto"
    max_bytes: int | None = None  # of the model's files; None: the limit alone
    commit: str | None = None  # of a hub: fetched in place of the branch or tag that is asked for
    token_file: Path | None = None  # of http(s): its content goes to the asked host, over https alone
    s3_endpoint: str | None = None  # None: as the environment says, else the one of AWS
    s3_region: str | None = None
    s3_credentials: Path | None = None  # a folder with one file for each variable; None: as AWS's tools find them
    limits: Limits = DEFAULT_LIMITS

    @property
    def most_bytes(self) -> int:
        return self.limits.fetch_bytes if self.max_bytes is None else min(self.max_bytes, self.limits.fetch_bytes)


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """A model that lies on this machine, verified."""

    path: Path  # the folder or file that `load_model` takes
    source: str
    commit: str | None = None  # of a hub
    bytes: int  # of its files
