"""The page of a run: its data, read from the run's files, and its HTML."""
