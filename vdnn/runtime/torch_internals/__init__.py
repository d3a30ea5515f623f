"""Every private name of torch that the runtime relies on, and every fact about tensors read through one."""
