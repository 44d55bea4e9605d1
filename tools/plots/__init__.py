"""Pictures of runs, plans and measurements, drawn with matplotlib."""
