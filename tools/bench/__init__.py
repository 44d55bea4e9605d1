"""Benchmarks: cases, the arms that compute them, and their tables."""
