"""Places that backups are kept in: a directory, or a URL of fsspec."""
