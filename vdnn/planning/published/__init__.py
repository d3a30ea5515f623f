"""Published policies, each a file of its own. `auto` imports none of them; README.md maps each file to its paper."""
