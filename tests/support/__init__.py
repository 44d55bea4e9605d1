"""Builders of inputs, runs and definitions that several test files share."""
