"""Benchmarks: cases, the variants that compute them, and their tables."""
