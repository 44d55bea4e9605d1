"""A testbed: data centres (DCs) simulated on one machine by processes with slow links
and slow cores, and the measurements made on it."""
