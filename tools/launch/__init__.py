"""Workers on one machine, and files for SLURM and Kubernetes."""
