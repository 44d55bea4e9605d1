"""Faults that tools/chaos.py puts into real runs, and the promises that must hold."""
