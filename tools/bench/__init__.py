"""Benchmarks: the cases, the variants that compute them, and the printed tables."""
