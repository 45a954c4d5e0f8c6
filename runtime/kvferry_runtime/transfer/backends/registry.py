"""Transfer back ends by name, and why one is not available. Others register by entry point."""

import importlib.metadata
from collections.abc import Callable

from kvferry_runtime.transfer.backends.base import BackendContext, BackendError, TransferBackend
from kvferry_runtime.transfer.backends.tcp import TcpBackend

ENTRY_POINTS = "kvferry.transfer_backends"

BackendFactory = Callable[[BackendContext], TransferBackend]

_BUILT_IN: dict[str, BackendFactory] = {"tcp": TcpBackend}


def make_backend(name: str, context: BackendContext) -> TransferBackend:
    """Build a back end.

    Raises:
        BackendError: no back end has this name, or it cannot work here; the message says which and why.
    """
    factory = _BUILT_IN.get(name)
    if factory is None:
        found = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
        if name not in found:
            known = ", ".join(sorted({*_BUILT_IN, *found}))
            raise BackendError(f"transfer back end: {name!r} given; accepted here: {known}")
        factory = found[name].load()
    return factory(context)
