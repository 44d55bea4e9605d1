"""What a run writes and shows: its directory, metrics, profile, progress and
summary."""
