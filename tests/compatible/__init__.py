"""The routes that other services' clients speak."""
