"""Tickets, tokens and TLS: permitted callers and connections."""
