"""The processes beside the trainer, and the links to them."""
