"""Data directories: damage, full disks, moves, backups."""
