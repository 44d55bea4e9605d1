"""What is saved and read back: checkpoints, their checksums, and whose they are."""
