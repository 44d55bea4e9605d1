"""Data centres on one machine: processes, slow links, slow cores, and what they
show."""
