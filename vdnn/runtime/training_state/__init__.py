"""The training state beside the activations: what an optimizer keeps for its parameters lives on the host."""
