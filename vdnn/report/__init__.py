"""Plans and steps for people and for programs: reads Recording, Plan and Timeline, and nothing of torch."""
