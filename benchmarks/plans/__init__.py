"""Plans of recorded steps in virtual time: comparisons of policies, the growth of planning time, published systems."""
