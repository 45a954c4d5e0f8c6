"""Deterministic simulation: the real decision cores of a router, prefill and decode pods in one process.

``python -m tests.simulation --seeds 500`` runs seeds; ``--seed N --trace`` replays one. A seed is a whole history:
sizes, requests, links and faults (``scenario``), in virtual time (``world``, ``links``, ``faults``). Around the cores
stand thin shells that do what the real threads and sockets do: ``pod`` (engine loop), ``server_shell`` (legs),
``owner_shell`` and ``reader_shell`` (leases and pulls), ``router_shell``, ``client``. The toy model (``toy_runner``)
computes on real block tables, so that wrong KV is a wrong token; ``answers`` knows the right ones from token ids alone.
``invariants`` are checked after each event and ``run`` judges the end. ``bugs`` plants known bugs; all must be caught.

A new core joins by its shell here; a new rule by a check in ``invariants``; a bug that a seed finds becomes a test of
its core.
"""
