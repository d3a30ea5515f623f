"""The training state beside the activations: an optimizer's state, gradients and parameters that live on the host."""
