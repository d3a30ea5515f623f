"""Plans of whole trainings: activations, parameters, gradients and optimizer state under one budget."""
