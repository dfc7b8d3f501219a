"""The whole service, as separate processes, seen from HTTP."""
