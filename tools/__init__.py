"""What a user runs beside training: data, calibrations, replays, plots, benchmarks."""
