"""What lets a restarted training go on from its last step, and how it moves in again."""
