"""One line in the frameworks that people train with; each file needs the extra of its name."""
