"""`kvferry bench`: measures a manifest's service on this machine. What decides is pure."""
