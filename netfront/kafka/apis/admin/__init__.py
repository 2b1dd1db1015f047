"""Topics, settings, log directories: the administration."""
