"""MicroMoE's policy: symmetric plans, asymmetric plans, and how even a split can be."""
