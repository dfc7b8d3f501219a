"""Everything that outlives a process: the only place that knows SQL, Redis and blobs."""
