"""Sources of a scan: the files of a directory, or a front."""
