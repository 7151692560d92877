"""Access control: tokens, roles, sessions, and what each route needs."""
