"""Stages of tools/bringup.py: what each measures or checks, and the processes they run
in."""
