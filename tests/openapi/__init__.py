"""The description of the HTTP surface, held against the service."""
