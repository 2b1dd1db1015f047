"""Records on standard input and output: files of rows, lines, readers of topics and writers."""
