"""Pictures of runs, plans and measurements."""
