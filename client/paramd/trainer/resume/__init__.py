"""How a restarted training resumes from its last step."""
