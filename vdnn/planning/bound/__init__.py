"""A certified lower bound on the step time that any plan can reach under a budget."""
