"""FlexMoE's policy, and the replicas of a layer while it adjusts them."""
