"""Programs that measure. They print; nothing in vdnn/ imports them."""
