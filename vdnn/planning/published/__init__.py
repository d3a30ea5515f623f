"""Published policies, each in a file of its own. `auto` imports none of them. README.md maps each file to its paper."""
