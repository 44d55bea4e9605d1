"""FlexMoE's policy, and the replicas of a layer while the policy adjusts them."""
