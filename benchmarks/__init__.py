"""Programs that measure. They print their results; nothing in vdnn/ imports them."""
