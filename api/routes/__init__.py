"""The route handlers, one module per resource."""
