"""The processes next to the trainer, and the links to them."""
