"""Gangs of processes on one machine, and files for SLURM and Kubernetes."""
