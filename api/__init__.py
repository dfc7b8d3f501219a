"""The HTTP surface: every scoring call is a durable job."""
