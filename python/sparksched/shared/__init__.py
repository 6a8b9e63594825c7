"""What an engine and those who look at it must agree on."""
