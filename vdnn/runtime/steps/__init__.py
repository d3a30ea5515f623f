"""Steps of training: where each begins and ends, its recording, its plan, and how the plan is followed."""
