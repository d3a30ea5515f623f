"""`make demo`: a small GPT trained under a budget beside the same loop without vdnn, and VGG-16 planned for a card."""
