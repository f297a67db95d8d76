"""From a configuration, its rows' lengths and a device to the fastest way that fits, with reasons."""
