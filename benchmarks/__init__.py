"""Measurements, each against its peers in the same run."""
