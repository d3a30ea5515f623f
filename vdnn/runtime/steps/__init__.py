"""Training steps: finds where they begin and end, records them, makes and follows their plans, measures timelines."""
