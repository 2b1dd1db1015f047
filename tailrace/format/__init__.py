"""Layouts of files, shared memory and messages, with their encoders, decoders and checks."""
