"""The process around the decisions: watches, queue, leadership, API calls, health. Everything here does I/O or feeds
what does; ``queue``, ``election``, ``cache``, ``streams`` and ``recorder`` decide and are pure."""
