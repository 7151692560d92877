"""The place of every element, and plans to read, edit and export it. Pure: no I/O, no torch."""
