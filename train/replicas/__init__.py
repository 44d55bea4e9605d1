"""Silent corruption: replicas of a run's leaves are compared, and a difference is
traced to a device.

Modules are imported by their own names.
"""
