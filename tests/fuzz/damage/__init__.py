"""The file fuzzer: damaged files of data directories."""
