"""Tickets, tokens and TLS: who may call, and over which connection."""
