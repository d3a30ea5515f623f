"""`make demo` trains a small GPT under a budget and the same loop without vdnn, and plans VGG-16 for a card."""
