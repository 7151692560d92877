"""Edit operations, and what each rank changes. Pure."""
