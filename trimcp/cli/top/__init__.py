"""The commands `ps` and `top`."""
