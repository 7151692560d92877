"""Values step by step: gradient frames, followed parameters, held steps."""
