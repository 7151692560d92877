"""The place of parameters: moved into the arena, or mirrored to it; and detection of moves out."""
