"""The page of a run: its data read from the run's files, its HTML, and its server."""
