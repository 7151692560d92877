"""Statistics of what is in a snapshot, heat maps, spectra, and the replay of an update."""
