"""The private names of torch that the runtime relies on, and the facts about tensors that it reads through them."""
