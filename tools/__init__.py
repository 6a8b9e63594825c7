"""What a maintainer runs, and no user needs."""
