"""Where every element lives: pure data and pure plans."""
