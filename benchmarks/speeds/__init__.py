"""Published speeds of training on one GPU, and the virtual machine's for the same steps."""
