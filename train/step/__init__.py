"""One training step, compiled: state, loss, gradients, optimizer. Nothing of the
host."""
