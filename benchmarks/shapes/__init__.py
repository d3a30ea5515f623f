"""Training whose shapes change from step to step, under a budget, in virtual time."""
