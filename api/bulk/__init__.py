"""Bulks in the API process: input read, packed into jobs, watched; results put together."""
