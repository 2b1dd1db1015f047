"""What lies in files, shared memory and on the wire, byte by byte: layouts, and how they are written, read and checked. Who uses them is elsewhere."""
