"""What every kvferry process has in common: logs, key files, hardened HTTP, health, metrics, CURVE sockets, the parent.

Imports ``kvferry_wire`` only, and never torch.
"""
