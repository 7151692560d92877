"""Version of paramd."""

__version__ = "0.1.0"
