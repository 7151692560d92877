"""Where every element lives, and plans to read, edit and export it. Pure: no I/O, no torch."""
