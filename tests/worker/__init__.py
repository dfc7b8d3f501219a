"""Tests of the worker, its engine apart."""
