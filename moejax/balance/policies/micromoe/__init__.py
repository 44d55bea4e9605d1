"""MicroMoE's policy: symmetric plans, asymmetric plans, and bounds on their splits."""
