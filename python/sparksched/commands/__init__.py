"""The commands of `sparksched`."""
