"""Processes that the benchmarks start: training ranks, clients, senders."""
