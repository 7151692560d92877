"""What a run is resumed from, or goes back to."""
