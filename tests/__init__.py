"""Tests, in folders that mirror the code; builders are in `tests/support`."""
