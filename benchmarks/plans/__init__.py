"""Plans of recorded steps, in virtual time: policies beside each other, their growth, published checkpointing."""
