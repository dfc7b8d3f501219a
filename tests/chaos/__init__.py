"""Faults: what dies, vanishes, stalls or fills up, and what must hold nevertheless."""
