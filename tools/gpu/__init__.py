"""Parts and table of tools/gpu_report.py."""
