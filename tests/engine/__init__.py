"""Tests of worker.engine."""
