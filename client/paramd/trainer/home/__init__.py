"""Where parameters live: moved into the arena, or mirrored to it; and what left it."""
