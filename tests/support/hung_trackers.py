"""A stand-in for the process of the trackers, which reads nothing and does not end."""

import signal

signal.pause()
