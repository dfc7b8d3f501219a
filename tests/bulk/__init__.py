"""Bulks through the real application, with a real worker beside it."""
