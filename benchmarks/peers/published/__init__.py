"""Published tables of other systems, and the same steps in virtual time."""
