"""Contracts between kvferry's processes.

Every message that crosses a process border is a ``msgspec.Struct`` of this package, and every byte string that two
processes must compute alike (block hashes, digests, MACs) is computed here. The package imports nothing of ours and
does no I/O, so that the router, the engine, the tools and the simulation read one definition.

``PROTOCOL_VERSION`` history:

1. Leg, frames, KV handle, KV control, tcp reads, state stream.
2. A leg goes on with an answer: frame `Begun`; a leg names its compat hash and how earlier ones were lost, and may
   insist on ferried KV: `Fail` of kind `transfer`.
3. A handle may carry checksums of its blocks; the last read may be followed by its `Release` on the same connection;
   the stream of an attached leg stays open behind `Prefilled` or `Handoff`, until a reader has taken the lease up.
   A text bundle holds no context length: that is each pod's own.
"""

PROTOCOL_VERSION = 3
