"""Plans of whole trainings beside those of other systems: decoder models, machines and budgets, in virtual time."""
