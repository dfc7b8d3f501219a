"""What every process agrees on."""
