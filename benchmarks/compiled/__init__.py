"""torch.compile under vdnn.compile_options, beside torch's own ways to save memory in a compiled graph."""
