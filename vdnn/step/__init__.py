"""The values between planning and the runtime: Recording, Plan and Timeline, with their JSON form."""
