"""Appliances with real processes: started, secured, read, killed, copied."""
