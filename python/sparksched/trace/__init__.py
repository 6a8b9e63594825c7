"""Recording what a scheduler is asked and decides, and replaying it without a GPU."""
