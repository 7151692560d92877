"""Floods of each listener, as another user of the host; see __main__.py."""
