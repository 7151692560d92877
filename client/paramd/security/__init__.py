"""Tickets, tokens and TLS: who may ask, and over which connection."""
