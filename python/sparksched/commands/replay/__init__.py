"""`sparksched replay`."""
