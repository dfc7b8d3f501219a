"""Text or token ids in, scores and hidden states out: no job, no Redis, no SQL, no HTTP."""
