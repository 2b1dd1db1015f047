"""The wire protocol without I/O: codecs and state machines that touch no socket."""
