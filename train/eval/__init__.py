"""Loss and text of a model on held-out data, and the baseline beside it."""
