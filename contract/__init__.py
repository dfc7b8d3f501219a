"""What every process and every client agrees on: msgspec and the standard library only."""
