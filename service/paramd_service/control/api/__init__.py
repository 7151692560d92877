"""REST: the application, its guard, models and routes."""
