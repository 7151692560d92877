"""What a trainer is doing: its stacks, its process, and the numbers its script logs."""
